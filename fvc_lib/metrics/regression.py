"""Errors of predicted numbers, in the unit of the predicted quantity.

The mean predictor, a control that always predicts the mean of the training part, is scored by the same functions. Its
R2 is at most 0, and below 0 where the means of the training and the test part differ. A value is NaN where all weights
are zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray, Metric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import measure_of_rows, value_of_rows

# If the sum of squares about the weighted mean is less than this share of the sum about a fixed centre, it is rounding:
# all rows with a weight above 0 have the same value.
_CONSTANT = 1e-13


@dataclass(frozen=True)
class RegressionScores:
    """Mean absolute error and root mean squared error in the target's unit, and the coefficient of determination."""

    mae: float
    rmse: float
    r2: float


def regression_scores(values: npt.ArrayLike, predicted: npt.ArrayLike) -> RegressionScores:
    """Return the errors of ``predicted`` against ``values``.

    Args:
        values: float (N,), the true numbers.
        predicted: float (N,), or one number for all rows, as of the mean predictor.

    Raises:
        ValueError: shapes differ, a number is not finite, or there are no rows.
    """
    columns = _columns(values, predicted)
    return RegressionScores(*(value_of_rows(columns, of_sums) for of_sums in _OF_SUMS.values()))


def regression_measures(values: npt.ArrayLike, predicted: npt.ArrayLike) -> dict[str, Metric]:
    """Return ``mae``, ``rmse`` and ``r2`` as measures by name, for ``intervals_over_groups``."""
    columns = _columns(values, predicted)
    return {name: measure_of_rows(name, columns, of_sums, _BOUNDS[name]) for name, of_sums in _OF_SUMS.items()}


def _columns(values: npt.ArrayLike, predicted: npt.ArrayLike) -> FloatArray:
    """Return columns (N, 5): absolute error, squared error, value, squared value, and 1, whose sum is the divisor.

    The median is subtracted from the values, so that squares of large numbers, such as years, lose no digits.
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
    """Return R2: 1 - sum of squared errors / sum of squares about the weighted mean of the values; 1 is best.

    NaN where all values are equal, since there is no variation to explain. scikit-learn returns 1 or 0 there.
    """
    _, squared_errors, total, total_square, rows = sums.T
    about_mean = total_square - divide(total**2, rows)
    varies = about_mean > _CONSTANT * total_square
    return 1 - divide(squared_errors, np.where(varies, about_mean, 0.0))


_OF_SUMS: dict[str, Callable[[FloatArray], FloatArray]]
_BOUNDS = {"mae": (0.0, np.inf), "rmse": (0.0, np.inf), "r2": (-np.inf, 1.0)}
_OF_SUMS = {"mae": _absolute, "rmse": _root_mean_square, "r2": _explained}
