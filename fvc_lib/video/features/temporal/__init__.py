"""Families on neighbouring frames."""
