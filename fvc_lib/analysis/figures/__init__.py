"""Figures and tables of results, data and training, one file per subject."""
