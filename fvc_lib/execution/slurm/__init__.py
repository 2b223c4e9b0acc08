"""SLURM: a run as jobs of a cluster, from what a site wants to what its queue says."""
