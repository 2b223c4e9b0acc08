"""Loaders of video corpora: each module reads several layouts, which are ways to store videos and labels in files."""
