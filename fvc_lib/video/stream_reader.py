"""Decoding a video from its first packet to its last: the slow and sure way, and the only one to count frames by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av.error
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from fvc_lib.video.errors import CorruptVideo
from fvc_lib.video.frame_sink import FrameSink
from fvc_lib.video.frame_table import FrameTable, IntArray
from fvc_lib.video.source import VideoSource, ffmpeg_errors, open_video

# What ffmpeg assumes where neither the container nor the bitstream states a rate.
_ASSUMED_RATE = Fraction(25)


@dataclass(frozen=True)
class FrameCount:
    """What decoding a whole video found.

    Attributes:
        order: int64 (n,), for each place in the presentation the number of the frame as the decoder puts them out.
        seconds: float64 (n,), presentation times, ascending.
        missing: why there are fewer frames than promised, or none.
        decoder_failed: it was the decoder that gave up.
    """

    order: IntArray
    seconds: npt.NDArray[np.float64]
    missing: str | None
    decoder_failed: bool

    @property
    def num_frames(self) -> int:
        """Frames that decode."""
        return len(self.order)


def read_as_promised(
    path: Path, table: FrameTable, places: IntArray, size: int | None
) -> tuple[FrameSink, npt.NDArray[np.float64]] | None:
    """Decode a whole video once and take frames on the way, trusting that it has as many as its packets promise.

    Returns:
        The filled sink and float64 (n,) the presentation times in seconds; none where the promise was not kept, a
        wanted frame is damaged, or frames came in another order.

    Raises:
        VideoError: the decoder gave up.
    """
    times: list[int | None] = []
    with open_video(path, thorough=True) as source:
        sink = FrameSink(source, size, places)
        for number, frame in enumerate(_decode_all(source)):
            times.append(frame.pts)
            if number in sink.wanted and frame.is_corrupt:
                return None
            sink.offer(number, frame)
        order, seconds = _order_and_seconds(source, times, table)
    kept = len(times) == table.num_shown and bool((order == np.arange(len(order))).all())
    return (sink, seconds) if kept and not sink.wanted else None


def count_frames(path: Path, table: FrameTable) -> FrameCount:
    """Decode all of ``path`` and keep only the times; stops at the first packet that does not decode."""
    times: list[int | None] = []
    failure: str | None = None
    with open_video(path, thorough=True) as source:
        try:
            with ffmpeg_errors(path, CorruptVideo):
                times.extend(frame.pts for frame in _decode_all(source))
        except CorruptVideo as error:
            failure = error.detail
        order, seconds = _order_and_seconds(source, times, table)
    missing = table.damage
    if failure is not None:
        missing = f"only {len(times)} frames decode, then: {failure}"
    elif missing is None and table.trusted and len(times) < table.num_shown:
        missing = f"{table.num_shown} frames are promised and {len(times)} decode"
    return FrameCount(order, seconds, missing, failure is not None)


def read_by_place(path: Path, order: IntArray, places: IntArray, size: int | None) -> FrameSink:
    """Decode a video from its beginning until all wanted frames are there.

    Args:
        path: the video.
        order: as ``FrameCount`` has it.
        places: see ``FrameSink``.
        size: see ``FrameConverter``.

    Raises:
        CorruptVideo: the decoder marked a wanted frame as damaged, failed before it, or never put it out.
    """
    with open_video(path, thorough=True) as source:
        sink = FrameSink(source, size, places)
        place_of = {int(order[place]): place for place in sink.wanted}
        for number, frame in enumerate(_decode_all(source)):
            if number in place_of and frame.is_corrupt:
                raise CorruptVideo(path, f"frame {place_of[number]} is damaged")
            sink.offer(place_of.get(number), frame)
            if not sink.wanted:
                return sink
    raise CorruptVideo(path, "decoding it twice gives different frames")


def _decode_all(source: VideoSource) -> Iterator[VideoFrame]:
    decodable = False
    for number, packet in enumerate(source.packets()):
        if packet.is_corrupt:
            raise CorruptVideo(source.path, f"data of packet {number} is lost")
        if number == 0 and packet.is_keyframe and source.begins_anew(bytes(packet)):
            source.refuse_damage()
        decodable = decodable or packet.is_keyframe
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if decodable:
                raise
            continue  # a recording that was joined in the middle of a group of pictures
        yield from frames


def _order_and_seconds(
    source: VideoSource, times: list[int | None], table: FrameTable
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    stream = source.stream
    time_base = float(stream.time_base or 0)
    known = [time for time in times if time is not None]
    if len(set(known)) < len(times) or not time_base:
        rate = stream.average_rate or stream.guessed_rate or _ASSUMED_RATE
        return np.arange(len(times)), np.arange(len(times), dtype=np.float64) / float(rate)
    pts = np.array(known, np.int64)
    order = np.argsort(pts, kind="stable").astype(np.int64) if table.stores_pts else np.arange(len(pts))
    return order, np.sort(pts).astype(np.float64) * time_base


def first_frame(path: Path) -> VideoFrame:
    """The first frame the decoder puts out.

    Raises:
        CorruptVideo: there is none.
    """
    with open_video(path) as source:
        frame = next(_decode_all(source), None)
    if frame is None:
        raise CorruptVideo(path, "it opens, but no frame can be decoded")
    return frame
