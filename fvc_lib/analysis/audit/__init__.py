"""Audit of detectors of any origin, from a table of their scores: metrics, controls, and the limits of both."""
