"""Metrics of a cross-validation: from scores or decisions, within folds or over all of them.

- Ranking metrics are computed inside each fold and averaged; a fold's weight is its number of pairs of a fake and a
  real. ``within_folds`` explains why one ranking over all folds is wrong.
- Metrics of decisions are computed once from the decisions of all folds, each made with the threshold of its fold.
  Averages of per-fold F1 are biased (G. Forman and M. Scholz, "Apples-to-apples in cross-validation studies", SIGKDD
  Explorations 12, 2010).
- Brier score and calibration error are computed once over all rows: a probability means the same in every fold.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics import classification
from fvc_lib.metrics.classification import ConfusionCurve, CurveReading, FloatArray, IntArray, Metric, SumsReading
from fvc_lib.metrics.declaration import declarations


def _declared(kind: str) -> dict[str, Metric]:
    """Return the metric functions in ``fvc_lib.metrics.*`` that are declared with ``of_folds`` = ``kind``, by name."""
    return {each.name: each.function for each in declarations() if each.of_folds == kind and each.function}


RANKING_METRICS, DECISION_METRICS, PROBABILITY_METRICS = map(_declared, ("ranking", "decision", "probability"))
METRICS = RANKING_METRICS | DECISION_METRICS | PROBABILITY_METRICS


def within_folds(metric: Metric, folds: npt.ArrayLike) -> Metric:
    """Return a metric that computes ``metric`` inside each fold and averages over folds.

    A fold's weight is its number of pairs of a fake and a real. A fold with one class, also in a half-sample, has no
    pairs and does not count; NaN where no fold has pairs. For the AUC the average is the probability that a fake scores
    above a real of the same fold.

    Every fold has a different model, and their scores need not share a scale, so one ranking over all folds would
    compare across models. Even a constant score would look worse than chance, because a fold with more fakes leaves
    fewer to train on (G. Forman and M. Scholz, "Apples-to-apples in cross-validation studies", SIGKDD Explorations 12,
    2010).

    Args:
        metric: a metric that is undefined with one class.
        folds: (N,), the folds of the rows that the returned metric is called with.
    """
    _, fold_of_row = np.unique(np.asarray(folds), return_inverse=True)
    fold_of_row = fold_of_row.astype(np.int64)
    rows_of_fold = [np.flatnonzero(fold_of_row == fold) for fold in range(int(fold_of_row.max(initial=-1)) + 1)]

    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        if labels.size != fold_of_row.size:
            raise ValueError(f"labels: got {labels.size} rows, wanted {fold_of_row.size}, one per entry of folds.")
        total, all_pairs = np.zeros(weights.shape[0]), np.zeros(weights.shape[0])
        for rows in rows_of_fold:
            in_fold = weights[:, rows]
            fakes = in_fold @ labels[rows]
            pairs = fakes * (in_fold @ (1 - labels[rows]))
            values = metric(labels[rows], scores[rows], in_fold)
            total += np.where(pairs > 0, values * pairs, 0.0)
            all_pairs += pairs
        return classification.divide(total, all_pairs)

    definition.__name__ = metric.__name__
    folded, reading = classification.weighted_metric(definition), getattr(metric, "reading", None)
    if not isinstance(reading, CurveReading) or reading.fold_of_row is not None:
        return folded
    of_curves = reading.of_curves
    over_folds = CurveReading(lambda curves: _by_pairs(of_curves, curves), fold_of_row, reading.bounds)
    return classification.with_reading(folded, over_folds)


def mean_over_targets(metric: Metric, targets: npt.ArrayLike, folds: npt.ArrayLike | None = None) -> Metric:
    """Return a metric that computes ``metric`` for each target and takes the plain mean over targets.

    All targets count equally, however many rows they have. On all rows the mean is NaN if one target has no value. In
    half-samples, where a class may be missing by chance, targets without a value are left out. A group that is in two
    targets is drawn in both together.

    Args:
        metric: metric of one target.
        targets: (N,), what each row is a test of, such as a generator.
        folds: (N,); ``metric`` is then computed within the folds of each target (``within_folds``). None: over all rows
            of a target.
    """
    target_of_row = np.asarray(targets, dtype=object)
    rows_of = [np.flatnonzero(target_of_row == name) for name in sorted(set(target_of_row.tolist()))]
    fold_of_row = None if folds is None else np.asarray(folds)
    of_target = [metric if fold_of_row is None else within_folds(metric, fold_of_row[rows]) for rows in rows_of]

    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        values = [
            np.atleast_1d(each(labels[rows], scores[rows], weights[:, rows]))
            for each, rows in zip(of_target, rows_of, strict=True)
        ]
        stacked = np.stack(values)
        return stacked.mean(0) if len(weights) == 1 else _mean_of_defined(stacked)  # one set: the rows as they are

    definition.__name__ = metric.__name__
    mean, reading = classification.weighted_metric(definition), getattr(metric, "reading", None)
    if isinstance(reading, SumsReading):
        return classification.with_reading(mean, _sums_of_targets(reading, rows_of, target_of_row.size))
    if not isinstance(reading, CurveReading) or reading.fold_of_row is not None:
        return mean
    codes, parts, first = np.zeros(target_of_row.size, dtype=np.int64), [], 0
    for rows in rows_of:
        inner = np.zeros(rows.size) if fold_of_row is None else fold_of_row[rows]
        found, code = np.unique(inner, return_inverse=True)
        codes[rows] = first + code
        parts.append(slice(first, first := first + found.size))
    of_curves = reading.of_curves

    def of_all(curves: list[ConfusionCurve]) -> FloatArray:
        return _mean_of_defined(np.stack([_by_pairs(of_curves, curves[part]) for part in parts]))

    return classification.with_reading(mean, CurveReading(of_all, codes, reading.bounds))


def _sums_of_targets(reading: SumsReading, rows_of: Sequence[IntArray], size: int) -> SumsReading:
    """Return how the mean over targets is computed from sums; every target has its own set of columns.

    Args:
        reading: how the metric of one target is computed from sums.
        rows_of: row numbers of each target.
        size: number of all rows.
    """

    def columns(labels: IntArray, scores: FloatArray) -> FloatArray:
        own = reading.columns(labels, scores)
        found = np.zeros((size, len(rows_of), own.shape[1]))
        for number, rows in enumerate(rows_of):
            found[rows, number] = own[rows]
        return found.reshape(size, -1)

    def of_sums(sums: FloatArray) -> FloatArray:
        split = sums.reshape(len(sums), len(rows_of), -1)
        return _mean_of_defined(np.stack([reading.of_sums(split[:, number]) for number in range(len(rows_of))]))

    return replace(reading, columns=columns, of_sums=of_sums)


def _mean_of_defined(values: FloatArray) -> FloatArray:
    """Return the mean (R,) over T of the finite ``values`` (T, R); NaN where there are none."""
    defined = np.isfinite(values)
    return classification.divide(np.where(defined, values, 0.0).sum(0), defined.sum(0).astype(np.float64))


def _by_pairs(of_curves: Callable[[list[ConfusionCurve]], FloatArray], curves: list[ConfusionCurve]) -> FloatArray:
    """Return the mean (R,) over folds of a metric of curves; a fold's weight is its number of pairs."""
    pairs = [curve.num_fake * curve.num_real for curve in curves]
    totals = [
        np.where(weight > 0, of_curves([curve]) * weight, 0.0) for curve, weight in zip(curves, pairs, strict=True)
    ]
    return classification.divide(np.sum(totals, axis=0), np.sum(pairs, axis=0))


def measure_over_folds(
    name: str,
    scores: npt.ArrayLike,
    thresholds: npt.ArrayLike,
    folds: npt.ArrayLike,
    targets: npt.ArrayLike | None = None,
) -> tuple[Metric, FloatArray]:
    """Return ``(metric, values)`` for ``group_intervals``: the metric ``name`` over all folds and its input (N,).

    Args:
        name: a key of ``METRICS``.
        scores: float (N,), probabilities of fake.
        thresholds: a number, or float (N,); a score of at least its threshold means fake.
        folds: (N,), the fold of each row.
        targets: (N,), what each row is a test of; the metric is then the mean over targets. None: one target.

    Raises:
        KeyError: ``name`` is not in ``METRICS``.
    """
    metric, values = METRICS[name], np.asarray(scores, dtype=np.float64)
    if name in DECISION_METRICS:
        values = classification.decide(values, thresholds).astype(np.float64)
    if targets is not None:
        return mean_over_targets(metric, targets, folds if name in RANKING_METRICS else None), values
    if name in DECISION_METRICS:
        return metric, values
    return (within_folds(metric, folds) if name in RANKING_METRICS else metric), values
