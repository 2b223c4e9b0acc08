"""Metrics: pure functions that compute metrics and their confidence intervals from labels and scores.

The modules of this folder import nothing else of this package.
"""
