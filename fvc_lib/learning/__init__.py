"""Models, tasks, the one training engine, evaluation and its controls."""
