"""The memory budget of this machine, and advice to stay within it."""
