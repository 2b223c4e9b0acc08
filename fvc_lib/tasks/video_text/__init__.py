"""Task video_text: train a network that finds the texts of a video and the videos of a text, and writes captions."""
