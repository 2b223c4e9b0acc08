"""The clip store: clips made once, kept as files or shards."""
