"""The tasks: video, image and video_text. Each gives the engine its data, loss, metrics, choices and results."""
