"""Measure traces of compression from the cosine coefficients of small blocks, as JPEG and video codecs use them.

There are two families of features, ``block_dct`` and ``double_compression``. Both are measured in tiles, cut-outs of
64 x 64 pixels of a frame.

``block_dct``: compression removes high frequencies and small coefficients. A picture that was compressed twice, scaled
or synthesised has lost another share of them than a recording that was compressed once.

``double_compression``: quantisation makes coefficients multiples of a step. If a picture was compressed before, by a
codec with the same block grid, the histograms of its coefficients have peaks at these multiples (a comb). H.264 and its
successors quantise differences from a prediction, so they leave combs only where the prediction is flat, in smooth and
still parts. JPEG, MPEG-2 and MPEG-4 leave strong combs in frames without prediction. Later compression with larger
steps blurs combs. Only some of the measured frames are without prediction. So the maximum over a video is the most
informative statistic.
"""

import numpy as np
import numpy.typing as npt
from scipy.fft import dct

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, ratio

_ORDER = np.add.outer(np.arange(8), np.arange(8)).ravel()  # row + column: 0 is the mean, 14 the finest
_BANDS = {"low": (1, 3), "middle": (4, 7), "high": (8, 14)}  # first and last order of a band
_FEWEST = 64  # least number of coefficients for a distribution of first digits
_FLAT = 1e-3  # grey levels; smaller coefficients are rounding errors, as in flat tiles
_FIRST_DIGIT = np.array([0, *(int(str(number)[0]) for number in range(1, 4096))])
_BENFORD = np.log10(1 + 1 / np.arange(1, 10))


def measure_block_dct(luma: Float32) -> dict[str, Float32]:
    """Measure how large the cosine coefficients of every tile are at low, middle and high frequencies.

    Args:
        luma: float32 (N, 64, 64), N tiles (cut-outs of frames) in grey levels.

    Returns:
        A mapping from the names of the features of the family ``block_dct`` to values, float32 (N,), one per tile.
    """
    sizes = np.abs(cosine_transform(luma, 8)).reshape(len(luma), 64, 64)
    values: dict[str, Float32] = {}
    for band, (first, last) in _BANDS.items():
        chosen = sizes[:, :, np.isin(_ORDER, range(first, last + 1))]
        scale = chosen.mean((1, 2))
        values[band] = scale
        values[f"{band}_zeros"] = (chosen < 0.5).mean((1, 2), dtype=np.float32)
        mean_square = np.einsum("nij,nij->n", chosen, chosen) / np.float32(chosen[0].size)
        values[f"{band}_shape"] = ratio(scale, np.sqrt(mean_square), scale > _FLAT)
    with np.errstate(divide="ignore"):
        decay = np.log2(ratio(values["low"], values["high"], values["high"] > _FLAT))
    return {**values, "decay": decay, "first_digits": _first_digits(sizes)}


def cosine_transform(luma: Float32, side: int) -> Float32:
    """Split N tiles into blocks, and return the orthonormal cosine coefficients (type II) of every block.

    Args:
        luma: float32 (N, 64, 64), the tiles.
        side: side of a block in pixels, a divisor of 64.

    Returns:
        float32 (N, B, side, side): the coefficients of the B blocks of every tile.
    """
    matrix = np.asarray(dct(np.eye(side), axis=0, norm="ortho"), np.float32)
    count, height, width = luma.shape
    rows = luma.reshape(count, height, width // side, side) @ matrix.T  # transformed along rows
    blocks = rows.reshape(count, height // side, side, width // side, side).swapaxes(2, 3)
    return (matrix @ blocks).reshape(count, height * width // side**2, side, side)


def _first_digits(sizes: Float32) -> Float32:
    """Return the distance of the first decimal digits of every tile's coefficients from Benford's law, float32 (N,).

    The distance is chi-square. Coefficients below 1 are not counted. The distance is NaN for a tile with fewer than 64
    counted coefficients. ``sizes`` are the absolute coefficients of B blocks in N tiles, float32 (N, B, 64).
    """
    # A number of at least 1 has the first digit of its integer part.
    digits = _FIRST_DIGIT[np.minimum(sizes[:, :, 1:], 4095).astype(np.int64)]
    tile = np.arange(len(sizes))[:, None, None] * 10
    counts = np.bincount((digits + tile).ravel(), minlength=10 * len(sizes)).reshape(-1, 10)[:, 1:]
    total = counts.sum(1)
    shares = counts / np.maximum(total, 1)[:, None]
    distance = ((shares - _BENFORD) ** 2 / _BENFORD).sum(1)
    return np.where(total >= _FEWEST, distance, np.nan).astype(np.float32)


_FREQUENCIES = {
    "low": "the 9 lowest frequencies",
    "middle": "26 middle frequencies",
    "high": "the 28 highest frequencies",
}
_PROXIES = ("low", "low_zeros", "low_shape", "high_shape")
FEATURES.register(
    FeatureFamily(
        name="block_dct",
        paper="Lam and Goodman, A mathematical analysis of the DCT coefficient distributions for images, IEEE TIP "
        "2000; Fu, Shi and Su, A generalized Benford's law for JPEG coefficients and its applications, SPIE 2007",
        features=(
            *(
                Feature(name, unit, meaning, size_proxy=name in _PROXIES)
                for band, frequencies in _FREQUENCIES.items()
                for name, unit, meaning in (
                    (band, "grey levels", f"Mean size of {frequencies}: the scale of a Laplacian distribution."),
                    (f"{band}_zeros", "share", f"Values under half a grey level among {frequencies}."),
                    (f"{band}_shape", "ratio", f"Mean over root mean square of {frequencies}; 0.71 if Laplacian."),
                )
            ),
            Feature("decay", "binary logarithm", "Mean size of the lowest frequencies over that of the highest."),
            Feature(
                "first_digits",
                "chi-square distance",
                "Distance of the coefficients' first digits from Benford's law.",
                size_proxy=True,
            ),
        ),
        measure=measure_block_dct,
        of="tiles",
    )
)

_BINS_PER_LEVEL = 4
_MOST = 128  # grey levels; larger coefficients are too rare for a comb
_BINS = _MOST * _BINS_PER_LEVEL
_CENTRES = np.arange(_BINS) / _BINS_PER_LEVEL
# For pixels of whole grey levels some coefficients are multiples of an eighth, and half of these lie on the limit of
# two bins. An offset above 0.5 puts them into the upper bin.
_ROUND = np.float32(0.54)
_STEPS = 3 * 2 ** (np.arange(0, 4.01, 0.125))  # 3 to 48 grey levels
# How near a bin (row) is to a multiple of a step (column): 1 at a multiple, -1 halfway between two. Coefficients below
# half a step do not count, since their number depends on the scale of the distribution. Coefficients above 6.5 steps do
# not count either: up to there, the combs of neighbouring steps become distinct.
_PHASE = _CENTRES[:, None] / _STEPS
_COUNTED = ((_PHASE > 0.5) & (_PHASE < 6.5)).astype(np.float32)
_COMB = (np.cos(2 * np.pi * _PHASE) * _COUNTED).astype(np.float32)


def measure_double_compression(luma: Float32) -> dict[str, Float32]:
    """Measure how strongly the cosine coefficients of every tile gather at multiples of a quantiser step.

    Such peaks are a trace of an earlier compression.

    Args:
        luma: float32 (N, 64, 64), N tiles (cut-outs of frames) in grey levels.

    Returns:
        A mapping from the names of the features of the family ``double_compression`` to values, float32 (N,), one per
        tile. Flat tiles, in which all coefficients are below about one grey level, give NaN.
    """
    histograms8 = _histograms(luma, 8, 4)
    comb8 = _combs(histograms8.sum(1))  # one step for all frequencies, as H.26x quantises
    comb4 = _combs(_histograms(luma, 4, 2).sum(1))
    is_flat = histograms8[:, :, _BINS_PER_LEVEL:].sum((1, 2)) == 0  # no coefficient of a grey level
    values = {
        "same_step": comb8.max(1),
        "own_steps": _combs(histograms8).max(2).mean(1),
        "fine_blocks": comb4.max(1),
        "step": _STEPS[comb8.argmax(1)],
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _histograms(luma: Float32, side: int, highest: int) -> Float32:
    """Return histograms of the cosine coefficients' sizes for every tile and frequency, float32 (N, F, 512).

    A bin is a quarter of a grey level wide.

    Args:
        luma: float32 (N, 64, 64), the tiles.
        side: side of a block in pixels.
        highest: the F frequencies are those whose row + column is 1 to ``highest``.
    """
    order = np.add.outer(np.arange(side), np.arange(side))
    sizes = np.abs(cosine_transform(luma, side)[:, :, (order > 0) & (order <= highest)])  # (N, B, F)
    count, _, frequencies = sizes.shape
    bins = np.minimum(sizes * np.float32(_BINS_PER_LEVEL) + _ROUND, _BINS).astype(np.int64)  # last bin: all larger
    row = np.arange(count)[:, None, None] * frequencies + np.arange(frequencies)
    counts = np.bincount((row * (_BINS + 1) + bins).ravel(), minlength=count * frequencies * (_BINS + 1))
    return counts.reshape(count, frequencies, _BINS + 1)[:, :, :_BINS].astype(np.float32)


def _combs(histograms: npt.NDArray[np.float32]) -> Float32:
    """Return scores, float32 (..., steps), of how strongly coefficients gather at the multiples of quantiser steps.

    There is one score per step in ``_STEPS``. For unquantised coefficients, scores have a mean of about 0 and a
    standard deviation of about 1. ``histograms`` is float32 (..., 512): the number of coefficients by absolute value,
    in bins of a quarter of a grey level.
    """
    return np.asarray((histograms @ _COMB) / np.sqrt(np.maximum(histograms @ _COUNTED, 1) / 2))


_UNIT = "standard deviations"
FEATURES.register(
    FeatureFamily(
        name="double_compression",
        paper="Popescu and Farid, Statistical tools for digital forensics, IH 2004; "
        "Wang and Farid, Exposing digital forgeries in video by detecting double MPEG compression, MM&Sec 2006",
        features=(
            Feature(
                "same_step", _UNIT, "Excess of coefficients of 8 x 8 blocks at multiples of one step.", size_proxy=True
            ),
            Feature("own_steps", _UNIT, "The same, where each frequency may have its own step.", size_proxy=True),
            Feature("fine_blocks", _UNIT, "Excess of coefficients of 4 x 4 blocks at multiples of one step."),
            Feature("step", "grey levels", "The step with the largest excess in 8 x 8 blocks."),
        ),
        measure=measure_double_compression,
        of="tiles",
    )
)
