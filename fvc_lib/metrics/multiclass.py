"""Metrics of a decision between many classes, numbered 0 .. C - 1.

For intervals over groups make a measure, a metric that holds its rows (``top_k_measure``, ``macro_measures``), and give
it to ``intervals_over_groups``. A value is NaN where all weights are zero.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import SHARE, FloatArray, IntArray, Metric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import measure_of_rows, value_of_rows

# Number of scores compared at once, so that the comparison takes little memory beyond the scores.
_SCORES_PER_BLOCK = 1 << 20


def ranks_of_class(scores: npt.ArrayLike, labels: npt.ArrayLike) -> IntArray:
    """Return the rank of the true class among all classes, 1 for the first; ties count against the model.

    The rank is the number of classes whose score is at least that of the true class, which counts too. So a model that
    gives all classes the same score gets rank C.

    Args:
        scores: float (N, C), higher is more likely; infinite values are compared like others.
        labels: int (N,) of 0 .. C - 1.

    Returns:
        int64 (N,) of 1 .. C.

    Raises:
        ValueError: scores are not (N, C) or have a NaN, or labels are not N classes of 0 .. C - 1.
    """
    table = np.asarray(scores)
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"scores: got shape {table.shape}, wanted (N, C), a score per row and class.")
    num_rows, num_classes = table.shape
    true_classes = check_classes(labels, num_classes, "labels")
    if true_classes.size != num_rows:
        raise ValueError(f"labels: got {true_classes.size} rows, wanted {num_rows}, one per row of the scores.")
    ranks = np.empty(num_rows, dtype=np.int64)
    step = max(1, _SCORES_PER_BLOCK // num_classes)
    for start in range(0, num_rows, step):
        block = table[start : start + step]
        if np.isnan(block).any():
            rows = start + np.flatnonzero(np.isnan(block).any(axis=1))
            raise ValueError(f"scores: NaN in row {rows[0]}; wanted numbers. Did the training diverge?")
        own = np.take_along_axis(block, true_classes[start : start + step, None], axis=1)
        ranks[start : start + step] = (block >= own).sum(axis=1)
    return ranks


def check_classes(classes: npt.ArrayLike, num_classes: int | None, name: str) -> IntArray:
    """Return ``classes`` as int64 (N,), N >= 1.

    Raises:
        ValueError: another shape, no rows, not integers, or a value outside [0, ``num_classes``). Without
            ``num_classes`` only negative values are refused.
    """
    array = np.asarray(classes)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, wanted (N,) with at least one row.")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: got {array.dtype}, wanted whole numbers, the numbers of classes.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        top = "C - 1" if num_classes is None else num_classes - 1
        raise ValueError(f"{name}: got values from {low} to {high}, wanted classes 0 .. {top}.")
    return array.astype(np.int64)


@declare("top1", "Top-1 accuracy", "higher", "Share of rows whose class is the likeliest one.", is_share=True)
@declare("top5", "Top-5 accuracy", "higher", "Share of rows whose class is among the five likeliest.", is_share=True)
def top_k_accuracy(ranks: npt.ArrayLike, k: int) -> float:
    """Return the share of the rows whose true class is among the first ``k``.

    Args:
        ranks: int (N,), from 1, as ``ranks_of_class`` returns them.
        k: at least 1. If it is at least the number of classes, the result is 1.

    Raises:
        ValueError: a rank or ``k`` is below 1.
    """
    return value_of_rows(_hits(ranks, k), _mean)


def top_k_measure(ranks: npt.ArrayLike, k: int) -> Metric:
    """Return ``top_k_accuracy`` as a measure of the rows of ``ranks``, for ``intervals_over_groups``."""
    return measure_of_rows(f"top{k}_accuracy", _hits(ranks, k), _mean, SHARE)


def _hits(ranks: npt.ArrayLike, k: int) -> FloatArray:
    """Return two columns, float64 (N, 2): 1 or 0 for a rank of at most ``k``, and 1, whose sum is the divisor."""
    if k < 1:
        raise ValueError(f"k: got {k}, wanted at least 1.")
    places = check_classes(ranks, None, "ranks")
    if places.min() < 1:
        raise ValueError("ranks: got 0, wanted 1 for the first place.")
    return np.stack([places <= k, np.ones(places.size)], axis=1).astype(np.float64)


def _mean(sums: FloatArray) -> FloatArray:
    return divide(sums[:, 0], sums[:, 1])


def confusion_matrix(labels: npt.ArrayLike, predicted: npt.ArrayLike, num_classes: int) -> IntArray:
    """Return the confusion matrix int64 (C, C): rows are true classes, columns are predicted classes.

    Args:
        labels: int (N,) of 0 .. C - 1.
        predicted: int (N,) of 0 .. C - 1.
        num_classes: C.

    Raises:
        ValueError: classes out of range or of unequal length.
    """
    true_classes, taken = _checked_pair(labels, predicted, num_classes)
    cells = np.bincount(true_classes * num_classes + taken, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


@dataclass(frozen=True)
class ClassScores:
    """Scores of each class, float64 (C,) each."""

    # Share of the rows predicted as the class that are of it. 0 where the class is never predicted but has rows; NaN
    # where it is neither predicted nor has rows.
    precision: FloatArray
    recall: FloatArray  # share of the class's rows that are predicted as it; NaN without rows
    f1: FloatArray  # harmonic mean of both, 2 TP / (2 TP + FP + FN); NaN where precision is NaN
    support: FloatArray  # number of rows of the class


def class_scores(labels: npt.ArrayLike, predicted: npt.ArrayLike, num_classes: int) -> ClassScores:
    """Return precision, recall, F1 and support of every class.

    Raises:
        ValueError: as ``confusion_matrix``.
    """
    matrix = confusion_matrix(labels, predicted, num_classes).astype(np.float64)
    return _scores_of(np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0))


def _scores_of(hits: FloatArray, support: FloatArray, called: FloatArray) -> ClassScores:
    """Return the scores from true positives, rows and predictions of each class, all (..., C)."""
    precision = divide(hits, called)
    precision = np.where((called == 0) & (support > 0), 0.0, precision)
    return ClassScores(precision, divide(hits, support), divide(2 * hits, support + called), support)


def macro_f1(labels: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return the plain mean of F1 over the classes that occur among the labels.

    A class that is never predicted has an F1 of 0 and so lowers the mean. A class that is predicted but does not occur
    is not averaged; rows predicted as it lower the recall of their true classes.

    Macro F1 is the mean of the classes' F1, not the F1 of the mean precision and recall (J. Opitz and S. Burst, "Macro
    F1 and Macro F1", 2019). It equals scikit-learn's ``f1_score`` with ``average="macro"``, ``zero_division=0`` and
    ``labels=np.unique(labels)``.

    Raises:
        ValueError: negative classes, no rows, or unequal lengths.
    """
    return value_of_rows(_class_columns(labels, predicted), _macro_f1)


def macro_measures(labels: npt.ArrayLike, predicted: npt.ArrayLike) -> dict[str, Metric]:
    """Return ``macro_precision``, ``macro_recall`` and ``macro_f1`` as measures, for ``intervals_over_groups``."""
    columns = _class_columns(labels, predicted)
    return {name: measure_of_rows(name, columns, of_sums, SHARE) for name, of_sums in _MACRO.items()}


def _class_columns(labels: npt.ArrayLike, predicted: npt.ArrayLike) -> FloatArray:
    """Return columns (N, 3 K): one-hot hits, labels and predictions of the K classes that occur among the labels.

    Other classes need no columns, since they are not averaged.
    """
    true_classes, taken = _checked_pair(labels, predicted, None)
    occurring, codes = np.unique(true_classes, return_inverse=True)
    columns = np.zeros((true_classes.size, 3, occurring.size))
    rows = np.arange(true_classes.size)
    columns[rows, 1, codes] = 1
    place = np.minimum(np.searchsorted(occurring, taken), occurring.size - 1)
    known = occurring[place] == taken
    columns[rows[known], 2, place[known]] = 1
    columns[:, 0] = columns[:, 1] * columns[:, 2]
    return columns.reshape(true_classes.size, -1)


def _occurring(sums: FloatArray) -> ClassScores:
    """Return the scores of the K classes, (R, K) each; NaN where a class has no rows."""
    hits, support, called = np.moveaxis(sums.reshape(len(sums), 3, -1), 1, 0)
    scores = _scores_of(hits, support, called)
    precision, recall, f1 = (
        np.where(support > 0, values, np.nan) for values in (scores.precision, scores.recall, scores.f1)
    )
    return ClassScores(precision, recall, f1, support)


def _mean_over_classes(values: FloatArray) -> FloatArray:
    """Return the mean (R,) over K of the ``values`` (R, K) that are not NaN; NaN where all are."""
    present = ~np.isnan(values)
    return divide(np.where(present, values, 0.0).sum(axis=1), present.sum(axis=1).astype(np.float64))


@declare("macro_precision", "Macro precision", "higher", "Precision, averaged over classes.", is_share=True)
def _macro_precision(sums: FloatArray) -> FloatArray:
    return _mean_over_classes(_occurring(sums).precision)


@declare("macro_recall", "Macro recall", "higher", "Recall, averaged over classes.", is_share=True)
def _macro_recall(sums: FloatArray) -> FloatArray:
    return _mean_over_classes(_occurring(sums).recall)


@declare("macro_f1", "Macro F1", "higher", "F1, averaged over classes.", is_share=True)
def _macro_f1(sums: FloatArray) -> FloatArray:
    return _mean_over_classes(_occurring(sums).f1)


_MACRO = {"macro_precision": _macro_precision, "macro_recall": _macro_recall, "macro_f1": _macro_f1}


def _checked_pair(
    labels: npt.ArrayLike, predicted: npt.ArrayLike, num_classes: int | None
) -> tuple[IntArray, IntArray]:
    true_classes = check_classes(labels, num_classes, "labels")
    taken = check_classes(predicted, num_classes, "predicted")
    if true_classes.size != taken.size:
        raise ValueError(f"predicted: got {taken.size} rows, wanted {true_classes.size}, one per label.")
    return true_classes, taken
