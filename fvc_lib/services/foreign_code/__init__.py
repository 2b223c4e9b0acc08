"""Code that is not ours: what counts of it, and how it is imported."""
