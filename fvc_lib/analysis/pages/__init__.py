"""Offline HTML pages: the report, one page per notebook, the list of all runs."""
