"""Encoders of single frames or pictures."""
