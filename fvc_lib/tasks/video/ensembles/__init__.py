"""Several finished runs as one detector: their predictions together, and files judged by all of them."""
