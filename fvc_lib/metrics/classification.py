"""Metrics of a two-class decision: 1 is fake, 0 is real, a score is the probability of fake.

Every metric is called as ``metric(labels (N,), scores (N,))`` and gives a float; with ``weights`` (..., N) it
gives an array of shape (...). Bad input (shape, NaN, labels other than 0 and 1, negative weights) raises
``ValueError``.

Where the weighted rows hold only one class, a metric that compares the classes is NaN: no number would say
anything about telling them apart. ``brier_score`` and ``log_loss`` judge each row by itself and stay defined.
NaN is also the answer where all weights are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.curves import ConfusionCurve, confusion_curve, curve_metric
from fvc_lib.metrics.weighting import (
    FloatArray,
    IntArray,
    check_labels,
    check_probabilities,
    check_scores,
    divide,
    sums_metric,
)


@curve_metric
def roc_auc(curve: ConfusionCurve) -> FloatArray:
    """Area under the ROC curve: the probability that a fake scores above a real, a tie counting half.

    Trapezoids between distinct scores, which is the Mann-Whitney statistic with midranks. Source: J. A.
    Hanley and B. J. McNeil, "The meaning and use of the area under a ROC curve", Radiology 143 (1982). NaN
    with one class.
    """
    true_positives, false_positives = curve.true_positives, curve.false_positives
    steps = false_positives[:, 1:] - false_positives[:, :-1]
    # A fake at this very score ties with the reals of the step: half of it is counted.
    doubled = np.einsum("rk,rk->r", steps, true_positives[:, 1:] + true_positives[:, :-1])
    doubled += false_positives[:, 0] * true_positives[:, 0]
    return divide(doubled / 2, curve.num_fake * curve.num_real)


@curve_metric
def average_precision(curve: ConfusionCurve) -> FloatArray:
    """Precision averaged over the recall gained at each distinct score: sum of (R_k - R_(k-1)) P_k.

    Not interpolated (trapezoids would be optimistic, Davis and Goadrich 2006), as in scikit-learn. Its chance
    level is the share of fakes. NaN with one class.
    """
    true_positives = curve.true_positives
    # Where nothing is called fake yet (rows of weight 0), no recall is gained either: 0 / tiny.
    precision = true_positives / np.maximum(true_positives + curve.false_positives, np.finfo(np.float64).tiny)
    gained = true_positives[:, 1:] - true_positives[:, :-1]
    total = np.einsum("rk,rk->r", gained, precision[:, 1:]) + true_positives[:, 0] * precision[:, 0]
    return np.where(curve.num_real > 0, divide(total, curve.num_fake), np.nan)


@curve_metric
def equal_error_rate(curve: ConfusionCurve) -> FloatArray:
    """The error rate where as large a share of reals is called fake as of fakes is called real. Lower is
    better.

    Read off the ROC curve where it crosses FPR = 1 - TPR, linearly between neighbouring points: the line
    between two points is what a random choice between their thresholds reaches. NaN with one class.
    """
    fakes, reals = curve.num_fake, curve.num_real

    def excess(hits: FloatArray, alarms: FloatArray) -> FloatArray:  # (1 - TPR) - FPR, times all pairs: it falls
        return (fakes - hits) * reals - alarms * fakes

    after = curve.points_while(lambda hits, alarms: excess(hits, alarms) > 0)
    before, beyond = curve.counts_at(after - 1), curve.counts_at(after)
    high, low = excess(*before), excess(*beyond)
    crossing = before[1] + divide(high, high - low) * (beyond[1] - before[1])
    return divide(crossing, reals)


@curve_metric
def true_positive_rate_at(curve: ConfusionCurve, *, false_positive_rate: float = 0.05) -> FloatArray:
    """The largest share of fakes found by a threshold that calls at most ``false_positive_rate`` of the reals
    fake.

    A value that a threshold reaches, so not interpolated: with fewer than 1 / ``false_positive_rate`` reals
    no false positive is allowed at all. NaN with one class.

    Raises:
        ValueError: ``false_positive_rate`` outside [0, 1].
    """
    if not 0 <= false_positive_rate <= 1:
        raise ValueError(f"false_positive_rate: got {false_positive_rate}, wanted a share in [0, 1].")
    # Counts, not rates, are compared: 1 of 20 must not fail 0.05 by rounding.
    allowed = false_positive_rate * curve.num_real * (1 + 1e-12)
    last = curve.points_while(lambda _, false_positives: false_positives <= allowed) - 1
    reached = divide(curve.counts_at(last)[0], curve.num_fake)
    return np.where(curve.num_real > 0, reached, np.nan)


def _cells(labels: IntArray, decisions: FloatArray) -> FloatArray:
    """(N, 4) of hits, misses, false alarms and correct rejections, fake being what is looked for."""
    if not np.isin(decisions, (0, 1)).all():
        raise ValueError("decisions: got other values than 0 and 1; use thresholds.decide(scores, threshold) first.")
    fake, called = labels == 1, decisions == 1
    return np.stack([fake & called, fake & ~called, ~fake & called, ~fake & ~called], axis=1).astype(np.float64)


def _squared_errors(labels: IntArray, scores: FloatArray) -> FloatArray:
    """(N, 2), the square and a one to divide by."""
    return _with_ones((check_probabilities(scores) - labels) ** 2)


def _log_losses(labels: IntArray, scores: FloatArray) -> FloatArray:
    epsilon = np.finfo(np.float64).eps
    clipped = np.clip(check_probabilities(scores), epsilon, 1 - epsilon)
    return _with_ones(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped)))


def _with_ones(losses: FloatArray) -> FloatArray:
    return np.stack([losses, np.ones(losses.size)], axis=1)


@sums_metric(_cells)
def f1(sums: FloatArray) -> FloatArray:
    """Harmonic mean of precision and recall of the fakes, 2 TP / (2 TP + FP + FN), of ``decisions`` (N,) of 0
    and 1.

    Its chance level depends on the share of fakes. NaN with one class. See ``decide`` for decisions from
    scores.
    """
    hits, misses, false_alarms, rejections = sums.T
    value = divide(2 * hits, 2 * hits + false_alarms + misses)
    return _where_two_classes(value, hits + misses, false_alarms + rejections)


@sums_metric(_cells)
def balanced_accuracy(sums: FloatArray) -> FloatArray:
    """Mean of the shares of fakes and of reals that ``decisions`` (N,) of 0 and 1 get right; 0.5 is chance.

    NaN with one class. See ``decide`` for decisions from scores.
    """
    hits, misses, false_alarms, rejections = sums.T
    return (divide(hits, hits + misses) + divide(rejections, false_alarms + rejections)) / 2


@sums_metric(_cells)
def matthews_correlation(sums: FloatArray) -> FloatArray:
    """Correlation of ``decisions`` (N,) of 0 and 1 with the labels, in [-1, 1].

    0 where all decisions are the same, its limit (D. Chicco and G. Jurman, BMC Genomics 21:6, 2020). NaN with
    one class.
    """
    hits, misses, false_alarms, rejections = sums.T
    fakes, reals = hits + misses, false_alarms + rejections
    called_fake, called_real = hits + false_alarms, misses + rejections
    # Roots one by one: the product of four sums overflows nothing, but loses digits.
    scale = np.sqrt(fakes) * np.sqrt(reals) * np.sqrt(called_fake) * np.sqrt(called_real)
    value = divide(hits * rejections - false_alarms * misses, scale, undefined=0.0)
    return _where_two_classes(value, fakes, reals)


@sums_metric(_squared_errors)
def brier_score(sums: FloatArray) -> FloatArray:
    """Mean squared difference between the probability of fake and the label; lower is better.

    Source: G. W. Brier, Monthly Weather Review 78 (1950), in its one-sided form (half of Brier's two-class
    sum). Defined with one class.

    Raises:
        ValueError: scores outside [0, 1].
    """
    return divide(sums[:, 0], sums[:, 1])


@sums_metric(_log_losses)
def log_loss(sums: FloatArray) -> FloatArray:
    """Mean negative log-likelihood of the labels in nats; lower is better.

    Probabilities are clipped to [eps, 1 - eps] with float64's eps, as in scikit-learn, so one certain mistake
    costs 36 nats and not infinity. Defined with one class.

    Raises:
        ValueError: scores outside [0, 1].
    """
    return divide(sums[:, 0], sums[:, 1])


@dataclass(frozen=True)
class RocCurve:
    """Points from (0, 0) to (1, 1), float64 (K + 1,) each; ``thresholds[0]`` is infinite."""

    false_positive_rates: FloatArray
    true_positive_rates: FloatArray
    thresholds: FloatArray


@dataclass(frozen=True)
class PrecisionRecallCurve:
    """Points in order of rising recall: all float64 (K,), one per distinct score as threshold."""

    recalls: FloatArray
    precisions: FloatArray
    thresholds: FloatArray


def roc_curve(labels: npt.ArrayLike, scores: npt.ArrayLike) -> RocCurve:
    """The receiver operating characteristic of ``labels`` (N,) and ``scores`` (N,), every distinct score a
    point.

    Source: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27 (2006), algorithm 1.
    Without reals (fakes) the false (true) positive rates are NaN: there is nothing to take a share of.

    Raises:
        ValueError: labels or scores that cannot be meant (shape, NaN, labels other than 0 and 1).
    """
    curve = _unweighted_curve(labels, scores)
    return RocCurve(curve.false_positive_rates[0], curve.true_positive_rates[0], np.append(np.inf, curve.thresholds))


def precision_recall_curve(labels: npt.ArrayLike, scores: npt.ArrayLike) -> PrecisionRecallCurve:
    """Precision and recall of the fakes at every distinct score of ``scores`` (N,) as threshold.

    Points must not be joined linearly (J. Davis and M. Goadrich, "The relationship between precision-recall
    and ROC curves", ICML 2006): draw steps. Without fakes recall is NaN.

    Raises:
        ValueError: labels or scores that cannot be meant (shape, NaN, labels other than 0 and 1).
    """
    curve = _unweighted_curve(labels, scores)
    called_fake = curve.true_positives + curve.false_positives
    precisions = divide(curve.true_positives, called_fake)[0]
    return PrecisionRecallCurve(curve.true_positive_rates[0, 1:], precisions, curve.thresholds)


def _unweighted_curve(labels: npt.ArrayLike, scores: npt.ArrayLike) -> ConfusionCurve:
    checked = check_labels(labels)
    return confusion_curve(checked, check_scores(scores, checked.size), np.ones((1, checked.size)))


def _where_two_classes(values: FloatArray, fakes: FloatArray, reals: FloatArray) -> FloatArray:
    return np.where((fakes > 0) & (reals > 0), values, np.nan)
