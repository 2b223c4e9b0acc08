"""``colour``: saturation, colour balance, and whether the channels have the same detail, as a camera's have.

How balance and saturation differ between the tiles of a video is in their pools, ``spread``, ``least`` and ``most``.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels

_FLAT = 0.01  # mean square of neighbours' differences, in grey levels squared, below which a channel has no detail


def measure(_luma: Float32, rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    channels = np.moveaxis(rgb, -1, 0)  # (3, N, 64, 64)
    red, green, blue = planes = [np.ascontiguousarray(channel, np.float32) for channel in channels]
    brightest, darkest = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    saturation = (brightest - darkest) / np.maximum(brightest, 1)
    means = [plane.mean((1, 2)) + 1 for plane in planes]
    # Detail: each pixel minus its right neighbour.
    details = [plane[:, :, :-1] - plane[:, :, 1:] for plane in planes]
    energies = [np.einsum("nij,nij->n", detail, detail) / (detail.shape[1] * detail.shape[2]) for detail in details]
    return {
        "saturation": saturation.mean((1, 2)),
        "red_green": np.log2(means[0] / means[1]),
        "blue_green": np.log2(means[2] / means[1]),
        "clipped": ((brightest > 254) | (brightest < 1)).mean((1, 2), dtype=np.float32),
        "red_detail": _correlation(details[0], details[1], energies[0], energies[1]),
        "blue_detail": _correlation(details[2], details[1], energies[2], energies[1]),
    }


def _correlation(one: Float32, other: Float32, one_energy: Float32, other_energy: Float32) -> Float32:
    """(N,), -1 to 1; NaN where either has no detail. Differences of neighbours have a mean of about zero."""
    product = np.einsum("nij,nij->n", one, other) / (one.shape[1] * one.shape[2])
    has_both = (one_energy > _FLAT) & (other_energy > _FLAT)
    scale = np.sqrt(np.where(has_both, one_energy * other_energy, 1))
    return np.where(has_both, product / scale, np.nan).astype(np.float32)


FEATURES.register(
    FeatureFamily(
        name="colour",
        paper="McCloskey and Albright, Detecting GAN-generated imagery using saturation cues, ICIP 2019",
        features=(
            Feature(
                "saturation", "share", "Mean of the difference of the strongest and weakest channel over the strongest."
            ),
            Feature("red_green", "binary logarithm", "Mean red over mean green."),
            Feature("blue_green", "binary logarithm", "Mean blue over mean green."),
            Feature("clipped", "share", "Pixels that are black, or at the limit in one channel."),
            Feature("red_detail", "correlation", "How far red and green change together from pixel to pixel."),
            Feature("blue_detail", "correlation", "How far blue and green change together from pixel to pixel."),
        ),
        measure=measure,
        of="tiles",
    )
)
