"""Heads: the last part of a detector, which turns the features of a clip into one logit."""
