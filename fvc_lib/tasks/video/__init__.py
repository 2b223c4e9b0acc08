"""Task video: real or fake, on outer folds."""
