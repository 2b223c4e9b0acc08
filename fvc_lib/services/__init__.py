"""Config, run paths, table schemas, memory, checkpoints, metric log, atomic files. Imports nothing of ours."""
