"""``quantisers``: how coarsely the codec rounded the sampled frames, where its decoder tells (``stream.py``).

At the same bit rate, what was compressed before, denoised or drawn smoothly is quantised more finely than what a camera
saw. Shares of the codec's largest quantiser: 51 in H.264, 62 in MPEG-1, MPEG-2 and MPEG-4, 255 in VP9.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Stream

_TYPES = "IPB"


def measure(stream: Stream) -> dict[str, float]:
    """One value by feature; NaN where no decoder told a quantiser."""
    told = np.isfinite(stream.qp[:, 0])
    mean, within = stream.qp[told].T.astype(np.float64)
    types = np.array(list(stream.frame_types), "U1")[told]
    groups = [mean[types == letter] for letter in _TYPES]
    of_type = [float(group.mean()) if group.size else np.nan for group in groups]
    # B frames are always coarser than P frames, so that frames are compared with those of their own type.
    off = np.concatenate([group - group.mean() for group in groups if group.size > 1] or [np.empty(0)])
    within = within[np.isfinite(within)]
    return {
        "level": float(mean.mean()) if mean.size else np.nan,
        "within": float(within.mean()) if within.size else np.nan,
        "between": float(off.std()) if off.size else np.nan,
        "key_step": of_type[1] - of_type[0],
        "intra": _mean(stream.intra),
    }


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)].astype(np.float64)
    return float(known.mean()) if known.size else np.nan


FEATURES.register(
    FeatureFamily(
        name="quantisers",
        paper="Shanableh, Detection of frame deletion for digital video forensics, Digital Investigation 10 (2013)",
        features=(
            Feature("level", "share", "Mean quantiser of the sampled frames, of the codec's largest.", size_proxy=True),
            Feature(
                "within",
                "share",
                "Standard deviation of the quantiser over the blocks of a frame, mean of frames.",
                size_proxy=True,
            ),
            Feature(
                "between",
                "share",
                "Standard deviation of frames' mean quantisers around that of their type.",
                size_proxy=True,
            ),
            Feature("key_step", "share", "How much coarser than I frames P frames are quantised.", size_proxy=True),
            Feature("intra", "share", "Area of P frames that is predicted from no other frame."),
        ),
        measure=measure,
        of="stream",
    )
)
