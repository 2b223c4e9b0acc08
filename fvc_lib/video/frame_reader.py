"""Decoding chosen frames of an open video: by seeking to their groups of pictures, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av.error
import numpy as np
import numpy.typing as npt
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fvc_lib.video.errors import CorruptVideo
from fvc_lib.video.frame_table import NO_PTS, FrameTable, IntArray
from fvc_lib.video.letterbox import Box, FrameConverter, Orientation, Pixels
from fvc_lib.video.source import VideoSource, ffmpeg_errors, open_video

# Reading past this many packets costs less than a seek.
_PACKETS_WORTH_A_SEEK = 32
# MPEG-TS knows no keyframes when it seeks: where it lands too late, try earlier.
_SEEK_MARGINS_SECONDS = (0, 1, 5)
# What ffmpeg assumes where neither the container nor the bitstream states a rate.
_ASSUMED_RATE = Fraction(25)


class FrameSink:
    """Collects the wanted frames of one video as pixels, in any order of arrival.

    Args:
        size: see ``FrameConverter``.
        sample_aspect_ratio: see ``FrameConverter``.
        places: int64 (T,), ascending places in the presentation order; a place may stand more than once.
    """

    def __init__(self, size: int | None, sample_aspect_ratio: Fraction | None, places: IntArray) -> None:
        self.places = places
        self.wanted = set(places.tolist())
        self.frames: Pixels = np.empty((0, 3, 0, 0), np.uint8)
        self.source_width = self.source_height = self.rotation_degrees = 0
        self.content = Box(0, 0, 0, 0)
        self._converter = FrameConverter(size, sample_aspect_ratio)

    def accept(self, place: int, frame: VideoFrame) -> None:
        """Convert ``frame`` into every slot that wants ``place``; the frame itself is not kept."""
        if not self.frames.size:
            self.frames = np.empty((len(self.places), 3, *self._converter.output_shape(frame)), np.uint8)
        if place == self.places[0]:
            self.source_width, self.source_height = frame.width, frame.height
            self.rotation_degrees = Orientation.of(frame).rotation_degrees
            self.content = self._converter.content_box(frame)
        slots = np.flatnonzero(self.places == place)
        self._converter.convert(frame, self.frames[slots[0]])
        self.frames[slots[1:]] = self.frames[slots[0]]
        self.wanted.discard(place)


def read_by_pts(source: VideoSource, table: FrameTable, order: IntArray, sink: FrameSink) -> bool:
    """Seek to each group of pictures that holds a wanted frame and decode only there.

    Args:
        source: the open video, at any position.
        table: its packets; must be ``trusted``.
        order: decoding positions in presentation order, ``table.presentation_order()``.
        sink: takes the frames it wants.

    Returns:
        Whether every wanted frame turned up whole; otherwise the sink is incomplete and must be given up.
    """
    cursor = _PacketCursor(source, table)
    for group in _groups(table, order, sorted(sink.wanted)):
        if not cursor.move_to(group.start) or not _read_group(source, cursor, group, sink):
            return False
    return not sink.wanted


@dataclass
class _Group:
    """Wanted frames that share a decoding start: their places by pts, and the last packet any of them needs."""

    start: int
    last: int
    places: dict[int, int]


def _groups(table: FrameTable, order: IntArray, wanted: list[int]) -> list[_Group]:
    groups: list[_Group] = []
    for position, place in sorted((int(order[place]), place) for place in wanted):
        start = table.decoding_start(position)
        if not groups or start > groups[-1].last:
            groups.append(_Group(start, position, {}))
        groups[-1].last = position
        groups[-1].places[int(table.pts[position])] = place
    return groups


class _PacketCursor:
    """Reads packets of one stream and knows the decoding position of the next."""

    def __init__(self, source: VideoSource, table: FrameTable) -> None:
        self._source = source
        self._table = table
        self._position_of = {pts: position for position, pts in enumerate(table.pts.tolist())}
        self._packets: Iterator[Packet[VideoStream]] = iter(())
        self._position = table.num_packets

    def move_to(self, key: int) -> bool:
        """Make the keyframe at decoding position ``key`` the next packet; false where the container does not seek."""
        ahead = key - self._position
        if 0 <= ahead <= _PACKETS_WORTH_A_SEEK:
            return all(self.next() is not None for _ in range(ahead))
        return any(self._seek(key, margin) for margin in _SEEK_MARGINS_SECONDS)

    def next(self) -> Packet[VideoStream] | None:
        """The next packet with data, or none at the end."""
        for packet in self._packets:
            if packet.size:
                self._position += 1
                return packet
        return None

    def _seek(self, key: int, margin_seconds: int) -> bool:
        stream, table = self._source.stream, self._table
        # MP4's index is sorted by decoding time, the others' by presentation time.
        times = table.dts if self._source.container_name == "mov" and table.dts[key] != NO_PTS else table.pts
        margin = round(margin_seconds / stream.time_base) if stream.time_base else 0
        self._source.container.seek(int(times[key]) - margin, stream=stream, backward=True)
        self._packets = self._source.container.demux(stream)
        for packet in self._packets:
            if packet.size and packet.is_keyframe and packet.pts == table.pts[key]:
                self._packets = _chain(packet, self._packets)
                self._position = key
                return True
            if packet.pts is not None and self._position_of.get(packet.pts, -1) > key:
                return False  # landed behind it
        return False


def _chain(first: Packet[VideoStream], rest: Iterator[Packet[VideoStream]]) -> Iterator[Packet[VideoStream]]:
    yield first
    yield from rest


def _read_group(source: VideoSource, cursor: _PacketCursor, group: _Group, sink: FrameSink) -> bool:
    source.stream.codec_context.flush_buffers()
    for _ in range(group.start, group.last + 1):
        packet = cursor.next()
        if packet is None:
            return False
        if not _take(packet.decode(), group, sink):
            return False
    # Everything the last wanted frame needs is in the decoder: have it put out without feeding what follows.
    return not group.places or (_take(source.stream.codec_context.decode(None), group, sink) and not group.places)


def _take(frames: list[VideoFrame], group: _Group, sink: FrameSink) -> bool:
    for frame in frames:
        if frame.pts is None or frame.pts not in group.places:
            continue
        if frame.is_corrupt:
            return False
        sink.accept(group.places.pop(frame.pts), frame)
    return True


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


def count_frames(path: Path, table: FrameTable) -> FrameCount:
    """Decode all of ``path`` and keep only the times; stops at the first packet that does not decode."""
    times: list[int | None] = []
    failure: str | None = None
    with open_video(path) as source:
        time_base = float(source.stream.time_base or 0)
        rate = source.stream.average_rate or source.stream.guessed_rate or _ASSUMED_RATE
        try:
            with ffmpeg_errors(path, CorruptVideo):
                times.extend(frame.pts for frame in _decode_all(source))
        except CorruptVideo as error:
            failure = error.detail
    order, seconds = _order_and_seconds(times, table, time_base, float(rate))
    missing = table.damage
    if failure is not None:
        missing = f"only {len(times)} frames decode, then: {failure}"
    elif missing is None and table.trusted and len(times) < table.num_shown:
        missing = f"{table.num_shown} frames are promised and {len(times)} decode"
    return FrameCount(order, seconds, missing, failure is not None)


def read_by_place(source: VideoSource, order: IntArray, sink: FrameSink) -> bool:
    """Decode a freshly opened video from its beginning until the sink has all it wants.

    Returns:
        Whether every wanted frame came.

    Raises:
        CorruptVideo: the decoder marked a wanted frame as damaged, or failed before the last wanted one.
    """
    place_of = {int(order[place]): place for place in sink.wanted}
    for number, frame in enumerate(_decode_all(source)):
        if number in place_of:
            if frame.is_corrupt:
                raise CorruptVideo(source.path, f"frame {place_of[number]} is damaged")
            sink.accept(place_of[number], frame)
        if not sink.wanted:
            return True
    return not sink.wanted


def _decode_all(source: VideoSource) -> Iterator[VideoFrame]:
    decodable = False
    for packet in source.container.demux(source.stream):
        decodable = decodable or packet.is_keyframe
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if decodable:
                raise
            continue  # a recording that was joined in the middle of a group of pictures
        yield from frames


def _order_and_seconds(
    times: list[int | None], table: FrameTable, time_base: float, rate: float
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    known = [time for time in times if time is not None]
    if len(set(known)) < len(times) or not time_base:
        return np.arange(len(times)), np.arange(len(times), dtype=np.float64) / rate
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
