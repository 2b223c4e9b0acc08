"""Audit of scores from any source: what a table of scores shows about its detectors, and what it does not."""
