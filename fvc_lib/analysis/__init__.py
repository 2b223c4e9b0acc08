"""Queries over finished and running runs, figures, reports."""
