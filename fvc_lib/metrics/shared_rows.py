"""Several metrics of the same rows in many bootstrap replicates: what they have in common is computed once.

Metrics that are read from curves share the curves of the same scores and folds. Metrics that are read from sums need no
rows at all: a replicate's sums are those of its groups. Any other metric is given the row weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.curves import CurveReading, RankedRows, rank_rows
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric, SumsReading, check_scores


@dataclass(frozen=True)
class _Ranking:
    """One ranking of the rows (or one in each fold), and which measures are read from its curves."""

    parts: list[RankedRows]
    readers: list[tuple[int, CurveReading]] = field(default_factory=list)


class SharedRows:
    """``measures`` of rows that are sorted once and drawn again and again.

    Args:
        labels: int64 (N,), checked.
        measures: each a metric and the float (N,) it takes.
        group_of_row: int64 (N,), codes 0 .. G - 1.
        num_groups: G.
        row_weights: float64 (N,), or None: all one.

    Raises:
        ValueError: values of another length or not finite, or from a metric that refuses its values.
    """

    def __init__(
        self,
        labels: IntArray,
        measures: Sequence[tuple[Metric, npt.ArrayLike]],
        group_of_row: IntArray,
        num_groups: int,
        row_weights: FloatArray | None = None,
    ) -> None:
        self._labels = labels
        self._group_of_row = group_of_row
        self._row_weights = row_weights
        self._measures = [(metric, check_scores(values, labels.size)) for metric, values in measures]
        self._rankings: dict[tuple[bytes, bytes], _Ranking] = {}
        self._sums: list[tuple[int, SumsReading, FloatArray]] = []
        self._others: list[int] = []
        for number, (metric, values) in enumerate(self._measures):
            reading = getattr(metric, "reading", None)
            if isinstance(reading, CurveReading):
                self._ranking_of(values, reading.fold_of_row).readers.append((number, reading))
            elif isinstance(reading, SumsReading):
                self._sums.append((number, reading, self._sums_of_groups(reading.columns(labels, values), num_groups)))
            else:
                self._others.append(number)

    def values(self) -> FloatArray:
        """(M,), the measures of the rows as they are, each by its own definition."""
        weights = np.ones(self._labels.size) if self._row_weights is None else self._row_weights
        return np.array([float(metric(self._labels, values, weights)) for metric, values in self._measures])

    def replicates(self, counts: FloatArray) -> FloatArray:
        """(M, R), the measures in R replicates, in which the groups count ``counts`` (R, G)."""
        found: dict[int, FloatArray] = {
            number: reading.of_sums(counts @ of_groups) for number, reading, of_groups in self._sums
        }
        for ranking in self._rankings.values():
            curves = [part.curve(self._weights(counts, part.rows)) for part in ranking.parts]
            found |= {number: reading.of_curves(curves) for number, reading in ranking.readers}
        if self._others:
            weights = self._weights(counts, np.arange(self._labels.size))
        for number in self._others:
            metric, values = self._measures[number]
            found[number] = metric(self._labels, values, weights)
        return np.stack([found[number] for number in range(len(self._measures))])

    def _weights(self, counts: FloatArray, rows: IntArray) -> FloatArray:
        """(R, n), what each of ``rows`` (n,) counts in each replicate."""
        drawn = counts[:, self._group_of_row[rows]]
        return drawn if self._row_weights is None else drawn * self._row_weights[rows]

    def _sums_of_groups(self, columns: FloatArray, num_groups: int) -> FloatArray:
        """(G, C), the sums over each group's rows."""
        weighted = columns if self._row_weights is None else columns * self._row_weights[:, None]
        sums = [np.bincount(self._group_of_row, weights=column, minlength=num_groups) for column in weighted.T]
        return np.stack(sums, axis=1)

    def _ranking_of(self, scores: FloatArray, fold_of_row: IntArray | None) -> _Ranking:
        folds = np.zeros(scores.size, dtype=np.int64) if fold_of_row is None else fold_of_row
        if folds.size != scores.size:
            raise ValueError(f"labels: got {scores.size} rows, wanted {folds.size}, one per entry of folds.")
        key = scores.tobytes(), folds.tobytes()
        if key not in self._rankings:
            parts = [np.flatnonzero(folds == fold) for fold in range(int(folds.max(initial=0)) + 1)]
            self._rankings[key] = _Ranking([rank_rows(self._labels, scores, rows) for rows in parts])
        return self._rankings[key]
