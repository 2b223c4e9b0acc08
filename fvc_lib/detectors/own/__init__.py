"""Networks that were designed in this project."""
