"""The generated sample corpora of the three tasks."""
