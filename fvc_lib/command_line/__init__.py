"""The commands of ``run_notebooks.py``, for a person at a terminal or a batch script."""
