"""Audit of any detector, also one from outside this project, from a table of its scores for videos.

An audit computes metrics with intervals, compares the detector with controls (simple predictors that it must beat), and
states the limits of the results.
"""
