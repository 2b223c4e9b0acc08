"""Task video_text: retrieval between videos and texts, and captions."""
