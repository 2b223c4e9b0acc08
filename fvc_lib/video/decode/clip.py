"""Decode a few frames of a video, chosen by their index in presentation order (the order in which they are shown).

``decoding.py`` decides which packets to decode. Only the wanted frames, and frames that the decoder needs, are in
memory. ``views.py`` has the other ways to choose frames and windows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode.decoding import decode
from fvc_lib.video.decode.frame_table import IntArray, Seconds, read_frame_table
from fvc_lib.video.decode.pixels import Box, FrameSink
from fvc_lib.video.decode.source import open_video

MAX_FRAMES = 100_000
PlacesOf = Callable[[int], IntArray]  # from the number of frames to ascending frame indices in presentation order


@dataclass(frozen=True)
class Clip:
    """Some decoded frames of one video, with their times and indices.

    Attributes:
        frames: uint8 (T, 3, H, W), RGB, upright.
        pts_seconds: float64 (T,), presentation times in seconds on the container's clock, which may not begin at 0.
        frame_indices: int64 (T,), indices of the frames in presentation order, 0 to ``num_source_frames - 1``.
        num_source_frames: number of frames of the whole video.
        content: the rectangle of ``frames`` that holds the picture; the rest is black.
    """

    frames: npt.NDArray[np.uint8]
    pts_seconds: Seconds
    frame_indices: IntArray
    num_source_frames: int
    content: Box

    @classmethod
    def of(cls, sink: FrameSink, seconds: Seconds) -> "Clip":
        """Return the clip of the frames that a sink has collected.

        Args:
            sink: a sink (an object that receives decoded frames) that has all the frames it wants.
            seconds: float64 (n,), presentation times of all n frames of the video.
        """
        return cls(sink.frames, seconds[sink.places], sink.places, len(seconds), sink.content)


def decode_clip(path: AnyPath, num_frames: int, size: int | None = None) -> Clip:
    """Decode ``num_frames`` frames spread evenly over a video.

    Frame k of T has the index round(k (n - 1) / (T - 1)) among the n frames in presentation order; for T = 1 it is the
    first frame. It equals the frame with this index when the whole video is decoded.

    Args:
        path: a local file.
        num_frames: T, 1 to ``MAX_FRAMES``. If the video has fewer frames, some are repeated.
        size: side in pixels of the square that every frame is letterboxed to. None: frames have the size as stored,
            turned upright.

    Raises:
        ValueError: an argument is out of range.
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
    """
    if not 1 <= num_frames <= MAX_FRAMES:
        raise ValueError(f"num_frames: got {num_frames}, wanted 1 to {MAX_FRAMES:,}")
    if size is not None and not 1 <= size <= 8192:
        raise ValueError(f"size: got {size}, wanted 1 to 8192 pixels, or None to keep the pixels as stored")
    return decode_places(path, lambda count: uniform_places(count, num_frames), size)


def decode_places(path: AnyPath, places_of: PlacesOf, size: int | None) -> Clip:
    """Decode the frames of a video that the function ``places_of`` chooses.

    Args:
        path: a local file.
        places_of: function from the video's number of frames to the ascending indices of the wanted frames in
            presentation order.
        size: side in pixels of the square that every frame is letterboxed to. None: frames have the size as stored,
            turned upright.

    Raises:
        VideoError: as ``decode_clip``.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        done = decode(opened, table, lambda source, count, _: FrameSink(source, size, places_of(count)))
    return Clip.of(done.sink, done.seconds)


def uniform_places(num_source_frames: int, num_frames: int) -> IntArray:
    """Return ``num_frames`` frame indices, spread evenly from the first to the last of ``num_source_frames`` frames.

    The result is int64 (num_frames,), ascending from 0 to ``num_source_frames - 1``, rounded. Indices repeat if the
    video has too few frames.
    """
    return np.round(np.linspace(0, num_source_frames - 1, num_frames)).astype(np.int64)
