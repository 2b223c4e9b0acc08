"""Decoding chosen frames of an open video, by seeking to their groups of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fvc_lib.video.frame_sink import FrameSink
from fvc_lib.video.frame_table import NO_PTS, FrameTable, IntArray
from fvc_lib.video.source import VideoSource

# Reading past this many packets costs less than a seek.
_PACKETS_WORTH_A_SEEK = 32
# MPEG-TS knows no keyframes when it seeks: where it lands too late, try earlier.
_SEEK_MARGINS_SECONDS = (0, 1, 5)
# No format holds back more (ITU-T H.264, A.3.1; H.265, A.4.2); told to, ffmpeg's decoder would abort the process.
_MAX_REORDER_DEPTH = 16
# Decoders that can leave out unreferenced frames and give the others unchanged: AV1's loses some, VP9's ignores it.
_SKIPS_NON_REFERENCES = frozenset({"h264", "hevc", "mpeg4"})


class OpenGroupError(Exception):
    """The packets promised that groups of pictures stand alone, and one does not say so itself."""


def read_by_pts(source: VideoSource, table: FrameTable, order: IntArray, sink: FrameSink) -> bool:
    """Seek to each group of pictures that holds a wanted frame and decode only there.

    Frames that nothing refers to are left out unless they are wanted, and no more is decoded than the last wanted
    frame of a group needs.

    Args:
        source: the open video, at any position.
        table: its packets; must be ``trusted``.
        order: decoding positions in presentation order, ``table.presentation_order()``.
        sink: takes the frames it wants.

    Returns:
        Whether every wanted frame turned up whole; otherwise the sink is incomplete and must be given up.

    Raises:
        OpenGroupError: the table's ``begins_anew`` is wrong; decode again with another that says so.
    """
    if table.begins_anew:
        source.refuse_damage()
    cursor = _PacketCursor(source, table)
    reorder_depth = table.reorder_depth(order)
    if reorder_depth > _MAX_REORDER_DEPTH:
        return False
    for group in _groups(table, order, sorted(sink.wanted)):
        if not cursor.move_to(group.start):
            return False
        source.stream.codec_context.flush_buffers()
        # The decoder may have to guess how long to hold frames back, and drops those that come late by its guess.
        source.stream.codec_context.reorder_depth = reorder_depth
        if not _read_group(source, cursor, group, sink, must_begin_anew=table.begins_anew):
            return False
    return not sink.wanted


@dataclass
class _Group:
    """Wanted frames that share a decoding start: their places by pts, and the packet pts up to the last of them."""

    start: int
    last: int
    places: dict[int, int]
    packet_pts: list[int]


def _groups(table: FrameTable, order: IntArray, wanted: list[int]) -> Iterator[_Group]:
    group: _Group | None = None
    for position, place in sorted((int(order[place]), place) for place in wanted):
        start = table.decoding_start(position)
        if group is None or start > group.last:
            if group is not None:
                yield group
            group = _Group(start, position, {}, [])
        group.start = min(group.start, start)  # a leading picture of the keyframe that began the group
        group.packet_pts = table.pts[group.start : position + 1].tolist()
        group.last = position
        group.places[int(table.pts[position])] = place
    if group is not None:
        yield group


class _PacketCursor:
    """Reads packets of one stream and knows the decoding position of the next."""

    def __init__(self, source: VideoSource, table: FrameTable) -> None:
        self._source = source
        self._table = table
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
        self._packets = self._source.packets()
        while (packet := self.next()) is not None:
            if packet.is_keyframe and packet.pts == table.pts[key]:
                self._packets = _chain(packet, self._packets)
                self._position = key
                return True
            if packet.pts is not None and (np.flatnonzero(table.pts == packet.pts) > key).any():
                return False  # landed behind it
        return False


def _chain(first: Packet[VideoStream], rest: Iterator[Packet[VideoStream]]) -> Iterator[Packet[VideoStream]]:
    yield first
    yield from rest


def _read_group(
    source: VideoSource, cursor: _PacketCursor, group: _Group, sink: FrameSink, *, must_begin_anew: bool
) -> bool:
    context = source.stream.codec_context
    skips = source.codec_name in _SKIPS_NON_REFERENCES
    for pts in group.packet_pts:
        packet = cursor.next()
        if packet is None or packet.pts != pts or packet.is_corrupt:
            return False
        if must_begin_anew and not source.begins_anew(memoryview(packet)):
            raise OpenGroupError
        must_begin_anew = False  # the frames after the first have their references
        if skips:
            context.skip_frame = "DEFAULT" if pts in group.places else "NONREF"
        if not _take(context.decode(packet), group, sink):
            return False
    # Everything the last wanted frame needs is in the decoder: have it put out without feeding what follows.
    return not group.places or (_take(context.decode(None), group, sink) and not group.places)


def _take(frames: list[VideoFrame], group: _Group, sink: FrameSink) -> bool:
    for frame in frames:
        place = None if frame.pts is None else group.places.pop(frame.pts, None)
        if place is not None and frame.is_corrupt:
            return False
        if frame.pts == group.packet_pts[0] and not frame.key_frame:
            return False  # the container called it a keyframe, and the decoder made it up from nothing
        sink.offer(place, frame)
    return True
