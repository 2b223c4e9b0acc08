from __future__ import annotations

import numpy as np
import pytest

from fvc_lib.metrics.classification import decide, f1, roc_auc
from fvc_lib.metrics.cross_validation import METRICS, measure_over_folds, within_folds


def sample() -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    folds = np.repeat([0, 1, 2], 20)
    labels = generator.integers(0, 2, folds.size)
    return labels, np.round(generator.random(folds.size), 1), 0.3 + 0.2 * folds, folds


def test_rankings_are_within_folds_decisions_by_their_own_threshold_and_probabilities_of_all_rows() -> None:
    labels, scores, thresholds, folds = sample()
    whole = {}
    for name in METRICS:
        metric, values = measure_over_folds(name, scores, thresholds, folds)
        whole[name] = metric(labels, values)
    assert whole["roc_auc"] == within_folds(roc_auc, folds)(labels, scores) != roc_auc(labels, scores)
    assert whole["f1"] == f1(labels, decide(scores, thresholds)) != f1(labels, decide(scores, 0.3))
    assert whole["brier_score"] == pytest.approx(np.mean((scores - labels) ** 2))
