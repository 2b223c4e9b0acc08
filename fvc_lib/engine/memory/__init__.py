"""Memory of a training: predicted before it starts (preflight), kept while it runs, swept over sizes."""
