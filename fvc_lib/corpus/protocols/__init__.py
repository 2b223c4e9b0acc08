"""Which videos train and which test, in every training of a run: one way to divide a corpus per file."""
