"""Anyone's scores: what a table of scores says of its detectors, and what it cannot say."""
