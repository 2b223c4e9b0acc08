"""Families on the tiles of single frames."""
