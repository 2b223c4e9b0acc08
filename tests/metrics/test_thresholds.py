from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from fvc_lib.metrics.classification import balanced_accuracy, best_threshold, decide

SCORES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1, allow_subnormal=False))
ROWS = st.lists(st.tuples(st.integers(0, 1), SCORES), min_size=2, max_size=25)


def columns(rows: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([label for label, _ in rows]), np.array([score for _, score in rows])


@given(ROWS)
def test_no_threshold_has_a_higher_balanced_accuracy(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
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


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_gives_a_half(label: int) -> None:
    assert best_threshold([label] * 3, [0.1, 0.2, 0.9]) == 0.5


def test_neighbouring_floats_are_still_separated() -> None:
    first = np.nextafter(0.3, 1)
    second = np.nextafter(first, 1)
    for scores in ([0.3, first], [first, second]):  # one midpoint rounds up, the other down
        assert decide(scores, best_threshold([0, 1], scores)).tolist() == [0, 1]
