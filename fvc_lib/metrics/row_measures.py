"""Intervals of metrics whose rows carry more than a two-class label: many classes, or numbers.

``cluster_bootstrap`` is given labels of 0 and 1 and one number per row. A measure of classes or of numbers brings its
rows along instead: it is bound to them when it is made, is read from weighted sums of columns, and goes through the
same draws of whole groups as every other metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.intervals import Interval, ReplicateValues, percentile_intervals, replicate_values
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric, check_weights, sums_metric

OfSums = Callable[[FloatArray], FloatArray]


def measure_of_rows(name: str, columns: FloatArray, of_sums: OfSums) -> Metric:
    """A metric that knows its rows already: whatever labels and scores it is called with, only their number counts.

    Args:
        name: its ``__name__``.
        columns: float64 (N, C), a row of numbers per row.
        of_sums: from the columns' sums (R, C) under R sets of weights to the metric (R,).

    Raises:
        ValueError: (from the function returned) called with another number of rows.
    """

    def own_columns(labels: IntArray, _scores: FloatArray) -> FloatArray:
        if labels.size != len(columns):
            raise ValueError(f"{name}: got {labels.size} rows, wanted the {len(columns)} rows it was made of.")
        return columns

    def own_sums(sums: FloatArray) -> FloatArray:
        return of_sums(sums)

    own_sums.__name__ = name
    return sums_metric(own_columns)(own_sums)


def weighted_value(columns: FloatArray, of_sums: OfSums, weights: npt.ArrayLike | None) -> float | FloatArray:
    """The metric itself: a float, or with ``weights`` (..., N) an array of shape (...).

    Raises:
        ValueError: see ``weighting.check_weights``.
    """
    if weights is None:
        return float(of_sums(columns.sum(axis=0, keepdims=True))[0])
    table = check_weights(weights, len(columns))
    return of_sums(table.reshape(-1, len(columns)) @ columns).reshape(table.shape[:-1])


def intervals_over_groups(
    measures: Sequence[Metric],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Interval, ...]:
    """Percentile intervals of measures of the same N rows, whole groups being drawn: see ``cluster_bootstrap``.

    There is one stratum, so a replicate may lack a class; a metric over the classes that occur is then one over the
    classes of the replicate. With fewer than two groups the values stand without intervals.

    Args:
        measures: made by ``top_k_measure``, ``macro_f1_measure``, ``regression_measures`` and the like.
        groups: (N,) of group ids, all text or all numbers.
        row_weights: float (N,), what each row counts by itself; all one if not given.
        replicates: how often the groups are drawn.
        seed: of the draws; they depend on it and on ``groups`` only, so intervals of several models are paired.
        confidence: coverage in (0, 1).

    Returns:
        An interval per measure, in their order.

    Raises:
        ValueError: no rows, measures of another number of rows, no replicate, or a confidence outside (0, 1).
    """
    drawn = replicates_over_groups(measures, groups, row_weights=row_weights, replicates=replicates, seed=seed)
    return percentile_intervals(drawn, confidence)


def replicates_over_groups(
    measures: Sequence[Metric],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> ReplicateValues:
    """The measures in every replicate, for differences between them. Arguments: see ``intervals_over_groups``."""
    nothing = np.zeros(np.asarray(groups, dtype=object).shape[0])
    return replicate_values(
        nothing, [(measure, nothing) for measure in measures], groups,
        row_weights=row_weights, replicates=replicates, seed=seed,
    )  # fmt: skip
