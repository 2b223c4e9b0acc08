import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from benchmarks import coverage
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
    true_positive_rate_at_1_percent,
    true_positive_rate_at_5_percent,
)
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    draw_half_samples,
    group_codes,
    group_interval,
    group_intervals,
    holm,
    is_above_control,
    one_vote_per_group,
    paired_difference,
    replicate_values,
)
from tests.metrics.interval_oracle import naive_ends

SCORED = (
    roc_auc, average_precision, equal_error_rate, true_positive_rate_at_5_percent, brier_score, log_loss,
    expected_calibration_error,
)  # fmt: skip
DECIDED = (f1, balanced_accuracy, matthews_correlation)


@Metric
def mean_score(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    """A metric that says of itself neither that it is read from curves nor from sums."""
    return divide(weights @ scores, weights.sum(axis=1))


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
@pytest.mark.parametrize(("folded", "by_group"), [(False, False), (True, True)])
def test_the_ends_are_those_of_naive_half_samples_with_the_same_draws(
    metric: Metric, folded: bool, by_group: bool
) -> None:
    labels, scores, groups = clustered(3, num_groups=12)
    labels, scores, groups = labels[:-2], scores[:-2], groups[:-2]  # groups of two sizes
    scores = np.round(scores, 1) if metric in (*SCORED, mean_score) else decide(scores, 0.6)  # ties
    folds = groups % 3
    votes = one_vote_per_group(groups) if by_group else None
    codes, num_groups = group_codes(groups, labels.size)
    naive = []
    for block in draw_half_samples(labels, codes, num_groups, replicates=60, seed=7):
        for half in block.astype(bool):
            rows = np.flatnonzero(half[codes])
            over = within_folds(metric, folds[rows]) if folded else metric
            weights = np.ones(rows.size) if votes is None else votes[rows]
            naive.append(float(over(labels[rows], scores[rows], weights)))
    over = within_folds(metric, folds) if folded else metric
    interval = group_interval(labels, scores, groups, over, row_weights=votes, replicates=60, seed=7, confidence=0.9)
    assert interval.value == over(labels, scores, np.ones(labels.size) if votes is None else votes)
    if folded and metric not in SCORED[:4]:  # such a mean over folds has no known bounds
        scale = "plain"
    else:
        scale = {"log_loss": "log", "mean_score": "plain"}.get(metric.__name__, "logit")
    value, drawn, half = interval.value, np.array(naive), metric is matthews_correlation and scale == "logit"
    if half:  # a correlation lies between -1 and 1
        value, drawn = (1 + value) / 2, (1 + drawn) / 2
    ends = naive_ends(value, drawn, 10, scale=scale, confidence=0.9)
    low, high = (2 * end - 1 if half else end for end in ends)
    assert interval.high == pytest.approx(high, abs=1e-12)
    if metric is expected_calibration_error and not folded:
        assert interval.low <= low
    else:
        assert interval.low == pytest.approx(low, abs=1e-12)
    assert (interval.num_groups, interval.num_rows) == (12, 46)


def test_whether_there_are_enough_reals_is_decided_on_the_sample_and_not_in_each_replicate() -> None:
    groups = np.repeat(np.arange(60), [1, 3] * 15 + [2] * 30)  # groups of reals differ in size, so replicates do
    labels = np.repeat([0, 1], 60)
    labels, groups = np.append(labels, np.zeros(40, dtype=int)), np.append(groups, np.repeat(np.arange(60, 80), 2))
    scores = np.random.default_rng(3).normal(labels * 2.0)
    measures = [(true_positive_rate_at_1_percent, scores), (Metric(true_positive_rate_at_1_percent.in_halves), scores)]
    resolved, anyhow = intervals.replicate_values(labels, measures, groups, replicates=200).replicates
    assert np.array_equal(resolved, anyhow)
    assert np.isfinite(resolved).all()
    one_too_few = labels.argsort()[1:]
    few = group_interval(
        labels[one_too_few], scores[one_too_few], groups[one_too_few], true_positive_rate_at_1_percent, replicates=50
    )
    assert np.isnan([few.value, few.low, few.high]).all()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), min_size=2, max_size=40), st.integers(0, 99))
def test_every_half_sample_holds_half_of_the_groups_of_each_stratum(rows: list[tuple[int, int]], seed: int) -> None:
    labels = np.array([label for _, label in rows])
    codes, num_groups = group_codes([group for group, _ in rows], labels.size)
    halves = np.concatenate(list(draw_half_samples(labels, codes, num_groups, replicates=9, seed=seed)))
    assert halves.shape == (9, num_groups)
    assert np.isin(halves, (0, 1)).all()
    strata = intervals.strata_of_groups(labels, codes, num_groups)
    assert sorted(np.concatenate(strata).tolist()) == list(range(num_groups))
    for members in strata:
        assert (np.abs(halves[:, members].sum(axis=1) - members.size / 2) <= 0.5).all()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 6)), min_size=4, max_size=40),
    st.integers(0, 99),
)
def test_no_interval_lacks_its_own_value(rows: list[tuple[int, int, int]], seed: int) -> None:
    groups, labels, scores = (np.array(column) for column in zip(*rows, strict=True))
    scores = scores / 6
    measures = [(metric, scores) for metric in (*SCORED, mean_score)]
    measures += [(metric, decide(scores, 0.5)) for metric in DECIDED]
    measures += [(within_folds(metric, groups % 2), scores) for metric in SCORED]
    for found in group_intervals(labels, measures, groups, replicates=20, seed=seed):
        if np.isfinite(found.low):
            assert found.low <= found.value <= found.high


@pytest.mark.parametrize(("pairs", "comparisons"), [(False, 10), (True, 5)])
def test_perfect_separation_has_a_one_sided_bound(pairs: bool, comparisons: int) -> None:
    labels = np.repeat([0, 1], 10)
    groups = np.tile(np.arange(10), 2) if pairs else np.arange(20)
    scores = labels + np.arange(20) / 100
    for metric, value in ((roc_auc, 1.0), (average_precision, 1.0), (equal_error_rate, 0.0)):
        found = group_interval(labels, scores, groups, metric, replicates=50)
        unseen = 1 - 0.05 ** (1 / comparisons)
        ends = (1 - unseen, 1.0) if value else (0.0, unseen)
        assert found.value == value
        assert (found.low, found.high) == pytest.approx(ends)


@pytest.mark.parametrize(
    "design",
    [
        coverage.Design(pairs=False, correlation=0.0, uneven=False, groups=30),
        coverage.Design(pairs=False, correlation=0.7, uneven=True, auc=0.9),
        coverage.Design(pairs=True, correlation=0.9, uneven=False, groups=20),
        coverage.Design(pairs=True, correlation=0.99, uneven=False, auc=0.7, groups=60),
        coverage.Design(pairs=True, correlation=0.5, uneven=True, auc=0.9, groups=60),
    ],
    ids=str,
)
def test_intervals_of_the_auc_hold_the_truth_about_as_often_as_they_say(design: coverage.Design) -> None:
    share, _ = coverage.auc_coverage(design, 300)
    assert 0.90 <= share <= 0.995  # 95 % and three standard deviations of 300 samples, and the excess of small samples


def test_intervals_of_other_metrics_and_of_differences_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_MANY", 40_000)
    shares = coverage.other_coverage(coverage.Design(pairs=True, correlation=0.5, uneven=False), 150)
    assert {name: share for name, share in shares.items() if share < 0.89} == {}
    assert {"difference of roc_auc", "average_precision", "expected_calibration_error", "r2"} <= shares.keys()


def test_the_standard_error_is_obuchowskis() -> None:
    labels, (scores,), groups = coverage.Design(True, 0.5, uneven=True, groups=400).sample(np.random.default_rng(1))
    auc, error = coverage.obuchowski(labels, scores, groups)
    drawn = intervals.replicate_values(labels, [(roc_auc, scores)], groups, replicates=4000)
    assert drawn.values[0] == pytest.approx(auc)
    assert drawn.replicates[0].std() == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ([0, 0, 1, 1], ["a", "b", "c", "c"]),  # one group of fakes
        ([0, 0, 1, 1], ["a", "a", "a", "a"]),
        ([0, 1, 0, 0], ["a", "a", "b", "c"]),
    ],
)
def test_one_group_of_a_class_gives_a_value_without_ends(labels: list[int], groups: list[str]) -> None:
    interval = group_interval(labels, [0.1, 0.4, 0.3, 0.8], groups, roc_auc, replicates=100)
    assert np.isfinite(interval.value)
    assert np.isnan([interval.low, interval.high]).all()


@pytest.mark.parametrize(("replicates", "confidence"), [(0, 0.95), (10, 0.0), (10, 1.0), (10, 95.0)])
def test_requests_without_sense_are_refused(replicates: int, confidence: float) -> None:
    labels, scores, groups = clustered(0)
    with pytest.raises(ValueError, match=r"replicates|confidence"):
        group_interval(labels, scores, groups, roc_auc, replicates=replicates, confidence=confidence)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_the_difference_is_that_of_naive_half_samples_with_the_same_draws(folded: bool, by_group: bool) -> None:
    (labels, first, groups), (_, second, _) = (clustered(seed, num_groups=12, per_group=3) for seed in (0, 1))
    first, second = np.round(first, 1), np.round(second, 1)  # ties
    folds = groups % 3
    base = one_vote_per_group(groups) if by_group else np.ones(labels.size)
    codes, num_groups = group_codes(groups, labels.size)
    naive = []
    for block in draw_half_samples(labels, codes, num_groups, replicates=120, seed=3):
        for half in block.astype(bool):
            rows = np.flatnonzero(half[codes])
            metric = within_folds(roc_auc, folds[rows]) if folded else roc_auc
            one, other = (metric(labels[rows], scores[rows], base[rows]) for scores in (first, second))
            naive.append(float(other - one))
    metric = within_folds(roc_auc, folds) if folded else roc_auc
    measures = [(metric, first), (metric, second)]
    drawn = replicate_values(labels, measures, groups, row_weights=base, replicates=120, seed=3)
    found = paired_difference(drawn, 0, 1, confidence=0.9)
    value = float(metric(labels, second, base) - metric(labels, first, base))
    assert found.value == pytest.approx(value, abs=1e-12)
    defined = np.array(naive)[np.isfinite(naive)]
    error = np.sqrt(((defined - value) ** 2).mean())
    reach = stats.t.ppf(0.95, 10) * error  # 6 groups of each class: Welch's degrees of freedom
    np.testing.assert_allclose([found.low, found.high], [value - reach, value + reach], atol=1e-12)
    assert found.p_value == pytest.approx(max(2 * stats.t.sf(abs(value) / error, 10), 2 / 2**12))
    assert (found.num_groups, found.num_rows) == (12, 36)


@given(st.lists(st.integers(0, 64), max_size=9), st.integers(1, 31))
def test_adjusted_p_values_reject_what_holms_procedure_rejects(sixty_fourths: list[int], alpha: int) -> None:
    # Sixty-fourths times small whole numbers are exact, and an odd 128th ties with none of them.
    p_values, level = [p / 64 for p in sixty_fourths], (2 * alpha + 1) / 128
    adjusted = holm(p_values)
    rejected = set()  # as Holm wrote it: step down until the first that is not small enough
    for step, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        if p_values[number] > level / (len(p_values) - step):
            break
        rejected.add(number)
    assert set(np.flatnonzero(adjusted <= level).tolist()) == rejected
    assert (adjusted >= p_values).all()
    assert (adjusted <= 1).all()
    ordered = np.argsort(p_values, kind="stable")
    assert (np.diff(adjusted[ordered]) >= 0).all()


def test_a_difference_that_no_half_sample_changes_is_not_certain():
    labels, groups = np.repeat([0, 1], 5), np.arange(10)
    drawn = replicate_values(labels, [(roc_auc, np.zeros(10)), (roc_auc, labels)], groups, replicates=50)
    found = paired_difference(drawn, 0, 1)
    assert found.value == 0.5
    assert found.low == pytest.approx(0.5 - (1 - 0.05 ** (1 / 5)))
    assert found.p_value == 2 / 2**10


@pytest.mark.parametrize(
    ("value", "low", "control_value", "control_high", "above"),
    [
        (0.9, 0.8, 0.5, 0.6, True),
        (0.6, 0.55, 0.5, 0.6, False),  # within the control's interval, its end included
        (0.9, 0.4, 0.5, 0.6, False),  # so uncertain that the control's value is among the possible ones
        (0.51, 0.3, 0.5, 0.5, False),  # a constant has no spread: that alone must not make 0.51 a success
        (0.52, 0.505, 0.5, 0.5, True),  # nor against one: there is nothing else that could be chance
        (0.3, 0.2, 0.5, 0.6, False),
        (0.72, 0.61, 0.6, 0.7, False),  # each beyond the other's interval, and both together open
        (0.76, 0.65, 0.6, 0.7, True),
        (0.7, 0.6, 0.7, 0.6, False),
        (None, None, 0.5, 0.6, False),
        (0.9, None, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, None, False),
        (0.9, 0.8, None, None, False),
        (float("nan"), 0.8, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, float("nan"), False),
    ],
)
def test_it_takes_more_than_both_intervals_leave_open(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None, above: bool
) -> None:
    assert is_above_control(value, low, control_value, control_high) is above
