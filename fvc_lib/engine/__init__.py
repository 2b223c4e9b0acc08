"""The training engine: loop, step, recovery from out-of-memory errors, checkpoints, training in several processes."""
