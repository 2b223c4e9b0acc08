"""Wavelet bands of a real clip in a fake of it: the augmentation of WaveRep.

R. Corvi et al., "Seeing what matters: Generalizable AI-generated video detection with forensic-oriented augmentation",
NeurIPS 2025. A fake that was made from a real video, such as its reconstruction by a generator's autoencoder, takes
over bands of that video. What both have in common does not separate them any more, and the model learns from the
diagonal details.

Bands are those of a Haar wavelet with three levels along both axes. Its lowest band along an axis holds the means of
eight neighbouring pixels, so no transform is computed.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from fvc_lib.video.augmentations import Float, Pixels

_BLOCK = 8  # two to the power of the number of levels


@dataclass(frozen=True)
class BandSwap:
    """The bands that a fake takes over from its real.

    Attributes:
        lowest: whether it takes over the band that is lowest along both axes.
        lower: whether it takes over the bands that are lowest along one axis alone.
    """

    lowest: bool
    lower: bool

    @classmethod
    def draw(cls, generator: np.random.Generator, probability: float) -> Self:
        """Return a swap in which both kinds of bands are drawn with ``probability``, independently."""
        return cls(*(bool(draw < probability) for draw in generator.random(2)))


def with_bands_of(fake: Pixels, real: Pixels, swap: BandSwap) -> Pixels:
    """Return the frames of ``fake`` with the bands of ``real`` that ``swap`` names, uint8 (T, 3, H, W).

    Up to seven rows and columns at the bottom and the right, beyond the last whole block, keep the pixels of ``fake``.

    Args:
        fake: uint8 (T, 3, H, W).
        real: uint8 (T, 3, H, W), the frames that ``fake`` was made from.
        swap: the bands.
    """
    height, width = (side - side % _BLOCK for side in fake.shape[2:])
    whole = np.s_[:, :, :height, :width]
    difference = real[whole].astype(np.float32) - fake[whole]
    along = [_block_means(difference, axis) for axis in (2, 3)]
    both = _block_means(along[0], 3)
    result = fake.copy()
    changed = fake[whole] + both * swap.lowest + (along[0] + along[1] - 2 * both) * swap.lower
    result[whole] = np.rint(changed).clip(0, 255).astype(np.uint8)
    return result


def _block_means(values: Float, axis: int) -> Float:
    """Return the mean of every eight values along ``axis``, at the place of each of them."""
    shape = [*values.shape[:axis], -1, _BLOCK, *values.shape[axis + 1 :]]
    means = values.reshape(shape).mean(axis + 1, keepdims=True, dtype=np.float32)
    return np.broadcast_to(means, values.reshape(shape).shape).reshape(values.shape)
