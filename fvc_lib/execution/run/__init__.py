"""Execute the stages of one run in Jupyter kernels, lock the run meanwhile, and write its status and its record."""
