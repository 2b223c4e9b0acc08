"""The tokenizer and the text encoders of task video_text (retrieval of videos by texts, and captions)."""
