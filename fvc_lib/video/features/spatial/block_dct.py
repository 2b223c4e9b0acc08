"""``block_dct``: how the coefficients of 8 x 8 blocks are distributed, by frequency, and the digits they begin with.

Compression empties high frequencies and thins out small values; what was compressed twice, scaled or synthesised has
other shares of them than a recording that was compressed once.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels
from fvc_lib.video.features.spatial.block_transform import cosine_transform

_ORDER = np.add.outer(np.arange(8), np.arange(8)).ravel()  # of frequencies: 0 is the mean, 14 the finest
_BANDS = {"low": (1, 3), "middle": (4, 7), "high": (8, 14)}  # orders, both included
_FEW = 64  # values, below which no distribution can be told
_FLAT = 1e-3  # grey levels: coefficients of a flat tile are rounding errors
_FIRST_DIGIT = np.array([0, *(int(str(number)[0]) for number in range(1, 4096))])
_BENFORD = np.log10(1 + 1 / np.arange(1, 10))


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    sizes = np.abs(cosine_transform(luma, 8)).reshape(len(luma), 64, 64)
    values: dict[str, Float32] = {}
    for band, (first, last) in _BANDS.items():
        chosen = sizes[:, :, np.isin(_ORDER, range(first, last + 1))]
        scale = chosen.mean((1, 2))
        values[band] = scale
        values[f"{band}_zeros"] = (chosen < 0.5).mean((1, 2), dtype=np.float32)
        mean_square = np.einsum("nij,nij->n", chosen, chosen) / np.float32(chosen[0].size if len(chosen) else 1)
        has_any = scale > _FLAT
        values[f"{band}_shape"] = np.where(has_any, scale / np.sqrt(np.where(has_any, mean_square, 1)), np.nan).astype(
            np.float32
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        decay = np.where(values["high"] > _FLAT, np.log2(values["low"] / values["high"]), np.nan)
    return {**values, "decay": decay.astype(np.float32), "first_digits": _first_digits(sizes)}


def _first_digits(sizes: Float32) -> Float32:
    """(N,): chi-square distance of the first digits of all sizes of 1 and more to Benford's law; NaN of few."""
    # A digit of a number of 1 and more is that of its whole part.
    digits = _FIRST_DIGIT[np.minimum(sizes[:, :, 1:], 4095).astype(np.int64)]
    tile = np.arange(len(sizes))[:, None, None] * 10
    counts = np.bincount((digits + tile).ravel(), minlength=10 * len(sizes)).reshape(-1, 10)[:, 1:]
    total = counts.sum(1)
    shares = counts / np.maximum(total, 1)[:, None]
    distance = ((shares - _BENFORD) ** 2 / _BENFORD).sum(1)
    return np.where(total >= _FEW, distance, np.nan).astype(np.float32)


_OF = {"low": "the 9 lowest frequencies", "middle": "26 middle frequencies", "high": "the 28 highest frequencies"}
_PROXIES = ("low", "low_zeros", "low_shape", "high_shape")
FEATURES.register(
    FeatureFamily(
        name="block_dct",
        paper="Lam and Goodman, A mathematical analysis of the DCT coefficient distributions for images, IEEE TIP "
        "2000; Fu, Shi and Su, A generalized Benford's law for JPEG coefficients and its applications, SPIE 2007",
        features=(
            *(
                Feature(name, unit, meaning, size_proxy=name in _PROXIES)
                for band, which in _OF.items()
                for name, unit, meaning in (
                    (band, "grey levels", f"Mean size of {which}: the scale of a Laplacian distribution."),
                    (f"{band}_zeros", "share", f"Of {which}, values under half a grey level."),
                    (f"{band}_shape", "ratio", f"Mean over root mean square of {which}; 0.71 if Laplacian."),
                )
            ),
            Feature("decay", "binary logarithm", "Mean size of the lowest frequencies over that of the highest."),
            Feature(
                "first_digits",
                "chi-square distance",
                "How far first digits of coefficients are from Benford's law.",
                size_proxy=True,
            ),
        ),
        measure=measure,
        of="tiles",
    )
)
