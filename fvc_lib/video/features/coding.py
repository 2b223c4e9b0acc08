"""Features of how a video was encoded and cut: packets, quantisers, motion vectors, times and repeated frames.

These features depend on codec and encoder settings as much as on manipulations. So compare a model on them with the
metadata control, a model that sees only facts such as codec and size.
"""

import numpy as np
import numpy.typing as npt
from scipy.ndimage import median_filter

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, IntArray, Run, Stream, Values

Floats = npt.NDArray[np.float64]

# ``packets`` compares the binary logarithm of a packet's size with the median of neighbouring packets of the same kind:
# keyframes, frames that refer to later ones (B), and others (P). Sizes depend on the content and on the kind.
_AROUND = 15  # number of packets of a kind in that median
# An eighth of that median. Of two equal neighbouring frames, the packet that is coded later is smaller than this. In a
# test with 44 repeated frames, one in eight, this limit finds 93 to 98 % of them in H.264 and HEVC by x264 and x265
# with default settings, and no other frames; in VP9 48 to 84 %, with 1 to 7 % of the other frames. Encoders that do not
# look ahead (x264's zerolatency, MPEG-4, VP8) use a repeated frame to refine the picture: the limit finds 2 to 41 %.
_TINY = -3.0
_LAYERED = frozenset({"av1"})  # half of its frames are that small: those in a layer to which no frame refers
_SHORTEST, _LONGEST = 4, 60  # periods in packets, as of usual groups; shorter ones are patterns of P and B frames
_FEWEST = 24  # least number of frames for a periodicity; at least three periods are needed, too
_OUTLIER = 4.0  # in standard deviations; values are clipped, so that the first frame of a scene makes no period


def measure_packets(stream: Stream) -> dict[str, float]:
    """Measure how the sizes of a video's packets vary, which shows for example an earlier compression.

    Returns:
        A mapping from the names of the features of the family ``packets`` to their values. One feature is ``key_step``,
        the size of keyframes over that of other frames. Values are NaN if there are too few packets.
    """
    logarithm = np.log2(np.maximum(stream.sizes, 1).astype(np.float64))
    timed = np.isfinite(stream.pts_seconds)
    known = np.where(timed, stream.pts_seconds, -np.inf)
    # B-frames are shown before a packet that was decoded earlier; packets with an unknown time count as none.
    is_b = timed & (known < np.maximum.accumulate(known)) & ~stream.is_key
    is_p = ~stream.is_key & ~is_b
    off = np.zeros(len(logarithm))
    for kind in (stream.is_key, is_b, is_p):
        if kind.any():
            off[kind] = logarithm[kind] - median_filter(logarithm[kind], _AROUND, mode="nearest")
    inter = ~stream.is_key
    # Index of every packet in presentation order; in decoding order if any time is unknown.
    order = np.argsort(known, kind="stable") if timed.all() else np.arange(len(known))
    place = np.argsort(order)
    strength, period = periodicity(place[is_p], off[is_p])
    lengths = np.diff(np.flatnonzero(stream.is_key))
    return {
        "key_step": _median(logarithm[stream.is_key]) - _median(logarithm[inter]),
        "b_step": _median(logarithm[is_p]) - _median(logarithm[is_b]),
        "spread": float(off[inter].std()) if inter.any() else np.nan,
        "tiny": np.nan if stream.codec in _LAYERED or not inter.any() else float((off[inter] <= _TINY).mean()),
        "largest": float(off[inter].max()) if inter.any() else np.nan,
        "periodicity": strength,
        "period": period,
        "key_distance": float(lengths.mean()) if lengths.size else np.nan,
        "odd_groups": float((lengths != np.bincount(lengths).argmax()).mean()) if lengths.size else np.nan,
        "shift": shift(logarithm[is_p]),
    }


def periodicity(place: IntArray, off: Floats) -> tuple[float, float]:
    """Find the period at which packets are larger than usual, such as every 12th packet.

    Such a period is a trace of an earlier compression: the frames that were keyframes in that compression need more
    bytes now (Vazquez-Padin et al.).

    Args:
        place: int64 (P,), index of every packet in presentation order.
        off: float64 (P,), binary logarithm of every packet's size over the usual size.

    Returns:
        A tuple (strength, period). The period, in frames, is the one at which packets are largest. The strength is the
        mean of ``off`` over every ``period``-th packet, above the overall mean, in standard errors. Noise alone gives
        2 to 4. Both are NaN for too few packets, or if all have the same size.
    """
    spread = off.std() if off.size >= _FEWEST else 0.0
    if not spread > 0:
        return np.nan, np.nan
    values = np.clip((off - off.mean()) / spread, -_OUTLIER, _OUTLIER)
    values -= values.mean()
    deviation = values.std()
    best = []
    for period in range(_SHORTEST, min(_LONGEST, off.size // 3) + 1):
        phase = place % period
        count = np.bincount(phase, minlength=period)
        sums = np.bincount(phase, weights=values, minlength=period)
        # A phase needs at least three packets. Its score is its mean in standard errors.
        scores = np.where(count >= 3, sums / np.sqrt(np.maximum(count, 1)), -np.inf) / deviation
        best.append((float(scores.max()), -float(period)))
    strength, negative = max(best)  # of equal scores that of the shorter period
    return strength, -negative


def shift(logarithm: Floats) -> float:
    """Return the rescaled range of a video's packet sizes, which shows how much their mean changes within the video.

    The rescaled range is the range of the cumulative sum of deviations from the mean, divided by their
    standard deviation times sqrt(P). Chance alone gives about 1 to 2. The value is larger if a part was encoded
    differently or has other content.

    Args:
        logarithm: float64 (P,), binary logarithms of the sizes.

    Returns:
        The value, without a unit; NaN for too few packets, or if all have the same size.
    """
    spread = float(logarithm.std()) if logarithm.size >= _FEWEST else 0.0
    if not spread > 0:
        return np.nan
    cumulated = np.cumsum(logarithm - logarithm.mean())
    return float((cumulated.max() - min(0.0, cumulated.min())) / (spread * np.sqrt(logarithm.size)))


def _median(values: Floats) -> float:
    return float(np.median(values)) if values.size else np.nan


def _mean(values: npt.NDArray[np.floating]) -> float:
    known = values[np.isfinite(values)].astype(np.float64)
    return float(known.mean()) if known.size else np.nan


FEATURES.register(
    FeatureFamily(
        name="packets",
        paper="Vazquez-Padin et al., Detection of video double encoding with GOP size estimation, WIFS 2012",
        features=(
            Feature("key_step", "binary logarithm", "Median size of keyframes over that of the other frames."),
            Feature("b_step", "binary logarithm", "Median size of P frames over that of B frames."),
            Feature("spread", "binary logarithm", "Standard deviation of sizes around the median of their kind."),
            Feature("tiny", "share", "Frames except keyframes below an eighth of the usual size: repeated ones."),
            Feature(
                "largest",
                "binary logarithm",
                "The largest size, over the usual one: a cut, or frames left out.",
                size_proxy=True,
            ),
            Feature("periodicity", "standard errors", "Excess size of P frames at their strongest period."),
            Feature("period", "frames", "That period: the keyframe distance of an earlier compression, if any."),
            Feature("key_distance", "frames", "Mean distance from one keyframe to the next.", True),
            Feature("odd_groups", "share", "Keyframe distances that differ from the most frequent one."),
            Feature("shift", "ratio", "Shift of the sizes of P frames within the video, over that of chance."),
        ),
        measure=measure_packets,
        of="stream",
    )
)


def measure_quantisers(stream: Stream) -> dict[str, float]:
    """Measure the quantisers of a video, which state how coarsely the blocks of its frames are coded.

    At the same bit rate, content that was compressed before, denoised or drawn smoothly gets smaller quantisers than
    camera footage.

    Returns:
        A mapping from the names of the features of the family ``quantisers`` to their values. Values are NaN if the
        decoder exports no quantisers.
    """
    known = np.isfinite(stream.qp[:, 0])
    mean, within = stream.qp[known].T.astype(np.float64)
    types = np.array(list(stream.frame_types), "U1")[known]
    groups = [mean[types == letter] for letter in "IPB"]
    # B frames are quantised more coarsely than P frames, so a frame is compared with frames of its type.
    off = np.concatenate([group - group.mean() for group in groups if group.size > 1] or [np.empty(0)])
    return {
        "level": _mean(mean),
        "within": _mean(within),
        "between": float(off.std()) if off.size else np.nan,
        "key_step": _mean(groups[1]) - _mean(groups[0]),
        "intra": _mean(stream.intra),
    }


FEATURES.register(
    FeatureFamily(
        name="quantisers",
        paper="Shanableh, Detection of frame deletion for digital video forensics, Digital Investigation 10 (2013)",
        features=(
            Feature("level", "share", "Mean quantiser of the sampled frames, of the codec's largest.", size_proxy=True),
            Feature(
                "within",
                "share",
                "Standard deviation of the quantiser within a frame, mean of frames.",
                size_proxy=True,
            ),
            Feature(
                "between", "share", "Standard deviation of frames' mean quantisers around that of their type.", True
            ),
            Feature("key_step", "share", "Mean quantiser of P frames minus that of I frames.", size_proxy=True),
            Feature("intra", "share", "Area of P frames that is not predicted from another frame."),
        ),
        measure=measure_quantisers,
        of="stream",
    )
)

_SECTORS = 16  # number of sectors into which directions are divided


def measure_codec_motion(stream: Stream) -> dict[str, float]:
    """Measure lengths and directions of the motion vectors that the encoder stored in a video.

    For nearly every block, a motion vector states where the content of the block was in another frame. A repeated frame
    has only zero vectors. Content that does not move like filmed objects has disordered vectors.

    Returns:
        A mapping from the names of the features of the family ``codec_motion`` to their values. Values are NaN if the
        decoder exports no vectors.
    """
    motion = stream.motion.astype(np.float64)
    length = np.hypot(motion[:, 0], motion[:, 1])
    moving = length > 0
    if not moving.any():
        zero = 1.0 if len(motion) else np.nan
        return {"zero": zero, "length": np.nan, "disorder": np.nan, "directions": np.nan}
    angle = np.arctan2(motion[moving, 1], motion[moving, 0])
    # Sectors are centred on the axes, where most vectors lie.
    sector = np.round(angle / (2 * np.pi) * _SECTORS).astype(np.int64) % _SECTORS
    share = np.bincount(sector, minlength=_SECTORS) / len(sector)
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    return {
        "zero": float(1 - moving.mean()),
        "length": float(length[moving].mean()),
        "disorder": float(length[moving].std() / length[moving].mean()),
        "directions": float(entropy),
    }


FEATURES.register(
    FeatureFamily(
        name="codec_motion",
        paper="Feng et al., Motion-adaptive frame deletion detection for digital video forensics, IEEE TCSVT 2016",
        features=(
            Feature("zero", "share", "Motion vectors of no length."),
            Feature("length", "pixels", "Mean length of the others.", True),
            Feature("disorder", "ratio", "Standard deviation of their length over its mean."),
            Feature("directions", "bits", "Entropy of their directions in 16 sectors: 0 in one direction, 4 in all."),
        ),
        measure=measure_codec_motion,
        of="stream",
    )
)


def measure_timing(stream: Stream) -> dict[str, float]:
    """Measure how regular the time intervals between a video's frames are; gaps show that frames were left out.

    Returns:
        A mapping from the names of the features of the family ``timing`` to their values. One feature is ``gaps``, the
        share of intervals above 1.5 times the median. Values are NaN if presentation times are unknown or equal.
    """
    intervals = np.diff(np.sort(stream.pts_seconds[np.isfinite(stream.pts_seconds)]))
    usual = _median(intervals)
    if not usual > 0:
        return dict.fromkeys(("gaps", "longest_gap", "missing", "crowded", "jitter"), np.nan)
    # Rounded, because rounding errors grow with the length of a video.
    ratios = np.round(intervals / usual, 9)
    return {
        "gaps": float((ratios > 1.5).mean()),
        "longest_gap": float(ratios.max()),
        "missing": float((np.round(ratios) - 1).clip(min=0).sum() / (len(ratios) + 1)),
        "crowded": float((ratios < 0.5).mean()),
        "jitter": float(np.abs(ratios - 1).clip(max=1).mean()),
    }


FEATURES.register(
    FeatureFamily(
        name="timing",
        paper="Gironi et al., A video forensic technique for detecting frame deletion and insertion, ICASSP 2014",
        features=(
            Feature("gaps", "share", "Intervals between frames above 1.5 times the median."),
            Feature("longest_gap", "ratio", "The longest interval between frames, over the median."),
            Feature("missing", "share", "Frames that would fill the gaps, over those that exist."),
            Feature("crowded", "share", "Intervals between frames below half the median."),
            Feature("jitter", "share", "Mean distance of intervals from their median, over it; each at most 1."),
        ),
        measure=measure_timing,
        of="stream",
    )
)

# Features of neighbouring frames that are (nearly) equal, and of jumps where frames were left out.
_FLOOR = 0.05  # grey levels, added before the logarithm, so that tiny differences in still scenes do not matter


def measure_repeats(run: Run) -> dict[str, Values]:
    """Measure how much neighbouring frames differ, to detect repeated frames and frames that were left out.

    The result maps the names of the features of the family ``repeats`` to their values. ``run`` holds L consecutive
    frames.

    For each pair of neighbouring frames, shape (L - 1,): ``equal`` (1 if all compared pixels are equal),
    ``equal_tiles`` (share of equal tiles) and ``difference`` (mean absolute difference of tiles, in grey levels).

    For the run, shape (1,), or (0,) for fewer than 3 frames: ``dip`` and ``jump``. They compare binary logarithms of
    ``difference``. ``dip`` is the median of the other pairs minus the smallest value; it is large if a frame was
    repeated. ``jump`` is the largest value minus the median of the other pairs; it is large if frames were left out.

    If the run has no tiles, all features except ``equal`` are empty arrays.
    """
    tiles = np.abs(run.luma[1:] - run.luma[:-1]).mean((2, 3))  # (L - 1, N)
    equal = ((run.small[1:] == run.small[:-1]).all((1, 2)) & (tiles == 0).all(1)).astype(np.float64)
    if not tiles.size:
        return {"equal": equal, **dict.fromkeys(("equal_tiles", "difference", "dip", "jump"), np.empty(0))}
    difference = tiles.mean(1)
    logarithm = np.sort(np.log2(difference + _FLOOR))
    has_others = len(run.luma) >= 3  # ``dip`` and ``jump`` compare a pair with other pairs
    return {
        "equal": equal,
        "equal_tiles": (tiles == 0).mean(1),
        "difference": difference,
        "dip": np.atleast_1d(np.median(logarithm[1:]) - logarithm[:1]) if has_others else np.empty(0),
        "jump": np.atleast_1d(logarithm[-1:] - np.median(logarithm[:-1])) if has_others else np.empty(0),
    }


FEATURES.register(
    FeatureFamily(
        name="repeats",
        paper="Wang and Farid, Exposing digital forgeries in video by detecting duplication, MM&Sec 2007",
        features=(
            Feature("equal", "share", "Pairs of neighbouring frames that are equal in every compared pixel."),
            Feature("equal_tiles", "share", "Tiles of a frame that equal those of the frame before."),
            Feature("difference", "grey levels", "Mean absolute difference of neighbouring frames."),
            Feature("dip", "binary logarithm", "How much less the most alike pair differs than the others of its run."),
            Feature("jump", "binary logarithm", "How much more the most different pair differs than the others."),
        ),
        measure=measure_repeats,
        of="pairs",
    )
)
