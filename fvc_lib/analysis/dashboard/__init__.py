"""The dashboard over any number of runs: controls, panels, live refresh."""
