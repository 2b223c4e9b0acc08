"""Access to what runs have recorded: logs, tables and SQL queries.

It also holds the headline of a run (main score and verdict) and comparisons of runs.
"""
