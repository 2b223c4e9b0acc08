"""``timing``: gaps and crowds in the times at which frames are shown: where frames were left out, or put in."""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Stream

_LONG, _SHORT = 1.5, 0.5  # of the usual interval


def measure(stream: Stream) -> dict[str, float]:
    """One value by feature; NaN where times are unknown or fewer than two frames are shown at different ones."""
    intervals = np.diff(np.sort(stream.pts_seconds[np.isfinite(stream.pts_seconds)]))
    usual = float(np.median(intervals)) if intervals.size else 0.0
    if not usual > 0:
        return {each.name: np.nan for each in _FEATURES}
    # Without rounding errors, which grow with the length of a video and would tell it.
    ratios = np.round(intervals / usual, 9)
    return {
        "gaps": float((ratios > _LONG).mean()),
        "longest_gap": float(ratios.max()),
        "missing": float((np.round(ratios) - 1).clip(min=0).sum() / (len(ratios) + 1)),
        "crowded": float((ratios < _SHORT).mean()),
        "jitter": float(np.abs(ratios - 1).clip(max=1).mean()),
    }


_FEATURES = (
    Feature("gaps", "share", "Intervals between frames that are more than 1.5 times as long as the median."),
    Feature("longest_gap", "ratio", "The longest interval between frames, over the median."),
    Feature("missing", "share", "Frames that would fill the gaps, over those that there are."),
    Feature("crowded", "share", "Intervals between frames that are less than half as long as the median."),
    Feature("jitter", "share", "Mean distance of intervals from their median, over it; of each at most 1."),
)

FEATURES.register(
    FeatureFamily(
        name="timing",
        paper="Gironi et al., A video forensic technique for detecting frame deletion and insertion, ICASSP 2014",
        features=_FEATURES,
        measure=measure,
        of="stream",
    )
)
