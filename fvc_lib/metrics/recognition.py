"""Metrics of classification into C classes, numbered 0 to C - 1, and of regression (predicted numbers).

A measure is a metric that holds the data of its rows. ``class_measures`` and ``regression_measures`` make measures. In
``metrics.intervals``, ``values_of`` returns their values and ``intervals_over_groups`` their confidence intervals. A
value is NaN where all weights are zero.

The same functions are used for the mean predictor, a baseline that always predicts the mean of the training part. Its
R2 is at most 0, and below 0 where the means of the training and the test part differ.
"""

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import SHARE, FloatArray, IntArray, SumsMetric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import mean_measure, measure_of_rows

# If the sum of squares about the weighted mean is less than this share of the sum about a fixed centre, it is rounding:
# all rows with a weight above 0 have the same value.
_CONSTANT = 1e-13

declare("top1", "Top-1 accuracy", "higher", "Share of rows whose class is the likeliest one.", is_share=True)
declare("top5", "Top-5 accuracy", "higher", "Share of rows whose class is among the five likeliest.", is_share=True)
declare("macro_precision", "Macro precision", "higher", "Precision, averaged over classes.", is_share=True)
declare("macro_recall", "Macro recall", "higher", "Recall, averaged over classes.", is_share=True)
declare("macro_f1", "Macro F1", "higher", "F1, averaged over classes.", is_share=True)
declare("mae", "Mean absolute error", "lower", "Mean of |predicted - value|.", unit="target", per_target=True)
declare("rmse", "Root mean squared error", "lower", "Root of the mean squared error.", unit="target", per_target=True)
declare("r2", "R²", "higher", "Share of the values' variation that is explained.", per_target=True)


def ranks_of_class(scores: ArrayLike, labels: ArrayLike) -> IntArray:
    """Return for each row the rank of its true class among the C classes, sorted by score; 1 is best.

    The rank is the number of classes, including the true class, whose score is at least that of the true class. So ties
    count against the model: if all classes have the same score, the rank is C.

    Args:
        scores: float (N, C), higher is more likely; infinite values are compared like others, NaN counts as a tie.
        labels: int (N,) of 0 .. C - 1.

    Returns:
        int64 (N,) of 1 .. C.
    """
    table = np.asarray(scores)
    of_class = np.take_along_axis(table, np.asarray(labels)[:, None], axis=1)
    return np.asarray((~(table < of_class)).sum(axis=1, dtype=np.int64))


def class_scores(labels: ArrayLike, predicted: ArrayLike) -> dict[str, FloatArray]:
    """Return a dictionary of ``precision``, ``recall`` and ``f1`` per class, each float64 (K,).

    The K classes are those that occur among ``labels`` (N,), in ascending order. ``predicted`` (N,) are the predicted
    classes. Precision is 0 for a class that is never predicted. F1 is the harmonic mean of precision and recall.
    """
    sums = _class_columns(labels, predicted).sum(axis=0, keepdims=True)
    return {name: values[0] for name, values in _scores_of_sums(sums).items()}


def class_measures(ranks: ArrayLike, labels: ArrayLike, predicted: ArrayLike) -> dict[str, SumsMetric]:
    """Return the measures ``top1``, ``top5``, ``macro_precision``, ``macro_recall`` and ``macro_f1`` by name.

    A measure is a metric that holds the data of its rows. ``topK`` is the share of rows whose true class is among the K
    classes with the highest scores. The other measures are means over the classes that occur among ``labels``. A class
    that is never predicted has an F1 of 0 and so lowers the mean. A class that is predicted but does not occur among
    the labels is left out of the mean.

    Macro F1 is the mean of the classes' F1, not the F1 of the mean precision and recall (J. Opitz and S. Burst, "Macro
    F1 and Macro F1", 2019). It equals scikit-learn's ``f1_score`` with ``average="macro"``, ``zero_division=0`` and
    ``labels=np.unique(labels)``.

    Args:
        ranks: int (N,), for each row the rank of its true class by score, 1 for the best (``ranks_of_class``).
        labels: (N,), the true classes, numbers or names.
        predicted: (N,), the predicted classes.
    """
    measures = {f"top{k}": mean_measure(f"top{k}", np.asarray(ranks) <= k) for k in (1, 5)}
    columns = _class_columns(labels, predicted)
    for name in ("precision", "recall", "f1"):
        measures[f"macro_{name}"] = measure_of_rows(f"macro_{name}", columns, partial(_macro, name), SHARE)
    return measures


def _class_columns(labels: ArrayLike, predicted: ArrayLike) -> FloatArray:
    """Return 3 K indicators (0 or 1) for each row, float64 (N, 3 K), whose sums are the counts per class.

    The K classes are those that occur among ``labels``. The first K columns mark true positives: the row has the class,
    and the class is predicted. The next K columns mark rows that have the class. The last K columns mark rows for which
    the class is predicted.
    """
    true_classes, taken = np.asarray(labels), np.asarray(predicted)
    occurring = np.unique(true_classes)
    is_class = true_classes[:, None] == occurring
    is_taken = taken[:, None] == occurring
    return np.concatenate([is_class & is_taken, is_class, is_taken], axis=1).astype(np.float64)


def _scores_of_sums(sums: FloatArray) -> dict[str, FloatArray]:
    """Return ``precision``, ``recall`` and ``f1`` of K classes, all (R, K); NaN where a class has no rows.

    ``sums`` (R, 3 K) are the sums of ``_class_columns`` under R sets of row weights.
    """
    hits, support, called = np.split(sums, 3, axis=1)
    precision = np.where(support > 0, divide(hits, called, undefined=0.0), np.nan)
    f1 = np.where(support > 0, divide(2 * hits, support + called), np.nan)
    return {"precision": precision, "recall": divide(hits, support), "f1": f1}


def _macro(name: str, sums: FloatArray) -> FloatArray:
    """Return the mean of ``name`` (``precision``, ``recall`` or ``f1``) over the classes that have rows, (R,).

    ``sums`` (R, 3 K) are the sums of ``_class_columns`` under R sets of row weights.
    """
    return np.asarray(np.nanmean(_scores_of_sums(sums)[name], axis=1))


# --- Numbers


def regression_measures(values: ArrayLike, predicted: ArrayLike) -> dict[str, SumsMetric]:
    """Return the measures ``mae``, ``rmse`` and ``r2`` by name: mean absolute error, root mean squared error, and R2.

    A measure is a metric that holds the data of its rows. ``values`` (N,) are the true numbers, all finite, and
    ``predicted`` (N,) the predicted numbers. If any prediction is NaN, all three measures are NaN.
    """
    truth = np.asarray(values, dtype=np.float64)
    errors = np.asarray(predicted, dtype=np.float64) - truth
    # Squares of large numbers, such as years, would lose digits.
    middle = truth.size // 2
    median = np.partition(truth, middle)[middle]
    centred = truth - median
    columns = np.stack([np.abs(errors), errors**2, centred, centred**2, np.ones(truth.size)], axis=1)
    return {name: measure_of_rows(name, columns, *error) for name, error in _ERRORS.items()}


def _explained(sums: FloatArray) -> FloatArray:
    """Return R2, (R,), from the sums of the columns of ``regression_measures`` under R sets of row weights; 1 is best.

    R2 is 1 - E / V. E is the sum of squared errors, and V the sum of squared deviations of the values from their
    weighted mean. NaN where all values are equal, because there is no variation to explain; scikit-learn returns 1 or 0
    there.
    """
    _, squared_errors, total, total_square, rows = sums.T
    about_mean = total_square - divide(total**2, rows)
    varies = about_mean > _CONSTANT * total_square
    return 1 - divide(squared_errors, np.where(varies, about_mean, 0.0))


_ERRORS = {
    "mae": (lambda sums: divide(sums[:, 0], sums[:, 4]), (0.0, np.inf)),
    "rmse": (lambda sums: np.sqrt(divide(sums[:, 1], sums[:, 4])), (0.0, np.inf)),
    "r2": (_explained, (-np.inf, 1.0)),
}
