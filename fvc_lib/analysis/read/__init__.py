"""Reading runs: logs, records, tables, DuckDB queries, headlines, comparisons."""
