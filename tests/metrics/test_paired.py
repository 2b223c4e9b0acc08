from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    draw_half_samples,
    group_codes,
    group_interval,
    holm,
    is_above_control,
    one_vote_per_group,
    paired_difference,
    replicate_values,
)


def two_models(seed: int, *, gain: float = 0.0, num_groups: int = 30, per_group: int = 3) -> tuple[np.ndarray, ...]:
    """Labels, two models' scores and groups; both models find the same groups hard."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), per_group)
    labels = groups % 2
    shared = labels + generator.normal(0, 1, num_groups)[groups]
    scores = [
        shared + extra * labels + generator.normal(0, 0.5, num_groups)[groups] + generator.normal(0, 0.3, labels.size)
        for extra in (0.0, gain)
    ]
    return labels, *(1 / (1 + np.exp(-score)) for score in scores), groups


def paired_over_groups(labels, first, second, groups, metric, *, second_metric=None, confidence=0.95, **draws):
    measures = [(metric, first), (second_metric or metric, second)]
    return paired_difference(replicate_values(labels, measures, groups, **draws), 0, 1, confidence=confidence)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_the_difference_is_that_of_naive_half_samples_with_the_same_draws(folded: bool, by_group: bool) -> None:
    labels, first, second, groups = two_models(0, gain=0.5, num_groups=12)
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
    found = paired_over_groups(
        labels, first, second, groups, metric, row_weights=base, replicates=120, seed=3, confidence=0.9
    )
    value = float(metric(labels, second, base) - metric(labels, first, base))
    assert found.value == pytest.approx(value, abs=1e-12)
    defined = np.array(naive)[np.isfinite(naive)]
    error = np.sqrt(((defined - value) ** 2).mean())
    reach = stats.t.ppf(0.95, 10) * error  # 6 groups of each class: Welch's degrees of freedom
    np.testing.assert_allclose([found.low, found.high], [value - reach, value + reach], atol=1e-12)
    assert found.p_value == pytest.approx(max(2 * stats.t.sf(abs(value) / error, 10), 2 / 2**12))
    assert (found.num_groups, found.num_rows) == (12, 36)


def test_what_both_models_find_hard_cancels() -> None:
    labels, first, second, groups = two_models(2, gain=0.6, num_groups=60)
    paired = paired_over_groups(labels, first, second, groups, roc_auc, replicates=400)
    alone = [group_interval(labels, scores, groups, roc_auc, replicates=400) for scores in (first, second)]
    unpaired_width = math.hypot(*(interval.high - interval.low for interval in alone))
    assert paired.high - paired.low < 0.8 * unpaired_width


def naive_holm_rejections(p_values: list[float], alpha: float) -> set[int]:
    """The procedure as Holm wrote it: step down until the first that is not small enough."""
    rejected = set()
    for step, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        if p_values[number] > alpha / (len(p_values) - step):
            break
        rejected.add(number)
    return rejected


@given(st.lists(st.integers(0, 64), max_size=9), st.integers(1, 31))
def test_adjusted_p_values_reject_what_holms_procedure_rejects(sixty_fourths: list[int], alpha: int) -> None:
    # Sixty-fourths times small whole numbers are exact, and an odd 128th ties with none of them.
    p_values, level = [p / 64 for p in sixty_fourths], (2 * alpha + 1) / 128
    adjusted = holm(p_values)
    assert set(np.flatnonzero(adjusted <= level).tolist()) == naive_holm_rejections(p_values, level)
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
