"""FVC: learn to tell real videos from fake ones, and say honestly how well it can."""

__version__ = "0.1.0"
