"""Counts of true and false positives at every threshold: what all ranking metrics are read from.

The decision rule everywhere is ``score >= threshold`` means fake. Equal scores fall on the same side of any
threshold, so they are one point of a curve; that is what gives ties half a win in the area under it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric, divide, weighted_metric


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

    def points_while(self, holds: Callable[[FloatArray, FloatArray], npt.NDArray[np.bool_]]) -> IntArray:
        """How many thresholds, from the strictest on, satisfy ``holds``, (R,): between 0 and K.

        Found by bisection, so ``holds`` must not hold again once it has failed, which is so for whatever only becomes
        worse as counts grow.

        Args:
            holds: from the counts (R,) of true and of false positives at one threshold each to bool (R,).
        """
        low = np.zeros(self.num_fake.size, dtype=np.int64)
        high = np.full(low.size, self.thresholds.size)
        while (low < high).any():
            middle = (low + high) // 2
            held = holds(*self.counts_at(np.minimum(middle, self.thresholds.size - 1)))
            # Where both ends have met, middle is where they did: neither may move on.
            low, high = np.where(held & (low < high), middle + 1, low), np.where(held, high, middle)
        return low

    def counts_at(self, points: IntArray) -> tuple[FloatArray, FloatArray]:
        """True and false positives (R,) at one threshold each, by number; -1 is nothing called fake."""
        cells = np.arange(points.size), np.maximum(points, 0)
        called = points >= 0
        return self.true_positives[cells] * called, self.false_positives[cells] * called


@dataclass(frozen=True)
class RankedRows:
    """Rows in the order in which a falling threshold calls them fake; sorted once for any number of weights.

    Attributes:
        rows: int64 (n,), which rows: first the fakes, then the reals, each strictest first.
        fakes_called: int64 (K,), how many fakes reach each distinct score.
        reals_called: int64 (K,), how many reals do.
        thresholds: float64 (K,), the distinct scores, descending.
    """

    rows: IntArray
    fakes_called: IntArray
    reals_called: IntArray
    thresholds: FloatArray

    def curve(self, weights: FloatArray) -> ConfusionCurve:
        """The curve under weights (R, n) of these rows in this order: a cumulative sum over each class."""
        split = int(self.fakes_called[-1])
        counts = [
            np.take(_cumulative(part), called, axis=1)
            for part, called in ((weights[:, :split], self.fakes_called), (weights[:, split:], self.reals_called))
        ]
        return ConfusionCurve(self.thresholds, *counts)


def rank_rows(labels: IntArray, scores: FloatArray, rows: IntArray | None = None) -> RankedRows:
    """Sort ``rows`` (all, if not given) by falling score.

    Args:
        labels: int64 (N,) of 0 and 1.
        scores: float64 (N,).
        rows: int64 (n,), n >= 1.
    """
    chosen = np.arange(scores.size) if rows is None else rows
    order = chosen[np.argsort(-scores[chosen], kind="stable")]
    descending, is_fake = scores[order], labels[order] == 1
    last_of_tie = np.append(np.flatnonzero(np.diff(descending)), order.size - 1)
    return RankedRows(
        np.concatenate([order[is_fake], order[~is_fake]]),
        np.cumsum(is_fake)[last_of_tie],
        np.cumsum(~is_fake)[last_of_tie],
        descending[last_of_tie],
    )


def confusion_curve(labels: IntArray, scores: FloatArray, weights: FloatArray) -> ConfusionCurve:
    """Sort once, then two cumulative sums for all R sets of weights: O(N log N + R N).

    Args:
        labels: int64 (N,) of 0 and 1.
        scores: float64 (N,).
        weights: float64 (R, N).
    """
    ranked = rank_rows(labels, scores)
    return ranked.curve(weights[:, ranked.rows])


@dataclass(frozen=True)
class CurveReading:
    """How a ranking metric is read from curves, so that several can be read from the same ones.

    Attributes:
        of_curves: from the curves of each fold to (R,).
        fold_of_row: int64 (N,), or None: all rows are one ranking.
    """

    of_curves: Callable[[list[ConfusionCurve]], FloatArray]
    fold_of_row: IntArray | None = None


def curve_metric(of_curve: Callable[..., FloatArray]) -> Metric:
    """The ``Metric`` of ``of_curve(curve, **settings) -> (R,)``; its ``reading`` is that with default settings."""

    @functools.wraps(of_curve)
    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray, **settings: Any) -> FloatArray:
        return of_curve(confusion_curve(labels, scores, weights), **settings)

    return with_reading(weighted_metric(definition), CurveReading(lambda curves: of_curve(curves[0])))


def with_reading(metric: Metric, reading: CurveReading) -> Metric:
    """``metric``, known to be ``reading`` of curves."""
    metric.reading = reading  # type: ignore[attr-defined]  # of a function, which ``shared_rows`` looks for
    return metric


def _cumulative(weights: FloatArray) -> FloatArray:
    """(R, n + 1): ``[:, k]`` is the sum of the first k."""
    sums = np.zeros((weights.shape[0], weights.shape[1] + 1))
    np.cumsum(weights, axis=1, out=sums[:, 1:])
    return sums


def _with_origin(rates: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((rates.shape[0], 1)), rates], axis=1)
