"""Find near-duplicates, and join them to leakage groups: sets of videos that a split must not divide."""
