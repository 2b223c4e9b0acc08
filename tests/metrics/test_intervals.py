from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.metrics import intervals
from fvc_lib.metrics.calibration import expected_calibration_error
from fvc_lib.metrics.classification import (
    FloatArray,
    IntArray,
    Metric,
    average_precision,
    balanced_accuracy,
    brier_score,
    decide,
    divide,
    equal_error_rate,
    f1,
    log_loss,
    matthews_correlation,
    roc_auc,
    true_positive_rate_at,
    true_positive_rate_at_1_percent,
    weighted_metric,
)
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    cluster_bootstrap,
    cluster_bootstrap_many,
    draw_group_counts,
    group_codes,
    one_vote_per_group,
)

SCORED = (
    roc_auc, average_precision, equal_error_rate, true_positive_rate_at, brier_score, log_loss,
    expected_calibration_error,
)  # fmt: skip
DECIDED = (f1, balanced_accuracy, matthews_correlation)


@weighted_metric
def mean_score(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    """A metric that says of itself neither that it is read from curves nor from sums."""
    return divide(weights @ scores, weights.sum(axis=1))


@weighted_metric
def at_1_percent_anyhow(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    return true_positive_rate_at(labels, scores, weights, false_positive_rate=0.01)


def clustered(
    seed: int, num_groups: int = 30, per_group: int = 4, group_effect: float = 1.0, row_effect: float = 0.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of one label whose scores share a random part, as near-duplicates do."""
    generator = np.random.default_rng(seed)
    group_of_row = np.repeat(np.arange(num_groups), per_group)
    labels = group_of_row % 2
    logits = (
        labels
        + generator.normal(0, group_effect, num_groups)[group_of_row]
        + generator.normal(0, row_effect, labels.size)
    )
    return labels, 1 / (1 + np.exp(-logits)), group_of_row


@pytest.mark.parametrize("metric", [*SCORED, *DECIDED, mean_score], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("by_group", [False, True])
def test_the_ends_are_those_of_naive_resampling_with_the_same_draws(
    metric: Metric, folded: bool, by_group: bool
) -> None:
    labels, scores, groups = clustered(3, num_groups=12)
    labels, scores, groups = labels[:-2], scores[:-2], groups[:-2]  # groups of two sizes
    scores = np.round(scores, 1) if metric in (*SCORED, mean_score) else decide(scores, 0.6)  # ties
    folds = groups % 3
    votes = one_vote_per_group(groups) if by_group else None
    codes, num_groups = group_codes(groups, labels.size)
    naive = []
    for block in draw_group_counts(labels, codes, num_groups, replicates=150, seed=7):
        for counts in block.astype(int):
            rows = np.concatenate([np.flatnonzero(groups == g) for g in range(num_groups) for _ in range(counts[g])])
            over = within_folds(metric, folds[rows]) if folded else metric
            weights = np.ones(rows.size) if votes is None else votes[rows]
            naive.append(float(over(labels[rows], scores[rows], weights)))
    over = within_folds(metric, folds) if folded else metric
    interval = cluster_bootstrap(
        labels, scores, groups, over, row_weights=votes, replicates=150, seed=7, confidence=0.9
    )
    np.testing.assert_allclose([interval.low, interval.high], np.nanquantile(naive, [0.05, 0.95]), atol=1e-12)
    assert interval.value == over(labels, scores, np.ones(labels.size) if votes is None else votes)
    assert (interval.replicates, interval.num_groups, interval.num_rows) == (150, 12, 46)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=25),
    st.booleans(),
    st.integers(0, 99),
)
def test_what_metrics_share_is_what_each_computes_from_weights(
    rows: list[tuple[int, int, int]], by_group: bool, seed: int
) -> None:
    groups, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    scores = np.array([row[2] for row in rows]) / 4
    folds = groups % 2
    measures = [(metric, scores) for metric in (*SCORED, mean_score)]
    measures += [(metric, decide(scores, 0.5)) for metric in DECIDED]
    measures += [(within_folds(metric, folds), scores) for metric in SCORED[:4]]
    votes = one_vote_per_group(groups) if by_group else np.ones(labels.size)
    got = intervals.replicate_values(labels, measures, groups, row_weights=votes, replicates=9, seed=seed)
    codes, num_groups = group_codes(groups, labels.size)
    blocks = draw_group_counts(labels, codes, num_groups, replicates=9, seed=seed)
    weights = np.concatenate([counts[:, codes] for counts in blocks]) * votes
    for number, (metric, values) in enumerate(measures):
        np.testing.assert_allclose(got.values[number], metric(labels, values, votes), atol=1e-12)
        if got.replicates.size:
            np.testing.assert_allclose(got.replicates[number], metric(labels, values, weights), atol=1e-12)


def test_whether_there_are_enough_reals_is_decided_on_the_sample_and_not_in_each_replicate() -> None:
    groups = np.repeat(np.arange(60), [1, 3] * 15 + [2] * 30)  # groups of reals differ in size, so replicates do
    labels = np.repeat([0, 1], 60)
    labels, groups = np.append(labels, np.zeros(40, dtype=int)), np.append(groups, np.repeat(np.arange(60, 80), 2))
    scores = np.random.default_rng(3).normal(labels * 2.0)
    resolved, anyhow = cluster_bootstrap_many(
        labels, [(true_positive_rate_at_1_percent, scores), (at_1_percent_anyhow, scores)], groups, replicates=200
    )
    assert resolved == anyhow
    assert resolved.replicates == 200
    one_too_few = labels.argsort()[1:]
    few = cluster_bootstrap(
        labels[one_too_few], scores[one_too_few], groups[one_too_few], true_positive_rate_at_1_percent, replicates=50
    )
    assert np.isnan([few.value, few.low, few.high]).all()


def test_one_fold_with_too_few_reals_leaves_the_whole_undefined() -> None:
    labels = np.repeat([0, 1], [250, 50])
    scores = np.random.default_rng(3).normal(labels * 2.0)
    for reals_of_first, defined in ((100, True), (99, False)):
        folds = np.where(np.arange(300) < reals_of_first, 0, 1)
        folds[275:] = 0
        metric = within_folds(true_positive_rate_at_1_percent, folds)
        interval = cluster_bootstrap(labels, scores, np.arange(300), metric, replicates=50)
        assert np.isfinite([interval.value, interval.low, interval.high]).tolist() == [defined] * 3
        assert interval.replicates == 50 * defined


def test_with_one_vote_per_group_copies_change_neither_value_nor_interval() -> None:
    labels, scores, groups = clustered(6, per_group=2)
    copies = np.where(groups < 5, 9, 1)
    more = [np.repeat(column, copies) for column in (labels, scores, groups)]
    for metric in (roc_auc, brier_score):
        one, other = (
            cluster_bootstrap(y, s, g, metric, row_weights=one_vote_per_group(g), replicates=200)
            for y, s, g in ((labels, scores, groups), more)
        )
        np.testing.assert_allclose([other.value, other.low, other.high], [one.value, one.low, one.high], rtol=1e-9)
        assert cluster_bootstrap(*more, metric, replicates=200).value != pytest.approx(one.value, abs=1e-4)


def test_the_order_of_rows_does_not_matter_and_the_seed_does() -> None:
    labels, scores, groups = clustered(2)
    order = np.random.default_rng(0).permutation(labels.size)
    first = cluster_bootstrap(labels, scores, groups, roc_auc, replicates=200, seed=5)
    assert cluster_bootstrap(labels[order], scores[order], groups[order], roc_auc, replicates=200, seed=5) == first
    assert cluster_bootstrap(labels, scores, groups, roc_auc, replicates=200, seed=6) != first


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), min_size=2, max_size=40), st.integers(0, 99))
def test_every_replicate_draws_as_many_groups_and_keeps_each_stratum(rows: list[tuple[int, int]], seed: int) -> None:
    labels = np.array([label for _, label in rows])
    codes, num_groups = group_codes([group for group, _ in rows], labels.size)
    blocks = list(draw_group_counts(labels, codes, num_groups, replicates=9, seed=seed))
    counts = np.concatenate(blocks)
    assert counts.shape == (9, num_groups)
    strata = intervals.strata_of_groups(labels, codes, num_groups)
    assert sorted(np.concatenate(strata).tolist()) == list(range(num_groups))
    for members in strata:
        assert (counts[:, members].sum(axis=1) == members.size).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), min_size=2, max_size=30))
def test_no_stratum_of_one_group_where_both_classes_have_two(rows: list[tuple[int, int]]) -> None:
    labels = np.array([label for _, label in rows])
    codes, num_groups = group_codes([group for group, _ in rows], labels.size)
    if intervals._groups_per_class(labels, codes, num_groups).min() >= 2:
        assert all(members.size > 1 for members in intervals.strata_of_groups(labels, codes, num_groups))


def test_intervals_cover_the_truth_about_as_often_as_they_say_and_row_intervals_do_not() -> None:
    # The true AUC of clustered(): a difference of 1 over the SD of the difference of two rows of different groups.
    spread = np.sqrt(2 * (1.0**2 + 0.5**2))
    truth = statistics.NormalDist().cdf(1 / spread)
    trials, by_group, by_row = 150, 0, 0
    for trial in range(trials):
        labels, scores, groups = clustered(1000 + trial, num_groups=40)
        grouped = cluster_bootstrap(labels, scores, groups, roc_auc, replicates=300, seed=trial)
        rows = cluster_bootstrap(labels, scores, np.arange(labels.size), roc_auc, replicates=300, seed=trial)
        by_group += grouped.low <= truth <= grouped.high
        by_row += rows.low <= truth <= rows.high
    assert 0.88 <= by_group / trials <= 0.99
    assert by_row / trials < 0.80


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ([0, 0, 1, 1], ["a", "b", "c", "c"]),  # one group of fakes
        ([0, 0, 1, 1], ["a", "a", "a", "a"]),
        ([0, 1, 0, 0], ["a", "a", "b", "c"]),
    ],
)
def test_one_group_of_a_class_gives_a_value_without_ends(labels: list[int], groups: list[str]) -> None:
    interval = cluster_bootstrap(labels, [0.1, 0.4, 0.3, 0.8], groups, roc_auc, replicates=100)
    assert np.isfinite(interval.value)
    assert np.isnan([interval.low, interval.high]).all()
    assert interval.replicates == 0


def test_replicates_where_a_fold_lacks_a_class_are_left_out_and_counted() -> None:
    # Each fold has one group of each class: many draws leave no fold with both.
    labels, groups, folds = np.array([0, 1, 0, 1]), np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1])
    interval = cluster_bootstrap(labels, [0.1, 0.8, 0.6, 0.4], groups, within_folds(roc_auc, folds), replicates=400)
    assert 0 < interval.replicates < 400
    assert (interval.low, interval.high) == (0.0, 1.0)


@pytest.mark.parametrize(("replicates", "confidence"), [(0, 0.95), (10, 0.0), (10, 1.0), (10, 95.0)])
def test_requests_without_sense_are_refused(replicates: int, confidence: float) -> None:
    labels, scores, groups = clustered(0)
    with pytest.raises(ValueError, match=r"replicates|confidence"):
        cluster_bootstrap(labels, scores, groups, roc_auc, replicates=replicates, confidence=confidence)


def test_a_group_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="groups"):
        cluster_bootstrap([0, 1], [0.1, 0.2], ["a"], roc_auc)
