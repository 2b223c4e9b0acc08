"""Agreement of several detectors on the same videos, and their average."""

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray


def percentile_ranks(scores: npt.ArrayLike) -> FloatArray:
    """Return float64 (N, D): within each column, the share of the N videos that score lower; ties count one half.

    A video counts as tied with itself, so values are in (0, 1). They depend on all videos and are no probabilities.
    """
    from scipy.stats import rankdata  # half a second to load

    table = _checked(scores)
    return np.asarray((rankdata(table, axis=0) - 0.5) / len(table), dtype=np.float64)


def rank_correlations(scores: npt.ArrayLike) -> FloatArray:
    """Return Spearman's rank correlations (D, D) of the columns of (N, D); NaN for a constant column."""
    from scipy.stats import rankdata  # half a second to load

    ranks = rankdata(_checked(scores), axis=0)
    centred = ranks - ranks.mean(axis=0)
    lengths = np.sqrt((centred**2).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((centred.T @ centred) / np.outer(lengths, lengths), dtype=np.float64)


def shares_of_equal_decisions(decisions: npt.ArrayLike) -> FloatArray:
    """Return (D, D): for each two columns of ``decisions`` (N, D) of 0 and 1, the share of videos where they agree."""
    called = _checked(decisions)
    return np.asarray((called.T @ called + (1 - called).T @ (1 - called)) / len(called), dtype=np.float64)


def average_scores(scores: npt.ArrayLike) -> FloatArray:
    """Return the mean score of each video, (N,), over the D columns of ``scores`` (N, D).

    If a score is outside [0, 1], percentile ranks are averaged instead.
    """
    table = _checked(scores)
    comparable = table.min() >= 0 and table.max() <= 1
    return np.asarray((table if comparable else percentile_ranks(table)).mean(axis=1), dtype=np.float64)


def _checked(table: npt.ArrayLike) -> FloatArray:
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape or not np.isfinite(values).all():
        raise ValueError(f"scores: got shape {values.shape}, wanted finite numbers (N, D), N and D at least 1.")
    return values
