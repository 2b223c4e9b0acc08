"""Decode a few frames of a video file, exactly as they would be if the whole video was decoded."""
