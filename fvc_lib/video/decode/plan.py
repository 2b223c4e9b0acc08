"""How wanted frames of a video are decoded: a plan, made from the packets before a frame is decoded, and doing it.

Where time stamps name every frame, only the runs of packets from a keyframe to the last frame wanted behind it go to
the decoder. Where that is not known to be exact (no time stamps, damaged seeking, frames before the first keyframe) the
whole video is decoded as a stream, a second time where the first shows that the packets promised another number of
frames. Windows over a whole video and files written anew take the same ways.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import av.error
import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, IntArray, Seconds, seconds_of
from fvc_lib.video.decode.source import (
    CorruptVideo,
    TruncatedVideo,
    UnsupportedVideo,
    VideoError,
    VideoSource,
    ffmpeg_errors,
    open_video,
)


class Sink(Protocol):
    """What takes frames of one video: those at ``wanted`` places in the presentation order."""

    wanted: set[int]

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""


S = TypeVar("S", bound=Sink)
# Of the open video that frames will come from, how many it has, and float64 (n,) their times in seconds: none where
# they are known behind a pass only. Called anew for every attempt; before a frame is decoded.
SinkOf = Callable[[VideoSource, int, Seconds | None], S]


class Route(StrEnum):
    """Ways to a video's frames, each surer and slower than the one before."""

    RUNS = "runs of packets"
    PASS = "one pass"
    COUNT = "two passes"


@dataclass(frozen=True)
class DecodePlan:
    """What is going to be done.

    Attributes:
        routes: the first is taken; the others in turn where the video is not as its packets promise.
        why: what keeps a faster route from being taken; empty: nothing.
        num_frames: of the video, as its packets promise.
        num_wanted: of them.
        num_packets: of the video.
        runs: half-open ranges of packets in decoding order that go to the decoder, apart and ascending.
        seeks: jumps in the file from one run to the next, and to the first.
        reorder_depth: frames that the decoder has to hold back.
        leaves_out: of the frames in ``runs``, those that nothing refers to and nobody wants are not decoded.
        threads: of the decoder.
    """

    routes: tuple[Route, ...]
    why: str
    num_frames: int
    num_wanted: int
    num_packets: int
    runs: tuple[tuple[int, int], ...]
    seeks: int
    reorder_depth: int
    leaves_out: bool
    threads: int

    @property
    def num_decoded(self) -> int:
        """Packets that go to the decoder; as often again where they have to be counted."""
        return sum(end - start for start, end in self.runs)

    def __str__(self) -> str:
        """A few plain sentences."""
        route, runs = self.routes[0], _count(len(self.runs), "run")
        told = f"{_count(self.num_wanted, 'frame')} of {self.num_frames or 'nobody knows how many'}, by {route}"
        told += f", because {self.why}. " if self.why else ": time stamps name every frame. "
        told += f"{self.num_decoded:,} of {_count(self.num_packets, 'packet')} go to the decoder "
        told += f"in {runs} with {_count(self.seeks, 'seek')}" if route is Route.RUNS else "from the first on"
        told += f", {_count(self.threads, 'thread')}."
        if self.leaves_out:
            told += " Frames that nothing refers to and nobody wants are left out undecoded."
        if route is Route.COUNT:
            told += " The first pass counts the frames and takes their times, the second takes the wanted ones."
        if self.routes[1:]:
            told += f" If the video is not as its packets promise: {', then '.join(self.routes[1:])}."
        return told


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Reading past this many packets costs less than a seek.
_PACKETS_WORTH_A_SEEK = 32
# MPEG-TS knows no keyframes when it seeks: where it lands too late, try earlier.
_SEEK_MARGINS_SECONDS = (0, 1, 5)
# No format holds back more (ITU-T H.264, A.3.1; H.265, A.4.2); told to, ffmpeg's decoder would abort the process.
_MAX_REORDER_DEPTH = 16
# Decoders that can leave out unreferenced frames and give the others unchanged: AV1's loses some, VP9's ignores it.
_SKIPS_NON_REFERENCES = frozenset({"h264", "hevc", "mpeg4"})


def plan_decoding(
    source: VideoSource, table: FrameTable, wanted: Collection[int], *, in_order: bool = False
) -> DecodePlan:
    """The plan for the frames at ``wanted`` places in the presentation order, of those that the packets promise.

    Args:
        source: the open video.
        table: its packets.
        wanted: places, each once, in any order.
        in_order: see ``decode``.

    Raises:
        TruncatedVideo: the file lacks what its container promises.
    """
    if table.damage is not None:
        raise TruncatedVideo(source.path, table.damage)
    why, depth = table.doubt, 0
    if not why:
        order = table.presentation_order()
        depth = table.reorder_depth(order)
        if depth > _MAX_REORDER_DEPTH:
            why = f"a frame is shown {depth} places behind its packet, more than a decoder holds back"
    threads = source.stream.codec_context.thread_count
    passes = (Route.COUNT,) if in_order or not table.num_shown else (Route.PASS, Route.COUNT)
    of_video = (table.num_shown, len(wanted), table.num_packets)
    if why:
        return DecodePlan(passes, why, *of_video, ((0, table.num_packets),), 0, depth, False, threads)
    runs: list[tuple[int, int]] = []
    positions = np.sort(order[np.fromiter(wanted, np.int64)])
    for start, position in zip(table.decoding_starts(positions).tolist(), positions.tolist(), strict=True):
        while runs and start <= runs[-1][1]:  # it begins within the run before, or goes on with it
            start = min(start, runs.pop()[0])
        runs.append((start, position + 1))
    between = [start - end for (_, end), (start, _) in itertools.pairwise(runs)]
    seeks = 1 + sum(apart > _PACKETS_WORTH_A_SEEK for apart in between)
    leaves_out = source.codec_name in _SKIPS_NON_REFERENCES
    return DecodePlan((Route.RUNS, *passes), "", *of_video, tuple(runs), seeks, depth, leaves_out, threads)


@dataclass(frozen=True)
class Decoded(Generic[S]):
    """What became of a plan: the sink with all that it wanted, the times of all frames, and the route that led there.

    Attributes:
        seconds: float64 (n,), presentation times of the video's n frames on the container's own clock; from the nominal
            rate where the container has no usable times.
    """

    sink: S
    seconds: Seconds
    route: Route


def decode(opened: VideoSource, table: FrameTable, sink_of: SinkOf[S], *, in_order: bool = False) -> Decoded[S]:
    """Give a sink the frames that it wants, as decoding the whole video gives them.

    Args:
        opened: the video, from which only ``table`` was read so far; closed where it has to be opened again.
        table: its packets.
        sink_of: makes the sink; ``FrameSink.wanted`` and ``offer`` are all that is used of it.
        in_order: the sink takes frames in the order of presentation only, and needs their times before.

    Raises:
        VideoError: the file is truncated, corrupt or refused, or its frames come in another order.
    """
    path, sink = opened.path, None
    seconds: Seconds = np.empty(0)
    if not table.doubt and table.damage is None:
        order = table.presentation_order()
        seconds = seconds_of(table.pts[order], opened.stream.time_base)
        sink = sink_of(opened, len(order), seconds)
    plan = plan_decoding(opened, table, () if sink is None else sink.wanted, in_order=in_order)
    if sink is not None and Route.RUNS in plan.routes:
        # Decoded from the beginning the same packets may be fine; if not, that says what is wrong.
        with suppress(CorruptVideo, TruncatedVideo), ffmpeg_errors(path, CorruptVideo):
            if _read_runs(opened, table, plan, sink, in_order):
                return Decoded(sink, seconds, Route.RUNS)
    opened.container.close()
    found = None
    if Route.PASS in plan.routes:
        with suppress(VideoError):  # counting will say what is wrong
            found = _read_once(path, table, sink_of)
    return found or _read_counted(path, table, sink_of, in_order)


def _read_runs(source: VideoSource, table: FrameTable, plan: DecodePlan, sink: Sink, in_order: bool) -> bool:
    """Whether every wanted frame turned up whole; otherwise the sink is incomplete and must be given up."""
    if table.begins_anew:
        source.refuse_damage()
    context, cursor = source.stream.codec_context, _PacketCursor(source, table)
    shown = table.pts[table.presentation_order()]
    taker = _Taker(sink, {int(shown[place]): place for place in sink.wanted}, in_order)
    for start, end in plan.runs:
        if not cursor.move_to(start):
            return False
        context.flush_buffers()
        # The decoder may have to guess how long to hold frames back, and drops those that come late by its guess.
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
        # Everything the last wanted frame needs is in the decoder: have it put out without feeding what follows.
        if taker.lacks(run) and (not taker.take(context.decode(None), run[0]) or taker.lacks(run)):
            return False
    return not sink.wanted


@dataclass
class _Taker:
    """Hands frames on by their times, ``place_of`` those that are wanted and still to come."""

    sink: Sink
    place_of: dict[int, int]
    in_order: bool
    latest: int = -1

    def take(self, frames: list[VideoFrame], first_pts: int) -> bool:
        """False where one is not as the packets promise; ``first_pts`` is that of the packet where decoding began."""
        for frame in frames:
            place = None if frame.pts is None else self.place_of.pop(frame.pts, None)
            if frame.pts == first_pts and not frame.key_frame:
                return False  # the container called it a keyframe, and the decoder made it up from nothing
            if place is not None:
                if frame.is_corrupt or (self.in_order and place < self.latest):
                    return False
                self.latest = place
            self.sink.offer(place, frame)
        return True

    def lacks(self, run: list[int]) -> bool:
        """Whether frames of these packets have not come yet."""
        return any(pts in self.place_of for pts in run)


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

    def next(self) -> "Packet[VideoStream] | None":
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
                self._packets = itertools.chain([packet], self._packets)
                self._position = key
                return True
            if packet.pts is not None and (np.flatnonzero(table.pts == packet.pts) > key).any():
                return False  # landed behind it
        return False


# Decoding a video from its first packet to its last: the slow and sure way, and the only one to count frames by.

# What ffmpeg assumes where neither the container nor the bitstream states a rate.
_ASSUMED_RATE = Fraction(25)
# Decoders that start anywhere and predict the first frames from grey, where others wait for a keyframe.
_PREDICTS_FROM_NOTHING = frozenset({"mpeg4", "h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"})
# Containers that state neither a size nor an end: of these a last packet that does not decode is all that tells a cut.
_ENDS_ANYWHERE = frozenset({"flv", "h264", "hevc", "ivf", "m4v", "mpeg", "mpegts", "mpegvideo", "obu"})
# At a join of two recordings the demuxer notices that packets are missing with one of the last before the keyframe.
_PACKETS_TO_JOIN = 3


@dataclass(frozen=True)
class FrameCount:
    """What decoding a whole video found."""

    # Int64 (n,), for each place in the presentation the number of the frame as the decoder puts them out.
    order: IntArray
    seconds: Seconds  # float64 (n,), presentation times, ascending
    missing: str | None  # why there are fewer frames than promised, or none
    decoder_failed: bool  # it was the decoder that gave up

    @property
    def num_frames(self) -> int:
        """Frames that decode."""
        return len(self.order)


def _read_once(path: Path, table: FrameTable, sink_of: SinkOf[S]) -> Decoded[S] | None:
    """Decode a whole video once and take frames on the way, trusting that it has as many as its packets promise.

    None where it has not, a wanted frame is damaged, or frames came in another order.
    """
    times: list[int | None] = []
    with open_video(path, thorough=True) as source:
        sink = sink_of(source, table.num_shown, None)
        for number, frame in enumerate(_decode_all(source, table)):
            times.append(frame.pts)
            if number in sink.wanted and frame.is_corrupt:
                return None
            sink.offer(number, frame)
        order, seconds = _order_and_seconds(source, times, table)
    kept = len(times) == table.num_shown and bool((order == np.arange(len(order))).all())
    return Decoded(sink, seconds, Route.PASS) if kept and not sink.wanted else None


def _read_counted(path: Path, table: FrameTable, sink_of: SinkOf[S], in_order: bool) -> Decoded[S]:
    """Decode a whole video to count its frames, and again from its beginning until all wanted ones are there."""
    count = count_frames(path, table)
    if not count.num_frames:
        raise CorruptVideo(path, count.missing or "it opens, but no frame can be decoded")
    if count.missing is not None:
        raise (CorruptVideo if count.decoder_failed else TruncatedVideo)(path, count.missing)
    if in_order and (count.order != np.arange(count.num_frames)).any():
        raise UnsupportedVideo(path, "its frames are not decoded in the order in which they are shown")
    with open_video(path, thorough=True) as source:
        sink = sink_of(source, count.num_frames, count.seconds)
        place_of = {int(count.order[place]): place for place in sink.wanted}
        for number, frame in enumerate(_decode_all(source, table)):
            if number in place_of and frame.is_corrupt:
                raise CorruptVideo(path, f"frame {place_of[number]} is damaged")
            sink.offer(place_of.get(number), frame)
            if not sink.wanted:
                return Decoded(sink, count.seconds, Route.COUNT)
    raise CorruptVideo(path, "decoding it twice gives different frames")


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
    elif missing is None and not table.doubt and len(times) < table.num_shown:
        missing = f"{table.num_shown} frames are promised and {len(times)} decode"
    return FrameCount(order, seconds, missing, isinstance(failure, CorruptVideo))


def _decode_all(source: VideoSource, table: FrameTable) -> Iterator[VideoFrame]:
    """All frames that are decoded from what is there; what is damaged or lost ends the video with an error."""
    has_begun = source.codec_name not in _PREDICTS_FROM_NOTHING
    reached_key = any_frame = False
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
        except av.error.InvalidDataError as error:
            if any_frame and number + 1 == table.num_packets and source.container_name in _ENDS_ANYWHERE:
                raise TruncatedVideo(source.path, "its last packet is cut short") from error
            if reached_key:
                raise
            continue  # a recording that was joined in the middle of a group of pictures
        for frame in frames:
            has_begun = has_begun or frame.key_frame
            if has_begun:
                any_frame = True
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
