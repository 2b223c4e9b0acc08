from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.metrics.calibration import (
    expected_calibration_error,
    reliability_bins,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))),
    min_size=1,
    max_size=40,
)


def naive_error(labels: np.ndarray, scores: np.ndarray, edges: np.ndarray) -> float:
    total = 0.0
    for k in range(len(edges) - 1):
        last = k == len(edges) - 2
        inside = (scores >= edges[k]) & ((scores <= edges[k + 1]) if last else (scores < edges[k + 1]))
        if inside.any():
            total += inside.mean() * abs(scores[inside].mean() - labels[inside].mean())
    return total


@given(ROWS)
def test_error_equals_the_naive_sum_over_bins(rows: list[tuple[int, float]]) -> None:
    labels, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    expected = naive_error(labels, scores, np.linspace(0, 1, 11))
    assert expected_calibration_error(labels, scores) == pytest.approx(expected, abs=1e-12)
    bins = reliability_bins(labels, scores)
    seen = bins.counts > 0
    from_bins = (bins.counts * np.abs(bins.mean_scores - bins.fake_shares))[seen].sum() / bins.counts.sum()
    assert from_bins == pytest.approx(expected, abs=1e-12)
    assert np.isnan(bins.mean_scores[~seen]).all()


def test_scores_that_are_no_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="scores"):
        reliability_bins([0, 1], [0.1, 1.1])
