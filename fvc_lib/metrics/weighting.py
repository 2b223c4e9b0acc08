"""One definition per metric: every metric is written once, over rows that carry weights.

A plain value is the metric with all weights one, a value with one vote per group is the metric with weights
one over the group's size, and a bootstrap replicate is the metric with weights that count how often each row
was drawn. So a definition takes weights (R, N) and returns (R,), and ``weighted_metric`` makes the public
function of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Definition = Callable[..., FloatArray]


class Metric(Protocol):
    """``metric(labels (N,), scores (N,))`` is a float; with ``weights`` (..., N) an array of shape (...)."""

    __name__: str

    @overload
    def __call__(
        self, labels: npt.ArrayLike, scores: npt.ArrayLike, weights: None = None, **settings: Any
    ) -> float: ...
    @overload
    def __call__(
        self, labels: npt.ArrayLike, scores: npt.ArrayLike, weights: npt.ArrayLike, **settings: Any
    ) -> FloatArray: ...


def weighted_metric(definition: Definition) -> Metric:
    """Turn ``definition(labels int64 (N,), scores float64 (N,), weights float64 (R, N)) -> (R,)`` into a
    ``Metric``.

    The public function checks its input, so that all metrics refuse the same things with the same words.

    Raises:
        ValueError: (from the function returned) see ``check_labels``, ``check_scores`` and ``check_weights``.
    """

    @functools.wraps(definition)
    def metric(
        labels: npt.ArrayLike, scores: npt.ArrayLike, weights: npt.ArrayLike | None = None, **settings: Any
    ) -> float | FloatArray:
        checked_labels = check_labels(labels)
        checked_scores = check_scores(scores, checked_labels.size)
        if weights is None:
            ones = np.ones((1, checked_labels.size))
            return float(definition(checked_labels, checked_scores, ones, **settings)[0])
        table = check_weights(weights, checked_labels.size)
        values = definition(checked_labels, checked_scores, table.reshape(-1, checked_labels.size), **settings)
        return values.reshape(table.shape[:-1])

    return metric  # type: ignore[return-value]  # the two overloads are told apart by ``weights`` at run time


@dataclass(frozen=True)
class SumsReading:
    """How a metric is read from weighted sums of columns, which need no more than each group's own sums.

    Attributes:
        columns: from labels (N,) and scores (N,) to float64 (N, C).
        of_sums: from the columns' sums (R, C) under R sets of weights to (R,).
    """

    columns: Callable[[IntArray, FloatArray], FloatArray]
    of_sums: Callable[[FloatArray], FloatArray]


def sums_metric(columns: Callable[..., FloatArray]) -> Callable[[Callable[[FloatArray], FloatArray]], Metric]:
    """A decorator that makes a ``Metric`` of ``of_sums(sums (R, C)) -> (R,)``, sums over the rows of ``columns``.

    Args:
        columns: ``columns(labels (N,), scores (N,), **settings)`` gives float64 (N, C).
    """

    def decorate(of_sums: Callable[[FloatArray], FloatArray]) -> Metric:
        @functools.wraps(of_sums)
        def definition(labels: IntArray, scores: FloatArray, weights: FloatArray, **settings: Any) -> FloatArray:
            return of_sums(weights @ columns(labels, scores, **settings))

        metric = weighted_metric(definition)
        metric.reading = SumsReading(columns, of_sums)  # type: ignore[attr-defined]  # of a function, with defaults
        return metric

    return decorate


def check_labels(labels: npt.ArrayLike) -> IntArray:
    """``labels`` as int64 (N,), N >= 1.

    Raises:
        ValueError: another shape, no rows, or a value other than 0 (real) and 1 (fake).
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"labels: got shape {array.shape}, wanted (N,) with at least one row.")
    if not np.isin(array, (0, 1)).all():
        found = ", ".join(repr(value) for value in np.unique(array)[:5].tolist())
        raise ValueError(f"labels: got values {found}, wanted only 0 (real) and 1 (fake).")
    return array.astype(np.int64)


def check_scores(scores: npt.ArrayLike, num_rows: int) -> FloatArray:
    """``scores`` as float64 (N,).

    Raises:
        ValueError: not ``num_rows`` numbers, or a value that is NaN or infinite.
    """
    array = np.asarray(scores, dtype=np.float64)
    if array.shape != (num_rows,):
        raise ValueError(f"scores: got shape {array.shape}, wanted ({num_rows},), one score per label.")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"scores: {bad} of {num_rows} are NaN or infinite; wanted finite numbers.")
    return array


def check_probabilities(scores: FloatArray) -> FloatArray:
    """``scores`` unchanged.

    Raises:
        ValueError: a value outside [0, 1].
    """
    if scores.min() < 0 or scores.max() > 1:
        raise ValueError(f"scores: got [{scores.min():g}, {scores.max():g}], wanted probabilities in [0, 1].")
    return scores


def check_weights(weights: npt.ArrayLike, num_rows: int) -> FloatArray:
    """``weights`` as float64 (..., N).

    Raises:
        ValueError: the last axis is not ``num_rows`` long, or a value is negative, NaN or infinite.
    """
    array = np.asarray(weights, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] != num_rows:
        raise ValueError(f"weights: got shape {array.shape}, wanted (..., {num_rows}), one weight per row.")
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        raise ValueError("weights: got a negative, NaN or infinite value; wanted finite numbers >= 0.")
    return array


def divide(numerator: FloatArray, denominator: FloatArray, undefined: float = np.nan) -> FloatArray:
    """Elementwise quotient; ``undefined`` where the denominator is zero, without a warning."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    quotient = np.full(denominator.shape, undefined)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient
