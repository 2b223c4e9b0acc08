"""Read runs: logs, records, tables, DuckDB queries, headlines and comparisons."""
