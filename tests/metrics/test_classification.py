import itertools

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import assume, given, settings, strategies as st

from fvc_lib.metrics import classification as c
from fvc_lib.metrics.classification import Metric, decide

RANKING = (c.roc_auc, c.average_precision, c.equal_error_rate, c.true_positive_rate_at_5_percent, c.partial_auc)
DECIDING = (c.f1, c.balanced_accuracy, c.matthews_correlation)
PROBABILITY = (c.brier_score, c.log_loss)
ALL = RANKING + DECIDING + PROBABILITY


@st.composite
def samples(draw: st.DrawFn, *, levels: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Both classes, few score levels: ties within and between the classes are the rule."""
    rows = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, levels - 1)), min_size=2, max_size=30))
    labels, scores = np.array(rows).T
    assume(labels.min() < labels.max())
    return labels, scores / (levels - 1)


def naive_roc(labels: np.ndarray, scores: np.ndarray) -> list[tuple[float, float]]:
    thresholds = [np.inf, *sorted(set(scores.tolist()), reverse=True)]
    return [(float((scores[labels == 0] >= t).mean()), float((scores[labels == 1] >= t).mean())) for t in thresholds]


def naive_equal_error_rate(labels: np.ndarray, scores: np.ndarray) -> float:
    points = naive_roc(labels, scores)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        before, after = 1 - y0 - x0, 1 - y1 - x1
        if before > 0 >= after:
            return x0 + (x1 - x0) * before / (before - after)
    raise AssertionError("the ROC curve runs from (0, 0) to (1, 1) and so crosses the diagonal")


@given(samples())
def test_rankings_and_probabilities_equal_scikit_learn_and_the_definition(
    sample: tuple[np.ndarray, np.ndarray],
) -> None:
    oracles = {
        c.roc_auc: sklearn.metrics.roc_auc_score(*sample),
        c.average_precision: sklearn.metrics.average_precision_score(*sample),
        c.partial_auc: sklearn.metrics.roc_auc_score(*sample, max_fpr=0.1),
        c.equal_error_rate: naive_equal_error_rate(*sample),
        c.true_positive_rate_at_5_percent: max(tpr for fpr, tpr in naive_roc(*sample) if fpr <= 0.05 + 1e-12),
        c.brier_score: sklearn.metrics.brier_score_loss(*sample),
        c.log_loss: sklearn.metrics.log_loss(*sample),
    }
    for metric, expected in oracles.items():
        assert metric(*sample) == pytest.approx(expected, rel=1e-9, abs=1e-12), metric.__name__


@pytest.mark.parametrize(
    ("metric", "share"), [(c.true_positive_rate_at_1_percent, 0.01), (c.true_positive_rate_at_0_1_percent, 0.001)]
)
def test_rates_at_few_false_alarms_are_scikit_learn_s_or_not_resolved(metric: Metric, share: float) -> None:
    generator = np.random.default_rng(3)
    labels = np.repeat([0, 1], [round(1 / share), 300])
    scores = np.round(generator.normal(labels * 2.0), 2)
    alarms, hits, _ = sklearn.metrics.roc_curve(labels, scores, drop_intermediate=False)
    assert metric(labels, scores) == pytest.approx(hits[alarms <= share + 1e-12].max(), abs=1e-12)
    assert np.isnan(metric(labels[1:], scores[1:]))  # one real too few


@given(samples(), st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_decision_metrics_equal_scikit_learn(sample: tuple[np.ndarray, np.ndarray], threshold: float) -> None:
    labels, scores = sample
    decisions = decide(scores, threshold)
    oracles = (
        sklearn.metrics.f1_score(labels, decisions, zero_division=0.0),
        sklearn.metrics.balanced_accuracy_score(labels, decisions),
        sklearn.metrics.matthews_corrcoef(labels, decisions),
    )
    for metric, expected in zip(DECIDING, oracles, strict=True):
        assert metric(labels, decisions) == pytest.approx(expected, abs=1e-12), metric.__name__


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.__name__)
@settings(max_examples=15)
@given(sample=samples(), data=st.data())
def test_integer_weights_are_repeated_rows(
    metric: Metric, sample: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    labels, scores = sample
    values = decide(scores, 0.5).astype(float) if metric in DECIDING else scores
    weights = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 3), min_size=labels.size, max_size=labels.size), min_size=1))
    )
    got = metric(labels, values, weights)
    assert got.shape == (weights.shape[0],)
    for value, counts in zip(got, weights, strict=True):
        rows = np.repeat(np.arange(labels.size), counts)
        expected = metric(labels[rows], values[rows]) if rows.size else np.nan
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_comparisons_undefined_and_errors_defined(label: int) -> None:
    labels, scores = np.full(3, label), np.array([0.2, 0.4, 0.6])
    assert all(np.isnan(metric(labels, scores)) for metric in RANKING)
    assert all(np.isnan(metric(labels, decide(scores, 0.5))) for metric in DECIDING)
    assert all(np.isfinite(metric(labels, scores)) for metric in PROBABILITY)


@pytest.mark.parametrize("metric", [c.roc_auc, c.f1], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("labels", "scores", "named"),
    [
        ([], [], "labels"),
        ([[0, 1]], [[0.1, 0.2]], "labels"),
        ([0, 2], [0.0, 1.0], "labels"),
        ([0, np.nan], [0.0, 1.0], "labels"),
        (["real", "fake"], [0.0, 1.0], "labels"),
        ([0, 1], [0.0], "scores"),
        ([0, 1], [0.0, np.nan], "scores"),
        ([0, 1], [0.0, np.inf], "scores"),
    ],
)
def test_bad_input_is_named(metric: Metric, labels: list, scores: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        metric(labels, scores)


@pytest.mark.parametrize("metric", PROBABILITY, ids=lambda metric: metric.__name__)
def test_scores_that_are_no_probabilities_are_refused(metric: Metric) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        metric([0, 1], [0.1, 1.2])
