"""The dashboard over any number of runs: widgets, panels, live refresh."""
