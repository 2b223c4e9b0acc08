"""Does a score of 0.8 mean fake in eight of ten cases? Bins of a reliability diagram and the error read from
them.

A bin is half open, [edge_k, edge_(k+1)), and the last one closed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.weighting import (
    FloatArray,
    IntArray,
    check_labels,
    check_probabilities,
    check_scores,
    divide,
    weighted_metric,
)

DEFAULT_NUM_BINS = 10


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram shows of B bins.

    Attributes:
        edges: float64 (B + 1,), ascending.
        counts: int64 (B,), videos per bin; empty bins stay, so that they can be shown as empty.
        mean_scores: float64 (B,), mean probability of fake; NaN in an empty bin.
        fake_shares: float64 (B,), share that is fake; NaN in an empty bin.
    """

    edges: FloatArray
    counts: IntArray
    mean_scores: FloatArray
    fake_shares: FloatArray


def equal_width_edges(num_bins: int = DEFAULT_NUM_BINS) -> FloatArray:
    """Edges (num_bins + 1,) of bins of one width over [0, 1].

    Raises:
        ValueError: fewer than one bin.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins: got {num_bins}, wanted at least 1.")
    return np.linspace(0.0, 1.0, num_bins + 1)


def equal_mass_edges(scores: npt.ArrayLike, num_bins: int = DEFAULT_NUM_BINS) -> FloatArray:
    """Edges over [0, 1] of at most ``num_bins`` bins with about as many of ``scores`` (N,) in each.

    Equal scores share a bin, so ties give fewer bins. Edges lie on scores: R. Roelofs et al., "Mitigating
    bias in calibration error estimation", AISTATS 2022, who show such bins less biased than those of one
    width.

    Raises:
        ValueError: no scores, scores outside [0, 1], or fewer than one bin.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins: got {num_bins}, wanted at least 1.")
    ordered = np.sort(check_probabilities(check_scores(scores, np.size(scores))))
    starts = ordered[np.arange(1, num_bins) * ordered.size // num_bins]
    inner = np.unique(starts[(starts > ordered[0]) & (starts < 1)])
    return np.concatenate([[0.0], inner, [1.0]])


def reliability_bins(
    labels: npt.ArrayLike, scores: npt.ArrayLike, edges: npt.ArrayLike | None = None
) -> ReliabilityBins:
    """Counts, mean score and share of fakes per bin of ``scores`` (N,), by default ten of one width.

    Raises:
        ValueError: labels, scores or edges that cannot be meant.
    """
    checked = check_labels(labels)
    probabilities = check_probabilities(check_scores(scores, checked.size))
    bounds = _check_edges(edges)
    bins = _bin_of(probabilities, bounds)
    size = bounds.size - 1
    counts = np.bincount(bins, minlength=size).astype(np.float64)
    score_sums = np.bincount(bins, weights=probabilities, minlength=size).astype(np.float64)
    fake_sums = np.bincount(bins, weights=checked, minlength=size).astype(np.float64)
    return ReliabilityBins(bounds, counts.astype(np.int64), divide(score_sums, counts), divide(fake_sums, counts))


@weighted_metric
def expected_calibration_error(
    labels: IntArray, scores: FloatArray, weights: FloatArray, *, edges: npt.ArrayLike | None = None
) -> FloatArray:
    """Distance between mean score and share of fakes, averaged over bins by their weight; lower is better.

    By default ten bins of one width, which do not depend on the sample, so that a bootstrap replicate
    measures the same thing; ``edges`` takes others, see ``equal_mass_edges``. Of the probability of fake, not
    of the larger of two probabilities. Source: M. P. Naeini et al., "Obtaining well calibrated probabilities
    using Bayesian binning", AAAI 2015. It is biased upwards in small samples: a calibrated score has an error
    above 0 too. Defined with one class.

    Raises:
        ValueError: scores outside [0, 1], or edges that do not ascend from 0 to 1.
    """
    bounds = _check_edges(edges)
    bins = _bin_of(check_probabilities(scores), bounds)
    # |mean score - share of fakes| times the bin's weight is |sum of (score - label)|: no division, no empty bin.
    excess = np.zeros((scores.size, bounds.size - 1))
    excess[np.arange(scores.size), bins] = scores - labels
    return divide(np.abs(weights @ excess).sum(axis=1), weights.sum(axis=1))


def _check_edges(edges: npt.ArrayLike | None) -> FloatArray:
    if edges is None:
        return equal_width_edges()
    bounds = np.asarray(edges, dtype=np.float64)
    if bounds.ndim != 1 or bounds.size < 2 or bounds[0] != 0 or bounds[-1] != 1 or not (np.diff(bounds) > 0).all():
        raise ValueError(f"edges: got {bounds.tolist()}, wanted at least two that ascend from 0 to 1.")
    return bounds


def _bin_of(scores: FloatArray, edges: FloatArray) -> IntArray:
    return np.searchsorted(edges[1:-1], scores, side="right").astype(np.int64)
