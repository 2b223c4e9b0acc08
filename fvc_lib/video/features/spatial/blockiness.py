"""``blockiness``: steps between pixels at the edges of coding blocks, against those everywhere else.

A codec leaves steps at the edges of its blocks of 4, 8 and 16 pixels, which begin at the frame's corner: that is where
tiles begin. Steps at other places tell of an earlier compression before a crop, shift or insertion.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels

_LEAST = 0.05  # grey levels: the mean step below which a tile is flat
# Step j lies between pixels j and j + 1 and is known for j from 1 to 61.
_STEPS = np.arange(1, 62)
_PHASES = np.stack([(_STEPS - phase) % 8 == 0 for phase in range(8)]).astype(np.float32)
_PHASES /= _PHASES.sum(1, keepdims=True)
_EDGE, _MIDDLE = 7, 3  # the phases of edges of 8 x 8 blocks, and of 4 x 4 blocks inside them
_INSIDE = [phase for phase in range(8) if phase not in (_EDGE, _MIDDLE)]


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    profiles = np.stack([_steps(luma), _steps(luma.swapaxes(1, 2))])  # (2, N, 61)
    phases = profiles @ _PHASES.T  # (2, N, 8)
    both = phases.mean(0)
    inside = both[:, _INSIDE].mean(1)
    each_inside = phases[:, :, _INSIDE]
    edges = profiles.mean(0)[:, 6::8]  # (N, 7): every second one is an edge of 16 x 16 blocks, odd or even
    shifted = _log_ratio(each_inside.max(2), np.median(each_inside, axis=2))
    is_flat = inside < _LEAST
    values = {
        "grid4": _log_ratio(both[:, _MIDDLE], inside),
        "grid8": _log_ratio(both[:, _EDGE], inside),
        "grid16": np.abs(_log_ratio(edges[:, ::2].mean(1), edges[:, 1::2].mean(1))),
        "shifted": shifted.mean(0),
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _steps(luma: Float32) -> Float32:
    """(N, 61): mean size of the steps from column j to j + 1 beyond the slopes on both sides."""
    slopes = luma[:, :, 1:] - luma[:, :, :-1]
    sizes = np.abs(slopes[:, :, 1:-1] - (slopes[:, :, :-2] + slopes[:, :, 2:]) / 2)
    return np.asarray(sizes.mean(1))


def _log_ratio(above: Float32, below: Float32) -> Float32:
    return np.log2((above + _LEAST) / (below + _LEAST))


_UNIT = "binary logarithm"
FEATURES.register(
    FeatureFamily(
        name="blockiness",
        paper="Fan and de Queiroz, Identification of bitmap compression history: JPEG detection and quantizer "
        "estimation, IEEE TIP 2003; Li, Yuan and Yu, Passive detection of doctored JPEG image via block artifact "
        "grid extraction, Signal Processing 2009",
        features=(
            Feature(
                "grid4",
                _UNIT,
                "Steps in the middle of 8 x 8 blocks, where 4 x 4 blocks end, over other steps.",
                size_proxy=True,
            ),
            Feature(
                "grid8", _UNIT, "Steps at edges of 8 x 8 blocks over steps inside of 4 x 4 blocks.", size_proxy=True
            ),
            Feature("grid16", _UNIT, "Steps at every second edge over those between them, whichever are larger."),
            Feature(
                "shifted", _UNIT, "Largest steps at any one place inside of blocks over the median of such places."
            ),
        ),
        measure=measure,
        of="tiles",
    )
)
