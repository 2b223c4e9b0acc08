"""The dashboard over any number of runs: widgets and panels."""
