"""Several metrics of the same rows under many weights: what they have in common is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.curves import CurveReading, RankedRows, rank_rows, reading_of
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric, check_scores

# Asked for rows (n,), gives their weights (R, n) in that order.
WeightsOf = Callable[[IntArray], FloatArray]


@dataclass(frozen=True)
class _Ranking:
    """One ranking of the rows (or one in each fold), and which measures are read from its curves."""

    parts: list[RankedRows]
    readers: list[tuple[int, CurveReading]] = field(default_factory=list)


class SharedRows:
    """Evaluates ``measures`` on rows that are sorted once and weighted again and again.

    Metrics that are read from curves share the curves of the same scores and folds; all others share the weights.

    Args:
        labels: int64 (N,), checked.
        measures: each a metric and the float (N,) it takes.

    Raises:
        ValueError: values of another length, or not finite.
    """

    def __init__(self, labels: IntArray, measures: Sequence[tuple[Metric, npt.ArrayLike]]) -> None:
        self._labels = labels
        self._rankings: dict[tuple[bytes, bytes], _Ranking] = {}
        self._others: list[tuple[int, Metric, FloatArray]] = []
        self._num_measures = len(measures)
        for number, (metric, given) in enumerate(measures):
            values = check_scores(given, labels.size)
            reading = reading_of(metric)
            if reading is None:
                self._others.append((number, metric, values))
            else:
                self._ranking_of(values, reading.fold_of_row).readers.append((number, reading))

    def evaluate(self, weights_of: WeightsOf) -> FloatArray:
        """(M, R), the measures in their order under R sets of weights.

        Raises:
            ValueError: from a metric that refuses its values.
        """
        found: dict[int, FloatArray] = {}
        for ranking in self._rankings.values():
            curves = [part.curve(weights_of(part.rows)) for part in ranking.parts]
            found |= {number: reading.of_curves(curves) for number, reading in ranking.readers}
        if self._others:
            weights = weights_of(np.arange(self._labels.size))
            found |= {number: metric(self._labels, values, weights) for number, metric, values in self._others}
        return np.stack([found[number] for number in range(self._num_measures)])

    def _ranking_of(self, scores: FloatArray, fold_of_row: IntArray | None) -> _Ranking:
        folds = np.zeros(scores.size, dtype=np.int64) if fold_of_row is None else fold_of_row
        if folds.size != scores.size:
            raise ValueError(f"labels: got {scores.size} rows, wanted {folds.size}, one per entry of folds.")
        key = scores.tobytes(), folds.tobytes()
        if key not in self._rankings:
            parts = [np.flatnonzero(folds == fold) for fold in range(int(folds.max(initial=0)) + 1)]
            self._rankings[key] = _Ranking([rank_rows(self._labels, scores, rows) for rows in parts])
        return self._rankings[key]
