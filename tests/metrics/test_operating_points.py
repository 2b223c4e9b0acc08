import math

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from fvc_lib.metrics.classification import balanced_accuracy, best_threshold, decide
from fvc_lib.metrics.operating_points import (
    crossed_thresholds,
    halves,
    operating_point,
    share_of_fakes_called,
    share_of_reals_called,
    threshold_at,
)

SCORE = st.one_of(st.sampled_from([-3.0, 0.0, 0.5, 7.0]), st.floats(-1e3, 1e3, allow_subnormal=False))
ROWS = st.lists(st.tuples(st.integers(0, 1), SCORE), min_size=2, max_size=25)


@pytest.mark.parametrize("text", ["best", "fpr=0.01", "cost=5:1", "cost=0.5:2"])
def test_an_operating_point_is_written_as_it_is_read(text: str) -> None:
    assert str(operating_point(f" {text.upper()} ")) == text


@pytest.mark.parametrize("text", ["", "fpr", "fpr=0", "fpr=1", "fpr=5%", "cost=5", "cost=0:1", "cost=-1:1", "0.5"])
def test_what_is_no_operating_point_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"fpr=0\.01.*cost=5:1"):
        operating_point(text)


@given(ROWS, st.sampled_from(["best", "fpr=0.05", "fpr=0.3", "cost=5:1", "cost=1:3"]))
def test_no_other_threshold_is_better(rows: list[tuple[int, float]], text: str) -> None:
    labels, scores = (np.array(column) for column in zip(*[*rows, (0, 0.25), (1, 0.25)], strict=True))
    point = operating_point(text)

    def merit(threshold: float) -> float:
        called = decide(scores, threshold)
        hits, alarms = share_of_fakes_called(labels, called), share_of_reals_called(labels, called)
        if point.kind == "fpr":
            return hits if alarms <= point.false_positive_rate else -1
        return -point.false_alarm_cost * alarms - point.miss_cost * (1 - hits)

    tried = [merit(other) for other in [*scores, *np.nextafter(scores, np.inf), math.inf]]
    assert merit(threshold_at(point, labels, scores)) == pytest.approx(max(tried), abs=1e-9)


def test_a_false_alarm_rate_needs_reals_only_and_may_call_nothing_fake() -> None:
    point = operating_point("fpr=0.1")
    assert threshold_at(point, [0] * 5, [1, 2, 3, 4, 5]) == math.inf
    assert threshold_at(point, [0] * 10 + [1], [*range(10), 8.5]) == 8.25
    assert not point.is_resolved_by(9)
    assert point.is_resolved_by(10)
    with pytest.raises(ValueError, match="wanted reals"):
        threshold_at(point, [1], [1])


def test_halves_keep_groups_whole_and_both_labels_even():
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 60, 300)
    labels = groups % 2
    half = halves(labels, groups, seed=3)
    assert all(np.unique(half[groups == group]).size == 1 for group in np.unique(groups))
    for label in (0, 1):
        in_each = [np.unique(groups[(half == each) & (labels == label)]).size for each in (0, 1)]
        assert abs(in_each[0] - in_each[1]) <= 1


def test_a_row_is_judged_by_the_threshold_of_the_other_half():
    labels, half = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    thresholds = crossed_thresholds(operating_point("cost=1:1"), labels, [1.0, 3.0, 10.0, 30.0], half)
    assert thresholds.tolist() == [20, 20, 2, 2]
    called = decide([1.0, 3.0, 10.0, 30.0], thresholds)
    assert (share_of_fakes_called(labels, called), share_of_reals_called(labels, called)) == (0.5, 0.5)


BOUNDED = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1, allow_subnormal=False))
BOUNDED_ROWS = st.lists(st.tuples(st.integers(0, 1), BOUNDED), min_size=2, max_size=25)


@given(BOUNDED_ROWS)
def test_no_threshold_has_a_higher_balanced_accuracy(rows: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(column) for column in zip(*rows, strict=True))
    assume(labels.min() < labels.max())
    threshold = best_threshold(labels, scores)
    reached = balanced_accuracy(labels, decide(scores, threshold))
    tried = [balanced_accuracy(labels, decide(scores, t)) for t in [*scores, *np.nextafter(scores, 2)]]
    assert 0 <= threshold <= 1
    assert reached == pytest.approx(max(tried), abs=1e-12)


def test_among_equals_the_nearest_to_a_half_wins_then_the_lower() -> None:
    # 0.05 | 0.15 and 0.55 | 0.75 split equally well; 0.65 is nearer to 0.5 than 0.1.
    assert best_threshold([0, 1, 0, 1], [0.05, 0.15, 0.55, 0.75]) == pytest.approx(0.65)
    assert best_threshold([0, 1, 0, 1], [0.25, 0.375, 0.625, 0.75]) == 0.3125
