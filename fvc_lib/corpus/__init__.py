"""From a folder or table of videos to an index, leakage groups and folds."""
