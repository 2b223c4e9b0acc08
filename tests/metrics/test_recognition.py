import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics.intervals import draw_half_samples, intervals_over_groups, values_of
from fvc_lib.metrics.recognition import class_measures, class_scores, ranks_of_class, regression_measures
from tests.metrics.interval_oracle import naive_ends

CLASSES = 5


@st.composite
def decisions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Few rows of many classes: classes without rows, without predictions and without either are the rule."""
    rows = draw(st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=12))
    labels, predicted = np.array(rows).T
    return labels, predicted


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 6))
def test_a_rank_is_the_worst_place_among_equal_scores(seed: int, num_rows: int, num_classes: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.choice([-np.inf, 0.0, 0.5, 1.0, np.inf], (num_rows, num_classes))
    labels = generator.integers(0, num_classes, num_rows)
    naive = []
    for row, label in zip(scores, labels, strict=True):
        others = [score for place, score in enumerate(row) if place != label]
        naive.append(1 + sum(other >= row[label] for other in others))
    assert ranks_of_class(scores, labels).tolist() == naive


@settings(max_examples=20)
@given(decisions())
def test_class_scores_and_macro_equal_scikit_learn_with_zero_division_zero(
    sample: tuple[np.ndarray, np.ndarray],
) -> None:
    labels, predicted = sample
    present = np.unique(labels)
    expected = sklearn.metrics.precision_recall_fscore_support(labels, predicted, labels=present, zero_division=0)
    np.testing.assert_allclose(np.stack([*class_scores(labels, predicted).values()]), expected[:3], atol=1e-12)
    averaged = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=present, average="macro", zero_division=0
    )[:3]
    nothing, measures = np.zeros(len(labels)), class_measures(predicted + 1, labels, predicted)
    found = [measure(nothing, nothing) for measure in measures.values()]
    np.testing.assert_allclose(found[2:], averaged, atol=1e-12)
    assert found[:2] == [(predicted == 0).mean(), 1]
    assert list(values_of(measures).values()) == pytest.approx(found, abs=1e-12)


def regression_scores(values, predicted):
    return values_of(regression_measures(values, predicted))


def test_bad_input_is_refused_or_undefined() -> None:
    assert ranks_of_class([[0.1, np.nan], [np.nan, 0.1]], [0, 0]).tolist() == [2, 2]
    with pytest.raises(ValueError, match="matmul"):
        intervals_over_groups(list(regression_measures([1, 1], [1, 1]).values()), ["a", "b", "c"])
    assert np.isnan(list(regression_scores([1.0, 2.0], [np.nan, 1.0]).values())).all()


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
        assert scores[name] == pytest.approx(oracle(values, predicted), abs=1e-9)
        expected = oracle(values, predicted, sample_weight=weights)
        assert weighted(name, values, predicted, weights) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e300])
def test_r_squared_of_equal_values_is_undefined(constant: float) -> None:
    values = np.full(7, constant)
    assert np.isnan(regression_scores(values, values)["r2"])
    assert np.isnan(regression_scores(values, values + 1)["r2"])
    assert regression_scores(values, values)["mae"] == 0


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
        drawn, scale = [score[name] for score in scores], "plain" if name == "r2" else "log"
        low, high = naive_ends(interval.value, drawn, 9, scale=scale)
        assert (interval.low, interval.high) == pytest.approx((low, min(high, 1.0) if name == "r2" else high))
        assert interval.value == pytest.approx(regression_scores(values, predicted)[name])
