import numpy as np
import pytest

from fvc_lib.metrics.classification import decide, f1, roc_auc
from fvc_lib.metrics.cross_validation import METRICS, measure_over_folds, within_folds


def sample(seed: int, num_rows: int = 60, num_folds: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return (
        generator.integers(0, 2, num_rows),
        generator.integers(0, 8, num_rows) / 7,
        generator.integers(0, num_folds, num_rows),
    )


@pytest.mark.parametrize("seed", range(2))
def test_auc_within_folds_is_the_share_of_pairs_of_one_fold_won(seed: int) -> None:
    labels, scores, folds = sample(seed)
    pairs = [
        (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2
        for i in np.flatnonzero(labels == 1)
        for j in np.flatnonzero(labels == 0)
        if folds[i] == folds[j]
    ]
    assert within_folds(roc_auc, folds)(labels, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_a_score_that_is_constant_in_each_fold_is_chance_though_pooled_it_is_not() -> None:
    labels = np.array([0, 0, 1, 0, 1, 1])
    folds = np.array([0, 0, 0, 1, 1, 1])
    scores = np.where(folds == 0, 2 / 3, 1 / 3)  # the training share of fakes: high where the test share is low
    assert roc_auc(labels, scores) < 0.4
    assert within_folds(roc_auc, folds)(labels, scores) == 0.5


def test_a_fold_of_one_class_has_no_say() -> None:
    labels, scores, folds = np.array([0, 1, 1, 1]), np.array([0.1, 0.9, 0.0, 0.0]), np.array([0, 0, 1, 1])
    assert within_folds(roc_auc, folds)(labels, scores) == 1.0
    assert np.isnan(within_folds(roc_auc, folds[2:])(labels[2:], scores[2:]))


def test_rankings_are_within_folds_decisions_by_their_own_threshold_and_probabilities_of_all_rows() -> None:
    labels, scores, folds = sample(0)
    thresholds = 0.3 + 0.2 * folds
    whole = {}
    for name in METRICS:
        metric, values = measure_over_folds(name, scores, thresholds, folds)
        whole[name] = metric(labels, values)
    assert whole["roc_auc"] == within_folds(roc_auc, folds)(labels, scores) != roc_auc(labels, scores)
    assert whole["f1"] == f1(labels, decide(scores, thresholds)) != f1(labels, decide(scores, 0.3))
    assert whole["brier_score"] == pytest.approx(np.mean((scores - labels) ** 2))
