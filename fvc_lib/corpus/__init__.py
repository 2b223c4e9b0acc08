"""Make an index, leakage groups and folds of a folder or table of videos."""
