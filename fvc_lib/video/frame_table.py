"""The frames of a video in presentation order, known without decoding one.

``stream.frames`` and the nominal rate are wrong on many real files, and counters restart after a seek; a packet's
presentation time stamp (pts) is what names a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fvc_lib.video.errors import CorruptVideo, TruncatedVideo

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
