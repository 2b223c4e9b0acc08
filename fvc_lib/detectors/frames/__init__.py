"""Networks that turn a single picture, such as a frame of a video, into features."""
