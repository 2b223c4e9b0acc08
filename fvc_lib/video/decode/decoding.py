"""Decode wanted frames of a video; the pixels equal those of decoding the whole video.

If time stamps identify every frame, only some runs (series of consecutive packets) are decoded. A run begins at a
keyframe and ends at the last wanted frame that needs this keyframe. If time stamps do not identify the frames, or
decoding the runs fails, the whole video is decoded. It is decoded a second time if the first pass gives another number
of frames than the packets should yield.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, IntArray, Seconds, seconds_of
from fvc_lib.video.decode.source import (
    CorruptVideo,
    TruncatedVideo,
    UnsupportedVideo,
    VideoSource,
    ffmpeg_errors,
    open_video,
)


class Sink(Protocol):
    """Interface of objects that receive the decoded frames of one video.

    Attributes:
        wanted: indices in presentation order of the frames that the sink needs and has not received yet.
    """

    wanted: set[int]

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Receive a decoded frame, and remove its index from ``wanted``.

        This is called for every frame that the decoder returns. Within a run (series of consecutive packets), the
        frames come in presentation order.

        Args:
            place: index of the frame in presentation order; None for a frame that is not wanted.
            frame: the frame.
        """


S = TypeVar("S", bound=Sink)
# Function that returns a new sink for one attempt at decoding. It takes the open video, its number of frames n, and
# their times in seconds, float64 (n,), or None if the times are not known before the whole video is decoded.
SinkOf = Callable[[VideoSource, int, Seconds | None], S]


@dataclass(frozen=True)
class DecodePlan:
    """The packets to decode for the wanted frames of a video.

    Attributes:
        runs: series of consecutive packets, as pairs (start, end) of packet indices in decoding order, ``end``
            excluded. The pairs are ascending, and do not overlap.
        reorder_depth: number of frames that the decoder must hold back to return them in presentation order.
        leaves_out: whether the decoder skips unwanted frames in ``runs`` that no other frame refers to.
    """

    runs: tuple[tuple[int, int], ...]
    reorder_depth: int
    leaves_out: bool


# To read and ignore this many packets takes less time than a seek.
_PACKETS_WORTH_A_SEEK = 32
# A seek in MPEG-TS may end after the keyframe; then an earlier position is tried.
_SEEK_MARGINS_SECONDS = (0, 1, 5)
# The most frames that a format holds back (ITU-T H.264, A.3.1; H.265, A.4.2); with more, ffmpeg aborts the process.
_MAX_REORDER_DEPTH = 16
# Codecs whose decoder can skip unreferenced frames without changing others. AV1's loses frames; VP9's does not skip.
_SKIPS_NON_REFERENCES = frozenset({"h264", "hevc", "mpeg4"})


def plan_decoding(source: VideoSource, table: FrameTable, wanted: Collection[int]) -> DecodePlan:
    """Return a plan for decoding some frames of a video.

    Args:
        source: the video.
        table: the packets of the video; ``table.doubt`` must be empty.
        wanted: indices of the frames in presentation order, without repeats.
    """
    order = table.presentation_order()
    runs: list[tuple[int, int]] = []
    positions = np.sort(order[np.fromiter(wanted, np.int64)])
    for start, position in zip(table.decoding_starts(positions).tolist(), positions.tolist(), strict=True):
        while runs and start <= runs[-1][1]:  # it overlaps or continues the run before
            start = min(start, runs.pop()[0])
        runs.append((start, position + 1))
    return DecodePlan(tuple(runs), table.reorder_depth(order), source.codec_name in _SKIPS_NON_REFERENCES)


@dataclass(frozen=True)
class Decoded(Generic[S]):
    """The result of ``decode``: a sink (receiver of frames) with the wanted frames of a video, and the times of frames.

    Attributes:
        sink: the sink, which has received all wanted frames.
        seconds: float64 (n,), presentation times of all n frames of the video, on the container's clock. If the
            container has no usable times, they are computed from the nominal frame rate.
        is_sparse: whether only runs of packets were decoded, not the whole video.
    """

    sink: S
    seconds: Seconds
    is_sparse: bool


def decode(opened: VideoSource, table: FrameTable, sink_of: SinkOf[S], *, in_order: bool = False) -> Decoded[S]:
    """Decode a video until a sink (an object that receives decoded frames) has all frames that it wants.

    Args:
        opened: the video, from which only ``table`` was read so far. It may be closed and opened again.
        table: the packets of the video.
        sink_of: function that returns a new sink (``SinkOf``); called for every attempt at decoding.
        in_order: whether the sink must receive frames in presentation order. If so, ``sink_of`` always gets the times
            of all frames, even if the whole video must be decoded first to find them.

    Raises:
        VideoError: the file is truncated, corrupt or refused, or its frames come in another order.
    """
    if table.damage:
        raise TruncatedVideo(opened.path, table.damage)
    if not table.doubt:
        seconds = seconds_of(table.pts[table.presentation_order()], opened.stream.time_base)
        sink = sink_of(opened, len(seconds), seconds)
        plan = plan_decoding(opened, table, sink.wanted)
        # Errors are ignored here: the whole video may decode without error; if not, that error is raised.
        with suppress(CorruptVideo, TruncatedVideo), ffmpeg_errors(opened.path, CorruptVideo):
            if plan.reorder_depth <= _MAX_REORDER_DEPTH and _read_runs(opened, table, plan, sink, in_order):
                return Decoded(sink, seconds, True)
    opened.container.close()
    return _decode_whole(opened.path, table, sink_of, in_order)


def _read_runs(source: VideoSource, table: FrameTable, plan: DecodePlan, sink: Sink, in_order: bool) -> bool:
    """Decode the runs (series of consecutive packets) that ``plan`` lists, and pass the frames to ``sink``.

    Returns:
        Whether the sink has received all wanted frames without damage. If False, discard the sink.
    """
    if table.is_closed[[start for start, _ in plan.runs]].all():
        source.be_strict()
    context, cursor = source.stream.codec_context, _PacketCursor(source, table)
    shown = table.pts[table.presentation_order()]
    taker = _Taker(sink, {int(shown[place]): place for place in sink.wanted}, in_order)
    for start, end in plan.runs:
        if not cursor.move_to(start):
            return False
        context.flush_buffers()
        # Without this the decoder may guess the depth too low, and drop frames.
        context.reorder_depth = plan.reorder_depth
        run = table.pts[start:end].tolist()
        for pts in run:
            packet = cursor.next()
            if packet is None or packet.pts != pts or packet.is_corrupt:
                return False
            if plan.leaves_out:
                context.skip_frame = "DEFAULT" if pts in taker.place_of else "NONREF"
            if not taker.take(context.decode(packet), run[0]):
                return False
        # The decoder has all packets for the last wanted frame: flush it, without packets after the run.
        if taker.lacks(run) and (not taker.take(context.decode(None), run[0]) or taker.lacks(run)):
            return False
    return not sink.wanted


@dataclass
class _Taker:
    """A helper that passes decoded frames to a sink (receiver of frames), and checks that they are valid.

    Attributes:
        sink: the sink.
        place_of: mapping from pts to index in presentation order, for the frames that are still wanted.
        in_order: whether frames must come in presentation order.
        latest: index of the last frame that was passed; -1 at the beginning.
    """

    sink: Sink
    place_of: dict[int, int]
    in_order: bool
    latest: int = -1

    def take(self, frames: list[VideoFrame], first_pts: int) -> bool:
        """Pass ``frames`` to the sink, and return whether they are valid.

        The result is False if a wanted frame is damaged or out of order, or if the frame with ``first_pts``, at which
        decoding began, is not a keyframe.
        """
        for frame in frames:
            place = None if frame.pts is None else self.place_of.pop(frame.pts, None)
            if frame.pts == first_pts and not frame.key_frame:
                return False  # marked as a keyframe by the container, but decoded without its references
            if place is not None:
                if frame.is_corrupt or (self.in_order and place < self.latest):
                    return False
                self.latest = place
            self.sink.offer(place, frame)
        return True

    def lacks(self, run: list[int]) -> bool:
        """Return whether the sink still lacks a wanted frame of a series of consecutive packets.

        ``run`` lists the presentation time stamps (pts) of these packets.
        """
        return any(pts in self.place_of for pts in run)


class _PacketCursor:
    """A reader of a video's packets, which can move to any keyframe.

    If the keyframe is a few packets ahead, the packets before it are read and ignored. Otherwise the reader seeks,
    which takes longer.
    """

    def __init__(self, source: VideoSource, table: FrameTable) -> None:
        self._source, self._table = source, table
        self._packets: Iterator[Packet[VideoStream]] = iter(())
        self._position = len(table.pts)

    def move_to(self, key: int) -> bool:
        """Move to the keyframe with index ``key`` in decoding order; return whether that succeeded."""
        ahead = key - self._position
        if 0 <= ahead <= _PACKETS_WORTH_A_SEEK:
            return all(self.next() is not None for _ in range(ahead))
        return any(self._seek(key, margin) for margin in _SEEK_MARGINS_SECONDS)

    def next(self) -> "Packet[VideoStream] | None":
        """Return the next packet that is not empty; None at the end."""
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
                self._packets = itertools.chain([packet], self._packets)
                self._position = key
                return True
            if packet.pts is not None and (np.flatnonzero(table.pts == packet.pts) > key).any():
                return False  # the seek ended after the keyframe
        return False


def _decode_whole(path: Path, table: FrameTable, sink_of: SinkOf[S], in_order: bool) -> Decoded[S]:
    """Decode the whole video and pass its frames to a sink; repeat it if number or order of frames is not as expected.

    If ``in_order`` is true, the first pass only collects the times, and the sink receives the frames in the second
    pass. Arguments and errors are those of ``decode``, but ``path`` is the video.
    """
    times: list[int | None] = []
    with open_video(path, thorough=True) as source:
        sink = sink_of(source, table.num_shown, None) if table.num_shown and not in_order else None
        for number, frame in enumerate(_decode_all(source, table)):
            times.append(frame.pts)
            if sink is not None:
                _offer(path, sink, number, frame)
        order, seconds = _order_and_seconds(source, times, table)
    if not times or (not table.doubt and len(times) < table.num_shown):
        detail = f"of its {table.num_shown} frames {len(times)} decode"
        raise (TruncatedVideo if times else CorruptVideo)(path, detail)
    is_in_order = bool((order == np.arange(len(order))).all())
    if sink is not None and len(times) == table.num_shown and is_in_order and not sink.wanted:
        return Decoded(sink, seconds, False)
    if in_order and not is_in_order:
        raise UnsupportedVideo(path, "its frames are not decoded in the order in which they are shown")
    with open_video(path, thorough=True) as source:
        sink = sink_of(source, len(times), seconds)
        place_of = {int(order[place]): place for place in sink.wanted}
        for number, frame in enumerate(_decode_all(source, table)):
            _offer(path, sink, place_of.get(number), frame)
            if not sink.wanted:
                return Decoded(sink, seconds, False)
    raise CorruptVideo(path, "decoding it twice gives different frames")


def _offer(path: Path, sink: Sink, place: int | None, frame: VideoFrame) -> None:
    if place in sink.wanted and frame.is_corrupt:
        raise CorruptVideo(path, f"frame {place} is damaged")
    sink.offer(place, frame)


# ffmpeg assumes this rate where neither the container nor the bitstream states one.
_ASSUMED_RATE = Fraction(25)
# Codecs whose decoders do not wait for a keyframe, but predict the first frames from grey. AVI and MP4 may mark packets
# as keyframes that are none.
_PREDICTS_FROM_NOTHING = frozenset({
    "mpeg4", "h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "rv10", "rv20",
})  # fmt: skip
# Where two recordings are joined, the packet marked as corrupt is one of the last before a keyframe.
_PACKETS_TO_JOIN = 3


def _decode_all(source: VideoSource, table: FrameTable) -> Iterator[VideoFrame]:
    """Decode a whole video, and yield its frames in the order in which the decoder returns them.

    Packets before the first keyframe are skipped.

    Raises:
        TruncatedVideo: the data of the last packet are lost.
        CorruptVideo: the data of another packet are lost.
    """
    reached_key, has_begun = False, source.codec_name not in _PREDICTS_FROM_NOTHING
    if table.is_closed[0] and table.is_shown.all():  # after trimmed packets references may be missing
        source.be_strict()
    for number, packet in enumerate(source.packets()):
        reached_key = reached_key or packet.is_keyframe
        if not reached_key:  # the recording begins within a group of pictures
            continue
        # Where two MPEG-TS recordings were joined, their packet counters differ, and ffmpeg assumes lost packets.
        soon = slice(number + 1, number + 1 + _PACKETS_TO_JOIN)
        if packet.is_corrupt and not (source.container_name == "mpegts" and table.is_key[soon].any()):
            is_last = number + 1 == len(table.pts)
            raise (TruncatedVideo if is_last else CorruptVideo)(source.path, f"data of packet {number} is lost")
        for frame in packet.decode():
            has_begun = has_begun or frame.key_frame
            if has_begun:
                yield frame


def _order_and_seconds(source: VideoSource, times: list[int | None], table: FrameTable) -> tuple[IntArray, Seconds]:
    """Return a tuple: the presentation order of decoded frames, and their times.

    Args:
        source: the video.
        times: pts of the n frames, in the order in which the decoder returned them; None where unknown.
        table: the packets of the video.

    Returns:
        int64 (n,), indices into ``times`` in presentation order, and float64 (n,), ascending presentation times in
        seconds. Without usable ``times`` the order is that of the decoder, and the seconds follow from the nominal
        frame rate.
    """
    stream = source.stream
    pts = np.array([time for time in times if time is not None], np.int64)
    stands_still = len(pts) > 1 and pts.min() == pts.max()
    has_ties_and_goes_back = len(np.unique(pts)) < len(pts) and (np.diff(pts) < 0).any()
    if len(pts) < len(times) or not stream.time_base or stands_still or has_ties_and_goes_back:
        rate = stream.average_rate or stream.guessed_rate or _ASSUMED_RATE
        return np.arange(len(times)), np.arange(len(times)) / float(rate)
    order = np.argsort(pts, kind="stable").astype(np.int64) if table.stores_pts else np.arange(len(pts))
    return order, seconds_of(np.sort(pts), stream.time_base)
