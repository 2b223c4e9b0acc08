"""The frames of a video in presentation order: from an MP4 file's index or from all packets, never by decoding.

``stream.frames`` and the nominal rate are wrong on many real files, and counters restart after a seek; a packet's
presentation time stamp (pts) is what names a frame.
"""

import itertools
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.packet import Packet
from av.video.stream import VideoStream

from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo, UnreadableVideo, VideoSource

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.floating]

NO_PTS = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class FrameTable:
    """The packets of one stream in decoding order, N of them.

    Attributes:
        pts: int64 (N,), in ``time_base`` units; ``NO_PTS`` where a packet has none.
        dts: int64 (N,), the same for decoding times.
        is_key: bool (N,), decoding can start here.
        is_shown: bool (N,), the packet yields a frame (not trimmed by an edit list, not a hidden reference).
        trusted: frame i of the presentation is the packet with the i-th smallest pts, and can be found by its pts.
        begins_anew: every keyframe does, by ``VideoSource.begins_anew``: after a seek, a missing reference is damage.
        stores_pts: the container states presentation times, so that their order is the order of the frames.
        damage: what the container promises and the file does not hold, or none.
        duration: int, of the last shown packet in ``time_base`` units, 0 where not stated.
    """

    pts: IntArray
    dts: IntArray
    is_key: BoolArray
    is_shown: BoolArray
    trusted: bool
    begins_anew: bool
    stores_pts: bool
    damage: str | None
    duration: int

    @property
    def num_packets(self) -> int:
        """Packets read, shown or not."""
        return len(self.pts)

    @property
    def num_shown(self) -> int:
        """Frames of the presentation, as promised by the packets."""
        return int(np.count_nonzero(self.is_shown))

    def presentation_order(self) -> IntArray:
        """Decoding positions (M,) of the M shown packets, in presentation order."""
        if self.is_shown.all():  # nearly always, and an hour has 100,000 frames
            return np.argsort(self.pts, kind="stable")
        shown = np.flatnonzero(self.is_shown)
        return shown[np.argsort(self.pts[shown], kind="stable")]

    def reorder_depth(self, order: IntArray) -> int:
        """How many frames a decoder must hold back to put them out in ``order``, the presentation order."""
        # The r-th frame shown is the d-th of the shown ones to be decoded: it is held back until d - r others came out.
        decoded = order if self.is_shown.all() else np.cumsum(self.is_shown)[order] - 1
        return int((decoded - np.arange(len(order))).max(initial=0))

    def decoding_start(self, position: int) -> int:
        """Where decoding must start so that the packet at ``position`` decodes exactly.

        The last keyframe before it, or the one before that for a leading picture of an open group of pictures: it
        is shown before the keyframe it follows and refers to the previous group.
        """
        keys = np.flatnonzero(self.is_key[: position + 1])
        if not len(keys):
            return 0
        leads = self.pts[position] < self.pts[keys[-1]]
        return int(keys[-2]) if leads and len(keys) > 1 else int(keys[-1])


def seconds_of(pts: IntArray, time_base: Fraction | None) -> Seconds:
    """float64 seconds of integer times, rounded once, so that they equal the float of the exact fraction."""
    return pts * time_base.numerator / time_base.denominator if time_base else np.zeros(len(pts))


def order_is_sure(pts: IntArray, is_key: BoolArray, is_shown: BoolArray) -> bool:
    """Whether the pts (N,) of packets name their frames: none missing, none twice, all decodable from the first on."""
    if not is_shown.any() or not is_key[0] or (pts == NO_PTS).any():
        return False
    # A hidden reference may share its pts with the frame shown next; two frames or two keyframes may not.
    for chosen in (is_shown, is_key):
        ordered = np.sort(pts[chosen])
        if (ordered[1:] == ordered[:-1]).any():
            return False
    # Frames shown before the first keyframe refer to frames that are not in the file; decoders drop them.
    return bool((pts[is_shown] >= pts[0]).all())


def check_not_empty(path: Path, table: FrameTable) -> None:
    """Refuse a video without a single packet: some broken files open and end without an error.

    Raises:
        TruncatedVideo: its index promises frames.
        CorruptVideo: nothing does.
    """
    if not table.num_packets:
        if table.damage is not None:
            raise TruncatedVideo(path, table.damage, "Fetch the file again.")
        raise CorruptVideo(path, "it opens, but holds no frame")


# The frames of an MP4 or QuickTime file from its sample tables (ISO/IEC 14496-12, 8.6 and 8.7), without reading a
# packet. Only where they say plainly which frames are shown: fragments, edit lists that trim or repeat, several sample
# descriptions and anything unexpected give none.


@dataclass(frozen=True)
class SampleTable:
    """The samples of one track in decoding order, N of them; times in the track's time scale, from the first dts."""

    pts: IntArray  # (N,), presentation times
    dts: IntArray  # (N,), decoding times
    is_key: BoolArray  # (N,), sync samples: decoding can start there
    smallest_bytes: int  # size of the smallest sample
    is_complete: bool  # no sample ends behind the end of the file
    last_duration: int


class _NotPlain(Exception):  # noqa: N818 - not an error: the packets will be read instead
    """The index does not say plainly which frames are shown."""


def read_sample_table(path: Path, track_id: int, num_samples: int) -> SampleTable | None:
    """The samples of a track, or none where the index does not tell the presentation plainly.

    Args:
        path: an MP4 or QuickTime file.
        track_id: of the track, as its header states it.
        num_samples: how many ffmpeg found; a table that claims another number is not believed, and so never allocated.

    Raises:
        OSError: the file cannot be read.
    """
    if num_samples < 1:
        return None
    try:
        with path.open("rb") as file:
            return _sample_table(_File(file), track_id, num_samples)
    except (_NotPlain, struct.error, KeyError):  # KeyError: a box that is not there
        return None


@dataclass(frozen=True)
class _Box:
    kind: bytes
    start: int  # of its content in the file
    end: int  # behind its content

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class _File:
    """Boxes and numbers of an open file; nothing is read that is not asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = file.seek(0, 2)
        self.whole = _Box(b"", 0, self.num_bytes)

    def children(self, parent: _Box) -> Iterator[_Box]:
        start = parent.start
        while start + 8 <= parent.end:
            size, kind = self._unpack(">I4s", start)
            header = 8
            if size == 1:
                (size,) = self._unpack(">Q", start + 8)
                header = 16
            elif size == 0:
                size = parent.end - start
            if size < header:
                raise _NotPlain
            yield _Box(kind, start + header, min(start + size, parent.end))
            start += size

    def child(self, parent: _Box, *kinds: bytes) -> _Box:
        for kind in kinds:
            found = [box for box in self.children(parent) if box.kind == kind]
            if len(found) != 1:
                raise _NotPlain
            parent = found[0]
        return parent

    def numbers(self, box: _Box, offset: int, layout: str) -> tuple[Any, ...]:
        """``struct`` numbers at ``offset`` of a box."""
        if box.start + offset + struct.calcsize(layout) > box.end:
            raise _NotPlain
        return self._unpack(layout, box.start + offset)

    def table(self, box: _Box, offset: int, count: int, columns: int = 1, dtype: str = ">u4") -> npt.NDArray[Any]:
        """Array (count, columns) of ``dtype`` from ``offset`` of a box on, read-only."""
        num_bytes = count * columns * np.dtype(dtype).itemsize
        if offset + num_bytes > box.num_bytes:
            raise _NotPlain
        self._file.seek(box.start + offset)
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise _NotPlain
        return np.frombuffer(content, dtype).reshape(count, columns)

    def _unpack(self, layout: str, position: int) -> tuple[Any, ...]:
        self._file.seek(position)
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))


def _sample_table(file: _File, track_id: int, num_samples: int) -> SampleTable:
    kinds = [box.kind for box in file.children(file.whole)]
    if b"moof" in kinds:
        raise _NotPlain
    movie = file.child(file.whole, b"moov")
    track = _track(file, movie, track_id)
    media = file.child(track, b"mdia")
    boxes = {box.kind: box for box in file.children(file.child(media, b"minf", b"stbl"))}
    if b"stps" in boxes or file.numbers(boxes[b"stsd"], 4, ">I") != (1,):
        raise _NotPlain
    if b"sbgp" in boxes and file.numbers(boxes[b"sbgp"], 4, ">4s") == (b"rap ",):  # more places to start decoding
        raise _NotPlain
    durations = file.table(*_counted(file, boxes[b"stts"], 2))
    dts = np.zeros(num_samples, np.int64)
    np.cumsum(_runs(durations, num_samples)[:-1], out=dts[1:])
    pts = dts
    if b"ctts" in boxes:  # signed in both versions, as ffmpeg and QuickTime read it
        pts = dts + _runs(file.table(*_counted(file, boxes[b"ctts"], 2), dtype=">i4"), num_samples)
    _check_edits(file, movie, track, media, pts)
    sizes = _sizes(file, boxes, num_samples)
    if not sizes.min():  # "the frame stays": no frame of its own
        raise _NotPlain
    return SampleTable(
        pts=pts,
        dts=dts,
        is_key=_sync_samples(file, boxes, num_samples),
        smallest_bytes=int(sizes.min()),
        is_complete=_end_of_samples(file, boxes, sizes) <= file.num_bytes,
        last_duration=int(durations[-1, 1]),
    )


def _counted(file: _File, box: _Box, columns: int) -> tuple[_Box, int, int, int]:
    """Arguments of ``table`` for a box of version and flags, an entry count, and the entries."""
    return box, 8, file.numbers(box, 4, ">I")[0], columns


def _runs(counts_and_values: npt.NDArray[Any], num_samples: int) -> npt.NDArray[Any]:
    """Integers (num_samples,) from run lengths; the lengths are added up before anything of their size is made."""
    counts, values = counts_and_values.T
    if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != num_samples:
        raise _NotPlain
    return np.repeat(values, counts)


def _track(file: _File, movie: _Box, track_id: int) -> _Box:
    for track in file.children(movie):
        if track.kind == b"trak" and _behind_times(file, file.child(track, b"tkhd")) == track_id:
            return track
    raise _NotPlain


def _behind_times(file: _File, header: _Box) -> int:
    """The number behind a header's two times, which version 1 gives 8 bytes each: a track's id or a time scale."""
    (version,) = file.numbers(header, 0, ">B")
    number: int = file.numbers(header, 20 if version else 12, ">I")[0]
    return number


def _check_edits(file: _File, movie: _Box, track: _Box, media: _Box, pts: IntArray) -> None:
    """Only a delay and an edit that shows every frame once leave the presentation as the sample table has it."""
    edits = [box for box in file.children(track) if box.kind == b"edts"]
    if not edits:
        return
    box = file.child(edits[0], b"elst")
    (version,), (count,) = file.numbers(box, 0, ">B"), file.numbers(box, 4, ">I")
    layout = ">QqI" if version else ">IiI"
    if count > 2:
        raise _NotPlain
    entries = [file.numbers(box, 8 + number * struct.calcsize(layout), layout) for number in range(count)]
    if len(entries) == 2 and entries[0][1] == -1:  # the delay before the video starts
        entries = entries[1:]
    if len(entries) != 1:
        raise _NotPlain
    duration, media_start, rate = entries[0]
    if rate != 1 << 16 or media_start != int(pts.min()):
        raise _NotPlain
    scales = _behind_times(file, file.child(media, b"mdhd")), _behind_times(file, file.child(movie, b"mvhd"))
    if not all(scales) or int(pts.max()) - media_start >= duration * scales[0] // scales[1]:
        raise _NotPlain


def _sync_samples(file: _File, boxes: dict[bytes, _Box], num_samples: int) -> BoolArray:
    if b"stss" not in boxes:
        return np.ones(num_samples, bool)
    numbers = file.table(*_counted(file, boxes[b"stss"], 1))[:, 0]
    if not len(numbers) or numbers.min() < 1 or numbers.max() > num_samples:
        raise _NotPlain
    is_key = np.zeros(num_samples, bool)
    is_key[numbers - 1] = True
    return is_key


def _sizes(file: _File, boxes: dict[bytes, _Box], num_samples: int) -> npt.NDArray[Any]:
    """Unsigned (num_samples,), bytes of each sample."""
    same_size, count = file.numbers(boxes[b"stsz"], 4, ">II")
    if count != num_samples:
        raise _NotPlain
    return np.full(count, same_size, np.uint32) if same_size else file.table(boxes[b"stsz"], 12, count)[:, 0]


def _end_of_samples(file: _File, boxes: dict[bytes, _Box], sizes: npt.NDArray[Any]) -> int:
    """The largest offset behind any chunk: samples lie in chunks without gaps, chunks anywhere in the file."""
    kind, dtype = (b"co64", ">i8") if b"co64" in boxes else (b"stco", ">u4")
    offsets = file.table(*_counted(file, boxes[kind], 1), dtype=dtype)[:, 0].astype(np.int64)
    runs = file.table(*_counted(file, boxes[b"stsc"], 3)).astype(np.int64)
    first_chunks = runs[:, 0] - 1
    if not len(runs) or first_chunks[0] != 0 or (np.diff(first_chunks) <= 0).any() or first_chunks[-1] >= len(offsets):
        raise _NotPlain
    per_chunk = np.repeat(runs[:, 1], np.diff(np.append(first_chunks, len(offsets))))
    if (per_chunk < 1).any() or int(per_chunk.sum()) != len(sizes):
        raise _NotPlain
    chunk_bytes = np.add.reduceat(sizes, np.cumsum(per_chunk) - per_chunk, dtype=np.int64)
    return int((offsets + chunk_bytes).max())


# Whether a file is shorter than its container says: how a cut AVI or Matroska file differs from a short video.

# Writers round chunk sizes up; a difference this small is no lost frame.
_SLACK_BYTES = 16
_EBML_HEADER = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def missing_bytes(path: Path) -> int:
    """How many bytes the outermost element states and the file lacks; 0 where it states nothing.

    Known are RIFF (AVI) and EBML (Matroska, WebM, RFC 8794). A recording that was never finished states no size.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(4096)
        num_bytes = file.seek(0, 2)
    stated = _riff_bytes(head) if head.startswith(b"RIFF") else _ebml_bytes(head)
    return stated - num_bytes if stated > num_bytes + _SLACK_BYTES else 0


def _riff_bytes(head: bytes) -> int:
    size = int.from_bytes(head[4:8], "little")
    return 0 if size == 0xFFFFFFFF else size + 8


def _ebml_bytes(head: bytes) -> int:
    """End of the segment, which follows the header."""
    if not head.startswith(_EBML_HEADER):
        return 0
    header_bytes, start = _variable_int(head, len(_EBML_HEADER))
    if header_bytes is None or head[start + header_bytes :][: len(_SEGMENT)] != _SEGMENT:
        return 0
    segment_bytes, start = _variable_int(head, start + header_bytes + len(_SEGMENT))
    return 0 if segment_bytes is None else start + segment_bytes


def _variable_int(data: bytes, start: int) -> tuple[int | None, int]:
    """An EBML data size and the place behind it; none for the size "unknown" or where there is none."""
    first = data[start] if start < len(data) else 0
    if not first:
        return None, start
    length = 9 - first.bit_length()
    bits = 7 * length
    value = int.from_bytes(data[start : start + length], "big") & ((1 << bits) - 1)
    return (None if value == (1 << bits) - 1 else value), start + length


# Containers that store a pts per packet. AVI and elementary streams hold decoding order only.
_STORES_PTS = frozenset({"mov", "matroska", "mpegts", "flv", "mpeg", "asf", "mxf", "nut", "ogg", "ivf", "gif", "apng"})
# Frames an encoder chose not to code are packets of a few bytes that yield no frame (MPEG-4 part 2's N-VOP).
_SMALLEST_MPEG4_FRAME_BYTES = 8


class _Scan:
    """A pass over the packets; packed columns, because a video of hours has a million of them."""

    def __init__(self, source: VideoSource) -> None:
        self.pts = array("q")
        self.dts = array("q")
        self.is_key = array("b")
        self.is_shown = array("b")
        self.begins_anew = True
        self.duration = 0
        self.smallest_bytes = 1 << 30
        self._source = source
        self._packets = source.packets()
        self._is_mp4 = source.container_name == "mov"
        self._is_hidden = _HIDDEN_PACKETS.get(source.codec_name)
        self._cut_short = 0
        self._failure: str | None = None

    def read(self, num_packets: int | None = None) -> None:
        """Read on, to the end or for so many packets; a failure ends the pass and is part of the damage."""
        try:
            for packet in itertools.islice((packet for packet in self._packets if packet.size), num_packets):
                self._add(packet)
        except av.error.FFmpegError as error:
            self._failure = f"reading stops after {len(self.pts)} packets: {(error.strerror or 'failure').lower()}"

    def damage(self) -> str | None:
        """What is missing after a whole pass: by the failure, by MP4's index of all packets, or by the stated size."""
        if self._failure is not None:
            return self._failure
        missing = max(self._cut_short, self._promised() - len(self.pts))
        if missing > 0:
            return f"{missing} of its {len(self.pts) + missing} frames are missing or cut short"
        num_missing = missing_bytes(self._source.path)
        if num_missing and not self._reaches_stated_end():  # otherwise only the index behind the frames was cut
            return f"the file ends {num_missing:,} bytes before the size its container states"
        if self._source.container_name == "mxf" and not self._reaches_stated_end():
            return "the file ends before the duration that its header states"
        return None

    def _promised(self) -> int:
        """Packets that the index of an MP4 file lists and that are not empty."""
        entries = self._source.stream.index_entries if self._is_mp4 else ()
        return len(entries) if len(entries) <= len(self.pts) else sum(entry.size > 0 for entry in entries)

    def _reaches_stated_end(self) -> bool:
        """Whether the last frame ends where the container says that the video does, give or take a frame."""
        stated, time_base = self._source.container.duration, self._source.stream.time_base
        if not stated or not time_base or not self.pts or NO_PTS in self.pts:
            return False
        seconds = float((max(self.pts) - min(self.pts)) * time_base)
        return seconds + 1.5 * seconds / max(1, len(self.pts) - 1) >= stated / av.time_base

    def _add(self, packet: "Packet[VideoStream]") -> None:
        if packet.is_corrupt and self._is_mp4:  # the file ends inside this packet
            self._cut_short += 1
            return
        hidden = packet.is_discard or (self._is_hidden is not None and self._is_hidden(memoryview(packet)))
        self.pts.append(NO_PTS if packet.pts is None else packet.pts)
        self.dts.append(NO_PTS if packet.dts is None else packet.dts)
        self.is_key.append(packet.is_keyframe)
        self.begins_anew &= not packet.is_keyframe or self._source.begins_anew(memoryview(packet))
        self.is_shown.append(not hidden)
        self.smallest_bytes = min(self.smallest_bytes, packet.size)
        self.duration = self.duration if hidden else packet.duration or 0


def read_frame_table(source: VideoSource) -> FrameTable:
    """The frames of a freshly opened video. The container is left anywhere: seek before reading on.

    Raises:
        UnreadableVideo: the file cannot be read any more.
    """
    scan = _Scan(source)
    scan.read(1)
    try:
        table = _table_of_index(source, scan)
        if table is None:
            scan.read()
            table = _table_of_packets(source, scan)
    except OSError as error:
        raise UnreadableVideo(source.path, (error.strerror or type(error).__name__).lower()) from error
    return table


def _table_of_index(source: VideoSource, scan: _Scan) -> FrameTable | None:
    """From the index of an MP4 file; none where that, or the first packet, leaves a doubt."""
    # VP8 and VP9 may hold hidden references, which only the packets tell.
    if source.container_name != "mov" or source.codec_name in _HIDDEN_PACKETS:
        return None
    if not scan.pts or scan.pts[0] == NO_PTS or not scan.is_shown[0]:
        return None
    samples = read_sample_table(source.path, source.stream.id, len(source.stream.index_entries))
    if samples is None or not samples.is_complete or samples.is_key[0] != scan.is_key[0]:
        return None
    pts, is_shown = samples.pts + (scan.pts[0] - samples.pts[0]), np.ones(len(samples.pts), bool)
    return FrameTable(
        pts=pts,
        dts=samples.dts + source.stream.index_entries[0].timestamp,
        is_key=samples.is_key,
        is_shown=is_shown,
        trusted=_codes_every_frame(source, samples.smallest_bytes) and order_is_sure(pts, samples.is_key, is_shown),
        begins_anew=True,  # what a sync sample is; where a file breaks its word, the decoder will fail
        stores_pts=True,
        damage=None,
        duration=samples.last_duration,
    )


def _table_of_packets(source: VideoSource, scan: _Scan) -> FrameTable:
    pts, is_key, is_shown = np.array(scan.pts, np.int64), np.array(scan.is_key, bool), np.array(scan.is_shown, bool)
    stores_pts = source.container_name in _STORES_PTS
    reorders = bool(source.stream.codec_context.has_b_frames)
    in_order = stores_pts or (source.container_name == "avi" and not reorders and bool((np.diff(pts) > 0).all()))
    return FrameTable(
        pts=pts,
        dts=np.array(scan.dts, np.int64),
        is_key=is_key,
        is_shown=is_shown,
        trusted=in_order and _codes_every_frame(source, scan.smallest_bytes) and order_is_sure(pts, is_key, is_shown),
        begins_anew=scan.begins_anew,
        stores_pts=stores_pts,
        damage=scan.damage(),
        duration=scan.duration,
    )


def _codes_every_frame(source: VideoSource, smallest_bytes: int) -> bool:
    if source.codec_name == "dirac":  # its decoder calls every frame a keyframe, so a wrong start is not noticed
        return False
    return source.codec_name != "mpeg4" or smallest_bytes >= _SMALLEST_MPEG4_FRAME_BYTES


def _vp8_is_hidden(data: memoryview) -> bool:
    return not data[0] & 0x10  # RFC 6386, 9.1: show_frame


def _vp9_is_hidden(data: memoryview) -> bool:
    """VP9 bitstream specification, 6.2 (uncompressed header) and annex B (superframes end with a shown frame)."""
    if (data[-1] & 0xE0) == 0xC0:
        return False
    bits = f"{data[0]:08b}{data[1] if len(data) > 1 else 0:08b}"
    start = 5 if bits[2:4] == "11" else 4  # profile 3 has a reserved bit
    shows_existing = bits[start] == "1"
    return not shows_existing and bits[start + 2] == "0"


# How to tell packets that are references only and never shown.
_HIDDEN_PACKETS = {"vp8": _vp8_is_hidden, "vp9": _vp9_is_hidden}
