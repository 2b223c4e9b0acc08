"""ROC curves of several folds as one curve with a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.analysis.curve_bands import curve_band
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.curves import confusion_curve
from fvc_lib.metrics.weighting import FloatArray, IntArray


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
