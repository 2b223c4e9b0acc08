"""Curves of several folds as one curve with a band: what ROC and precision-recall curves have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import (
    FloatArray,
    IntArray,
    Metric,
    average_precision,
    check_labels,
    check_scores,
    confusion_curve,
    divide,
    roc_auc,
    weighted_metric,
)
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import draw_group_counts, group_codes

GRID_POINTS = 201
_FEWEST_GROUPS = 2  # of a class: of one there is no telling how groups vary, and metrics have no interval either

# (labels (N,), scores (N,), weights (R, N), grid (G,)) -> heights (R, G), NaN in rows where a class has no weight.
Heights = Callable[[IntArray, FloatArray, FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True)
class CurveBand:
    """A mean curve over folds on a grid of G places in [0, 1].

    Attributes:
        grid: float64 (G,), ascending from 0 to 1.
        mean: float64 (G,).
        low: float64 (G,), pointwise lower end; NaN where there is no telling.
        high: float64 (G,), pointwise upper end.
        area: the exact value of the curve's own area metric within folds.
        folds: the folds that hold both classes.
        fold_heights: float64 (F, G), each such fold's own curve.
    """

    grid: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    folds: tuple[int, ...]
    fold_heights: FloatArray


def curve_band(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: Sequence[str],
    folds: npt.ArrayLike,
    *,
    heights: Heights,
    area: Metric,
    replicates: int,
    seed: int,
    confidence: float,
) -> CurveBand:
    """Average the folds' curves vertically, each weighing its pairs of a fake and a real, and bootstrap groups.

    Each fold has a model of its own whose scores need not share a scale with the others', so curves are made within
    folds; weighted by pairs, the area under their mean is the area metric within folds. The band is pointwise, from the
    same draws of groups as the intervals.

    Args:
        labels: int (N,), 1 is fake.
        scores: float (N,).
        groups: (N,) group ids.
        folds: int (N,).
        heights: the kind of curve.
        area: the metric that is the area under one such curve.
        replicates: how often the groups are drawn.
        seed: of the draws.
        confidence: pointwise coverage in (0, 1).

    Raises:
        ValueError: labels or scores that cannot be meant.
    """
    checked = check_labels(labels)
    values = check_scores(scores, checked.size)
    fold_of_row = np.asarray(folds)
    grid = np.linspace(0.0, 1.0, GRID_POINTS)
    usable = [int(f) for f in np.unique(fold_of_row) if np.unique(checked[fold_of_row == f]).size == 2]
    rows = [np.flatnonzero(fold_of_row == fold) for fold in usable]
    whole = np.ones((1, checked.size))
    if not usable:  # one class in every fold: one pooled curve says more than none
        rows = [np.arange(checked.size)]
    group_of_row, num_groups = group_codes(groups, checked.size)
    blocks = draw_group_counts(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
    drawn = [_mean_curves(checked, values, c[:, group_of_row], rows, grid, heights) for c in blocks]
    low, high = pointwise_interval(np.concatenate(drawn), confidence)
    if min(np.unique(group_of_row[checked == label]).size for label in (0, 1)) < _FEWEST_GROUPS:
        low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
    own = [heights(checked[r], values[r], whole[:, r], grid)[0] for r in rows] if usable else []
    return CurveBand(
        grid,
        _mean_curves(checked, values, whole, rows, grid, heights)[0],
        low,
        high,
        float((within_folds(area, fold_of_row) if usable else area)(checked, values)),
        tuple(usable),
        np.array(own).reshape(-1, grid.size),
    )


def pointwise_interval(drawn: FloatArray, confidence: float) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends (G,) of replicates (R, G), those with a NaN left out; NaN with fewer than two."""
    kept = drawn[np.isfinite(drawn).all(axis=1)]
    if len(kept) < 2:
        unknown = np.full(drawn.shape[1], np.nan)
        return unknown, unknown
    tail = (1 - confidence) / 2
    low, high = np.quantile(kept, [tail, 1 - tail], axis=0)
    return low, high


def _mean_curves(
    labels: IntArray,
    scores: FloatArray,
    weights: FloatArray,
    rows_of_fold: list[IntArray],
    grid: FloatArray,
    heights: Heights,
) -> FloatArray:
    """(R, G) heights averaged over folds by their pairs; NaN where no fold has both classes."""
    total, pairs = np.zeros((weights.shape[0], grid.size)), np.zeros(weights.shape[0])
    for rows in rows_of_fold:
        in_fold = weights[:, rows]
        fold_pairs = (in_fold @ labels[rows]) * (in_fold @ (1 - labels[rows]))
        values = heights(labels[rows], scores[rows], in_fold, grid)
        total += np.where(fold_pairs[:, None] > 0, values * fold_pairs[:, None], 0.0)
        pairs += fold_pairs
    return divide(total, pairs[:, None])


# ----------------------------------------------------------------------------------------------------
# Precision-recall curves of several folds as one curve with a band, and the chance level to compare it with.


# A recall of 3 / 10 and the grid's 0.3 differ in their last bits.
_SAME = 1e-9


@dataclass(frozen=True)
class PrBand:
    """A mean precision-recall curve over folds on a grid of G recalls.

    Attributes:
        recalls: float64 (G,), ascending from 0 to 1: shares of the fakes that are found.
        mean: float64 (G,), precisions: shares of fakes among what is called fake.
        low: float64 (G,), pointwise lower end; NaN where there is no telling.
        high: float64 (G,), pointwise upper end.
        area: the exact average precision within folds.
        chance: the precision of guessing: the share of fakes, averaged over folds like the curves.
        folds: the folds that hold both classes.
        fold_precisions: float64 (F, G), each such fold's own curve.
    """

    recalls: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    chance: float
    folds: tuple[int, ...]
    fold_precisions: FloatArray

    @property
    def has_interval(self) -> bool:
        """Whether the band could be computed at all."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def precision_at(self, recall: float) -> float:
        """The mean curve's height at one recall of the grid."""
        return float(self.mean[int(np.argmin(np.abs(self.recalls - recall)))])


def pr_band(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: Sequence[str],
    folds: npt.ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PrBand:
    """The folds' precision-recall curves averaged vertically, with a band; ``curve_bands.curve_band`` has the rule.

    A curve is the step function whose area is the average precision, not a straight line between its points, which
    would be too good: J. Davis and M. Goadrich, "The relationship between precision-recall and ROC curves", ICML 2006.

    Args:
        labels: int (N,), 1 is fake.
        scores: float (N,).
        groups: (N,) group ids.
        folds: int (N,).
        replicates: how often the groups are drawn.
        seed: of the draws.
        confidence: pointwise coverage in (0, 1).

    Raises:
        ValueError: labels or scores that cannot be meant.
    """
    band = curve_band(
        labels, scores, groups, folds, heights=_precisions, area=average_precision, replicates=replicates, seed=seed,
        confidence=confidence,
    )  # fmt: skip
    guess = within_folds(_share_of_fakes, folds) if band.folds else _share_of_fakes
    chance = float(guess(labels, scores))
    return PrBand(band.grid, band.mean, band.low, band.high, band.area, chance, band.folds, band.fold_heights)


@weighted_metric
def _share_of_fakes(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    del scores
    return divide(weights @ labels, weights.sum(axis=1))


def _precisions(labels: IntArray, scores: FloatArray, weights: FloatArray, grid: FloatArray) -> FloatArray:
    """(R, G) precision at the strictest threshold that finds at least the grid's recall; NaN without fakes or reals."""
    curve = confusion_curve(labels, scores, weights)
    recalls = divide(curve.true_positives, curve.num_fake[:, None])
    precisions = divide(curve.true_positives, curve.true_positives + curve.false_positives)
    heights = np.full((weights.shape[0], grid.size), np.nan)
    for number in np.flatnonzero((curve.num_fake > 0) & (curve.num_real > 0)):
        # At recall 0 the first threshold that finds any fake: a row of weight 0 has no precision.
        first = int(np.argmax(recalls[number] > 0))
        place = np.maximum(np.searchsorted(recalls[number], grid - _SAME), first)
        heights[number] = precisions[number, np.minimum(place, recalls.shape[1] - 1)]
    return heights


# ----------------------------------------------------------------------------------------------------
# ROC curves of several folds as one curve with a band.


@dataclass(frozen=True)
class RocBand:
    """A mean ROC curve over folds on a grid of G false positive rates.

    Attributes:
        false_positive_rates: float64 (G,), ascending from 0 to 1.
        mean: float64 (G,), true positive rates.
        low: float64 (G,), pointwise lower end; NaN where there is no telling.
        high: float64 (G,), pointwise upper end.
        area: the exact area under the mean curve: the AUC within folds.
        folds: the folds that hold both classes.
        fold_rates: float64 (F, G), each such fold's own curve.
    """

    false_positive_rates: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    folds: tuple[int, ...]
    fold_rates: FloatArray

    @property
    def has_interval(self) -> bool:
        """Whether the band could be computed at all."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())


def roc_band(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: Sequence[str],
    folds: npt.ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> RocBand:
    """The folds' ROC curves averaged vertically, with a band; ``curve_bands.curve_band`` has the rule.

    Vertical averaging: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27 (2006).

    Args:
        labels: int (N,), 1 is fake.
        scores: float (N,).
        groups: (N,) group ids.
        folds: int (N,).
        replicates: how often the groups are drawn.
        seed: of the draws.
        confidence: pointwise coverage in (0, 1).

    Raises:
        ValueError: labels or scores that cannot be meant.
    """
    band = curve_band(
        labels, scores, groups, folds, heights=_rates, area=roc_auc, replicates=replicates, seed=seed,
        confidence=confidence,
    )  # fmt: skip
    return RocBand(band.grid, band.mean, band.low, band.high, band.area, band.folds, band.fold_heights)


def _rates(labels: IntArray, scores: FloatArray, weights: FloatArray, grid: FloatArray) -> FloatArray:
    """(R, G) true positive rates at the grid's false positive rates, the upper one where the curve is vertical."""
    curve = confusion_curve(labels, scores, weights)
    false_rates, true_rates = curve.false_positive_rates, curve.true_positive_rates
    heights = np.full((weights.shape[0], grid.size), np.nan)
    for number, (x, y) in enumerate(zip(false_rates, true_rates, strict=True)):
        if np.isfinite(x[-1]) and np.isfinite(y[-1]):
            # np.interp takes the last of several equal x, which is the top of a vertical piece.
            heights[number] = np.interp(grid, x, y)
    return heights
