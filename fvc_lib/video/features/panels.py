"""What can be looked at of one frame of a video: its noise, its frequencies, and what its compression left.

All of the middle of the middle frame, at native resolution and by the filters that the families of features use, so
that a picture and a number tell of the same thing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.clips.worker import as_indexed
from fvc_lib.video.decode.frame_table import read_frame_table
from fvc_lib.video.decode.plan import decode
from fvc_lib.video.decode.source import VideoError, open_video
from fvc_lib.video.decode.windows import middle_luma, packed
from fvc_lib.video.features.family import Float32, Pixels
from fvc_lib.video.features.spatial.block_transform import cosine_transform

# Private there: making them public would change the code of two families, under which measured values are kept.
from fvc_lib.video.features.spatial.blockiness import _steps
from fvc_lib.video.features.spatial.noise_residual import _square5
from fvc_lib.video.reencode import reencoded

MIDDLE_FUNCTION = f"{__name__}:middle_item"  # run in the worker processes
LEAST = 32  # pixels: of a smaller picture there is nothing to show
_SQUARE5_CENTRE = 12  # its weight of the pixel itself
_RESIDUAL, _WINDOW, _PERIOD = 128, 128, 16
_DARKEST = 1e-3  # grey levels squared: power below which a frequency counts as empty


@dataclass(frozen=True)
class FramePanels:
    """Of a frame's middle, h x w pixels, multiples of 8 and at most 256.

    Attributes:
        luma: uint8 (h, w), as coded.
        residual: float32 (r, q), at most 128 each, of the middle of ``luma``: what a linear filter of 5 x 5 pixels does
            not foresee, in grey levels.
        power: float32 (s, s), decibels over one grey level squared, by frequency; 0 in the middle, half a cycle per
            pixel at the borders. The mean of overlapping windows of s pixels (Welch).
        blocks: float32 (8, 8), grey levels: mean size of the cosine coefficients of 8 x 8 blocks, lowest frequency
            first.
        steps: float32 (16,), grey levels: mean step between neighbouring pixels beyond the slopes around it, over rows
            and columns, by its place in 16 x 16 blocks: the last is the edge of blocks of 16, the eighth of those of 8.
    """

    luma: Pixels
    residual: Float32
    power: Float32
    blocks: Float32
    steps: Float32


def panels_of(luma: Pixels) -> FramePanels | None:
    """The panels of ``luma``, uint8 (h, w), as ``middle_luma`` has it; None where it is too small."""
    if min(luma.shape) < LEAST:
        return None
    whole = luma[None].astype(np.float32)
    residual = _square5(whole)[0] / np.float32(_SQUARE5_CENTRE)
    along = [_steps(each)[0] for each in (whole, whole.swapaxes(1, 2))]
    place = np.concatenate([np.arange(len(each)) + 1 for each in along]) % _PERIOD  # step j is that to pixel j + 1
    steps = np.bincount(place, np.concatenate(along), _PERIOD) / np.bincount(place, minlength=_PERIOD)
    blocks = np.abs(cosine_transform(whole[0][None], 8)[0]).mean(0)
    return FramePanels(luma, _centre(residual, _RESIDUAL), _power(whole[0]), blocks, steps.astype(np.float32))


def _centre(plane: Float32, side: int) -> Float32:
    top, left = (max(0, (size - side) // 2) for size in plane.shape)
    return plane[top : top + side, left : left + side]


def _power(luma: Float32) -> Float32:
    side = min(_WINDOW, *luma.shape)
    bell = np.outer(np.hanning(side), np.hanning(side)).astype(np.float32)
    places = [np.unique([0, (size - side) // 2, size - side]) for size in luma.shape]
    found = np.zeros((side, side))
    for top in places[0]:
        for left in places[1]:
            part = luma[top : top + side, left : left + side]
            found += np.abs(np.fft.fft2((part - part.mean()) * bell)) ** 2
    mean = found / (len(places[0]) * len(places[1]) * (bell**2).sum())
    return np.fft.fftshift(10 * np.log10(np.maximum(mean, _DARKEST))).astype(np.float32)


def middle_of(path: AnyPath) -> Pixels:
    """What ``decode_windows`` gives of a video as ``middle``, and no more decoded for it than its group of pictures.

    Raises:
        VideoError: the file is unreadable, truncated, corrupt or refused.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        return decode(opened, table, lambda _, count, __: _MiddleSink(count // 2)).sink.luma


class _MiddleSink:
    """Keeps the luma of one frame."""

    def __init__(self, place: int) -> None:
        self.wanted = {place}
        self.luma: Pixels = np.empty((0, 0), np.uint8)

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""
        if place is not None and place in self.wanted:
            self.luma = middle_luma(frame)
            self.wanted.discard(place)


def middle_item(item: dict[str, Any]) -> dict[str, Any]:
    """The middle of the video at ``source``.

    Args:
        item: ``source``, ``content_sha256`` and ``encoded``, as ``worker.measure_item`` has them.

    Returns:
        ``middle``, as ``packed`` has it, or ``video_error``: what is wrong with the video.
    """
    try:
        path = as_indexed(item)
        return {"middle": packed(middle_of(reencoded(path, *item["encoded"]) if item["encoded"] else path))}
    except VideoError as error:
        return {"video_error": str(error)}
