"""Which stages a run has, which of them need to run, and why."""
