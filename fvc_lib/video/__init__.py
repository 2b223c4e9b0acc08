"""Turn a video file into a clip, a uint8 array of a few square frames: decode, letterbox, augment and store it."""
