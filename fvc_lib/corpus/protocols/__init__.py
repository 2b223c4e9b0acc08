"""Decide which videos are trained on and which are tested in every training of a run: one protocol per file."""
