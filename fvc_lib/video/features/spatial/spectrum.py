"""``spectrum``: how the power of a tile falls with frequency, in which directions, and where it has peaks.

Pictures of the world fall by a power law. Blur, scaling up and generators end it early or bend its tail; scaling and
networks that scale up leave peaks.
"""

import numpy as np
import scipy.fft

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Feature, FeatureFamily, Float32, Pixels

_HALF = TILE // 2  # the highest frequency, in cycles per tile
_DOWN = np.abs(scipy.fft.fftfreq(TILE, 1 / TILE))[:, None] * np.ones(_HALF + 1)
_RIGHT = np.ones((TILE, 1)) * np.arange(_HALF + 1)
_RADIUS = np.rint(np.hypot(_DOWN, _RIGHT)).astype(np.int64).ravel()
# How often a coefficient of a real transform stands in the whole one.
_TIMES = np.where((_RIGHT == 0) | (_RIGHT == _HALF), 1.0, 2.0).ravel()
_WINDOW = (
    np.sin(np.pi * (np.arange(TILE) + 0.5) / TILE) ** 2
)  # the same from both ends, so that a mirrored tile is alike
_TAPER = np.outer(_WINDOW, _WINDOW).astype(np.float32)
_FLAT = 1e-3  # of the mean power of a coefficient: rounding errors


def _rings() -> Float32:
    """(coefficients, 33): means over rings of equal frequency, 0 to 32 cycles per tile."""
    weights = np.zeros((_RADIUS.size, _HALF + 1), np.float32)
    inside = _RADIUS <= _HALF
    weights[inside, _RADIUS[inside]] = _TIMES[inside]
    return np.asarray(weights / weights.sum(0))


_RINGS = _rings()
_FITTED = np.arange(2, 25)  # rings of the power law: without the taper's own and without the tail
_LAW = np.linalg.pinv(np.stack([np.log2(_FITTED), np.ones(_FITTED.size)], axis=1)).astype(np.float32)  # (2, rings)
_TAIL = np.arange(28, 33)
_BANDS = {"low": (2, 7), "middle": (8, 15), "high": (16, 32)}  # rings, both included
# Peaks are looked for off the harmonics of the 8 x 8 grid, which every codec leaves, and their neighbours in the taper.
_OFF_GRID = ~np.isin(_DOWN % 8, (7, 0, 1)) & ~np.isin(_RIGHT % 8, (7, 0, 1))
_PEAKS = np.flatnonzero(_OFF_GRID.ravel() & (_RADIUS >= 10) & (_RADIUS <= _HALF))


def _regions() -> Float32:
    """(coefficients, 4): means over the highest frequencies of both directions and over those around them, and over
    high frequencies mostly along rows and mostly along columns.
    """
    regions = [
        (_DOWN >= 31) & (_RIGHT >= 31),
        (_DOWN >= 26) & (_RIGHT >= 26) & (_DOWN + _RIGHT <= 59),
        (_RIGHT >= 12) & (3 * _DOWN < _RIGHT),
        (_DOWN >= 12) & (3 * _RIGHT < _DOWN),
    ]
    weights = np.stack([region.ravel() * _TIMES for region in regions], axis=1)
    return np.asarray(weights / weights.sum(0), np.float32)


_REGIONS = _regions()
_LINE = 56  # a whole number of blocks: their grid is in every seventh frequency of it alone
_BEND = 2.0  # grey levels: what is larger counts as much, else a few edges drown what scaling leaves everywhere
_OFF_BLOCKS = np.array([number for number in range(4, _LINE // 2) if number % 7])


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    centred = (luma - luma.mean((1, 2), keepdims=True)) * _TAPER
    transformed = scipy.fft.rfft2(centred).reshape(len(luma), _RADIUS.size)
    power = transformed.real**2 + transformed.imag**2
    rings = power @ _RINGS
    is_flat = rings[:, 1:].mean(1) < _FLAT * TILE**2
    floor = np.float32(_FLAT)
    logs = np.log2(rings + floor)
    slope, level = (logs[:, _FITTED] @ _LAW.T).T
    total = rings[:, 2:].sum(1) + floor
    expected = slope[:, None] * np.log2(_TAIL).astype(np.float32) + level[:, None]
    peaks = np.log2((power[:, _PEAKS] + floor) / (rings[:, _RADIUS[_PEAKS]] + floor))
    corner, around, along, across = (power @ _REGIONS + floor).T
    values = {
        "slope": slope,
        "tail": (logs[:, _TAIL] - expected).mean(1),
        **{
            name: np.log2((rings[:, first : last + 1].sum(1) + floor) / total) for name, (first, last) in _BANDS.items()
        },
        "peak": peaks.max(1),
        "corner": np.log2(corner / around),
        "direction": np.abs(np.log2(along / across)),
        "periodic": (_periodic(luma) + _periodic(luma.swapaxes(1, 2))) / 2,
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _periodic(luma: Float32) -> Float32:
    """(N,): the strongest period along rows of the size of second differences, over the median one."""
    bends = np.abs(2 * luma[:, :, 4:60] - luma[:, :, 3:59] - luma[:, :, 5:61])
    sizes = np.abs(scipy.fft.rfft(np.minimum(bends, _BEND).mean(1)))[:, _OFF_BLOCKS]
    return np.asarray(np.log2((sizes.max(1) + _FLAT) / (np.median(sizes, axis=1) + _FLAT)), np.float32)


_UNIT = "binary logarithm"
FEATURES.register(
    FeatureFamily(
        name="spectrum",
        paper="Durall, Keuper and Keuper, Watch your up-convolution, CVPR 2020; "
        "Gallagher, Detection of linear and cubic interpolation in JPEG compressed images, CRV 2005",
        features=(
            Feature(
                "slope", "exponent", "How power falls with frequency, from 2 to 24 cycles per tile; -2 to -3 in nature."
            ),
            Feature("tail", _UNIT, "Power of the highest frequencies over what the slope leads to expect."),
            Feature("low", _UNIT, "Share of power of 2 to 7 cycles per tile.", size_proxy=True),
            Feature("middle", _UNIT, "Share of power of 8 to 15 cycles per tile.", size_proxy=True),
            Feature("high", _UNIT, "Share of power of 16 to 32 cycles per tile."),
            Feature("peak", _UNIT, "Strongest single frequency over the mean of its ring, off the codec's grid."),
            Feature("corner", _UNIT, "Power of a checkerboard of single pixels over that of frequencies close by."),
            Feature("direction", _UNIT, "Fine detail along rows over that along columns, whichever has more."),
            Feature(
                "periodic", _UNIT, "Strongest period of second differences over the median one; scaling leaves one."
            ),
        ),
        measure=measure,
        of="tiles",
    )
)
