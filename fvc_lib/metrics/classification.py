"""Metrics for two classes, real (0) and fake (1); every metric accepts a weight for each row.

A group holds videos that belong together, such as near-duplicates. The weights decide what is computed:

- all weights 1: the plain value;
- weights of 1 / group size: a value in which every group has one vote;
- weights of 0 and 1: the value in a half-sample, a random half of the groups. Confidence intervals need it.

The definition of a metric is the function that computes it. It takes R sets of weights (R, N) and returns R values
(R,). ``Metric`` makes it a public function, which also works without weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fvc_lib.metrics.declaration import declare

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Definition = Callable[[IntArray, FloatArray, FloatArray], FloatArray]
Bounds = tuple[float, float]  # the least and the largest value that a metric can have
SHARE: Bounds = (0.0, 1.0)
ANY_NUMBER: Bounds = (-np.inf, np.inf)


class Metric:
    """A metric that is called like a function, ``metric(labels, scores, weights=None)``.

    ``labels`` (N,) are 0 (real) or 1 (fake). ``scores`` (N,) are scores, or decisions of 0 and 1 for metrics of
    decisions. The call returns a float, or with ``weights`` (..., N) an array of shape (...). It raises ``ValueError``
    for invalid labels or scores.

    Args:
        definition: function of labels int64 (N,), scores float64 (N,) and weights float64 (R, N) that returns (R,).
        bounds: least and largest value of the metric. If both are finite, its confidence intervals are computed on the
            logit scale.
        is_distance: whether the metric is a mean of absolute values. Noise makes it larger, so its confidence interval
            reaches further down.
        in_halves: function like ``definition`` for half-samples (random halves of the groups, for intervals), where
            too few rows must not give NaN. None: ``definition`` is used.
    """

    __name__: str

    def __init__(
        self,
        definition: Definition,
        bounds: Bounds = ANY_NUMBER,
        *,
        is_distance: bool = False,
        in_halves: Definition | None = None,
    ) -> None:
        self.definition, self.in_halves = definition, in_halves or definition
        self.bounds, self.is_distance = bounds, is_distance
        functools.update_wrapper(self, definition, updated=())

    def __call__(self, labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> Any:
        """Return the metric of N rows, as a float.

        ``weights`` (..., N) are one or more sets of row weights. With them the result is a float64 array of shape
        (...), one value for each set.
        """
        checked = check_labels(labels)
        values = check_scores(scores, checked.size)
        if weights is None:
            return float(self.definition(checked, values, np.ones((1, checked.size)))[0])
        table = np.asarray(weights, dtype=np.float64)
        return self.definition(checked, values, table.reshape(-1, checked.size)).reshape(table.shape[:-1])


class SumsMetric(Metric):
    """A metric that is computed from weighted sums over the rows.

    The sums can be computed once per group and then added for every half-sample of the groups, which saves time. A mean
    error, for example, is the sum of the errors divided by the sum of ones.

    Args:
        columns: function of labels (N,) and scores (N,) that returns the C numbers of each row to be summed, float64
            (N, C).
        of_sums: function of the weighted sums (R, C), for R sets of row weights, that returns the metric (R,).
        bounds: least and largest value of the metric.
        is_distance: whether the metric is a mean of absolute values (see ``Metric``).
    """

    def __init__(
        self,
        columns: Callable[[IntArray, FloatArray], FloatArray],
        of_sums: Callable[[FloatArray], FloatArray],
        bounds: Bounds = ANY_NUMBER,
        *,
        is_distance: bool = False,
    ) -> None:
        @functools.wraps(of_sums)
        def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
            return of_sums(weights @ columns(labels, scores))

        super().__init__(definition, bounds, is_distance=is_distance)
        self.columns, self.of_sums = columns, of_sums


def check_labels(labels: ArrayLike) -> IntArray:
    """Return ``labels`` as int64 (N,), N >= 1; raise ``ValueError`` for another shape or other values than 0 and 1."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"labels: got shape {array.shape}, wanted (N,) with at least one row.")
    if not np.isin(array, (0, 1)).all():
        raise ValueError(f"labels: got {np.unique(array)[:5].tolist()}, wanted only 0 (real) and 1 (fake).")
    return array.astype(np.int64)


def check_scores(scores: ArrayLike, num_rows: int) -> FloatArray:
    """Return ``scores`` as float64 (N,); raise ``ValueError`` unless they are ``num_rows`` finite numbers."""
    array = np.asarray(scores, dtype=np.float64)
    if array.shape != (num_rows,):
        raise ValueError(f"scores: got shape {array.shape}, wanted ({num_rows},), one score per label.")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"scores: {bad} of {num_rows} are NaN or infinite; wanted finite numbers.")
    return array


def check_probabilities(scores: FloatArray) -> FloatArray:
    """Return ``scores`` unchanged; raise ``ValueError`` for a value outside [0, 1]."""
    if scores.min() < 0 or scores.max() > 1:
        raise ValueError(f"scores: got [{scores.min():g}, {scores.max():g}], wanted probabilities in [0, 1].")
    return scores


def divide(numerator: FloatArray, denominator: FloatArray, undefined: float = np.nan) -> FloatArray:
    """Return ``numerator / denominator`` elementwise, without a warning.

    Where the denominator is zero, the result is ``undefined``.
    """
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    quotient = np.full(denominator.shape, undefined)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient


# Counts of true and false positives at every threshold. ``score >= threshold`` means fake, so equal scores make
# one point of a curve. In the area under the curve a tie of a real and a fake then counts half.


@dataclass(frozen=True)
class ConfusionCurve:
    """Weighted counts of true and false positives at K thresholds, for R sets of row weights.

    The thresholds are the distinct scores, highest first.
    """

    thresholds: FloatArray  # float64 (K,), descending
    true_positives: FloatArray  # float64 (R, K), weight of the fakes with a score at or above the threshold
    false_positives: FloatArray  # float64 (R, K), weight of the reals with a score at or above the threshold

    @property
    def num_fake(self) -> FloatArray:
        """Return the total weight of the fakes, (R,), for each set of row weights."""
        return self.true_positives[:, -1]

    @property
    def num_real(self) -> FloatArray:
        """Return the total weight of the reals, (R,), for each set of row weights."""
        return self.false_positives[:, -1]

    @property
    def true_positive_rates(self) -> FloatArray:
        """Return the share of fakes called fake at each threshold, (R, K + 1); NaN without fakes.

        Before the K thresholds comes a column of 0, where nothing is called fake. The last column is 1.
        """
        rates = divide(self.true_positives, self.num_fake[:, None])
        return np.pad(rates, ((0, 0), (1, 0)))

    @property
    def false_positive_rates(self) -> FloatArray:
        """Return the share of reals called fake at each threshold, (R, K + 1); NaN without reals.

        Before the K thresholds comes a column of 0, where nothing is called fake. The last column is 1.
        """
        rates = divide(self.false_positives, self.num_real[:, None])
        return np.pad(rates, ((0, 0), (1, 0)))

    def counts_at(self, points: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the counts of true and false positives at one chosen threshold for each set of row weights.

        ``points`` int64 (R,) are the chosen thresholds, as indices into ``thresholds``. The index -1 means that nothing
        is called fake, so both counts are 0. The result is ``(true_positives, false_positives)``, both float64 (R,).
        """
        cells = np.arange(points.size), np.maximum(points, 0)
        called = points >= 0
        return self.true_positives[cells] * called, self.false_positives[cells] * called


def confusion_curve(labels: IntArray, scores: FloatArray, weights: FloatArray) -> ConfusionCurve:
    """Return the counts of true and false positives at every distinct score, for R sets of row weights.

    ``labels`` and ``scores`` are (N,), ``weights`` (R, N). Rows are sorted once for all sets of weights.
    """
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    is_fake = labels[order] == 1
    before_a_lower_score = np.flatnonzero(np.diff(descending))
    last_of_tie = np.append(before_a_lower_score, order.size - 1)
    counts = []
    for of_class in (is_fake, ~is_fake):
        sums = np.zeros((len(weights), 1 + np.count_nonzero(of_class)))  # [:, k]: weight of the first k
        np.cumsum(weights[:, order[of_class]], axis=1, out=sums[:, 1:])
        rows_reached = np.cumsum(of_class)[last_of_tie]
        counts.append(np.take(sums, rows_reached, axis=1))
    return ConfusionCurve(descending[last_of_tie], *counts)


class CurveMetric(Metric):
    """A metric that is computed from a confusion curve, with values in [0, 1].

    The value is NaN if the weights of the reals sum to less than ``fewest_reals``. With weights 1 this is the number of
    reals. The limit does not apply to half-samples (random halves of the groups, from which confidence intervals are
    computed). If half-samples with few reals were left out, the interval would be biased.

    Args:
        of_curve: function of a ``ConfusionCurve`` that returns the metric (R,).
        fewest_reals: least sum of the weights of the reals for which the metric is defined.
    """

    def __init__(self, of_curve: Callable[[ConfusionCurve], FloatArray], fewest_reals: float = 0.0) -> None:
        def in_halves(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
            return of_curve(confusion_curve(labels, scores, weights))

        @functools.wraps(of_curve)
        def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
            curve = confusion_curve(labels, scores, weights)
            enough_reals = curve.num_real > fewest_reals - 1e-7
            return np.where(enough_reals, of_curve(curve), np.nan)

        super().__init__(definition, SHARE, in_halves=in_halves)
        self.of_curve = of_curve


# Metrics of a two-class decision: a score is the probability of fake. A metric that compares the classes is NaN where
# the weighted rows hold one class only; ``brier_score`` and ``log_loss`` stay defined. All are NaN where all weights
# are zero.


@declare(
    "roc_auc", "ROC AUC", "higher", "The probability that a fake scores above a real.",
    is_share=True, chance=0.5, of_folds="ranking",
)  # fmt: skip
@CurveMetric
def roc_auc(curve: ConfusionCurve) -> FloatArray:
    """Return the area under the ROC curve: the probability that a fake scores above a real, a tie counting half.

    Call it as ``roc_auc(labels, scores)``; ``curve`` is internal. The area is made of trapezoids between distinct
    scores and equals the Mann-Whitney statistic with midranks. NaN if only one class occurs. Source: J. A. Hanley and
    B. J. McNeil, "The meaning and use of the area under a ROC curve", Radiology 143 (1982).
    """
    true_positives, false_positives = curve.true_positives, curve.false_positives
    steps = false_positives[:, 1:] - false_positives[:, :-1]
    # A fake at this very score ties with the reals of the step: half of it is counted.
    at_both_ends = true_positives[:, 1:] + true_positives[:, :-1]
    doubled = np.einsum("rk,rk->r", steps, at_both_ends)
    doubled += false_positives[:, 0] * true_positives[:, 0]
    return divide(doubled / 2, curve.num_fake * curve.num_real)


@declare(
    "average_precision", "Average precision", "higher", "Area under precision against recall of the fakes.",
    is_share=True, of_folds="ranking",
)  # fmt: skip
@CurveMetric
def average_precision(curve: ConfusionCurve) -> FloatArray:
    """Return the average precision of the fakes: the sum over thresholds k of (R_k - R_(k-1)) P_k.

    P_k and R_k are precision and recall at the k-th highest distinct score. As in scikit-learn, the curve is not
    interpolated (trapezoids would be optimistic, Davis and Goadrich 2006). The chance level is the share of fakes. NaN
    if only one class occurs.
    """
    true_positives = curve.true_positives
    called_fake = true_positives + curve.false_positives
    # Where nothing is called fake yet (rows of weight 0), no recall is gained either: 0 / tiny.
    precision = true_positives / np.maximum(called_fake, np.finfo(np.float64).tiny)
    gained = true_positives[:, 1:] - true_positives[:, :-1]
    after_the_first = np.einsum("rk,rk->r", gained, precision[:, 1:])
    total = after_the_first + true_positives[:, 0] * precision[:, 0]
    return np.where(curve.num_real > 0, divide(total, curve.num_fake), np.nan)


@declare(
    "equal_error_rate", "Equal error rate", "lower", "Share of errors where both classes have the same share.",
    of_folds="ranking",
)  # fmt: skip
@CurveMetric
def equal_error_rate(curve: ConfusionCurve) -> FloatArray:
    """Return the error rate at the threshold where reals and fakes have the same error rate; lower is better.

    FPR is the false-positive rate and TPR the true-positive rate. The value is the FPR at the point where the ROC curve
    crosses the line FPR = 1 - TPR. Neighbouring points of the curve are joined linearly. NaN if only one class occurs.
    """
    fakes, reals = curve.num_fake, curve.num_real

    # (1 - TPR) - FPR, times the number of pairs of a real and a fake. It falls along the curve.
    missed = (fakes - curve.true_positives.T) * reals
    falling = missed - curve.false_positives.T * fakes
    after = (falling > 0).sum(axis=0)
    before = curve.counts_at(after - 1)
    beyond = curve.counts_at(after)
    high, low = ((fakes - hits) * reals - alarms * fakes for hits, alarms in (before, beyond))
    share_of_step = divide(high, high - low)
    crossing = before[1] + share_of_step * (beyond[1] - before[1])
    return divide(crossing, reals)


def _largest_rate(curve: ConfusionCurve, false_positive_rate: float) -> FloatArray:
    """Return the largest true-positive rate whose false-positive rate is within a limit, (R,).

    ``false_positive_rate`` is the limit: the largest share of the reals, 0 to 1, that may be called fake. The value
    belongs to one of the thresholds; it is not interpolated. With fewer than 1 / ``false_positive_rate`` reals, no real
    may be called fake. NaN if only one class occurs.
    """
    # Counts, not rates, are compared: 1 of 20 must not fail 0.05 by rounding.
    allowed = false_positive_rate * curve.num_real * (1 + 1e-12)
    is_allowed = curve.false_positives <= allowed[:, None]
    last = is_allowed.sum(axis=1) - 1
    reached = divide(curve.counts_at(last)[0], curve.num_fake)
    return np.where(curve.num_real > 0, reached, np.nan)


@declare(
    "true_positive_rate_at_5_percent", "Fakes found at 5% false alarms", "higher",
    "Share of fakes found by a threshold that calls at most 5 % of the reals fake.", of_folds="ranking",
)  # fmt: skip
@CurveMetric
def true_positive_rate_at_5_percent(curve: ConfusionCurve) -> FloatArray:
    """Return the largest share of fakes called fake at a threshold that calls at most 5 % of the reals fake.

    This is the true-positive rate at a false-positive rate of at most 5 %. NaN if only one class occurs.
    """
    return _largest_rate(curve, 0.05)


@declare(
    "true_positive_rate_at_1_percent", "Fakes found at 1% false alarms", "higher",
    "Share of fakes found by a threshold that calls at most 1 % of the reals fake; needs 100 reals in each fold.",
    of_folds="ranking",
)  # fmt: skip
@partial(CurveMetric, fewest_reals=100)
def true_positive_rate_at_1_percent(curve: ConfusionCurve) -> FloatArray:
    """Return the largest share of fakes called fake at a threshold that calls at most 1 % of the reals fake.

    This is the true-positive rate at a false-positive rate of at most 1 %. NaN with fewer than 100 reals.
    """
    return _largest_rate(curve, 0.01)


@declare(
    "true_positive_rate_at_0_1_percent", "Fakes found at 0.1% false alarms", "higher",
    "Share of fakes found by a threshold that calls at most 0.1 % of the reals fake; needs 1,000 reals in each fold.",
    of_folds="ranking",
)  # fmt: skip
@partial(CurveMetric, fewest_reals=1000)
def true_positive_rate_at_0_1_percent(curve: ConfusionCurve) -> FloatArray:
    """Return the largest share of fakes called fake at a threshold that calls at most 0.1 % of the reals fake.

    This is the true-positive rate at a false-positive rate of at most 0.1 %. NaN with fewer than 1,000 reals.
    """
    return _largest_rate(curve, 0.001)


@declare(
    "partial_auc_to_10_percent", "Partial AUC to 10% false alarms", "higher",
    "Area under the ROC curve up to 10 % of the reals called fake, scaled so that chance is 0.5.",
    is_share=True, chance=0.5, of_folds="ranking",
)  # fmt: skip
@CurveMetric
def partial_auc(curve: ConfusionCurve) -> FloatArray:
    """Return the area under the ROC curve up to a false-positive rate of 10 %, scaled: 0.5 is chance and 1 perfect.

    Points of the curve are joined linearly, as in scikit-learn's ``roc_auc_score(max_fpr=0.1)``. NaN if only one class
    occurs. Source: D. K. McClish, "Analyzing a portion of the ROC curve", Medical Decision Making 9 (1989).
    """
    end = 0.1
    alarms, hits = curve.false_positive_rates, curve.true_positive_rates
    width = alarms[:, 1:] - alarms[:, :-1]
    inside = np.clip(end - alarms[:, :-1], 0, width)  # the part of a step below the end
    share_inside = divide(inside, width, undefined=0.0)
    rise = (hits[:, 1:] - hits[:, :-1]) * share_inside
    mean_height = hits[:, :-1] + rise / 2
    area = (inside * mean_height).sum(axis=1)
    least = end**2 / 2
    above_chance = (area - least) / (end - least)
    return np.where(curve.num_fake > 0, (1 + above_chance) / 2, np.nan)


def cells_of_confusion(labels: IntArray, decisions: FloatArray) -> FloatArray:
    """Return the cell of the confusion matrix to which each row belongs, one-hot encoded, float64 (N, 4).

    The columns are hit (a fake called fake), miss (a fake called real), false alarm (a real called fake) and correct
    rejection (a real called real). ``decisions`` (N,) are 1 for fake and 0 for real.
    """
    if not np.isin(decisions, (0, 1)).all():
        raise ValueError("decisions: got other values than 0 and 1; use thresholds.decide(scores, threshold) first.")
    fake, called = labels == 1, decisions == 1
    cells = [fake & called, fake & ~called, ~fake & called, ~fake & ~called]
    return np.stack(cells, axis=1).astype(np.float64)


def _squared_errors(labels: IntArray, scores: FloatArray) -> FloatArray:
    """Return (squared error, 1) for each row, float64 (N, 2); the Brier score is the quotient of the column sums."""
    return _with_ones((check_probabilities(scores) - labels) ** 2)


def _log_losses(labels: IntArray, scores: FloatArray) -> FloatArray:
    epsilon = np.finfo(np.float64).eps
    clipped = np.clip(check_probabilities(scores), epsilon, 1 - epsilon)
    log_likelihoods = np.where(labels == 1, np.log(clipped), np.log1p(-clipped))
    return _with_ones(-log_likelihoods)


def _with_ones(losses: FloatArray) -> FloatArray:
    return np.stack([losses, np.ones(losses.size)], axis=1)


@declare(
    "f1", "F1", "higher", "Harmonic mean of precision and recall of the fakes.", is_share=True, of_folds="decision"
)
@partial(SumsMetric, cells_of_confusion, bounds=SHARE)
def f1(sums: FloatArray) -> FloatArray:
    """Return the harmonic mean of precision and recall of the fakes, 2 TP / (2 TP + FP + FN).

    Call it as ``f1(labels, decisions)`` with decisions of 0 and 1 (``decide`` makes them from scores); ``sums`` are
    internal. The chance level depends on the share of fakes. NaN if only one class occurs.
    """
    hits, misses, false_alarms, rejections = sums.T
    value = divide(2 * hits, 2 * hits + false_alarms + misses)
    return _where_two_classes(value, hits + misses, false_alarms + rejections)


@declare(
    "balanced_accuracy", "Balanced accuracy", "higher", "Mean of the shares of fakes and of reals that are right.",
    is_share=True, chance=0.5, of_folds="decision",
)  # fmt: skip
@partial(SumsMetric, cells_of_confusion, bounds=SHARE)
def balanced_accuracy(sums: FloatArray) -> FloatArray:
    """Return the mean of two shares: of the fakes called fake, and of the reals called real; 0.5 is chance.

    Call it as ``balanced_accuracy(labels, decisions)`` with decisions of 0 and 1 (``decide`` makes them from scores);
    ``sums`` are internal. NaN if only one class occurs.
    """
    hits, misses, false_alarms, rejections = sums.T
    share_of_fakes = divide(hits, hits + misses)
    share_of_reals = divide(rejections, false_alarms + rejections)
    return (share_of_fakes + share_of_reals) / 2


@declare(
    "matthews_correlation", "Matthews correlation", "higher", "Correlation of decisions with labels.",
    of_folds="decision",
)  # fmt: skip
@partial(SumsMetric, cells_of_confusion, bounds=(-1.0, 1.0))
def matthews_correlation(sums: FloatArray) -> FloatArray:
    """Return the correlation of decisions with labels, -1 to 1.

    Call it as ``matthews_correlation(labels, decisions)`` with decisions of 0 and 1; ``sums`` are internal. The value
    is 0 where all decisions are the same, the limit of the formula (D. Chicco and G. Jurman, BMC Genomics 21:6, 2020).
    NaN if only one class occurs.
    """
    hits, misses, false_alarms, rejections = sums.T
    fakes, reals = hits + misses, false_alarms + rejections
    called_fake, called_real = hits + false_alarms, misses + rejections
    # Roots one by one: the product of four sums overflows nothing, but loses digits.
    scale = np.sqrt(fakes) * np.sqrt(reals) * np.sqrt(called_fake) * np.sqrt(called_real)
    agreement = hits * rejections - false_alarms * misses
    value = divide(agreement, scale, undefined=0.0)
    return _where_two_classes(value, fakes, reals)


@declare(
    "brier_score", "Brier score", "lower", "Mean squared difference between the probability of fake and the label.",
    of_folds="probability",
)  # fmt: skip
@partial(SumsMetric, _squared_errors, bounds=SHARE)
def brier_score(sums: FloatArray) -> FloatArray:
    """Return the mean squared difference between the probability of fake and the label; lower is better.

    Call it as ``brier_score(labels, scores)``; ``sums`` are internal. It is also defined where only one class occurs.
    Source: G. W. Brier, Monthly Weather Review 78 (1950); the value is half of Brier's sum over two classes.

    Raises:
        ValueError: scores outside [0, 1].
    """
    return divide(sums[:, 0], sums[:, 1])


@declare("log_loss", "Log loss", "lower", "Mean negative log-likelihood of the labels.", unit="nats")
@partial(SumsMetric, _log_losses, bounds=(0.0, np.inf))
def log_loss(sums: FloatArray) -> FloatArray:
    """Return the mean negative log-likelihood of the labels in nats; lower is better.

    Call it as ``log_loss(labels, scores)`` with probabilities of fake; ``sums`` are internal. Probabilities are clipped
    to [eps, 1 - eps] with float64's eps, as in scikit-learn. So a mistake with probability 1 costs 36 nats and not
    infinity. It is also defined where only one class occurs.

    Raises:
        ValueError: scores outside [0, 1].
    """
    return divide(sums[:, 0], sums[:, 1])


def _where_two_classes(values: FloatArray, fakes: FloatArray, reals: FloatArray) -> FloatArray:
    return np.where((fakes > 0) & (reals > 0), values, np.nan)


# From a score to a decision: fake where the score reaches the threshold.


def decide(scores: ArrayLike, threshold: ArrayLike) -> IntArray:
    """Return decisions int64 (N,): 1 (fake) where ``scores`` (N,) are at least ``threshold``, else 0 (real).

    ``threshold`` is a number, or (N,) with the threshold of each row, such as the threshold of its fold.
    """
    is_fake = np.asarray(scores, dtype=np.float64) >= np.asarray(threshold, dtype=np.float64)
    return is_fake.astype(np.int64)


def best_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the threshold in [0, 1] with the highest balanced accuracy on ``labels`` (N,) and ``scores`` (N,).

    Candidates lie midway between neighbouring distinct scores, and between the outermost scores and 0 or 1. Of equally
    good candidates the one nearest to 0.5 is returned; of two equally near ones, the lower. The order of the rows does
    not matter. With one class the threshold is 0.5.

    Call it with out-of-fold scores: scores of videos of the training part by a model that was not trained on their
    groups. Never call it with scores of the test part.

    Raises:
        ValueError: labels are not 0 and 1, or scores are not N numbers in [0, 1].
    """
    checked = check_labels(labels)
    probabilities = check_probabilities(check_scores(scores, checked.size))
    if checked.min() == checked.max():
        return 0.5
    curve = confusion_curve(checked, probabilities, np.ones((1, checked.size)))
    # Counts times the other class's size: balanced accuracy in integers, so that equally good means equal.
    fakes, reals = curve.num_fake[0], curve.num_real[0]
    merit = np.append(0.0, curve.true_positives[0] * reals - curve.false_positives[0] * fakes)
    candidates = _midpoints(curve.thresholds)
    usable = candidates <= 1
    has_most_merit = merit == merit[usable].max()
    best = candidates[usable & has_most_merit]
    nearest = np.lexsort((best, np.abs(best - 0.5)))[0]
    return float(best[nearest])


def _midpoints(descending: FloatArray) -> FloatArray:
    """Return K + 1 thresholds between K distinct scores in [0, 1], which are given in descending order.

    Threshold k calls exactly the k highest scores fake, so threshold 0 calls nothing fake. If the highest score is 1,
    threshold 0 is infinite, because no number in [0, 1] is above that score.
    """
    upper = np.append(1.0, descending)
    lower = np.append(descending, 0.0)
    middle = lower + (upper - lower) / 2
    # Between neighbouring floats the midpoint rounds to one of them; the lower one would be called fake.
    middle = np.where(middle <= lower, upper, middle)
    middle[0] = middle[0] if descending[0] < 1 else np.inf
    return middle
