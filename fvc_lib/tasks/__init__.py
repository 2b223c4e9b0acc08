"""The tasks (learning problems) video, image and video_text: their data, losses, trainings and tests.

The training loop itself is the engine's. A task provides its data, loss, metrics and result tables.
"""
