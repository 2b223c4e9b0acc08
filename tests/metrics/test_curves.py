from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from fvc_lib.metrics.classification import confusion_curve, rank_rows

ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=25
)


@given(ROWS)
def test_counts_are_the_weights_at_or_above_each_distinct_score(rows: list[tuple[int, int, int, int]]) -> None:
    labels, scores, *weights = (np.array(column) for column in zip(*rows, strict=True))
    curve = confusion_curve(labels, scores.astype(float), np.array(weights, dtype=float))
    assert curve.thresholds.tolist() == sorted(set(scores.tolist()), reverse=True)
    for number, threshold in enumerate(curve.thresholds):
        for replicate, counted in enumerate(weights):
            reached = counted * (scores >= threshold)
            assert curve.true_positives[replicate, number] == reached[labels == 1].sum()
            assert curve.false_positives[replicate, number] == reached[labels == 0].sum()


def test_some_rows_are_ranked_among_themselves_fakes_first() -> None:
    labels, scores = np.array([1, 0, 1, 0, 1]), np.array([0.1, 0.9, 0.8, 0.2, 0.5])
    ranked = rank_rows(labels, scores, np.array([0, 2, 3]))
    assert ranked.rows.tolist() == [2, 0, 3]
    assert ranked.thresholds.tolist() == [0.8, 0.2, 0.1]
    assert (ranked.fakes_called.tolist(), ranked.reals_called.tolist()) == ([1, 1, 2], [0, 1, 1])
