"""What is typed: commands that put the other rooms together for a person at a terminal or a batch script."""
