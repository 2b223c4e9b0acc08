"""Families on what packets and decoder tell of how a video was encoded."""
