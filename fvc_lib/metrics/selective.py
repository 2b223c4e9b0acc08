"""What a detector gets right when it may abstain: the risk among the videos it is surest of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.thresholds import decide
from fvc_lib.metrics.weighting import FloatArray, check_labels, check_scores


@dataclass(frozen=True)
class RiskCoverage:
    """The share of wrong decisions among the surest videos, for each share of videos that is decided at all.

    Attributes:
        coverages: float64 (K,), ascending to 1: the share decided when the rest is abstained from.
        risks: float64 (K,), share of the decided that is decided wrongly; the last is the plain error rate.
        confidences: float64 (K,), descending: the least distance to the threshold that is still decided.
        area: mean risk over all coverages (AURC); lower is better. The plain error rate where all are equally sure.
    """

    coverages: FloatArray
    risks: FloatArray
    confidences: FloatArray
    area: float


def risk_coverage(labels: npt.ArrayLike, scores: npt.ArrayLike, thresholds: npt.ArrayLike) -> RiskCoverage:
    """The risk-coverage curve of deciding by ``thresholds`` and abstaining where a score is near its threshold.

    Source: R. El-Yaniv and Y. Wiener, "On the foundations of noise-free selective classification", JMLR 11 (2010);
    the area: Y. Geifman, G. Uziel and R. El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers",
    ICLR 2019. Videos at one distance are decided together, so a curve has a point per distinct distance, and the area
    is the mean over all orders of such videos: the order of the rows does not count.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,).
        thresholds: a number or (N,) (say one per fold); fake where a score reaches its threshold.

    Raises:
        ValueError: labels, scores or thresholds that cannot be meant (shape, NaN, labels other than 0 and 1).
    """
    checked = check_labels(labels)
    values = check_scores(scores, checked.size)
    limits = check_scores(np.broadcast_to(np.asarray(thresholds, dtype=np.float64), checked.shape), checked.size)
    distances, tie_of_row = np.unique(-np.abs(values - limits), return_inverse=True)
    wrong = (decide(values, limits) != checked).astype(np.float64)
    sizes = np.bincount(tie_of_row, minlength=distances.size)
    wrong_in_tie = np.bincount(tie_of_row, weights=wrong, minlength=distances.size)
    decided, mistakes = np.cumsum(sizes), np.cumsum(wrong_in_tie)
    # The j-th of a tie of m with e mistakes has, over all orders, j e / m mistakes up to it.
    place = np.arange(1, checked.size + 1)
    tie = np.repeat(np.arange(distances.size), sizes)
    expected = (mistakes - wrong_in_tie)[tie] + (place - (decided - sizes)[tie]) * (wrong_in_tie / sizes)[tie]
    return RiskCoverage(decided / checked.size, mistakes / decided, -distances, float(np.mean(expected / place)))
