"""Export of a run to MLflow."""
