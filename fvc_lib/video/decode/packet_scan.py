"""Reading a video's frame table: from the index of an MP4 file, or from all packets, never by decoding."""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path

import av
import av.error
import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, IntArray, order_is_sure, read_sample_table
from fvc_lib.video.decode.source import UnreadableVideo, VideoSource

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
# Of those without, the ones whose frames are shown in the order they are stored when no frame is reordered.
_IN_ORDER = frozenset({"avi"})
# Frames an encoder chose not to code are packets of a few bytes that yield no frame (MPEG-4 part 2's N-VOP).
_SMALLEST_MPEG4_FRAME_BYTES = 8


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
    in_order = source.container_name in _STORES_PTS or _is_stored_in_order(source, pts)
    return FrameTable(
        pts=pts,
        dts=np.array(scan.dts, np.int64),
        is_key=is_key,
        is_shown=is_shown,
        trusted=in_order and _codes_every_frame(source, scan.smallest_bytes) and order_is_sure(pts, is_key, is_shown),
        begins_anew=scan.begins_anew,
        stores_pts=source.container_name in _STORES_PTS,
        damage=scan.damage(),
        duration=scan.duration,
    )


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

    def _add(self, packet: Packet[VideoStream]) -> None:
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


def _codes_every_frame(source: VideoSource, smallest_bytes: int) -> bool:
    if source.codec_name == "dirac":  # its decoder calls every frame a keyframe, so a wrong start is not noticed
        return False
    return source.codec_name != "mpeg4" or smallest_bytes >= _SMALLEST_MPEG4_FRAME_BYTES


def _is_stored_in_order(source: VideoSource, pts: IntArray) -> bool:
    reorders = bool(source.stream.codec_context.has_b_frames)
    return source.container_name in _IN_ORDER and not reorders and bool((np.diff(pts) > 0).all())


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
