"""Fine detail of tiles, by gradients (``sharpness``) and by frequency (``spectrum``).

Blur, upscaling and generators leave less detail, sharpening leaves more. In natural pictures power falls with
frequency by a power law. Blur, upscaling and generators cut this law off or bend it at high frequencies. Scaling, and
networks that upscale, leave peaks.
"""

import numpy as np
import scipy.fft

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Feature, FeatureFamily, Float32

_EDGE = 8.0  # grey levels per pixel, from which on a pixel lies on an edge


def measure_sharpness(luma: Float32) -> dict[str, Float32]:
    """Return float32 (N,), one value per tile of luma (N, 64, 64), for every feature of ``sharpness``, by name.

    Only the inner 62 x 62 pixels of a tile are measured.
    """
    inner = luma[:, 1:-1, 1:-1]
    sum_across = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    laplacian = sum_across + luma[:, :-2, 1:-1]
    laplacian += luma[:, 2:, 1:-1]
    laplacian -= 4 * inner
    # Sobel's operators in grey levels per pixel: smoothing by 1 2 1 across a difference over two pixels.
    down = luma[:, :-2] + luma[:, 2:] + 2 * luma[:, 1:-1]  # (N, 62, 64)
    right = luma[:, :, :-2] + luma[:, :, 2:] + 2 * luma[:, :, 1:-1]  # (N, 64, 62)
    squared = (down[:, :, 2:] - down[:, :, :-2]) ** 2 + (right[:, 2:] - right[:, :-2]) ** 2
    squared /= 64
    gradient = squared.mean((1, 2))
    variance = laplacian.var((1, 2))
    with np.errstate(divide="ignore", invalid="ignore"):  # a flat tile has neither: NaN
        fineness = np.where(gradient > 0, variance / gradient, np.nan).astype(np.float32)
    return {
        "laplacian": variance,
        "gradient": gradient,
        "fineness": fineness,
        "edges": (squared > _EDGE**2).mean((1, 2), dtype=np.float32),
    }


FEATURES.register(
    FeatureFamily(
        name="sharpness",
        paper="Pech-Pacheco et al., Diatom autofocusing in brightfield microscopy: a comparative study, ICPR 2000",
        features=(
            Feature("laplacian", "grey levels squared", "Variance of the Laplacian of the luma: the finest detail."),
            Feature(
                "gradient",
                "grey levels squared",
                "Mean squared gradient of the luma, by Sobel's operators.",
                size_proxy=True,
            ),
            Feature("fineness", "ratio", "Laplacian over gradient: fineness of detail at any contrast."),
            Feature("edges", "share", "Pixels with a gradient above 8 grey levels per pixel.", size_proxy=True),
        ),
        measure=measure_sharpness,
        of="tiles",
    )
)

_HALF = TILE // 2  # the highest frequency, in cycles per tile
_DOWN = np.abs(scipy.fft.fftfreq(TILE, 1 / TILE))[:, None] * np.ones(_HALF + 1)
_RIGHT = np.ones((TILE, 1)) * np.arange(_HALF + 1)
_RADIUS = np.rint(np.hypot(_DOWN, _RIGHT)).astype(np.int64).ravel()
# Multiplicity of a real transform's coefficients in the whole transform.
_TIMES = np.where((_RIGHT == 0) | (_RIGHT == _HALF), 1.0, 2.0).ravel()
_WINDOW = np.sin(np.pi * (np.arange(TILE) + 0.5) / TILE) ** 2  # symmetric, so that mirrored tiles are alike
_TAPER = np.outer(_WINDOW, _WINDOW).astype(np.float32)
_FLAT = 1e-3  # of the mean power of a coefficient: rounding errors


def _rings() -> Float32:
    """Return (coefficients, 33), weights for the mean power at every frequency from 0 to 32 cycles per tile."""
    weights = np.zeros((_RADIUS.size, _HALF + 1), np.float32)
    inside = _RADIUS <= _HALF
    weights[inside, _RADIUS[inside]] = _TIMES[inside]
    return np.asarray(weights / weights.sum(0))


_RINGS = _rings()
_FITTED = np.arange(2, 25)  # rings of the power law: without the taper's own and without the tail
_LAW = np.linalg.pinv(np.stack([np.log2(_FITTED), np.ones(_FITTED.size)], axis=1)).astype(np.float32)  # (2, rings)
_TAIL = np.arange(28, 33)
_BANDS = {"low": (2, 7), "middle": (8, 15), "high": (16, 32)}  # rings, both included
# Peaks are searched off the harmonics of the 8 x 8 grid, which every codec leaves, and their neighbours in the taper.
_OFF_GRID = ~np.isin(_DOWN % 8, (7, 0, 1)) & ~np.isin(_RIGHT % 8, (7, 0, 1))
_PEAKS = np.flatnonzero(_OFF_GRID.ravel() & (_RADIUS >= 10) & (_RADIUS <= _HALF))


def _regions() -> Float32:
    """Return (coefficients, 4), weights for the mean power in four regions of frequency.

    The regions are: the highest frequencies in both directions, the frequencies around these, high frequencies along
    rows, and high frequencies along columns.
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
_BEND = 2.0  # grey levels; larger ones are cut to it, so that few edges do not hide the traces of scaling
_OFF_BLOCKS = np.array([number for number in range(4, _LINE // 2) if number % 7])


def measure_spectrum(luma: Float32) -> dict[str, Float32]:
    """Return float32 (N,), one value per tile of luma (N, 64, 64), for every feature of ``spectrum``, by name.

    Flat tiles give NaN.
    """
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
    """Return (N,), the binary logarithm of the strongest periodic component over the median component.

    The components are those of the absolute second differences along rows, averaged over the rows of a tile.
    """
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
                "slope",
                "exponent",
                "Power law of frequency, from 2 to 24 cycles per tile; -2 to -3 in natural pictures.",
            ),
            Feature("tail", _UNIT, "Power of the highest frequencies over that expected from the slope."),
            Feature("low", _UNIT, "Share of power at 2 to 7 cycles per tile.", size_proxy=True),
            Feature("middle", _UNIT, "Share of power at 8 to 15 cycles per tile.", size_proxy=True),
            Feature("high", _UNIT, "Share of power at 16 to 32 cycles per tile."),
            Feature("peak", _UNIT, "Strongest single frequency over the mean of its ring, off the codec's grid."),
            Feature("corner", _UNIT, "Power of a checkerboard of single pixels over that of frequencies close by."),
            Feature("direction", _UNIT, "Fine detail along rows over that along columns, or the reverse if larger."),
            Feature(
                "periodic", _UNIT, "Strongest period of second differences over the median one; scaling leaves one."
            ),
        ),
        measure=measure_spectrum,
        of="tiles",
    )
)
