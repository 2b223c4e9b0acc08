"""Combine the scores of several detectors on the same videos.

Probabilities are combined by their mean, or by a logistic regression on their log odds.
A few dozen videos show little about which detector is better, and weights that fit them closely fit noise. So the
regression is penalised towards equal weights. With no videos the weights are equal.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logsumexp

from fvc_lib.metrics.classification import FloatArray, check_labels


@dataclass(frozen=True)
class Stacking:
    """A linear combination of log odds: ``intercept`` plus the log odds of C detectors times ``weights`` (C,)."""

    weights: FloatArray
    intercept: float

    def log_odds(self, log_odds: FloatArray) -> FloatArray:
        """Return the combined log odds (N,) of N videos from the log odds of the detectors, (N, C)."""
        return np.asarray(self.intercept + log_odds @ self.weights)


def mean_log_odds(log_odds: ArrayLike) -> FloatArray:
    """Return the log odds (N,) of the mean probability over C detectors, given their log odds, float (N, C).

    NaN marks a missing probability: the mean is over the others, and NaN where all are missing. The result is exact
    also where probabilities would round to 0 or 1.
    """
    values = np.asarray(log_odds, dtype=np.float64)
    there = ~np.isnan(values)
    known = np.where(there, values, 0.0)
    # The number of summands is the same in both sums, so it need not be divided by.
    fake, real = (logsumexp(np.where(there, log_expit(sign * known), -np.inf), axis=1) for sign in (1, -1))
    with np.errstate(invalid="ignore"):  # -inf minus -inf where all are missing
        return np.asarray(fake - real)


def fit_stacking(labels: ArrayLike, log_odds: ArrayLike, weights: ArrayLike) -> Stacking:
    """Return the ``Stacking`` of C detectors that fits ``labels`` best, with weights of at least 0 and near 1 / C.

    The loss is the negative log-likelihood plus a penalty: half of the squared intercept, and for each weight half of
    the squared difference from 1 / C times the mean square of all log odds. The loss is convex. With one class, or no
    video, weights are 1 / C and the intercept is 0.

    Sources: D. H. Wolpert, "Stacked generalization", Neural Networks 5 (1992); for weights of at least 0, L. Breiman,
    "Stacked regressions", Machine Learning 24 (1996).

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        log_odds: float (N, C), calibrated log odds by models that were not trained on the video.
        weights: float (N,), weights of the videos.

    Raises:
        ValueError: log odds are not finite, or lengths differ.
    """
    values, truth = np.asarray(log_odds, dtype=np.float64), np.asarray(labels)
    votes = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("log_odds: wanted finite numbers.")
    size = values.shape[1]
    equal = np.full(size, 1 / size)
    if not len(values) or truth.min() == truth.max():
        return Stacking(equal, 0.0)
    scale = float(np.sqrt(np.mean(values**2))) or 1.0
    sign = np.where(check_labels(truth) == 1, 1.0, -1.0)

    def loss(point: FloatArray) -> tuple[float, FloatArray]:
        away, intercept = scale * (point[1:] - equal), point[0]
        margin = sign * (intercept + values @ point[1:])
        slope = -votes * sign * expit(-margin)
        value = -(votes * log_expit(margin)).sum() + 0.5 * (away @ away + intercept**2)
        return float(value), np.concatenate([[slope.sum() + intercept], slope @ values + scale * away])

    begin = np.concatenate([[0.0], equal])
    bounds = [(None, None), *[(0.0, None)] * size]
    options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-9}
    solution = minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return Stacking(np.asarray(solution[1:]), float(solution[0]))
