from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics.intervals import draw_half_samples, intervals_over_groups
from fvc_lib.metrics.regression import regression_measures, regression_scores
from tests.metrics.interval_oracle import naive_ends

ORACLES = {
    "mae": sklearn.metrics.mean_absolute_error,
    "rmse": sklearn.metrics.root_mean_squared_error,
    "r2": sklearn.metrics.r2_score,
}


def weighted(name: str, values: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    nothing = np.zeros(values.size)
    return regression_measures(values, predicted)[name](nothing, nothing, weights)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 30), st.sampled_from([0.0, 1e6]))
def test_all_equal_scikit_learn(seed: int, num_rows: int, offset: float) -> None:
    generator = np.random.default_rng(seed)
    values = offset + generator.normal(0, 30, num_rows)
    predicted = values + generator.normal(0, 10, num_rows)
    weights = generator.integers(1, 4, num_rows)
    scores = regression_scores(values, predicted)
    for name, oracle in ORACLES.items():
        assert getattr(scores, name) == pytest.approx(oracle(values, predicted), abs=1e-9)
    for name, oracle in ORACLES.items():
        expected = oracle(values, predicted, sample_weight=weights)
        assert weighted(name, values, predicted, weights) == pytest.approx(expected, abs=1e-9)


def test_the_mean_predictor_is_given_the_training_mean_and_scores_no_better_than_zero() -> None:
    values = np.array([1.0, 2.0, 6.0])
    own = regression_scores(values, values.mean())
    assert own.r2 == pytest.approx(0.0, abs=1e-12)
    other = regression_scores(values, 5.0)
    assert other.r2 == pytest.approx(1 - (16 + 9 + 1) / 14)
    assert other.mae == pytest.approx((4 + 3 + 1) / 3)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e300])
def test_r_squared_of_equal_values_is_undefined(constant: float) -> None:
    values = np.full(7, constant)
    assert np.isnan(regression_scores(values, values).r2)
    assert np.isnan(regression_scores(values, values + 1).r2)
    assert regression_scores(values, values).mae == 0


def test_intervals_are_those_of_naive_half_samples_of_whole_groups() -> None:
    generator = np.random.default_rng(1)
    groups = np.repeat(np.arange(10), 4)
    values = np.repeat(generator.normal(300, 80, 10), 4)
    predicted = values + generator.normal(0, 40, 40)
    measures = regression_measures(values, predicted)
    intervals = intervals_over_groups(list(measures.values()), groups, replicates=60, seed=2)
    zeros = np.zeros(40, dtype=np.int64)
    counts = np.concatenate(list(draw_half_samples(zeros, groups, 10, replicates=60, seed=2))).astype(int)
    drawn = [np.repeat(np.arange(40), row[groups]) for row in counts]
    scores = [regression_scores(values[rows], predicted[rows]) for rows in drawn]
    for name, interval in zip(measures, intervals, strict=True):
        drawn, scale = [getattr(score, name) for score in scores], "plain" if name == "r2" else "log"
        low, high = naive_ends(interval.value, drawn, 9, scale=scale)
        assert (interval.low, interval.high) == pytest.approx((low, min(high, 1.0) if name == "r2" else high))
        assert interval.value == pytest.approx(getattr(regression_scores(values, predicted), name))


@pytest.mark.parametrize(
    ("values", "predicted", "message"),
    [
        ([1.0, np.nan], [1.0, 1.0], "values: 1 of 2 are NaN"),
        ([1.0, 2.0], [1.0, np.inf], "predicted: 1 of 2 are NaN"),
        ([1.0, 2.0], [1.0], "got 1 rows, wanted 2"),
        ([], [], "at least one row"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: list[float], predicted: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regression_scores(values, predicted)
