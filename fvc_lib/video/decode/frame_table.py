"""The frames of a video in presentation order: from its packets, never by decoding.

``stream.frames`` and the nominal rate are wrong on many real files, and counters restart after a seek; a packet's
presentation time stamp (pts) is what names a frame.
"""

from array import array
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.packet import Packet
from av.video.stream import VideoStream

from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo, UnreadableVideo, VideoSource, pictures_in
from fvc_lib.video.decode.tar_members import opened

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.floating]

NO_PTS = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class FrameTable:
    """The packets of one stream in decoding order, N of them."""

    pts: IntArray  # int64 (N,), in ``time_base`` units; ``NO_PTS`` where a packet has none
    dts: IntArray  # int64 (N,), the same for decoding times
    num_bytes: IntArray  # int64 (N,), size of each packet
    is_key: BoolArray  # bool (N,), decoding can start here
    is_shown: BoolArray  # bool (N,), the packet yields a frame (not trimmed by an edit list, not a hidden reference)
    # Why frame i of the presentation may not be the packet with the i-th smallest pts, to be found by it; empty: it is.
    doubt: str
    # Every keyframe does, by ``VideoSource.begins_anew``: after a seek, a missing reference is damage.
    begins_anew: bool
    stores_pts: bool  # the container states presentation times, so that their order is the order of the frames
    damage: str | None  # what the container promises and the file does not hold, or none

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

    def decoding_starts(self, positions: IntArray) -> IntArray:
        """Where decoding must start so that the packets at ``positions`` decode exactly; without ``doubt`` only.

        The last keyframe before each, or the one before that for a leading picture of an open group of pictures: it
        is shown before the keyframe it follows and refers to the previous group.
        """
        keys = np.flatnonzero(self.is_key)
        last = np.searchsorted(keys, positions, side="right") - 1
        leads = (last > 0) & (self.pts[positions] < self.pts[keys[last]])
        return keys[last - leads]


def seconds_of(pts: IntArray, time_base: Fraction | None) -> Seconds:
    """float64 seconds of integer times, rounded once, so that they equal the float of the exact fraction."""
    return pts * time_base.numerator / time_base.denominator if time_base else np.zeros(len(pts))


def _doubt_of_times(pts: IntArray, is_key: BoolArray, is_shown: BoolArray) -> str:
    """Why the pts (N,) of packets do not name their frames; empty: none is missing or twice, all can be decoded."""
    if not is_shown.any():
        return "no packet is shown"
    if not is_key[0]:
        return "it begins between keyframes"
    if (pts == NO_PTS).any():
        return "packets lack their times"
    # A hidden reference may share its pts with the frame shown next; two frames or two keyframes may not.
    for chosen in (is_shown, is_key):
        ordered = np.sort(pts[chosen])
        if (ordered[1:] == ordered[:-1]).any():
            return "several frames have one time"
    # Frames shown before the first keyframe refer to frames that are not in the file; decoders drop them.
    return "frames are shown before the first keyframe" if (pts[is_shown] < pts[0]).any() else ""


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
    if pictures_in(path) is not None:  # each of them was looked at
        return 0
    with opened(path) as (file, start, end):
        file.seek(start)
        head, num_bytes = file.read(min(4096, end - start)), end - start
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
        self.num_bytes = array("q")
        self.is_key = array("b")
        self.is_shown = array("b")
        self.begins_anew = True
        self._source = source
        self._is_mp4 = source.container_name == "mov"
        self._is_hidden = _HIDDEN_PACKETS.get(source.codec_name)
        self._cut_short = 0
        self._failure: str | None = None

    def read(self) -> None:
        """Read to the end; a failure ends the pass and is part of the damage."""
        try:
            for packet in self._source.packets():
                if packet.size:
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
        self.num_bytes.append(packet.size)


def read_frame_table(source: VideoSource) -> FrameTable:
    """The frames of a freshly opened video. The container is left anywhere: seek before reading on.

    Raises:
        UnreadableVideo: the file cannot be read any more.
        VideoError: as ``check_not_empty``.
    """
    scan = _Scan(source)
    try:
        scan.read()
        damage = scan.damage()
    except OSError as error:
        raise UnreadableVideo(source.path, (error.strerror or type(error).__name__).lower()) from error
    pts, is_key, is_shown = np.array(scan.pts, np.int64), np.array(scan.is_key, bool), np.array(scan.is_shown, bool)
    stores_pts = source.container_name in _STORES_PTS
    reorders = bool(source.stream.codec_context.has_b_frames)
    in_order = stores_pts or (source.container_name == "avi" and not reorders and bool((np.diff(pts) > 0).all()))
    table = FrameTable(
        pts=pts,
        dts=np.array(scan.dts, np.int64),
        num_bytes=np.array(scan.num_bytes, np.int64),
        is_key=is_key,
        is_shown=is_shown,
        doubt=("" if in_order else "its container stores no times of presentation")
        or _doubt_of_codec(source, min(scan.num_bytes, default=0))
        or _doubt_of_times(pts, is_key, is_shown),
        begins_anew=scan.begins_anew,
        stores_pts=stores_pts,
        damage=damage,
    )
    check_not_empty(source.path, table)
    return table


def _doubt_of_codec(source: VideoSource, smallest_bytes: int) -> str:
    if source.codec_name == "dirac":
        return "its decoder calls every frame a keyframe, so that a wrong start is not noticed"
    skips = source.codec_name == "mpeg4" and smallest_bytes < _SMALLEST_MPEG4_FRAME_BYTES
    return "some packets yield no frame" if skips else ""


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
