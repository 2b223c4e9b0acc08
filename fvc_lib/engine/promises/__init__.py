"""What a device must keep before a training on it is to be trusted."""
