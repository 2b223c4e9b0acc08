"""An augmentation that replaces wavelet bands of a fake clip by the bands of the real clip that it was made from.

The method is WaveRep, from R. Corvi et al., "Seeing what matters: Generalizable AI-generated video detection with
forensic-oriented augmentation", NeurIPS 2025. The fake clip may be, for example, a reconstruction of the real clip by
a generator's autoencoder. After the replacement both clips have the replaced bands in common. So a model cannot tell
the clips apart by these bands, and learns from the others, the diagonal details.

The bands are those of a Haar wavelet with three levels along both axes. The lowest band along an axis holds the means
of eight neighbouring pixels. So block means are enough, and no wavelet transform is computed.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from fvc_lib.video.augmentations import Float, Pixels

_BLOCK = 8  # two to the power of the number of levels


@dataclass(frozen=True)
class BandSwap:
    """The choice of wavelet bands of a fake clip that are replaced by those of the real clip.

    Attributes:
        lowest: whether the band is replaced that is lowest along both axes.
        lower: whether the bands are replaced that are lowest along only one axis.
    """

    lowest: bool
    lower: bool

    @classmethod
    def draw(cls, generator: np.random.Generator, probability: float) -> Self:
        """Return a random choice: both attributes are drawn independently, and are true with ``probability``."""
        return cls(*(bool(draw < probability) for draw in generator.random(2)))


def with_bands_of(fake: Pixels, real: Pixels, swap: BandSwap) -> Pixels:
    """Return a copy of ``fake`` in which some wavelet bands are replaced by those of ``real``, uint8 (T, 3, H, W).

    Bands are computed in blocks of 8 x 8 pixels. Up to seven rows at the bottom and columns at the right, which do not
    fill a block, keep the pixels of ``fake``.

    Args:
        fake: uint8 (T, 3, H, W).
        real: uint8 (T, 3, H, W), the frames that ``fake`` was made from.
        swap: the choice of bands to replace.
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
    """Return ``values`` with every eight neighbours along ``axis`` replaced by their mean; the shape stays the same."""
    shape = [*values.shape[:axis], -1, _BLOCK, *values.shape[axis + 1 :]]
    means = values.reshape(shape).mean(axis + 1, keepdims=True, dtype=np.float32)
    return np.broadcast_to(means, values.reshape(shape).shape).reshape(values.shape)
