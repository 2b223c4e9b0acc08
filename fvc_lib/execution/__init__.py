"""Execute runs: stages and plans, the notebook engine, the runner with its status files, and jobs of SLURM."""
