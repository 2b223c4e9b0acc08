"""Code: which of ours and of a user's counts, and how a user's is imported."""
