"""What records on the disk hold, and how damage to them is told."""
