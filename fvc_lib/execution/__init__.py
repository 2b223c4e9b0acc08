"""Execute runs: decide which stages must run, and run their notebooks on this machine or as jobs of SLURM."""
