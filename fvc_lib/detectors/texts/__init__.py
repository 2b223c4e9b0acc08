"""Tokenizer and text encoders."""
