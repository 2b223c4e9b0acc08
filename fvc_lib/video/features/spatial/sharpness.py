"""``sharpness``: how much fine detail tiles have. Blur, scaling up and generators leave less, sharpening more."""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels

_EDGE = 8.0  # grey levels per pixel, from which on a pixel lies on an edge


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature, of the inner 62 x 62 pixels of each tile."""
    inner = luma[:, 1:-1, 1:-1]
    sum_across = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    laplacian = sum_across + luma[:, :-2, 1:-1]
    laplacian += luma[:, 2:, 1:-1]
    laplacian -= 4 * inner
    # Sobel's operators, in grey levels per pixel: a smoothing by 1 2 1 across a difference of neighbours but one.
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
            Feature("fineness", "ratio", "Laplacian over gradient: how fine the detail is, whatever its contrast."),
            Feature("edges", "share", "Pixels whose gradient is above 8 grey levels per pixel.", size_proxy=True),
        ),
        measure=measure,
        of="tiles",
    )
)
