"""Agreement of several detectors on the same videos, and their average."""

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray


def percentile_ranks(scores: npt.ArrayLike) -> FloatArray:
    """Return, for each column of (N, D), the share of videos that score lower, with ties as one half.

    The result is in (0, 1). It depends on all videos and is no probability.
    """
    from scipy.stats import rankdata  # half a second to load

    table = _checked(scores)
    return np.asarray((rankdata(table, axis=0) - 0.5) / len(table), dtype=np.float64)


def rank_correlations(scores: npt.ArrayLike) -> FloatArray:
    """Return Spearman's correlations (D, D) of the columns of (N, D), with midranks; NaN for a constant column."""
    from scipy.stats import rankdata  # half a second to load

    ranks = rankdata(_checked(scores), axis=0)
    centred = ranks - ranks.mean(axis=0)
    lengths = np.sqrt((centred**2).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((centred.T @ centred) / np.outer(lengths, lengths), dtype=np.float64)


def shares_of_equal_decisions(decisions: npt.ArrayLike) -> FloatArray:
    """Return (D, D), the share of N videos for which two of the D columns of 0 and 1 are equal."""
    called = _checked(decisions)
    return np.asarray((called.T @ called + (1 - called).T @ (1 - called)) / len(called), dtype=np.float64)


def average_scores(scores: npt.ArrayLike) -> FloatArray:
    """Return (N,), the mean of the columns of (N, D): of scores if all are in [0, 1], else of percentile ranks."""
    table = _checked(scores)
    comparable = table.min() >= 0 and table.max() <= 1
    return np.asarray((table if comparable else percentile_ranks(table)).mean(axis=1), dtype=np.float64)


def _checked(table: npt.ArrayLike) -> FloatArray:
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape or not np.isfinite(values).all():
        raise ValueError(f"scores: got shape {values.shape}, wanted finite numbers (N, D), N and D at least 1.")
    return values
