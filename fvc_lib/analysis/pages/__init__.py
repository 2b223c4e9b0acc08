"""HTML pages that work offline: reports, the list of runs, and predictions for new files. Also notebook displays."""
