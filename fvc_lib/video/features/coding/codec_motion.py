"""``codec_motion``: how the codec's own motion vectors lie, where its decoder tells them (``stream.py``).

An encoder finds a vector for nearly every block, up to quarters of a pixel. Repeated frames have none but zeros; what
moves like nothing filmed has vectors in disorder.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Stream

_ENTROPY_BINS = 16  # directions


def measure(stream: Stream) -> dict[str, float]:
    """One value by feature; NaN where no decoder told a vector."""
    motion = stream.motion.astype(np.float64)
    if not len(motion):
        return {each.name: np.nan for each in _FEATURES}
    length = np.hypot(motion[:, 0], motion[:, 1])
    moving = length > 0
    if not moving.any():
        return {"zero": 1.0, "length": np.nan, "disorder": np.nan, "directions": np.nan}
    angle = np.arctan2(motion[moving, 1], motion[moving, 0])
    # Half a bin is added, so that vectors along an axis, the most frequent ones, do not lie on a border.
    turns = np.round(angle / (2 * np.pi) * _ENTROPY_BINS).astype(np.int64) % _ENTROPY_BINS
    share = np.bincount(turns, minlength=_ENTROPY_BINS) / len(turns)
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    return {
        "zero": float(1 - moving.mean()),
        "length": float(length[moving].mean()),
        "disorder": float(length[moving].std() / length[moving].mean()),
        "directions": float(entropy),
    }


_FEATURES = (
    Feature("zero", "share", "Motion vectors of no length."),
    Feature("length", "pixels", "Mean length of the others.", True),
    Feature("disorder", "ratio", "Standard deviation of their length over its mean."),
    Feature("directions", "bits", "Entropy of their directions in 16 sectors: 0 where all point one way, 4 evenly."),
)

FEATURES.register(
    FeatureFamily(
        name="codec_motion",
        paper="Feng et al., Motion-adaptive frame deletion detection for digital video forensics, IEEE TCSVT 2016",
        features=_FEATURES,
        measure=measure,
        of="stream",
    )
)
