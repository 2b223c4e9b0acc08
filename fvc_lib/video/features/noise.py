"""``noise_residual``: level and grain of the noise in tiles, measured by three linear filters and a wavelet.

Camera footage has noise of a certain level and grain. Denoised, blurred and generated pictures have less. An inserted
object has the noise of another camera. Scaling makes the grain coarser, and compression leaves exact zeros. The pooled
statistics, such as the standard deviation, show how much the tiles of a video differ.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32

_OF_MEAN_SIZE = float(np.sqrt(np.pi / 2))  # standard deviation over mean absolute value, of Gaussian noise
_OF_MEDIAN_SIZE = 1 / 0.6744897501960817  # standard deviation over median absolute value, likewise
_ZERO = 0.5  # grey levels, below which a residual counts as none
_NO_NOISE = 0.01  # grey levels; the wavelet's rounding errors
_FLAT = 1e-6  # mean square of a residual below which a tile has none


def measure(luma: Float32) -> dict[str, Float32]:
    """Return float32 (N,), one value per tile of luma (N, 64, 64), for every feature of ``noise_residual``."""
    square3 = _square3(luma)
    square5 = _square5(luma)
    third = (_third(luma), _third(luma.swapaxes(1, 2)))
    fine, coarse = _wavelet_noise(luma)
    has_grain = np.minimum(fine, coarse) > _NO_NOISE
    grain = np.log2(np.where(has_grain, coarse, 1) / np.where(has_grain, fine, 1))
    return {
        "third": sum(_mean_size(each) for each in third) * np.float32(_OF_MEAN_SIZE / 2 / np.sqrt(20)),
        "square3": _mean_size(square3) * np.float32(_OF_MEAN_SIZE / 6),
        "square5": _mean_size(square5) * np.float32(_OF_MEAN_SIZE / np.sqrt(_SQUARE5_NORM)),
        "zeros": (np.abs(square3) < 4 * _ZERO).mean((1, 2), dtype=np.float32),
        "tails": _kurtosis(square5),
        "neighbours": _correlation(square3, 1, 0) / 2 + _correlation(square3, 0, 1) / 2,
        "diagonal": _correlation(square3, 1, 1) / 2 + _correlation(square3[:, ::-1], 1, 1) / 2,
        "wavelet": fine,
        "wavelet_coarse": coarse,
        "grain": np.where(has_grain, grain, np.nan).astype(np.float32),
    }


def _third(luma: Float32) -> Float32:
    """Return (N, 64, 61), ``luma`` filtered by 1 -3 3 -1 along rows; the squares of the weights sum to 20."""
    steps: Float32 = luma[:, :, 1:] - luma[:, :, :-1]
    bends: Float32 = steps[:, :, 1:] - steps[:, :, :-1]
    return bends[:, :, 1:] - bends[:, :, :-1]


def _square3(luma: Float32) -> Float32:
    """Return (N, 62, 62), ``luma`` filtered by 1 -2 1 along rows and then along columns.

    The squares of the weights sum to 36. It is the Spatial Rich Model's filter "square 3 x 3" times -4.
    """
    along: Float32 = luma[:, :, :-2] + luma[:, :, 2:] - 2 * luma[:, :, 1:-1]
    return along[:, :-2] + along[:, 2:] - 2 * along[:, 1:-1]


# One row of each of the filter's three kinds, outermost first.
_SQUARE5_ROWS = ((-1, 2, -2), (2, -6, 8), (-2, 8, -12))  # weights of columns 2 off, 1 off and in the middle
_SQUARE5_NORM = 596  # sum of squares


def _square5(luma: Float32) -> Float32:
    """Return (N, 60, 60), ``luma`` filtered by the Spatial Rich Model's filter "square 5 x 5" times 12."""
    middle = luma[:, :, 2:-2]
    near = luma[:, :, 1:-3] + luma[:, :, 3:-1]
    far = luma[:, :, :-4] + luma[:, :, 4:]
    outer, inner, centre = (far * far_by + near * near_by + middle * by for far_by, near_by, by in _SQUARE5_ROWS)
    return outer[:, :-4] + outer[:, 4:] + inner[:, 1:-3] + inner[:, 3:-1] + centre[:, 2:-2]


def _mean_size(residual: Float32) -> Float32:
    return np.asarray(np.abs(residual).mean((1, 2)))


def _kurtosis(residual: Float32) -> Float32:
    """Return (N,), the kurtosis of every tile's residual around 0: 3 for Gaussian noise; NaN without a residual."""
    squares = residual * residual
    mean_square = squares.mean((1, 2))
    fourth = np.einsum("nij,nij->n", squares, squares) / np.float32(squares[0].size if len(squares) else 1)
    has_any = mean_square > _FLAT
    return np.where(has_any, fourth / np.where(has_any, mean_square, 1) ** 2, np.nan).astype(np.float32)


def _correlation(residual: Float32, down: int, right: int) -> Float32:
    """Return (N,), the correlation of values ``down`` rows and ``right`` columns apart; NaN without a residual."""
    height, width = residual.shape[1:]
    one, other = residual[:, : height - down, : width - right], residual[:, down:, right:]
    product = np.einsum("nij,nij->n", one, other)
    scale = np.einsum("nij,nij->n", one, one) + np.einsum("nij,nij->n", other, other)
    has_any = scale > _FLAT * height * width
    return np.where(has_any, 2 * product / np.where(has_any, scale, 1), np.nan).astype(np.float32)


def _wavelet_noise(luma: Float32) -> tuple[Float32, Float32]:
    """Return two noise levels per tile, float32 (N,) each, in grey levels.

    They come from the finest and the second finest diagonal details of a Daubechies wavelet.
    """
    import pywt  # takes 0.2 s to load, which a list of families need not

    if not len(luma):
        return np.empty(0, np.float32), np.empty(0, np.float32)
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
        measure=measure,
        of="tiles",
    )
)
