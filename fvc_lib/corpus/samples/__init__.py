"""Generators of the sample corpora for the tasks video, image and video_text; no data is downloaded."""
