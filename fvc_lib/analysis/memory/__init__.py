"""Where a run's memory went: findings, sentences, figures, the terminal report."""
