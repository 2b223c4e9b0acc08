"""Memory of a training: measured and planned before it starts, observed and recorded while it runs."""
