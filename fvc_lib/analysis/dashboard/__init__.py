"""The interactive dashboard of a notebook: widgets to choose runs, and panels with figures of these runs."""
