"""Pure functions from labels and scores to numbers with intervals. Imports nothing of ours."""
