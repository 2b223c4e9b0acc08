"""The commands of ``fvc``, for a person at a terminal or a batch script."""
