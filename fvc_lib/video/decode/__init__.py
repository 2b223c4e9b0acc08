"""From a video file to a few exact frames."""
