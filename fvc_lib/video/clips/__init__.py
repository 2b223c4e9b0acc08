"""Make the clips of videos once, and store them as files or in shards (large tar files)."""
