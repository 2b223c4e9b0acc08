"""Turn a video file into a small uint8 clip: decode, letterbox, augment, and store the clip."""
