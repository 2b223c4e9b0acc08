"""The tokenizer and the text encoders of task video_text."""
