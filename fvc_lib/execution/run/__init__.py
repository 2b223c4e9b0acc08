"""Running stages: runner, session, status, lock, run record."""
