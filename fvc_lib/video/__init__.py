"""From a file to a small uint8 clip: decode, letterbox, augmentation, clip store."""
