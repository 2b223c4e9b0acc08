"""Records on the disk, and checks of their digests."""
