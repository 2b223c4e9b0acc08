"""Records of runs and ensembles on the disk, and checks of their digests."""
