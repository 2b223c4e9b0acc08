"""How busy training keeps a GPU, and what the engine costs there: ``make bench-gpu``."""
