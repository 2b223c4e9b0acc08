"""Run the stages of a run: the runner, an open notebook's session, status and locks, and the run's record."""
