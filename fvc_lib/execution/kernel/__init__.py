"""One notebook in one kernel, and a record that tells the truth."""
