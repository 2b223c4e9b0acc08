"""FVC: learn to tell real videos from fake ones, and say honestly how well it can."""

from pathlib import Path

__version__ = "0.1.0"

CHECKOUT = Path(__file__).resolve().parents[1]  # what holds this package, the notebooks and run_notebooks.py
