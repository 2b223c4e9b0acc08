"""Analysis of finished and running runs: queries, figures, reports, dashboard and audit."""
