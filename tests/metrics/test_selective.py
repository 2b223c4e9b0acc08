from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.metrics.calibration import risk_coverage

ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8)), min_size=1, max_size=30)


def naive_curve(labels: np.ndarray, scores: np.ndarray, threshold: float) -> list[tuple[float, float, float]]:
    distances = np.abs(scores - threshold)
    wrong = (scores >= threshold) != (labels == 1)
    curve = []
    for confidence in sorted(set(distances.tolist()), reverse=True):
        decided = distances >= confidence
        curve.append((decided.mean(), wrong[decided].mean(), confidence))
    return curve


def area_in_order(wrong: np.ndarray) -> float:
    return float(np.mean(np.cumsum(wrong) / np.arange(1, wrong.size + 1)))


@given(ROWS, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_the_curve_is_the_naive_one(rows: list[tuple[int, int]], threshold: float) -> None:
    labels, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows]) / 8
    curve = risk_coverage(labels, scores, threshold)
    got = np.stack([curve.coverages, curve.risks, curve.confidences], axis=1)
    np.testing.assert_allclose(got, naive_curve(labels, scores, threshold), atol=1e-12)
    assert curve.coverages[-1] == 1


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6))
def test_the_area_is_the_mean_over_all_orders_of_equally_sure_rows(rows: list[tuple[int, int]]) -> None:
    labels, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows]) / 2
    distances, wrong = np.abs(scores - 0.5), ((scores >= 0.5) != (labels == 1)).astype(float)
    orders = [np.array(order) for order in itertools.permutations(range(len(rows)))]
    areas = [area_in_order(wrong[order]) for order in orders if (np.diff(distances[order]) <= 0).all()]
    assert risk_coverage(labels, scores, 0.5).area == pytest.approx(np.mean(areas), abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "scores", "thresholds"), [([], [], 0.5), ([2], [0.1], 0.5), ([1], [np.nan], 0.5), ([1], [0.1], np.nan)]
)
def test_what_cannot_be_meant_is_refused(labels: list[int], scores: list[float], thresholds: float) -> None:
    with pytest.raises(ValueError, match=r"labels|scores"):
        risk_coverage(labels, scores, thresholds)
