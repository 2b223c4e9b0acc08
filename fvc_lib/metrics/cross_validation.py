"""Metrics of a cross-validation, computed within each fold or once over all folds.

- Ranking metrics are computed inside each fold and averaged; a fold's weight is its number of pairs of a fake and a
  real. ``within_folds`` explains why one ranking over all folds is wrong.
- Metrics of decisions are computed once from the decisions of all folds. A decision uses the threshold of its fold.
  Averages of per-fold F1 are biased (G. Forman and M. Scholz, "Apples-to-apples in cross-validation studies", SIGKDD
  Explorations 12, 2010).
- Brier score and calibration error are computed once over all rows: a probability means the same in every fold.
"""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import (
    CurveMetric,
    Definition,
    FloatArray,
    IntArray,
    Metric,
    confusion_curve,
    decide,
    divide,
)
from fvc_lib.metrics.declaration import declarations


def _declared(kind: str) -> dict[str, Metric]:
    """Return, by name, the metrics in ``fvc_lib.metrics.*`` whose input is of ``kind``.

    ``kind`` is ``ranking``, ``decision`` or ``probability``: the field ``of_folds`` of a metric's declaration.
    """
    known = [declared for declared in declarations() if declared.of_folds == kind]
    return {declared.name: declared.function for declared in known if isinstance(declared.function, Metric)}


RANKING_METRICS, DECISION_METRICS, PROBABILITY_METRICS = map(_declared, ("ranking", "decision", "probability"))
METRICS = RANKING_METRICS | DECISION_METRICS | PROBABILITY_METRICS


def within_folds(metric: Metric, folds: ArrayLike) -> Metric:
    """Return a metric that computes ``metric`` inside each fold and averages the values over folds.

    A fold's weight in the average is its number of pairs of a fake and a real. So a fold with a single class has no
    weight. The same holds within a half-sample (a random half of the groups, for confidence intervals). The value is
    NaN where no fold has both classes. For the AUC, the average is the probability that a fake scores above a real of
    the same fold.

    Every fold has a different model, and the models' scores need not share a scale. So a single ranking over all folds
    would compare scores of different models. Even models that predict a constant would look worse than chance: if the
    test part of a fold has more fakes, its training part has fewer, and its constant is lower (G. Forman and M. Scholz,
    "Apples-to-apples in cross-validation studies", SIGKDD Explorations 12, 2010).

    Args:
        metric: a metric that is undefined with one class.
        folds: (N,), the folds of the rows that the returned metric is called with.
    """
    fold_of_row = np.asarray(folds)
    rows_of_fold = [np.flatnonzero(fold_of_row == fold) for fold in np.unique(fold_of_row)]

    def average(parts: Callable[[IntArray, FloatArray, FloatArray], tuple[FloatArray, FloatArray]]) -> Definition:
        """Return the function that computes the average over folds from labels, scores and weights.

        ``parts`` takes labels, scores and weights of the rows of a fold. It returns (values, pairs), both (R,): the
        fold's values and their weights in the average, for R sets of row weights.
        """

        @functools.wraps(metric)
        def averaged(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
            total = np.zeros(len(weights))
            all_pairs = np.zeros(len(weights))
            for rows in rows_of_fold:
                values, pairs = parts(labels[rows], scores[rows], weights[:, rows])
                total += np.where(pairs > 0, values * pairs, 0.0)
                all_pairs += pairs
            return divide(total, all_pairs)

        return averaged

    def of_rows(labels: IntArray, scores: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        pairs = (weights @ labels) * (weights @ (1 - labels))
        return metric.definition(labels, scores, weights), pairs

    if not isinstance(metric, CurveMetric):
        return Metric(average(of_rows))

    def of_curve(labels: IntArray, scores: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        curve = confusion_curve(labels, scores, weights)
        return metric.of_curve(curve), curve.num_fake * curve.num_real

    return Metric(average(of_rows), metric.bounds, in_halves=average(of_curve))


def mean_over_targets(metric: Metric, targets: ArrayLike, folds: ArrayLike | None = None) -> Metric:
    """Return a metric that averages ``metric`` over targets.

    Every row belongs to one target, for example to one generator of fakes whose detection is tested. All targets count
    equally, however many rows they have. The mean is NaN if any target has no value. Half-samples (random halves of the
    groups, for confidence intervals) may lack a class by chance. So their mean leaves out targets without a value. A
    half-sample has all rows of a group or none, also if the rows have different targets.

    Args:
        metric: metric to compute for each target.
        targets: (N,), the target of each row.
        folds: (N,); ``metric`` is then computed within the folds of each target (``within_folds``). None: over all rows
            of a target.
    """
    target_of_row = np.asarray(targets, dtype=object)
    rows_of = [np.flatnonzero(target_of_row == name) for name in sorted(set(target_of_row.tolist()))]
    parts = [(metric if folds is None else within_folds(metric, np.asarray(folds)[rows]), rows) for rows in rows_of]

    @functools.wraps(metric)
    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        values = [part.definition(labels[rows], scores[rows], weights[:, rows]) for part, rows in parts]
        return np.asarray(np.mean(values, axis=0))

    def in_halves(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        values = np.array([part.in_halves(labels[rows], scores[rows], weights[:, rows]) for part, rows in parts])
        defined = np.isfinite(values)
        return divide(np.where(defined, values, 0.0).sum(0), defined.sum(0).astype(np.float64))

    return Metric(definition, metric.bounds, is_distance=metric.is_distance, in_halves=in_halves)


def measure_over_folds(
    name: str,
    scores: ArrayLike,
    thresholds: ArrayLike,
    folds: ArrayLike,
    targets: ArrayLike | None = None,
) -> tuple[Metric, FloatArray]:
    """Return ``(metric, values)``: a metric of a cross-validation, and its input.

    ``group_intervals`` computes the confidence interval from this pair. A ranking metric is computed within folds and
    averaged; all others are computed once over all rows. ``values``, float64 (N,), are the scores. For a metric of
    decisions they are the decisions, 1 (fake) or 0 (real).

    Args:
        name: a key of ``METRICS``.
        scores: float (N,), probabilities of fake.
        thresholds: a number, or float (N,); a score of at least its threshold means fake.
        folds: (N,), the fold of each row.
        targets: (N,), the target of each row, such as the generator of fakes that is tested with it; the metric is then
            the mean over targets (``mean_over_targets``). None: all rows have the same target.

    Raises:
        KeyError: ``name`` is not in ``METRICS``.
    """
    metric = METRICS[name]
    values = np.asarray(scores, dtype=np.float64)
    if name in DECISION_METRICS:
        values = decide(values, thresholds).astype(np.float64)
    ranked_in = folds if name in RANKING_METRICS else None
    if targets is not None:
        metric = mean_over_targets(metric, targets, ranked_in)
    elif ranked_in is not None:
        metric = within_folds(metric, ranked_in)
    return metric, values
