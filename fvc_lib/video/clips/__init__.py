"""The clip store: clips are made once and stored as files or in shards (large tar files)."""
