"""Decoding a video from its first packet to its last: the slow and sure way, and the only one to count frames by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av.error
import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.video.errors import CorruptVideo, TruncatedVideo, VideoError
from fvc_lib.video.frame_sink import FrameSink
from fvc_lib.video.frame_table import FrameTable, IntArray, Seconds, seconds_of
from fvc_lib.video.source import VideoSource, ffmpeg_errors, open_video

# What ffmpeg assumes where neither the container nor the bitstream states a rate.
_ASSUMED_RATE = Fraction(25)
# Decoders that start anywhere and predict the first frames from grey, where others wait for a keyframe.
_PREDICTS_FROM_NOTHING = frozenset({"mpeg4", "h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"})
# At a join of two recordings the demuxer notices that packets are missing with one of the last before the keyframe.
_PACKETS_TO_JOIN = 3


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
    seconds: Seconds
    missing: str | None
    decoder_failed: bool

    @property
    def num_frames(self) -> int:
        """Frames that decode."""
        return len(self.order)


def read_as_promised(
    path: Path, table: FrameTable, places: IntArray, size: int | None
) -> tuple[FrameSink, Seconds] | None:
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
        for number, frame in enumerate(_decode_all(source, table)):
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
    failure: VideoError | None = None
    with open_video(path, thorough=True) as source:
        try:
            with ffmpeg_errors(path, CorruptVideo):
                times.extend(frame.pts for frame in _decode_all(source, table))
        except VideoError as error:
            failure = error
        order, seconds = _order_and_seconds(source, times, table)
    missing = table.damage
    if failure is not None:
        missing = f"only {len(times)} frames decode, then: {failure.detail}"
    elif missing is None and table.trusted and len(times) < table.num_shown:
        missing = f"{table.num_shown} frames are promised and {len(times)} decode"
    return FrameCount(order, seconds, missing, isinstance(failure, CorruptVideo))


def read_by_place(path: Path, table: FrameTable, order: IntArray, places: IntArray, size: int | None) -> FrameSink:
    """Decode a video from its beginning until all wanted frames are there.

    Args:
        path: the video.
        table: its packets.
        order: as ``FrameCount`` has it.
        places: see ``FrameSink``.
        size: see ``FrameConverter``.

    Raises:
        CorruptVideo: the decoder marked a wanted frame as damaged, failed before it, or never put it out.
    """
    with open_video(path, thorough=True) as source:
        sink = FrameSink(source, size, places)
        place_of = {int(order[place]): place for place in sink.wanted}
        for number, frame in enumerate(_decode_all(source, table)):
            if number in place_of and frame.is_corrupt:
                raise CorruptVideo(path, f"frame {place_of[number]} is damaged")
            sink.offer(place_of.get(number), frame)
            if not sink.wanted:
                return sink
    raise CorruptVideo(path, "decoding it twice gives different frames")


def _decode_all(source: VideoSource, table: FrameTable) -> Iterator[VideoFrame]:
    """All frames that are decoded from what is there; what is damaged or lost ends the video with an error."""
    has_begun = source.codec_name not in _PREDICTS_FROM_NOTHING
    reached_key = False
    for number, packet in enumerate(source.packets()):
        if packet.is_corrupt and not _is_a_join(source, table, number):
            lost = f"data of packet {number} is lost"
            raise (TruncatedVideo if number + 1 == table.num_packets else CorruptVideo)(source.path, lost)
        # Behind trimmed packets the file may go on at a keyframe whose leading pictures lack their references.
        if number == 0 and packet.is_keyframe and table.is_shown.all() and source.begins_anew(memoryview(packet)):
            source.refuse_damage()
        reached_key = reached_key or packet.is_keyframe
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if reached_key:
                raise
            continue  # a recording that was joined in the middle of a group of pictures
        for frame in frames:
            has_begun = has_begun or frame.key_frame
            if has_begun:
                yield frame


def _is_a_join(source: VideoSource, table: FrameTable, number: int) -> bool:
    """Whether a packet was flagged only because two MPEG-TS recordings were joined: their counters do not go on."""
    return source.container_name == "mpegts" and bool(table.is_key[number + 1 : number + 1 + _PACKETS_TO_JOIN].any())


def _order_and_seconds(source: VideoSource, times: list[int | None], table: FrameTable) -> tuple[IntArray, Seconds]:
    """Places and times of the frames a decoder put out at ``times``; by the nominal rate where those make no sense."""
    stream = source.stream
    pts = np.array([time for time in times if time is not None], np.int64)
    has_ties = len(np.unique(pts)) < len(pts)
    goes_back = bool((np.diff(pts) < 0).any())
    stands_still = len(pts) > 1 and pts.min() == pts.max()
    if len(pts) < len(times) or not stream.time_base or stands_still or (has_ties and goes_back):
        rate = stream.average_rate or stream.guessed_rate or _ASSUMED_RATE
        return np.arange(len(times)), np.arange(len(times)) / float(rate)
    order = np.argsort(pts, kind="stable").astype(np.int64) if table.stores_pts else np.arange(len(pts))
    return order, seconds_of(np.sort(pts), stream.time_base)


def first_frame(path: Path, table: FrameTable) -> VideoFrame:
    """The first frame the decoder puts out.

    Raises:
        CorruptVideo: there is none.
    """
    with open_video(path) as source:
        frame = next(_decode_all(source, table), None)
    if frame is None:
        raise CorruptVideo(path, "it opens, but no frame can be decoded")
    return frame
