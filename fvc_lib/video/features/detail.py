"""Measure the fine detail of tiles (cut-outs of frames) in three ways: by gradients, by frequency and as noise.

The families of features are ``sharpness`` (gradients), ``spectrum`` (frequency) and ``noise_residual`` (noise).

Blur, upscaling and generators leave less detail; sharpening leaves more. In natural pictures the power falls with
frequency by a power law. Blur, upscaling and generators change this law at high frequencies. Scaling, and networks that
upscale, leave peaks.

Camera footage has noise of a certain level and grain (the size of its structures). Denoised, blurred and generated
pictures have less noise. An inserted object has the noise of another camera. Scaling makes the grain coarser, and
compression leaves exact zeros. Statistics over all tiles of a video, such as the standard deviation, show how much
tiles differ.
"""

import numpy as np
import scipy.fft

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Feature, FeatureFamily, Float32, ratio

_EDGE = 8.0  # gradient in grey levels per pixel above which a pixel lies on an edge


def measure_sharpness(luma: Float32) -> dict[str, Float32]:
    """Measure the fine detail of every tile by its gradients and its Laplacian.

    Args:
        luma: float32 (N, 64, 64), N tiles (cut-outs of frames). Their inner 62 x 62 pixels are measured.

    Returns:
        A mapping from the names of the features of the family ``sharpness`` to values, float32 (N,), one per tile.
    """
    inner = luma[:, 1:-1, 1:-1]
    laplacian = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] + luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] - 4 * inner
    # Sobel's operators: a difference over two pixels, smoothed by 1 2 1 in the other direction.
    down = luma[:, :-2] + luma[:, 2:] + 2 * luma[:, 1:-1]  # (N, 62, 64)
    right = luma[:, :, :-2] + luma[:, :, 2:] + 2 * luma[:, :, 1:-1]  # (N, 64, 62)
    squared = (down[:, :, 2:] - down[:, :, :-2]) ** 2 + (right[:, 2:] - right[:, :-2]) ** 2
    squared /= 64
    gradient = squared.mean((1, 2))
    variance = laplacian.var((1, 2))
    return {
        "laplacian": variance,
        "gradient": gradient,
        "fineness": ratio(variance, gradient, gradient > 0),
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

_HALF = TILE // 2  # highest frequency, in cycles per tile
_DOWN, _RIGHT = np.meshgrid(np.abs(scipy.fft.fftfreq(TILE, 1 / TILE)), np.arange(_HALF + 1), indexing="ij")
_RADIUS = np.rint(np.hypot(_DOWN, _RIGHT)).astype(np.int64).ravel()
# How often a coefficient of the real transform occurs in the full complex transform.
_TIMES = np.where((_RIGHT == 0) | (_RIGHT == _HALF), 1.0, 2.0).ravel()
_WINDOW = np.sin(np.pi * (np.arange(TILE) + 0.5) / TILE) ** 2  # symmetric: mirrored tiles give equal values
_TAPER = np.outer(_WINDOW, _WINDOW).astype(np.float32)
_FLAT = np.float32(1e-3)  # mean power of a coefficient per pixel below which a tile is flat


# float32 (coefficients, 33): ``power @ _RINGS`` is the mean power of a tile at 0, 1, ... 32 cycles per tile.
_RINGS = ((_RADIUS[:, None] == np.arange(_HALF + 1)) * _TIMES[:, None]).astype(np.float32)
_RINGS /= _RINGS.sum(0)
_FITTED = np.arange(2, 25)  # frequencies that the power law is fitted to: not those of the taper, nor the tail
_LAW = np.linalg.pinv(np.stack([np.log2(_FITTED), np.ones(_FITTED.size)], axis=1)).astype(np.float32)  # (2, rings)
_TAIL = np.arange(28, 33)
_BANDS = {"low": (2, 7), "middle": (8, 15), "high": (16, 32)}  # first and last frequency, in cycles per tile
# Peaks are not searched at the harmonics of the 8 x 8 grid, which all codecs leave, nor next to them.
_OFF_GRID = ~np.isin(_DOWN % 8, (7, 0, 1)) & ~np.isin(_RIGHT % 8, (7, 0, 1))
_PEAKS = np.flatnonzero(_OFF_GRID.ravel() & (_RADIUS >= 10) & (_RADIUS <= _HALF))


# Highest frequencies in both directions, frequencies next to them, high ones along rows, and high ones along columns.
_MASKS = (
    (_DOWN >= 31) & (_RIGHT >= 31),
    (_DOWN >= 26) & (_RIGHT >= 26) & (_DOWN + _RIGHT <= 59),
    (_RIGHT >= 12) & (3 * _DOWN < _RIGHT),
    (_DOWN >= 12) & (3 * _RIGHT < _DOWN),
)
_WEIGHTS = np.stack([mask.ravel() * _TIMES for mask in _MASKS], axis=1)
# float32 (coefficients, 4): ``power @ _REGIONS`` is the mean power of a tile in these four regions.
_REGIONS = np.asarray(_WEIGHTS / _WEIGHTS.sum(0), np.float32)
_LINE = 56  # pixels, seven blocks of 8: the grid of blocks affects only every seventh frequency
_BEND = 2.0  # grey levels; larger second differences are clipped, so that edges do not hide the traces of scaling
_OFF_BLOCKS = np.array([number for number in range(4, _LINE // 2) if number % 7])


def measure_spectrum(luma: Float32) -> dict[str, Float32]:
    """Measure the power of every tile by frequency (Fourier transform), such as slope, tail and peaks of the spectrum.

    Args:
        luma: float32 (N, 64, 64), N tiles (cut-outs of frames).

    Returns:
        A mapping from the names of the features of the family ``spectrum`` to values, float32 (N,), one per tile. Flat
        tiles give NaN.
    """
    centred = (luma - luma.mean((1, 2), keepdims=True)) * _TAPER
    transformed = scipy.fft.rfft2(centred).reshape(len(luma), _RADIUS.size)
    power = transformed.real**2 + transformed.imag**2
    rings = power @ _RINGS
    is_flat = rings[:, 1:].mean(1) < _FLAT * TILE**2
    logs = np.log2(rings + _FLAT)
    slope, level = (logs[:, _FITTED] @ _LAW.T).T
    total = rings[:, 2:].sum(1) + _FLAT
    expected = slope[:, None] * np.log2(_TAIL).astype(np.float32) + level[:, None]
    peaks = np.log2((power[:, _PEAKS] + _FLAT) / (rings[:, _RADIUS[_PEAKS]] + _FLAT))
    corner, around, along, across = (power @ _REGIONS + _FLAT).T
    values = {
        "slope": slope,
        "tail": (logs[:, _TAIL] - expected).mean(1),
        **{
            name: np.log2((rings[:, first : last + 1].sum(1) + _FLAT) / total) for name, (first, last) in _BANDS.items()
        },
        "peak": peaks.max(1),
        "corner": np.log2(corner / around),
        "direction": np.abs(np.log2(along / across)),
        "periodic": (_periodic(luma) + _periodic(luma.swapaxes(1, 2))) / 2,
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _periodic(luma: Float32) -> Float32:
    """Measure the periodic pattern that scaling leaves in every tile; return its strength, float32 (N,).

    The absolute second differences along rows are averaged over the rows of a tile, and Fourier transformed. The value
    is the binary logarithm of the largest magnitude over the median magnitude. ``luma`` is float32 (N, 64, 64).
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


# --- Noise, by three linear filters and a wavelet

_OF_MEAN_SIZE = float(np.sqrt(np.pi / 2))  # standard deviation over mean absolute value, of Gaussian noise
_OF_MEDIAN_SIZE = 1 / 0.6744897501960817  # standard deviation over median absolute value, of Gaussian noise
_ZERO = 0.5  # grey levels; a smaller residual counts as zero
_NO_NOISE = 0.01  # grey levels; a smaller noise level is a rounding error of the wavelet
_NO_RESIDUAL = 1e-6  # mean square of a residual below which a tile has none


def measure_noise(luma: Float32) -> dict[str, Float32]:
    """Measure level and structure of the noise of every tile, by three linear filters and a wavelet.

    Args:
        luma: float32 (N, 64, 64), N tiles (cut-outs of frames).

    Returns:
        A mapping from the names of the features of the family ``noise_residual`` to values, float32 (N,), one per tile.
    """
    square3 = _square3(luma)
    square5 = _square5(luma)
    third = (np.diff(luma, n=3, axis=2), np.diff(luma, n=3, axis=1))  # -1 3 -3 1; the squares of the weights sum to 20
    fine, coarse = _wavelet_noise(luma)
    return {
        "third": sum(np.abs(each).mean((1, 2)) for each in third) * np.float32(_OF_MEAN_SIZE / 2 / np.sqrt(20)),
        "square3": np.abs(square3).mean((1, 2)) * np.float32(_OF_MEAN_SIZE / 6),
        "square5": np.abs(square5).mean((1, 2)) * np.float32(_OF_MEAN_SIZE / np.sqrt(_SQUARE5_NORM)),
        "zeros": (np.abs(square3) < 4 * _ZERO).mean((1, 2), dtype=np.float32),
        "tails": _kurtosis(square5),
        "neighbours": _correlation(square3, 1, 0) / 2 + _correlation(square3, 0, 1) / 2,
        "diagonal": _correlation(square3, 1, 1) / 2 + _correlation(square3[:, ::-1], 1, 1) / 2,
        "wavelet": fine,
        "wavelet_coarse": coarse,
        "grain": np.log2(ratio(coarse, fine, np.minimum(fine, coarse) > _NO_NOISE)),
    }


def _square3(luma: Float32) -> Float32:
    """Return the noise residual of N tiles: ``luma`` filtered by 1 -2 1 along rows, then along columns.

    ``luma`` is float32 (N, 64, 64), the result float32 (N, 62, 62). The squares of the weights sum to 36. The filter is
    the Spatial Rich Model's "square 3 x 3" times -4.
    """
    along: Float32 = luma[:, :, :-2] + luma[:, :, 2:] - 2 * luma[:, :, 1:-1]
    return along[:, :-2] + along[:, 2:] - 2 * along[:, 1:-1]


# The first, second and third of the filter's five rows; the other two mirror the first two.
_SQUARE5_ROWS = ((-1, 2, -2), (2, -6, 8), (-2, 8, -12))  # weights 2 and 1 columns from the middle, and in it
_SQUARE5_NORM = 596  # sum of squares


def _square5(luma: Float32) -> Float32:
    """Return the noise residual of N tiles: ``luma`` filtered by the Spatial Rich Model's "square 5 x 5" times 12.

    ``luma`` is float32 (N, 64, 64), the result float32 (N, 60, 60).
    """
    middle = luma[:, :, 2:-2]
    near = luma[:, :, 1:-3] + luma[:, :, 3:-1]
    far = luma[:, :, :-4] + luma[:, :, 4:]
    outer, inner, centre = (far * far_by + near * near_by + middle * by for far_by, near_by, by in _SQUARE5_ROWS)
    return outer[:, :-4] + outer[:, 4:] + inner[:, 1:-3] + inner[:, 3:-1] + centre[:, 2:-2]


def _kurtosis(residual: Float32) -> Float32:
    """Return the kurtosis of every tile's noise residual, float32 (N,); it is 3 for Gaussian noise.

    The mean of a residual is assumed to be 0. A tile whose residual is 0 everywhere gives NaN.
    """
    squares = residual * residual
    mean_square = squares.mean((1, 2))
    fourth = np.einsum("nij,nij->n", squares, squares) / np.float32(squares[0].size)
    return ratio(fourth, mean_square**2, mean_square > _NO_RESIDUAL)


def _correlation(residual: Float32, down: int, right: int) -> Float32:
    """Return the autocorrelation of every tile's noise residual at a distance of some rows and columns, float32 (N,).

    It correlates pixels that are ``down`` rows and ``right`` columns apart. A tile whose residual is 0 everywhere
    gives NaN.
    """
    height, width = residual.shape[1:]
    one = residual[:, : height - down, : width - right]
    other = residual[:, down:, right:]
    product = np.einsum("nij,nij->n", one, other)
    scale = np.einsum("nij,nij->n", one, one) + np.einsum("nij,nij->n", other, other)
    return ratio(2 * product, scale, scale > _NO_RESIDUAL * height * width)


def _wavelet_noise(luma: Float32) -> tuple[Float32, Float32]:
    """Return a tuple of two noise levels per tile in grey levels, both float32 (N,): fine and coarse.

    They are estimated from the finest and the second finest diagonal details of a Daubechies wavelet (db2).
    """
    import pywt  # takes 0.2 s to load; not needed to list the families

    details = []
    for _ in range(2):
        luma, (_, _, diagonal) = pywt.dwt2(luma, "db2", mode="symmetric", axes=(1, 2))
        inner = np.abs(diagonal[:, 2:-2, 2:-2])  # at the borders half of the filters' input is extrapolated
        details.append((np.median(inner, axis=(1, 2)) * _OF_MEDIAN_SIZE).astype(np.float32))
    return details[0], details[1]


_LEVELS = "grey levels"
FEATURES.register(
    FeatureFamily(
        name="noise_residual",
        paper="Fridrich and Kodovsky, Rich models for steganalysis of digital images, IEEE TIFS 2012; "
        "Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage, Biometrika 1994",
        features=(
            Feature("third", _LEVELS, "Noise by differences of the third order along rows and columns."),
            Feature("square3", _LEVELS, "Noise by the square filter of 3 x 3 pixels."),
            Feature("square5", _LEVELS, "Noise by the square filter of 5 x 5 pixels."),
            Feature("zeros", "share", "Pixels where the filter of 3 x 3 pixels leaves under half a grey level."),
            Feature(
                "tails", "kurtosis", "Heaviness of the tails of the 5 x 5 filter's residual; 3 for Gaussian noise."
            ),
            Feature("neighbours", "correlation", "Correlation of residuals next to and below each other."),
            Feature("diagonal", "correlation", "Correlation of residuals across corners."),
            Feature("wavelet", _LEVELS, "Noise by the median of the finest diagonal wavelet details."),
            Feature("wavelet_coarse", _LEVELS, "The same for details twice as large.", size_proxy=True),
            Feature("grain", "binary logarithm", "Noise of the details twice as large over that of the finest."),
        ),
        measure=measure_noise,
        of="tiles",
    )
)
