"""ROC curves of several folds as one curve with a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.curves import confusion_curve
from fvc_lib.metrics.intervals import draw_group_counts, group_codes
from fvc_lib.metrics.weighting import FloatArray, IntArray, check_labels, check_scores, divide
from fvc_lib.metrics.within_folds import within_folds

_GRID_POINTS = 201


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

    def true_positive_rate_at(self, false_positive_rate: float) -> float:
        """The mean curve's height at one false positive rate."""
        return float(np.interp(false_positive_rate, self.false_positive_rates, self.mean))


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
    """Average the folds' ROC curves vertically, each weighing its pairs of a fake and a real, and bootstrap groups.

    Each fold has a model of its own whose scores need not share a scale with the others', so curves are made within
    folds; weighted by pairs, the area under their mean is the AUC within folds. Vertical averaging: T. Fawcett, "An
    introduction to ROC analysis", Pattern Recognition Letters 27 (2006). The band is pointwise, from the same draws of
    groups as the intervals.

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
    checked = check_labels(labels)
    values = check_scores(scores, checked.size)
    fold_of_row = np.asarray(folds)
    grid = np.linspace(0.0, 1.0, _GRID_POINTS)
    usable = [int(f) for f in np.unique(fold_of_row) if np.unique(checked[fold_of_row == f]).size == 2]
    rows = [np.flatnonzero(fold_of_row == fold) for fold in usable]
    whole = np.ones((1, checked.size))
    if not usable:  # one class in every fold: one pooled curve says more than none
        rows = [np.arange(checked.size)]
    group_of_row, num_groups = group_codes(groups, checked.size)
    blocks = draw_group_counts(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
    drawn = np.concatenate([_mean_curves(checked, values, c[:, group_of_row], rows, grid) for c in blocks])
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    tail = (1 - confidence) / 2
    unknown = np.full(grid.size, np.nan)
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0) if len(drawn) > 1 else (unknown, unknown)
    fold_rates = [_rates(checked[r], values[r], whole[:, r], grid)[0] for r in rows] if usable else []
    return RocBand(
        grid,
        _mean_curves(checked, values, whole, rows, grid)[0],
        low,
        high,
        float((within_folds(roc_auc, fold_of_row) if usable else roc_auc)(checked, values)),
        tuple(usable),
        np.array(fold_rates).reshape(-1, grid.size),
    )


def _mean_curves(
    labels: IntArray, scores: FloatArray, weights: FloatArray, rows_of_fold: list[IntArray], grid: FloatArray
) -> FloatArray:
    """(R, G) true positive rates, averaged over folds by their pairs; NaN where no fold has both classes."""
    total, pairs = np.zeros((weights.shape[0], grid.size)), np.zeros(weights.shape[0])
    for rows in rows_of_fold:
        in_fold = weights[:, rows]
        fold_pairs = (in_fold @ labels[rows]) * (in_fold @ (1 - labels[rows]))
        rates = _rates(labels[rows], scores[rows], in_fold, grid)
        total += np.where(fold_pairs[:, None] > 0, rates * fold_pairs[:, None], 0.0)
        pairs += fold_pairs
    return divide(total, pairs[:, None])


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
