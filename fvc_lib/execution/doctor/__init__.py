"""Whether this machine can do the work, and what to do where it cannot."""
