"""``texture``: local binary patterns and co-occurrence of grey levels, whatever the brightness."""

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Feature, FeatureFamily, Float32, Pixels

_PATTERNS = 10  # uniform patterns of 0 to 8 brighter neighbours, and all others
_LEVELS, _WIDTH = 16, 8  # levels of so many grey levels each; the tile's mean is between the 8th and the 9th
_ANGLES = (0, np.pi / 4, np.pi / 2, 3 * np.pi / 4)
# Rows down and columns right of eight neighbours, each beside the next.
_CIRCLE = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    shares = _pattern_shares(luma)
    entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    values = {
        "spots": shares[:, 0] + shares[:, 8],
        "corners": shares[:, [1, 2, 6, 7]].sum(1),
        "edges": shares[:, 3:6].sum(1),
        "irregular": shares[:, 9],
        "flat": shares[:, 8],
        "pattern_entropy": entropy,
        **_co_occurrence(luma),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def _uniform_patterns() -> npt.NDArray[np.float64]:
    """(256, 10): by the bits of eight neighbours in a circle, which pattern it is: the number of bits, or irregular."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    changes = (bits != np.roll(bits, 1, axis=1)).sum(1)
    return np.eye(_PATTERNS)[np.where(changes <= 2, bits.sum(1), _PATTERNS - 1)]


_PATTERN_OF = _uniform_patterns()


def _pattern_shares(luma: Float32) -> npt.NDArray[np.float64]:
    """(N, 10), of the inner 62 x 62 pixels; a neighbour's bit is set where it is not darker.

    The eight pixels themselves are compared, not values interpolated on a circle: scikit-image's, which does so, takes
    ten times as long.
    """
    inner = luma[:, 1:-1, 1:-1]
    codes = np.zeros(inner.shape, np.uint8)
    for bit, (down, right) in enumerate(_CIRCLE):
        brighter = luma[:, 1 + down : TILE - 1 + down, 1 + right : TILE - 1 + right] >= inner
        codes |= brighter.view(np.uint8) << np.uint8(bit)
    offsets = np.arange(len(luma))[:, None, None] * 256
    counts = np.bincount((codes + offsets).ravel(), minlength=256 * len(luma)).reshape(-1, 256)
    return counts @ _PATTERN_OF / (TILE - 2) ** 2


def _co_occurrence(luma: Float32) -> dict[str, npt.NDArray[np.float64]]:
    from skimage.feature import graycomatrix, graycoprops  # takes 0.2 s, and a list of families needs none

    shifted = (luma - luma.mean((1, 2), keepdims=True)) / _WIDTH + _LEVELS // 2
    levels = np.clip(np.floor(shifted), 0, _LEVELS - 1).astype(np.uint8)
    matrices = np.zeros((_LEVELS, _LEVELS, len(luma), 1))  # graycoprops has distances where the tiles stand
    for number, tile in enumerate(levels):  # in a loop, which is four times as fast as counting all at once by numpy
        each = graycomatrix(tile, (1,), _ANGLES, _LEVELS, symmetric=True, normed=True)
        matrices[:, :, number, 0] = each.mean((2, 3))
    names = ("contrast", "homogeneity", "energy", "correlation")
    return {name: graycoprops(matrices, name)[:, 0] if len(luma) else np.empty(0) for name in names}


FEATURES.register(
    FeatureFamily(
        name="texture",
        paper="Ojala, Pietikainen and Maenpaa, Multiresolution gray-scale and rotation invariant texture "
        "classification with local binary patterns, IEEE TPAMI 2002; Haralick, Shanmugam and Dinstein, Textural "
        "features for image classification, IEEE SMC 1973",
        features=(
            Feature("spots", "share", "Pixels that are brighter than all eight neighbours, or not brighter than any."),
            Feature(
                "corners",
                "share",
                "Pixels with one or two neighbours in a row unlike the others: darker or not darker.",
            ),
            Feature("edges", "share", "Pixels with three to five neighbours in a row that are not darker."),
            Feature("irregular", "share", "Pixels around which darker neighbours and others alternate."),
            Feature("flat", "share", "Pixels that are not brighter than any neighbour, such as all in a flat place."),
            Feature("pattern_entropy", "bit", "How evenly the kinds of local patterns are spread."),
            Feature("contrast", "levels squared", "Mean squared difference of neighbours, in levels of 8 grey levels."),
            Feature("homogeneity", "share", "How far neighbours have the same of 16 levels."),
            Feature("energy", "ratio", "How few pairs of levels make up the tile; 1 is one level alone."),
            Feature("correlation", "correlation", "How far neighbours have levels alike over the tile's spread."),
        ),
        measure=measure,
        of="tiles",
    )
)
