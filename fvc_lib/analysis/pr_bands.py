"""Precision-recall curves of several folds as one curve with a band, and the chance level to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.analysis.curve_bands import curve_band
from fvc_lib.metrics.classification import average_precision
from fvc_lib.metrics.curves import confusion_curve
from fvc_lib.metrics.weighting import FloatArray, IntArray, divide, weighted_metric
from fvc_lib.metrics.within_folds import within_folds

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
