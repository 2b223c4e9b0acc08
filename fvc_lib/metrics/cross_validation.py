"""What each metric of a cross-validation is computed from: scores or decisions, within folds or over all of them.

- Ranking metrics are computed inside each fold and averaged, a fold counting as its pairs of a fake and a real:
  ``within_folds`` says why one ranking over all folds is wrong.
- Metrics of decisions count the decisions of all folds together, each made with its own fold's threshold: averages of
  per-fold F1 are biased (G. Forman and M. Scholz, "Apples-to-apples in cross-validation studies", SIGKDD Explorations
  12, 2010).
- Brier score and calibration error take all rows together: a probability means the same in every fold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics import classification
from fvc_lib.metrics.classification import FloatArray, Metric
from fvc_lib.metrics.declaration import declarations
from fvc_lib.metrics.within_folds import within_folds


def _declared(kind: str) -> dict[str, Metric]:
    """Those of this kind in ``fvc_lib.metrics.*``, by name."""
    return {each.name: each.function for each in declarations() if each.of_folds == kind and each.function}


RANKING_METRICS, DECISION_METRICS, PROBABILITY_METRICS = map(_declared, ("ranking", "decision", "probability"))
METRICS = RANKING_METRICS | DECISION_METRICS | PROBABILITY_METRICS


def measure_over_folds(
    name: str, scores: npt.ArrayLike, thresholds: npt.ArrayLike, folds: npt.ArrayLike
) -> tuple[Metric, FloatArray]:
    """The metric called ``name`` over all folds and the values (N,) it takes, as ``cluster_bootstrap_many`` wants them.

    Args:
        name: a key of ``METRICS``.
        scores: float (N,), probabilities of fake.
        thresholds: float, a number or (N,); fake where a score reaches it.
        folds: (N,), the fold of each row.

    Raises:
        KeyError: another name.
    """
    metric, values = METRICS[name], np.asarray(scores, dtype=np.float64)
    if name in DECISION_METRICS:
        return metric, classification.decide(values, thresholds).astype(np.float64)
    return (within_folds(metric, folds) if name in RANKING_METRICS else metric), values


def fold_values(
    name: str,
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    thresholds: npt.ArrayLike,
    folds: npt.ArrayLike,
) -> FloatArray:
    """The metric called ``name`` in each fold by itself, (K,) in the folds' order; NaN where it is undefined.

    Raises:
        KeyError: another name.
    """
    truth, fold_of_row = np.asarray(labels), np.asarray(folds)
    _, values = measure_over_folds(name, scores, thresholds, folds)
    parts = [fold_of_row == fold for fold in np.unique(fold_of_row)]
    return np.array([METRICS[name](truth[rows], values[rows]) for rows in parts])
