"""Metrics: pure functions that compute values and their intervals from labels and scores.

The modules of this folder import nothing else of this package.
"""
