"""From near-duplicates to leakage groups: hashes, likeness, connected components."""
