"""The training engine: loop, step (the transaction), out-of-memory recovery, checkpoints, memory, ranks."""
