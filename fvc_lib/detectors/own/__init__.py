"""The project's own networks."""
