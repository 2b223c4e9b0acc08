"""Memory: the budget of this machine, and what is done to stay within it."""
