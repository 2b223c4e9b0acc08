"""Errors of predicted numbers, in the unit of what is predicted.

The mean predictor stands beside them by the same functions: ``predicted`` is then the training part's mean, for the
test part's own mean is not known when one predicts. Its R2 is therefore 0 at most, and below it where the parts'
means differ. A value is NaN where all weights are zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray, Metric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import measure_of_rows, value_of_rows

# Sums of squares about the weighted mean below this share of those about a fixed centre are rounding: the rows that
# carry weight have one value.
_CONSTANT = 1e-13


@dataclass(frozen=True)
class RegressionScores:
    """Mean absolute error and root mean squared error in the target's unit, and the coefficient of determination."""

    mae: float
    rmse: float
    r2: float


def regression_scores(values: npt.ArrayLike, predicted: npt.ArrayLike) -> RegressionScores:
    """Return the errors of ``predicted`` against ``values``, float (N,) each.

    Args:
        values: what is true.
        predicted: likewise (N,), or one number for all rows, as the mean predictor's.

    Raises:
        ValueError: not (N,) finite numbers, or no rows.
    """
    columns = _columns(values, predicted)
    return RegressionScores(*(value_of_rows(columns, of_sums) for of_sums in _OF_SUMS.values()))


def regression_measures(values: npt.ArrayLike, predicted: npt.ArrayLike) -> dict[str, Metric]:
    """Return ``mae``, ``rmse`` and ``r2`` of these rows, for ``intervals_over_groups``."""
    columns = _columns(values, predicted)
    return {name: measure_of_rows(name, columns, of_sums, _BOUNDS[name]) for name, of_sums in _OF_SUMS.items()}


def _columns(values: npt.ArrayLike, predicted: npt.ArrayLike) -> FloatArray:
    """Return absolute and squared error, value, its square, and a one to divide by, (N, 5).

    Values are taken from their median, so that squares of, say, years lose no digits, and equal values are 0 exactly.
    """
    truth = _finite(values, "values")
    guess = np.asarray(predicted, dtype=np.float64)
    guess = _finite(np.full(truth.size, guess) if guess.ndim == 0 else guess, "predicted")
    if guess.size != truth.size:
        raise ValueError(f"predicted: got {guess.size} rows, wanted {truth.size}, one per value.")
    errors = guess - truth
    centred = truth - np.partition(truth, truth.size // 2)[truth.size // 2]
    return np.stack([np.abs(errors), errors**2, centred, centred**2, np.ones(truth.size)], axis=1)


def _finite(numbers: npt.ArrayLike, name: str) -> FloatArray:
    array = np.asarray(numbers, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, wanted (N,) with at least one row.")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {array.size} are NaN or infinite; wanted finite numbers.")
    return array


@declare("mae", "Mean absolute error", "lower", "Mean of |predicted - value|.", unit="target", per_target=True)
def _absolute(sums: FloatArray) -> FloatArray:
    return divide(sums[:, 0], sums[:, 4])


@declare("rmse", "Root mean squared error", "lower", "Root of the mean squared error.", unit="target", per_target=True)
def _root_mean_square(sums: FloatArray) -> FloatArray:
    return np.sqrt(divide(sums[:, 1], sums[:, 4]))


@declare("r2", "R²", "higher", "Share of the values' variation that is explained.", per_target=True)
def _explained(sums: FloatArray) -> FloatArray:
    """Return 1 - sum of squared errors / sum of squares about the values' own (weighted) mean; 1 is best.

    NaN where all values are equal: there is no variation to explain, and 0 / 0 or minus infinity would say nothing
    about the model (scikit-learn's 1 or 0 there looks like a finding).
    """
    _, squared_errors, total, total_square, rows = sums.T
    about_mean = total_square - divide(total**2, rows)
    varies = about_mean > _CONSTANT * total_square
    return 1 - divide(squared_errors, np.where(varies, about_mean, 0.0))


_OF_SUMS: dict[str, Callable[[FloatArray], FloatArray]]
_BOUNDS = {"mae": (0.0, np.inf), "rmse": (0.0, np.inf), "r2": (-np.inf, 1.0)}
_OF_SUMS = {"mae": _absolute, "rmse": _root_mean_square, "r2": _explained}
