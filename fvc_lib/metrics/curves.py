"""Counts of true and false positives at every threshold: what all ranking metrics are read from.

The decision rule everywhere is ``score >= threshold`` means fake. Equal scores fall on the same side of any
threshold, so they are one point of a curve; that is what gives ties half a win in the area under it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fvc_lib.metrics.weighting import FloatArray, IntArray, divide


@dataclass(frozen=True)
class ConfusionCurve:
    """Weighted counts at the K distinct scores as thresholds, strictest first, for R sets of row weights.

    Attributes:
        thresholds: float64 (K,), descending.
        true_positives: float64 (R, K), weight of the fakes with a score at or above the threshold.
        false_positives: float64 (R, K), weight of the reals with a score at or above the threshold.
    """

    thresholds: FloatArray
    true_positives: FloatArray
    false_positives: FloatArray

    @property
    def num_fake(self) -> FloatArray:
        """Weight of all fakes, (R,)."""
        return self.true_positives[:, -1]

    @property
    def num_real(self) -> FloatArray:
        """Weight of all reals, (R,)."""
        return self.false_positives[:, -1]

    @property
    def true_positive_rates(self) -> FloatArray:
        """(R, K + 1), from 0 (nothing called fake) to 1; NaN without fakes."""
        return _with_origin(divide(self.true_positives, self.num_fake[:, None]))

    @property
    def false_positive_rates(self) -> FloatArray:
        """(R, K + 1), from 0 (nothing called fake) to 1; NaN without reals."""
        return _with_origin(divide(self.false_positives, self.num_real[:, None]))


def confusion_curve(labels: IntArray, scores: FloatArray, weights: FloatArray) -> ConfusionCurve:
    """Sort once, then two cumulative sums for all R sets of weights: O(N log N + R N).

    Args:
        labels: int64 (N,) of 0 and 1.
        scores: float64 (N,).
        weights: float64 (R, N).
    """
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    last_of_tie = np.append(np.flatnonzero(np.diff(descending)), scores.size - 1)
    is_fake = labels[order] == 1
    ordered = weights[:, order]
    true_positives = np.cumsum(ordered * is_fake, axis=1)
    false_positives = np.cumsum(ordered * ~is_fake, axis=1)
    if last_of_tie.size < scores.size:
        true_positives, false_positives = true_positives[:, last_of_tie], false_positives[:, last_of_tie]
    return ConfusionCurve(descending[last_of_tie], true_positives, false_positives)


def _with_origin(rates: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((rates.shape[0], 1)), rates], axis=1)
