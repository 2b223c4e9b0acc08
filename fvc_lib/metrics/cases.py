"""Scores of cases: a case is several videos of one event, such as camera views or cuts, which get a single score."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import FloatArray, IntArray

CaseScore = Literal["mean", "max"]


def case_scores(scores: ArrayLike, cases: ArrayLike, how: CaseScore = "mean") -> tuple[IntArray, FloatArray]:
    """Return ``(rows, values)``: the first row of each of M cases, int64 (M,), and the score of the case, float64 (M,).

    Args:
        scores: float (N,), such as calibrated logits; all scores of a case must share one scale.
        cases: (N,), name of the case of each row.
        how: ``mean`` averages the scores of a case; ``max`` takes the largest, so that a single fake makes a fake case.
    """
    values = np.asarray(scores, dtype=np.float64)
    _, rows, case_of_row = np.unique(np.asarray(cases), return_index=True, return_inverse=True)
    if how == "max":
        largest = np.full(rows.size, -np.inf)
        np.maximum.at(largest, case_of_row, values)
        return rows, largest
    return rows, np.bincount(case_of_row, values) / np.bincount(case_of_row)
