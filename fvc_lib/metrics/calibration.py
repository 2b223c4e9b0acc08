"""Calibrate scores (turn them into probabilities of fake), and combine the scores of several detectors.

The calibration error uses ten bins of equal width over [0, 1]: bin k is [k / 10, (k + 1) / 10); the last includes 1.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_expit, logsumexp, softmax

from fvc_lib.metrics.classification import (
    SHARE,
    FloatArray,
    IntArray,
    SumsMetric,
    check_labels,
    check_probabilities,
    check_scores,
    divide,
)
from fvc_lib.metrics.declaration import declare

NUM_BINS = 10
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0
_HALVINGS = 60  # of the bracket in log temperature: its width ends below the spacing of float64
_INNER_EDGES = np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1]


def _excess_by_bin(labels: IntArray, scores: FloatArray) -> FloatArray:
    """Return 11 numbers per video, float64 (N, 11); the calibration error is computed from their sums over videos.

    The first ten columns belong to the ten bins. A video has its score minus its label in the column of its bin, and 0
    in the other nine. The last column is 1; its sum is the divisor.
    """
    columns = np.zeros((scores.size, NUM_BINS + 1))
    bins = np.searchsorted(_INNER_EDGES, check_probabilities(scores), side="right")
    columns[np.arange(scores.size), bins] = scores - labels
    columns[:, -1] = 1.0
    return columns


@declare(
    "expected_calibration_error", "Calibration error (ECE)", "lower",
    "Distance between mean score and share of fakes, averaged over bins.", of_folds="probability",
)  # fmt: skip
@partial(SumsMetric, _excess_by_bin, bounds=SHARE, is_distance=True)
def expected_calibration_error(sums: FloatArray) -> FloatArray:
    """Return the mean over ten bins of the absolute difference between mean score and share of fakes; lower is better.

    Call it as ``expected_calibration_error(labels, scores)``; ``sums`` are internal. Scores are probabilities of fake,
    the probability of the likelier class. A bin's weight in the mean is the total weight of its videos. The edges of
    the bins are fixed. The error is biased upwards in small samples: calibrated scores have an error above 0 too. It is
    also defined where only one class occurs. Source: M. P. Naeini et al., "Obtaining well calibrated probabilities
    using Bayesian binning", AAAI 2015.

    Raises:
        ValueError: scores outside [0, 1].
    """
    # |mean score - share of fakes| times the bin's weight is |sum of (score - label)|: no division, no empty bin.
    return divide(np.abs(sums[:, :-1]).sum(axis=1), sums[:, -1])


def fit_temperature(labels: ArrayLike, logits: ArrayLike) -> float:
    """Return the temperature T in [0.05, 20] for which ``sigmoid(logits / T)`` fits ``labels`` best.

    It minimises the negative log-likelihood (C. Guo et al., "On calibration of modern neural networks", ICML 2017) with
    a Gamma(2, 1) prior on 1 / T, whose mode is T = 1. Without a prior, validation videos that are ranked without
    a mistake would give a temperature near 0, and all probabilities would be nearly 0 or 1. With few videos this
    happens often. With some hundred videos the prior has no visible effect. (In simulations with 16 and 60 videos the
    prior gave a lower Brier score on new videos than Platt's softened labels.)

    Likelihood and prior are log-concave in 1 / T, so the derivative has one root. It is found by bisection in log T;
    the order of the rows does not matter. If the best T lies outside the range, the nearest end is returned. For logits
    that rank fakes below reals this is the upper end. With one class T is 1, which leaves the logits unchanged.

    Call it with out-of-fold logits: logits of videos of the training part by a model that was not trained on their
    groups. Never call it with logits of the test part.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        logits: float (N,), positive where the network says fake.

    Raises:
        ValueError: no rows, labels other than 0 and 1, another number of logits, or a logit that is NaN or infinite.
    """
    checked = check_labels(labels)
    values = check_scores(logits, checked.size)
    if checked.min() == checked.max():
        return 1.0
    order = np.lexsort((checked, values))  # the rounding of a sum depends on its order
    checked, values = checked[order], values[order]

    def slope(temperature: float) -> float:  # of negative log-likelihood + b - log b (the prior), by b = 1 / T
        excess = _sigmoid(values / temperature) - checked
        return float(np.sum(values * excess)) + 1 - temperature

    return _root(slope)


def fit_class_temperature(classes: ArrayLike, logits: ArrayLike) -> float:
    """Return the temperature T in [0.05, 20] for which ``softmax(logits / T)`` fits ``classes`` best.

    Method and prior are those of ``fit_temperature``, for any number of classes. Call it on the validation part only.

    Args:
        classes: int (N,) in [0, C).
        logits: float (N, C).

    Raises:
        ValueError: no rows, a negative class, or a logit that is NaN or infinite.
    """
    wanted = np.asarray(classes)
    values = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(values).all() or wanted.min() < 0:
        raise ValueError("wanted finite logits, and classes from 0.")
    of_class = values[np.arange(wanted.size), wanted]

    def slope(temperature: float) -> float:
        expected = (class_probabilities(values, temperature) * values).sum(axis=1)
        return math.fsum((expected - of_class).tolist()) + 1 - temperature  # equal for any order of the rows

    return _root(slope)


def class_probabilities(logits: ArrayLike, temperature: float) -> FloatArray:
    """Return ``softmax(logits / temperature)`` over C classes, float64 (N, C), of ``logits`` float (N, C)."""
    return np.asarray(softmax(np.asarray(logits, dtype=np.float64) / temperature, axis=1))


def _root(slope: Callable[[float], float]) -> float:
    """Return the temperature in [0.05, 20] where ``slope`` is 0; if there is none, return the nearest end of the range.

    ``slope`` maps a temperature to the derivative of the objective. Its result must decrease with the temperature.
    """
    low, high = np.log(LOWEST_TEMPERATURE), np.log(HIGHEST_TEMPERATURE)
    if slope(LOWEST_TEMPERATURE) <= 0:
        return LOWEST_TEMPERATURE
    if slope(HIGHEST_TEMPERATURE) >= 0:
        return HIGHEST_TEMPERATURE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        root_is_above = slope(float(np.exp(middle))) > 0
        low, high = (middle, high) if root_is_above else (low, middle)
    return float(np.exp((low + high) / 2))


def probabilities(logits: ArrayLike, temperature: ArrayLike) -> FloatArray:
    """Return ``sigmoid(logits / temperature)``, float64 (N,): the probability of fake.

    Args:
        logits: float (N,).
        temperature: above 0; a number, or (N,) with the temperature of each row, such as that of its fold.

    Raises:
        ValueError: a logit that is NaN or infinite, or a temperature that is NaN or not above 0.
    """
    values = np.asarray(logits, dtype=np.float64)
    divisor = np.asarray(temperature, dtype=np.float64)
    scaled = values / np.where(divisor > 0, divisor, np.nan)
    if not np.isfinite(values).all() or np.isnan(scaled).any():
        raise ValueError("wanted finite logits, and temperatures above 0.")
    return _sigmoid(scaled)


def _sigmoid(logits: FloatArray) -> FloatArray:
    # Only the exponential of a number below 0 is taken, which cannot overflow.
    small: FloatArray = np.exp(-np.abs(logits))
    larger: FloatArray = np.where(logits >= 0, 1.0, small)
    return larger / (1 + small)


def mean_log_odds(log_odds: ArrayLike) -> FloatArray:
    """Return the log odds of the mean probability of C detectors, float64 (N,).

    The result is exact also where probabilities would round to 0 or 1.

    Args:
        log_odds: float (N, C), log odds of fake by each detector. NaN marks a missing detector: the mean is over the
            others, and NaN where all are missing.
    """
    values = np.asarray(log_odds, dtype=np.float64)
    there = ~np.isnan(values)
    known = np.where(there, values, 0.0)
    # The number of summands is the same in both sums, so it need not be divided by.
    fake, real = (logsumexp(np.where(there, log_expit(sign * known), -np.inf), axis=1) for sign in (1, -1))
    with np.errstate(invalid="ignore"):  # -inf minus -inf where all are missing
        return np.asarray(fake - real)
