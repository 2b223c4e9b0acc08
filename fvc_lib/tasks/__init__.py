"""The tasks video, image and video_text: what a network learns from, its loss, and how it is tested.

The training loop itself is the engine's. A task provides its data, loss, metrics and result tables.
"""
