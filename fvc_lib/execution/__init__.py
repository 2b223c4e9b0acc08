"""Stages, the notebook engine, run status, the command line."""
