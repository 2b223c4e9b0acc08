"""Heads: from a clip's features to one logit."""
