"""Where wanted frames go: one array of pixels, and what the first of them tells about the video."""

from __future__ import annotations

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.video.frame_table import IntArray
from fvc_lib.video.letterbox import Box, FrameConverter, Pixels
from fvc_lib.video.source import VideoSource


class FrameSink:
    """Collects the wanted frames of one video as pixels, in any order of arrival.

    Args:
        source: the open video the frames come from.
        size: see ``FrameConverter``.
        places: int64 (T,), ascending places in the presentation order; a place may stand more than once.
    """

    def __init__(self, source: VideoSource, size: int | None, places: IntArray) -> None:
        self.places = places
        self.wanted = set(places.tolist())
        self.frames: Pixels = np.empty((0, 3, 0, 0), np.uint8)
        self.source_width = self.source_height = self.rotation_degrees = 0
        self.content = Box(0, 0, 0, 0)
        self._source = source
        self._converter = FrameConverter(size, None)

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Convert a decoded frame into every slot that wants ``place``; the frame itself is not kept.

        Args:
            place: of the frame, or none where it is known not to be wanted.
            frame: every frame the decoder puts out, in presentation order.
        """
        converter = self._converter
        converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        if not self.frames.size:  # only a decoded frame tells the aspect ratio where the container does not
            converter.sample_aspect_ratio = self._source.sample_aspect_ratio
            self.frames = np.empty((len(self.places), 3, *converter.output_shape(frame)), np.uint8)
        if place == self.places[0]:
            self.source_width, self.source_height = frame.width, frame.height
            self.rotation_degrees = converter.orientation.rotation_degrees
            self.content = converter.content_box(frame)
        slots = np.flatnonzero(self.places == place)
        converter.convert(frame, self.frames[slots[0]])
        self.frames[slots[1:]] = self.frames[slots[0]]
        self.wanted.discard(place)
