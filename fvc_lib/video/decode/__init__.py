"""Decode a few frames of a video file; they equal the frames that decoding the whole video gives."""
