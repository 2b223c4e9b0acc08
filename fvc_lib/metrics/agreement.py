"""Several detectors of the same videos: how far they agree, and what they could do together."""

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray, IntArray, check_labels


def percentile_ranks(scores: npt.ArrayLike) -> FloatArray:
    """The share of videos that score lower, equal ones counting half: (N, D) inside (0, 1), of each column of (N, D).

    It puts scores of any scale on one, and knows all videos: it is no probability and cannot be had of a single video.
    """
    from scipy.stats import rankdata  # half a second to load

    table = _checked(scores)
    return np.asarray((rankdata(table, axis=0) - 0.5) / len(table), dtype=np.float64)


def rank_correlations(scores: npt.ArrayLike) -> FloatArray:
    """Spearman's correlation (D, D) of the columns of (N, D), ties with midranks; NaN for a constant column."""
    from scipy.stats import rankdata  # half a second to load

    ranks = rankdata(_checked(scores), axis=0)
    centred = ranks - ranks.mean(axis=0)
    lengths = np.sqrt((centred**2).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((centred.T @ centred) / np.outer(lengths, lengths), dtype=np.float64)


def shares_of_equal_decisions(decisions: npt.ArrayLike) -> FloatArray:
    """(D, D): in what share of the N videos two of the D columns of 0 and 1 say the same."""
    called = _checked(decisions)
    return np.asarray((called.T @ called + (1 - called).T @ (1 - called)) / len(called), dtype=np.float64)


def average_scores(scores: npt.ArrayLike) -> FloatArray:
    """(N,), the mean over the columns of (N, D): of the scores where all lie in [0, 1], else of percentile ranks."""
    table = _checked(scores)
    comparable = table.min() >= 0 and table.max() <= 1
    return np.asarray((table if comparable else percentile_ranks(table)).mean(axis=1), dtype=np.float64)


def oracle_scores(labels: npt.ArrayLike, scores: npt.ArrayLike) -> FloatArray:
    """(N,), each video's best percentile rank over the columns of (N, D): the highest of a fake, the lowest of a real.

    It asks the label which detector to believe, so it bounds from above what choosing among these detectors could
    reach; nobody can use it.
    """
    checked: IntArray = check_labels(labels)
    ranks = percentile_ranks(scores)
    return np.asarray(np.where(checked == 1, ranks.max(axis=1), ranks.min(axis=1)), dtype=np.float64)


def _checked(table: npt.ArrayLike) -> FloatArray:
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape or not np.isfinite(values).all():
        raise ValueError(f"scores: got shape {values.shape}, wanted finite numbers (N, D), N and D at least 1.")
    return values
