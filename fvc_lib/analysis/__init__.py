"""Analysis of runs, finished or still working: queries, figures, reports, dashboard and audit."""
