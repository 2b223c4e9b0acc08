"""The training engine: training loop and step, recovery from out-of-memory errors, checkpoints, several processes."""
