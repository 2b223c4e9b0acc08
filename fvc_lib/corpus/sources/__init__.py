"""Loaders of corpora: one file per layout."""
