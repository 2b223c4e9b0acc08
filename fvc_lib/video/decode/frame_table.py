"""Find the frames of a video and their presentation order from its packets, without decoding.

A packet's presentation time stamp (pts) identifies a frame. PyAV's ``stream.frames`` and the nominal frame rate cannot
be used for that: they are wrong for many files. A count of decoded frames is wrong after a seek.
"""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import av
import av.error
import numpy as np
import numpy.typing as npt

from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo, VideoSource, system_reason

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.floating]

NO_PTS = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class FrameTable:
    """The N packets of one video stream, in decoding order.

    Attributes:
        pts, dts: int64 (N,), times of presentation and decoding in ``time_base`` units; ``NO_PTS`` where missing.
        num_bytes: int64 (N,), sizes of the packets.
        is_key: bool (N,), whether decoding can start at the packet.
        is_closed: bool (N,), whether decoding can start at the packet, and no later packet refers to packets before it.
            If the decoder nevertheless lacks a reference frame, the file is damaged. In H.264 only IDR pictures are
            closed.
        is_shown: bool (N,), whether the packet yields a frame that is shown. False for a packet that an edit list
            trims, and for a frame that serves only as a reference for other frames.
        doubt: text that states why a frame cannot be found by its pts, for example because two packets have the same
            pts. Empty if the i-th frame that is shown has the i-th smallest pts.
        stores_pts: whether the container stores presentation times, so that their order is the order of the frames.
        damage: text that states which data the container lists, but the file lacks. Empty if nothing is missing.
    """

    pts: IntArray
    dts: IntArray
    num_bytes: IntArray
    is_key: BoolArray
    is_closed: BoolArray
    is_shown: BoolArray
    doubt: str
    stores_pts: bool
    damage: str

    @property
    def num_shown(self) -> int:
        """Return the number of frames that the packets should yield."""
        return int(np.count_nonzero(self.is_shown))

    def presentation_order(self) -> IntArray:
        """Return int64 (M,), the indices of the M shown packets in this table, sorted by presentation time."""
        shown = np.flatnonzero(self.is_shown)
        return shown[np.argsort(self.pts[shown], kind="stable")]

    def reorder_depth(self, order: IntArray) -> int:
        """Return the number of frames that a decoder must hold back to return frames in presentation order.

        ``order`` is the result of ``presentation_order``.
        """
        # If the r-th frame in presentation order is the d-th in decoding order, the decoder holds back d - r frames.
        decoded = order if self.is_shown.all() else np.cumsum(self.is_shown)[order] - 1
        return int((decoded - np.arange(len(order))).max(initial=0))

    def decoding_starts(self, positions: IntArray) -> IntArray:
        """Return for every wanted packet the keyframe at which decoding must start; only valid if ``doubt`` is empty.

        Usually this is the last keyframe at or before the packet. A leading picture is an exception: it is decoded
        after a keyframe, but shown before it, and refers to earlier frames. So decoding must start one keyframe
        earlier.

        Args:
            positions: int64 (P,), indices of the wanted packets in decoding order.

        Returns:
            int64 (P,), indices of keyframes in decoding order.
        """
        keys = np.flatnonzero(self.is_key)
        last = np.searchsorted(keys, positions, side="right") - 1
        leads = (last > 0) & (self.pts[positions] < self.pts[keys[last]])
        return keys[last - leads]


def seconds_of(pts: IntArray, time_base: Fraction | None) -> Seconds:
    """Return times in seconds, float64 (N,), for integer times ``pts`` (N,) in units of ``time_base`` seconds.

    Without a time base all results are zero.
    """
    return pts * time_base.numerator / time_base.denominator if time_base else np.zeros(len(pts))


# Containers that store a pts per packet. AVI and elementary streams store only the decoding order.
_STORES_PTS = frozenset({"mov", "matroska", "mpegts", "flv", "mpeg", "asf", "mxf", "ogg", "ivf", "gif", "apng"})
# For frames that an encoder skips, MPEG-4 part 2 has packets of a few bytes (N-VOP), which yield no frame.
_SMALLEST_MPEG4_FRAME_BYTES = 8


def read_frame_table(source: VideoSource) -> FrameTable:
    """Read all packets of a video that was just opened, and return a table of their times, sizes and keyframes.

    Afterwards the reading position in the container is undefined.

    Raises:
        TruncatedVideo: no packet could be read, because reading failed or data are missing.
        CorruptVideo: no packet could be read, though no fault was found.
    """
    is_hidden = _HIDDEN_PACKETS.get(source.codec_name)
    is_mp4 = source.container_name == "mov"
    is_h264 = source.codec_name == "h264"
    extradata = source.stream.codec_context.extradata or b""
    pts, dts, num_bytes = array("q"), array("q"), array("q")  # packed: there may be a million packets
    is_key = array("b")
    is_closed = array("b")
    is_shown = array("b")
    num_cut, failure = 0, ""
    try:
        for packet in source.packets():
            if not packet.size:
                continue
            if packet.is_corrupt and is_mp4:  # the file ends inside this packet
                num_cut += 1
                continue
            pts.append(NO_PTS if packet.pts is None else packet.pts)
            dts.append(NO_PTS if packet.dts is None else packet.dts)
            num_bytes.append(packet.size)
            is_key.append(packet.is_keyframe)
            is_closed.append(packet.is_keyframe and (not is_h264 or _is_idr(memoryview(packet), extradata)))
            is_shown.append(not (packet.is_discard or (is_hidden is not None and is_hidden(memoryview(packet)))))
    except av.error.FFmpegError as error:
        failure = f"reading stops after {len(pts)} packets: {system_reason(error)}"
    shown_at = np.array(pts, np.int64)
    are_keys = np.array(is_key, bool)
    are_shown = np.array(is_shown, bool)
    damage = failure or _damage(source, shown_at, num_cut)
    if not pts:
        raise (TruncatedVideo if damage else CorruptVideo)(source.path, damage or "it opens, but holds no frame")
    stores_pts = source.container_name in _STORES_PTS
    doubt = _doubt_of_codec(source, stores_pts, shown_at, min(num_bytes))
    doubt = doubt or _doubt_of_times(shown_at, are_keys, are_shown)
    return FrameTable(
        pts=shown_at,
        dts=np.array(dts, np.int64),
        num_bytes=np.array(num_bytes, np.int64),
        is_key=are_keys,
        is_closed=np.array(is_closed, bool),
        is_shown=are_shown,
        doubt=doubt,
        stores_pts=stores_pts,
        damage=damage,
    )


def _doubt_of_codec(source: VideoSource, stores_pts: bool, pts: IntArray, smallest_bytes: int) -> str:
    reorders = bool(source.stream.codec_context.has_b_frames)
    is_avi_in_order = source.container_name == "avi" and not reorders and bool((np.diff(pts) > 0).all())
    if not stores_pts and not is_avi_in_order:
        return "its container stores no times of presentation"
    if source.codec_name == "dirac":
        return "its decoder calls every frame a keyframe, so that a wrong start is not noticed"
    skips = source.codec_name == "mpeg4" and smallest_bytes < _SMALLEST_MPEG4_FRAME_BYTES
    return "some packets yield no frame" if skips else ""


def _doubt_of_times(pts: IntArray, is_key: BoolArray, is_shown: BoolArray) -> str:
    """Return a text that states why packets' presentation times do not identify the frames; empty if they do.

    The arguments are the fields of ``FrameTable`` with the same names, each of shape (N,).
    """
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


# Matches the size of the file in the header of AVI (RIFF), and of the segment in Matroska and WebM (RFC 8794). In a
# recording that was never finished all bits of the size are 1.
_STATED_SIZE = re.compile(
    rb"RIFF(?P<riff>.{4})|\x1a\x45\xdf\xa3.{1,256}?\x18\x53\x80\x67\x01(?P<segment>.{7})", re.DOTALL
)
_SLACK_BYTES = 16  # writers round sizes up


def missing_bytes(head: bytes, size_bytes: int) -> int:
    """Return how many bytes are missing at the end of an AVI or Matroska file, by the size that its header states.

    The result is 0 if no size is stated, or at most 16 bytes are missing.

    Args:
        head: the first bytes of the file.
        size_bytes: actual size of the file.
    """
    match = _STATED_SIZE.match(head)
    if match is None:
        return 0
    riff, segment = match["riff"], match["segment"]
    number = riff[::-1] if riff else segment
    if number == b"\xff" * len(number):
        return 0
    stated = int.from_bytes(number, "big") + (8 if riff else match.end())
    return stated - size_bytes if stated > size_bytes + _SLACK_BYTES else 0


def _damage(source: VideoSource, pts: IntArray, num_cut: int) -> str:
    """Return a text that states which data are missing in the file; empty if nothing is missing.

    The packets are compared with the index of packets in an MP4. The file's size is compared with the size that the
    header of AVI or Matroska states.

    Args:
        source: the video.
        pts: int64 (N,), presentation times of the N whole packets.
        num_cut: number of packets that are cut off by the end of the file.
    """
    entries = source.stream.index_entries if source.container_name == "mov" else ()
    promised = len(entries) if len(entries) <= len(pts) else sum(entry.size > 0 for entry in entries)
    missing = max(num_cut, promised - len(pts))
    if missing > 0:
        return f"{missing} of its {len(pts) + missing} frames are missing or cut short"
    num_missing = missing_bytes(source.head, source.size_bytes)
    if num_missing and not _reaches_stated_end(source, pts):  # otherwise only the index after the frames is missing
        return f"the file ends {num_missing:,} bytes before the size its container states"
    return ""


def _reaches_stated_end(source: VideoSource, pts: IntArray) -> bool:
    """Return whether the presentation times ``pts`` span the duration that the container states, up to about a frame.

    Return False if the duration or a time is unknown.
    """
    stated, time_base = source.container.duration, source.stream.time_base
    if not stated or not time_base or not len(pts) or (pts == NO_PTS).any():
        return False
    seconds = float(int(pts.max() - pts.min()) * time_base)
    tolerance = 1.5 * seconds / max(1, len(pts) - 1)
    return seconds + tolerance >= stated / av.time_base


_IDR = re.compile(rb"\x00\x00\x01[\x25\x45\x65]")  # nal_unit_type 5 (ITU-T H.264, table 7-1) behind a start code


def _is_idr(packet: memoryview, extradata: bytes) -> bool:
    """Return whether an H.264 packet holds a slice of an IDR picture, a keyframe that needs no earlier data.

    ``extradata`` are the codec's header bytes. They determine how the parts of a packet (NAL units) are separated.
    """
    if extradata[:1] != b"\x01" or len(extradata) < 7:
        return _IDR.search(packet) is not None
    start, length_bytes = 0, (extradata[4] & 3) + 1  # a NAL unit follows its length (ISO/IEC 14496-15, 5.3.3.1)
    while start + length_bytes < len(packet):
        if packet[start + length_bytes] & 0x1F == 5:
            return True
        start += length_bytes + int.from_bytes(packet[start : start + length_bytes], "big")
    return False


def _vp9_is_hidden(data: memoryview) -> bool:
    """Return whether a VP9 packet yields no visible frame.

    See the VP9 bitstream specification, 6.2 (uncompressed header) and annex B (superframes end with a shown frame).
    """
    if (data[-1] & 0xE0) == 0xC0:
        return False
    bits = f"{data[0]:08b}{data[1] if len(data) > 1 else 0:08b}"
    start = 5 if bits[2:4] == "11" else 4  # profile 3 has a reserved bit
    shows_existing = bits[start] == "1"
    return not shows_existing and bits[start + 2] == "0"


# By codec: a function that returns whether a packet is only a reference for other frames and never shown.
_HIDDEN_PACKETS: dict[str, Callable[[memoryview], bool]] = {
    "vp8": lambda data: not data[0] & 0x10,  # RFC 6386, 9.1: show_frame
    "vp9": _vp9_is_hidden,
}
