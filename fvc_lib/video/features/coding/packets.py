"""``packets``: sizes of all packets and distances of keyframes; a repeated frame, another encoding and a joint show.

What a frame costs depends on what it shows and on its type. Compared are therefore the binary logarithms of sizes, with
the median of the packets of the same kind around them: keyframes, frames that refer to later ones (B), others (P).
"""

import numpy as np
import numpy.typing as npt
from scipy.ndimage import median_filter

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Stream

Values = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

AROUND = 15  # packets of a kind, whose median one is compared with
# An eighth of that median: what a frame costs that repeats the one before, or is repeated by the one behind, whichever
# is coded last. Of 44 repeats, one in eight frames, it finds 93 to 98 % in H.264 and HEVC as x264 and x265 write them
# by themselves, and calls no other frame one; in VP9 48 to 84 %, with 1 to 7 % of the others. Encoders that do not look
# ahead (x264's zerolatency, MPEG-4, VP8) use such a frame to refine the picture: 2 to 41 %.
TINY = -3.0
_LAYERED = frozenset({"av1"})  # frames of a layer that nobody refers to are as small as that; half of all are
_PERIODS = range(4, 61)  # packets: encoders' usual groups of pictures; shorter ones are patterns of P and B frames
_FEWEST = 24  # frames, and as many as three periods: below, nothing can be called periodic
_OUTLIER = 4.0  # standard deviations: a scene's first frame shall not make a period


def measure(stream: Stream) -> dict[str, float]:
    """One value by feature; NaN where there are too few packets of the kinds that it compares."""
    logarithm = np.log2(np.maximum(stream.sizes, 1).astype(np.float64))
    is_b = reordered(stream.pts_seconds) & ~stream.is_key
    is_p = ~stream.is_key & ~is_b
    off = np.zeros(len(logarithm))
    for kind in (stream.is_key, is_b, is_p):
        off[kind] = off_median(logarithm[kind])
    inter = ~stream.is_key
    place = shown_place(stream.pts_seconds)
    strength, period = periodicity(place[is_p], off[is_p])
    lengths = np.diff(np.flatnonzero(stream.is_key))
    return {
        "key_step": _median(logarithm[stream.is_key]) - _median(logarithm[inter]),
        "b_step": _median(logarithm[is_p]) - _median(logarithm[is_b]),
        "spread": float(off[inter].std()) if inter.any() else np.nan,
        "tiny": _tiny_share(stream, off[inter]),
        "largest": float(off[inter].max()) if inter.any() else np.nan,
        "periodicity": strength,
        "period": period,
        "key_distance": float(lengths.mean()) if lengths.size else np.nan,
        "odd_groups": float((lengths != np.bincount(lengths).argmax()).mean()) if lengths.size else np.nan,
        "shift": shift(logarithm[is_p]),
    }


def _tiny_share(stream: Stream, off: Values) -> float:
    return np.nan if stream.codec in _LAYERED or not off.size else float((off <= TINY).mean())


def reordered(seconds: Values) -> Flags:
    """Bool (P,): packets that are shown before one that is decoded before them; where times are known."""
    known = np.where(np.isfinite(seconds), seconds, -np.inf)
    return np.asarray(np.isfinite(seconds) & (known < np.maximum.accumulate(known)))


def shown_place(seconds: Values) -> IntArray:
    """int64 (P,): the place at which each packet is shown; where a time is unknown, that of decoding."""
    if not np.isfinite(seconds).all():
        return np.arange(len(seconds))
    return np.argsort(np.argsort(seconds, kind="stable"), kind="stable").astype(np.int64)


def off_median(values: Values) -> Values:
    """(P,): each value minus the median of the 15 around it."""
    if not values.size:
        return values
    return np.asarray(values - median_filter(values, AROUND, mode="nearest"))


def periodicity(place: IntArray, off: Values) -> tuple[float, float]:
    """How much larger than the others the packets are that lie one period apart, at the best period and phase.

    Where a video was compressed before, frames that were keyframes then cost more now (Vazquez-Padin et al.).

    Args:
        place: int64 (P,), of each packet in the presentation.
        off: float64 (P,), how much larger it is than usual.

    Returns:
        The mean of those packets over its standard error (of noise alone, 2 to 4) and the period; NaN where there are
        too few packets or all are alike.
    """
    spread = off.std() if off.size >= _FEWEST else 0.0
    if not spread > 0:
        return np.nan, np.nan
    values = np.clip((off - off.mean()) / spread, -_OUTLIER, _OUTLIER)
    values -= values.mean()
    deviation = values.std()
    best, found = -np.inf, np.nan
    for period in _PERIODS:
        if 3 * period > off.size:
            break
        phase = place % period
        count = np.bincount(phase, minlength=period)
        sums = np.bincount(phase, weights=values, minlength=period)
        # Fewer than three packets make no period; a mean is compared with those of the other phases.
        scores = np.where(count >= 3, sums / np.sqrt(np.maximum(count, 1)), -np.inf) / deviation
        if scores.max() > best:
            best, found = float(scores.max()), float(period)
    return (best, found) if np.isfinite(best) else (np.nan, np.nan)


def shift(logarithm: Values) -> float:
    """How far sizes shift within the video: the range of their cumulated deviations, over the noise's.

    About 1 to 2 for sizes that vary by chance alone; more where a part was encoded differently, or shows other things.
    """
    spread = float(logarithm.std()) if logarithm.size >= _FEWEST else 0.0
    if not spread > 0:
        return np.nan
    cumulated = np.cumsum(logarithm - logarithm.mean())
    return float((cumulated.max() - min(0.0, cumulated.min())) / (spread * np.sqrt(logarithm.size)))


def _median(values: Values) -> float:
    return float(np.median(values)) if values.size else np.nan


FEATURES.register(
    FeatureFamily(
        name="packets",
        paper="Vazquez-Padin et al., Detection of video double encoding with GOP size estimation, WIFS 2012",
        features=(
            Feature("key_step", "binary logarithm", "Median size of keyframes over that of the other frames."),
            Feature("b_step", "binary logarithm", "Median size of P frames over that of B frames."),
            Feature("spread", "binary logarithm", "Standard deviation of sizes off the median of those of their kind."),
            Feature("tiny", "share", "Frames but keyframes of less than an eighth of the usual size: repeated ones."),
            Feature(
                "largest",
                "binary logarithm",
                "The largest size, over the usual one: a cut, or frames left out.",
                size_proxy=True,
            ),
            Feature(
                "periodicity", "standard errors", "How much larger P frames are at the period that shows the most."
            ),
            Feature("period", "frames", "That period: the keyframe distance of an earlier compression, if any."),
            Feature("key_distance", "frames", "Mean distance from one keyframe to the next.", True),
            Feature("odd_groups", "share", "Keyframe distances that differ from the most frequent one."),
            Feature("shift", "ratio", "How far the sizes of P frames shift within the video, over what chance does."),
        ),
        measure=measure,
        of="stream",
    )
)
