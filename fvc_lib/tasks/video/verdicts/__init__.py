"""Judge new files as real, fake or undecided, with a finished run, an ensemble or an exported bundle."""
