"""Decoding chosen frames of an open video, by seeking to their groups of pictures, into upright RGB pixels."""

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import av.error
import numpy as np
import numpy.typing as npt
from av.packet import Packet
from av.sidedata.sidedata import SideData, SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream

from fvc_lib.video.decode.frame_table import (
    NO_PTS,
    FrameTable,
    IntArray,
    Seconds,
    check_not_empty,
    read_frame_table,
    seconds_of,
)
from fvc_lib.video.decode.source import (
    CorruptVideo,
    TruncatedVideo,
    UnsupportedVideo,
    VideoError,
    VideoSource,
    ffmpeg_errors,
    open_video,
)

# From a decoded frame to upright planar RGB of a given size, without distortion. swscale's packed ``rgb24`` output is
# 1.5 grey levels too dark; planar ``gbrp`` is not, so frames go through the latter.

Pixels = npt.NDArray[np.uint8]

# Bilinear widens its support when it scales down, so it does not alias; accurate rounding keeps it free of bias.
SCALER = (
    Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)
_GBRP_TO_RGB = (2, 0, 1)


@dataclass(frozen=True)
class Orientation:
    """How stored pixels are turned for display: transposed first, then mirrored along either axis."""

    transposed: bool = False
    mirrored_x: bool = False
    mirrored_y: bool = False

    @classmethod
    def from_display_matrix(cls, matrix: bytes) -> "Orientation":
        """From ffmpeg's 3 x 3 fixed-point matrix; any angle is rounded to a quarter turn, nonsense to none."""
        a, b, _, c, d = np.frombuffer(matrix, np.int32, count=5).astype(np.int64)
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, bool(a < 0), bool(d < 0))
        return cls(True, bool(c < 0), bool(b < 0))

    @classmethod
    def tagged_on(cls, frame: VideoFrame) -> "Orientation | None":
        """As the container or the bitstream tells with ``frame``, or none where it tells nothing."""
        # frame.side_data would keep the container in the frame and so both, with a decoder's buffer, until the
        # garbage collector comes by.
        data = SideDataContainer(frame).get("DISPLAYMATRIX")  # type: ignore[call-arg]  # the stub lacks it
        return cls.from_display_matrix(bytes(data)) if isinstance(data, SideData) else None

    @property
    def rotation_degrees(self) -> int:
        """Clockwise turn in {0, 90, 180, 270} that display applies, after mirroring left to right where it mirrors."""
        if self.transposed:
            return 90 if self.mirrored_x else 270
        return 180 if self.mirrored_y else 0

    def apply(self, pixels: Pixels) -> Pixels:
        """A view of ``pixels`` (..., H, W) as displayed."""
        if self.transposed:
            pixels = pixels.swapaxes(-1, -2)
        if self.mirrored_x:
            pixels = pixels[..., ::-1]
        return pixels[..., ::-1, :] if self.mirrored_y else pixels


@dataclass(frozen=True)
class Box:
    """A half-open rectangle in pixels: columns ``left`` to ``left + width``, rows ``top`` to ``top + height``."""

    left: int
    top: int
    width: int
    height: int


def fit(display_width: Fraction, display_height: Fraction, width: int, height: int) -> Box:
    """The largest centred box of that aspect ratio in ``width`` x ``height`` pixels, at least one pixel each way."""
    scale = min(width / display_width, height / display_height)
    content_width = min(width, max(1, round(display_width * scale)))
    content_height = min(height, max(1, round(display_height * scale)))
    return Box((width - content_width) // 2, (height - content_height) // 2, content_width, content_height)


class FrameConverter:
    """Writes frames of one video into a uint8 array (3, H, W), upright; one scaler is reused for all of them.

    A bitstream may tell the orientation with its keyframes only (ITU-T H.264, D.2.27): it holds until the next. So the
    frames between must be shown too, with ``observe``.

    Args:
        size: side of the square each frame is letterboxed to with black bars; none keeps the pixels of the first
            frame as stored (turned upright, not stretched where pixels are not square), and fits later frames of
            another size into that.
        sample_aspect_ratio: width of a pixel over its height as the container states it, or none.
    """

    def __init__(self, size: int | None, sample_aspect_ratio: Fraction | None) -> None:
        self.sample_aspect_ratio = sample_aspect_ratio
        self.orientation = Orientation()
        self._size = size
        self._reformatter = VideoReformatter()
        self._shape: tuple[int, int] | None = None if size is None else (size, size)

    def observe(self, frame: VideoFrame) -> None:
        """Take note of what a frame tells about the orientation; every decoded frame, in presentation order."""
        tagged = Orientation.tagged_on(frame)
        if tagged is not None:
            self.orientation = tagged
        elif frame.key_frame:
            self.orientation = Orientation()

    def output_shape(self, frame: VideoFrame) -> tuple[int, int]:
        """(H, W) of every output; without a given size the first frame that is asked about decides it."""
        if self._shape is None:
            self._shape = (frame.width, frame.height) if self.orientation.transposed else (frame.height, frame.width)
        return self._shape

    def content_box(self, frame: VideoFrame) -> Box:
        """Where the picture lies in the output; the rest is black."""
        height, width = self.output_shape(frame)
        aspect = (self.sample_aspect_ratio if self._size is not None else None) or Fraction(1)
        sides = (frame.width * aspect, Fraction(frame.height))
        display_width, display_height = sides[::-1] if self.orientation.transposed else sides
        return fit(display_width, display_height, width, height)

    def convert(self, frame: VideoFrame, out: Pixels) -> None:
        """Fill ``out`` (3, H, W) uint8 with the frame, which was observed last, as RGB."""
        orientation, box = self.orientation, self.content_box(frame)
        stored = (box.height, box.width) if orientation.transposed else (box.width, box.height)
        planar = self._reformatter.reformat(frame, stored[0], stored[1], "gbrp", interpolation=int(SCALER), threads=1)
        out[...] = 0
        content = out[:, box.top : box.top + box.height, box.left : box.left + box.width]
        for channel, plane_index in enumerate(_GBRP_TO_RGB):
            plane = planar.planes[plane_index]
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            content[channel] = orientation.apply(rows[: planar.height, : planar.width])


# Where wanted frames go: one array of pixels, and what the first of them tells about the video.


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
            self.content = converter.content_box(frame)
        slots = np.flatnonzero(self.places == place)
        converter.convert(frame, self.frames[slots[0]])
        self.frames[slots[1:]] = self.frames[slots[0]]
        self.wanted.discard(place)


@dataclass
class FirstFrame:
    """What the first frame of a video tells about it, once it was offered."""

    pixel_format: str = ""
    width: int = 0
    height: int = 0
    orientation: Orientation = Orientation()

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Take note of the frame at place 0."""
        if place == 0:
            self.pixel_format, self.width, self.height = frame.format.name, frame.width, frame.height
            self.orientation = Orientation.tagged_on(frame) or Orientation()


class Sink(Protocol):
    """What takes frames of one video: those at ``wanted`` places in the presentation order."""

    wanted: set[int]

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""


class Sinks:
    """The sinks that one pass fills; ``first``, where it is given, wants the first frame.

    Attributes:
        wanted: places in the presentation order that some sink still wants.
    """

    def __init__(self, sinks: Sequence[FrameSink], first: FirstFrame | None = None) -> None:
        self.wanted = set[int]().union(*(sink.wanted for sink in sinks), () if first is None else (0,))
        self._sinks: list[FrameSink | FirstFrame] = [*sinks, *(() if first is None else (first,))]

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""
        for sink in self._sinks:
            sink.offer(place, frame)
        if place is not None:
            self.wanted.discard(place)


# Reading past this many packets costs less than a seek.
_PACKETS_WORTH_A_SEEK = 32
# MPEG-TS knows no keyframes when it seeks: where it lands too late, try earlier.
_SEEK_MARGINS_SECONDS = (0, 1, 5)
# No format holds back more (ITU-T H.264, A.3.1; H.265, A.4.2); told to, ffmpeg's decoder would abort the process.
_MAX_REORDER_DEPTH = 16
# Decoders that can leave out unreferenced frames and give the others unchanged: AV1's loses some, VP9's ignores it.
_SKIPS_NON_REFERENCES = frozenset({"h264", "hevc", "mpeg4"})


def read_by_pts(source: VideoSource, table: FrameTable, order: IntArray, sink: Sink) -> bool:
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
        if not _read_group(source, cursor, group, sink):
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


def _read_group(source: VideoSource, cursor: _PacketCursor, group: _Group, sink: Sink) -> bool:
    context = source.stream.codec_context
    skips = source.codec_name in _SKIPS_NON_REFERENCES
    for pts in group.packet_pts:
        packet = cursor.next()
        if packet is None or packet.pts != pts or packet.is_corrupt:
            return False
        if skips:
            context.skip_frame = "DEFAULT" if pts in group.places else "NONREF"
        if not _take(context.decode(packet), group, sink):
            return False
    # Everything the last wanted frame needs is in the decoder: have it put out without feeding what follows.
    return not group.places or (_take(context.decode(None), group, sink) and not group.places)


def _take(frames: list[VideoFrame], group: _Group, sink: Sink) -> bool:
    for frame in frames:
        place = None if frame.pts is None else group.places.pop(frame.pts, None)
        if place is not None and frame.is_corrupt:
            return False
        if frame.pts == group.packet_pts[0] and not frame.key_frame:
            return False  # the container called it a keyframe, and the decoder made it up from nothing
        sink.offer(place, frame)
    return True


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


_Places = Sequence[tuple[IntArray, int | None]]  # of each sink: ``places`` and ``size`` of ``FrameSink``


def read_as_promised(
    path: Path, table: FrameTable, places: _Places, first: FirstFrame | None = None
) -> tuple[list[FrameSink], Seconds] | None:
    """Decode a whole video once and take frames on the way, trusting that it has as many as its packets promise.

    Returns:
        The filled sinks and float64 (n,) the presentation times in seconds; none where the promise was not kept, a
        wanted frame is damaged, or frames came in another order.

    Raises:
        VideoError: the decoder gave up.
    """
    times: list[int | None] = []
    with open_video(path, thorough=True) as source:
        sinks = [FrameSink(source, size, some) for some, size in places]
        together = Sinks(sinks, first)
        for number, frame in enumerate(_decode_all(source, table)):
            times.append(frame.pts)
            if number in together.wanted and frame.is_corrupt:
                return None
            together.offer(number, frame)
        order, seconds = _order_and_seconds(source, times, table)
    kept = len(times) == table.num_shown and bool((order == np.arange(len(order))).all())
    return (sinks, seconds) if kept and not together.wanted else None


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


def read_by_place(path: Path, table: FrameTable, order: IntArray, places: _Places) -> list[FrameSink]:
    """Decode a video from its beginning until all wanted frames are there.

    Args:
        path: the video.
        table: its packets.
        order: as ``FrameCount`` has it.
        places: see ``FrameSink``, for each of them.

    Raises:
        CorruptVideo: the decoder marked a wanted frame as damaged, failed before it, or never put it out.
    """
    with open_video(path, thorough=True) as source:
        sinks = [FrameSink(source, size, some) for some, size in places]
        together = Sinks(sinks)
        place_of = {int(order[place]): place for place in together.wanted}
        for number, frame in enumerate(_decode_all(source, table)):
            if number in place_of and frame.is_corrupt:
                raise CorruptVideo(path, f"frame {place_of[number]} is damaged")
            together.offer(place_of.get(number), frame)
            if not together.wanted:
                return sinks
    raise CorruptVideo(path, "decoding it twice gives different frames")


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


class MissingFrames(Exception):  # noqa: N818 - no error of the video's: another look at it may find them
    """Decoding gave other frames than the packets promised."""


@dataclass(frozen=True)
class SeenFrame:
    """One of a video's frames, its place in the presentation, and the times in seconds, float64 (n,), of all n."""

    source: VideoSource
    number: int
    frame: VideoFrame
    times: Seconds


def all_frames(path: Path, *, counted: bool = False) -> Generator[SeenFrame]:
    """Every frame of a video in the order of presentation, one at a time: those that ``decode_clip`` counts.

    Args:
        path: the video.
        counted: decode it all once before, where the packets' promise of so many frames at such times is not kept.

    Raises:
        MissingFrames: so it is, and they were not counted.
        VideoError: the file is unreadable, truncated or corrupt, or its frames come in another order.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        check_not_empty(path, table)
        shown, time_base = np.sort(table.pts[table.is_shown]), opened.stream.time_base
    if table.damage is not None:
        raise TruncatedVideo(path, table.damage)
    trusted = table.trusted and not counted
    if trusted:
        times = seconds_of(shown, time_base)
    else:
        count = count_frames(path, table)
        if count.missing is not None or not count.num_frames:
            detail = count.missing or "it opens, but no frame can be decoded"
            raise (CorruptVideo if count.decoder_failed or not count.num_frames else TruncatedVideo)(path, detail)
        if (count.order != np.arange(count.num_frames)).any():
            raise UnsupportedVideo(path, "its frames are not decoded in the order in which they are shown")
        times = count.seconds
    number = 0
    with open_video(path, thorough=True) as source:
        for frame in _decode_all(source, table):
            if trusted and (number >= len(shown) or frame.pts != shown[number]):
                raise MissingFrames(path)
            if frame.is_corrupt or number >= len(times):
                raise CorruptVideo(path, f"frame {number} is damaged")
            yield SeenFrame(source, number, frame, times)
            number += 1
    if number < len(times):
        if trusted:
            raise MissingFrames(path)
        raise CorruptVideo(path, "decoding it twice gives different frames")


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
