"""Commands that ask a trained detector about files: predictions, their pages, and the page for uploads."""
