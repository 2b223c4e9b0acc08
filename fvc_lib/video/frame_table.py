"""The frames of a video in presentation order, known from its packets without decoding one.

``stream.frames`` and the nominal rate are wrong on many real files, and counters restart after a seek; a packet's
presentation time stamp (pts) is what names a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av.error
import numpy as np
import numpy.typing as npt
from av.packet import Packet
from av.video.stream import VideoStream

from fvc_lib.video.errors import CorruptVideo, TruncatedVideo
from fvc_lib.video.source import VideoSource

IntArray = npt.NDArray[np.int64]

NO_PTS = np.iinfo(np.int64).min
# Containers that store a pts per packet. AVI and elementary streams hold decoding order only.
_STORES_PTS = frozenset({"mov", "matroska", "mpegts", "flv", "mpeg", "asf", "mxf", "nut", "ogg", "ivf", "gif", "apng"})
# Of those without, the ones whose frames are shown in the order they are stored when no frame is reordered.
_IN_ORDER = frozenset({"avi"})
# Frames an encoder chose not to code are packets of a few bytes that yield no frame (MPEG-4 part 2's N-VOP).
_SMALLEST_MPEG4_FRAME_BYTES = 8


@dataclass(frozen=True)
class FrameTable:
    """The packets of one stream in decoding order, N of them.

    Attributes:
        pts: int64 (N,), in ``time_base`` units; the smallest int64 where a packet has none.
        dts: int64 (N,), the same for decoding times.
        is_key: bool (N,), decoding can start here.
        is_shown: bool (N,), the packet yields a frame (not trimmed by an edit list, not a hidden reference).
        trusted: frame i of the presentation is the packet with the i-th smallest pts, and can be found by its pts.
        stores_pts: the container states presentation times, so that their order is the order of the frames.
        damage: what the container's own index promises and the file does not hold, or none.
        duration: int, of the last shown packet in ``time_base`` units, 0 where not stated.
    """

    pts: IntArray
    dts: IntArray
    is_key: npt.NDArray[np.bool_]
    is_shown: npt.NDArray[np.bool_]
    trusted: bool
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
        shown = np.flatnonzero(self.is_shown)
        return shown[np.argsort(self.pts[shown], kind="stable")]

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


def read_frame_table(source: VideoSource) -> FrameTable:
    """Demux the whole stream once, without decoding. The container is left at its end."""
    scan = _Scan(source)
    container, codec = source.container_name, source.codec_name
    pts, is_key, is_shown = np.array(scan.pts, np.int64), np.array(scan.is_key, bool), np.array(scan.is_shown, bool)
    in_order = container in _STORES_PTS or _is_stored_in_order(source, pts)
    codes_every_frame = codec != "mpeg4" or scan.smallest_bytes >= _SMALLEST_MPEG4_FRAME_BYTES
    return FrameTable(
        pts=pts,
        dts=np.array(scan.dts, np.int64),
        is_key=is_key,
        is_shown=is_shown,
        trusted=in_order and codes_every_frame and _order_is_sure(pts, is_key, is_shown),
        stores_pts=container in _STORES_PTS,
        damage=scan.damage(),
        duration=scan.duration,
    )


def check_not_empty(path: Path, table: FrameTable) -> None:
    """Refuse a video without a single packet: some broken files open and end without an error.

    Raises:
        TruncatedVideo: its index promises frames.
        CorruptVideo: nothing does.
    """
    if not table.num_packets:
        if table.damage is not None:
            raise TruncatedVideo(path, table.damage)
        raise CorruptVideo(path, "it opens, but holds no frame")


class _Scan:
    """One pass over the packets; column lists, because a video of hours has a million of them."""

    def __init__(self, source: VideoSource) -> None:
        self.pts: list[int] = []
        self.dts: list[int] = []
        self.is_key: list[bool] = []
        self.is_shown: list[bool] = []
        self.duration = 0
        self.smallest_bytes = 1 << 30
        self._source = source
        self._is_mp4 = source.container_name == "mov"
        self._is_hidden = {"vp8": _vp8_is_hidden, "vp9": _vp9_is_hidden}.get(source.codec_name)
        self._cut_short = 0
        self._failure: str | None = None
        try:
            for packet in source.container.demux(source.stream):
                self._add(packet)
        except av.error.FFmpegError as error:
            self._failure = f"reading stops after {len(self.pts)} packets: {(error.strerror or 'failure').lower()}"

    def _add(self, packet: Packet[VideoStream]) -> None:
        if not packet.size:
            return
        if packet.is_corrupt and self._is_mp4:  # the file ends inside this packet
            self._cut_short += 1
            return
        hidden = packet.is_discard or (self._is_hidden is not None and self._is_hidden(bytes(packet)))
        self.pts.append(NO_PTS if packet.pts is None else packet.pts)
        self.dts.append(NO_PTS if packet.dts is None else packet.dts)
        self.is_key.append(packet.is_keyframe)
        self.is_shown.append(not hidden)
        self.smallest_bytes = min(self.smallest_bytes, packet.size)
        self.duration = self.duration if hidden else packet.duration or 0

    def damage(self) -> str | None:
        """What is missing. Only MP4 promises frames: its index lists every packet, of fragments once they are read."""
        if self._failure is not None:
            return self._failure
        promised = len(self._source.stream.index_entries) if self._is_mp4 else 0
        missing = max(self._cut_short, promised - len(self.pts))
        return f"{missing} of its {len(self.pts) + missing} frames are missing or cut short" if missing > 0 else None


def _order_is_sure(pts: IntArray, is_key: npt.NDArray[np.bool_], is_shown: npt.NDArray[np.bool_]) -> bool:
    if not is_shown.any() or not is_key[0] or (pts == NO_PTS).any():
        return False
    # A hidden reference may share its pts with the frame shown next; two frames or two keyframes may not.
    for chosen in (is_shown, is_key):
        if len(np.unique(pts[chosen])) < np.count_nonzero(chosen):
            return False
    # Frames shown before the first keyframe refer to frames that are not in the file; decoders drop them.
    return bool((pts[is_shown] >= pts[0]).all())


def _is_stored_in_order(source: VideoSource, pts: IntArray) -> bool:
    reorders = bool(source.stream.codec_context.has_b_frames)
    return source.container_name in _IN_ORDER and not reorders and bool((np.diff(pts) > 0).all())


def _vp8_is_hidden(data: bytes) -> bool:
    return not data[0] & 0x10  # RFC 6386, 9.1: show_frame


def _vp9_is_hidden(data: bytes) -> bool:
    """VP9 bitstream specification, 6.2 (uncompressed header) and annex B (superframes end with a shown frame)."""
    if (data[-1] & 0xE0) == 0xC0:
        return False
    bits = f"{data[0]:08b}{data[1] if len(data) > 1 else 0:08b}"
    start = 5 if bits[2:4] == "11" else 4  # profile 3 has a reserved bit
    shows_existing = bits[start] == "1"
    return not shows_existing and bits[start + 2] == "0"
