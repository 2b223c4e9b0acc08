"""Task ``video``: train a detector of fake videos, and test it on outer folds."""
