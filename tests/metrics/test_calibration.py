import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.special import expit

from fvc_lib.metrics.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    class_probabilities,
    expected_calibration_error,
    fit_class_temperature,
    fit_temperature,
    mean_log_odds,
    probabilities,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))),
    min_size=1,
    max_size=40,
)


@given(ROWS)
def test_error_equals_the_naive_sum_over_bins(rows: list[tuple[int, float]]) -> None:
    labels, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    edges, expected = np.linspace(0, 1, 11), 0.0
    for k in range(10):
        inside = (scores >= edges[k]) & ((scores <= edges[k + 1]) if k == 9 else (scores < edges[k + 1]))
        if inside.any():
            expected += inside.mean() * abs(scores[inside].mean() - labels[inside].mean())
    assert expected_calibration_error(labels, scores) == pytest.approx(expected, abs=1e-12)


LOGITS = st.lists(
    st.tuples(st.integers(0, 1), st.one_of(st.floats(-30, 30), st.sampled_from([-2.0, 0.0, 2.0]))),
    min_size=1,
    max_size=25,
)


def naive_loss(labels: np.ndarray, logits: np.ndarray, temperature: float) -> float:
    """Negative log-likelihood and the prior's share, written out."""
    scaled = logits / temperature
    return float(np.sum(np.logaddexp(0, scaled) - labels * scaled)) + 1 / temperature + np.log(temperature)


@given(LOGITS)
def test_no_temperature_of_a_fine_grid_fits_better(rows: list[tuple[int, float]]) -> None:
    labels, logits = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    fitted = fit_temperature(labels, logits)
    assert LOWEST_TEMPERATURE <= fitted <= HIGHEST_TEMPERATURE
    if 0 < labels.mean() < 1:
        grid = np.geomspace(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, 200)
        best = min(naive_loss(labels, logits, temperature) for temperature in grid)
        assert naive_loss(labels, logits, fitted) <= best + 1e-9 * max(1.0, abs(best))


@given(LOGITS, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_bit(rows: list[tuple[int, float]], shuffler) -> None:
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    fits = [fit_temperature([row[0] for row in some], [row[1] for row in some]) for some in (rows, shuffled)]
    assert fits[0] == fits[1]


@pytest.mark.parametrize(
    ("labels", "logits"), [([1, 1], [1.0, -3.0]), ([0], [2.0]), ([0, 1], [0.0, 0.0])], ids=["fakes", "real", "zeros"]
)
def test_where_nothing_can_be_fitted_logits_stay_as_they_are(labels: list[int], logits: list[float]) -> None:
    assert fit_temperature(labels, logits) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "logits", "named"),
    [([], [], "labels"), ([0, 2], [1.0, 1.0], "labels"), ([0, 1], [1.0], "scores"), ([0, 1], [1.0, np.inf], "scores")],
)
def test_what_cannot_be_fitted_is_refused(labels: list[int], logits: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit_temperature(labels, logits)


def test_probabilities_are_the_sigmoid_and_huge_logits_do_not_overflow() -> None:
    got = probabilities([0.0, 1.0, -1.0, 800.0, -800.0, 1e308], 1.0)
    np.testing.assert_allclose(got[:3], [0.5, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-15)
    np.testing.assert_array_equal(got[3:], [1.0, 0.0, 1.0])


def test_two_classes_have_the_temperature_of_one_logit():
    draw = np.random.default_rng(5)
    logits = draw.normal(0, 3, 200)
    labels = (draw.uniform(size=200) < probabilities(logits, 1.7)).astype(int)
    both = np.stack([0.3 * logits, 1.3 * logits], axis=1)  # softmax sees the difference alone
    assert fit_class_temperature(labels, both) == pytest.approx(fit_temperature(labels, logits), rel=1e-9)
    order = draw.permutation(200)
    assert fit_class_temperature(labels[order], both[order]) == fit_class_temperature(labels, both)
    np.testing.assert_allclose(class_probabilities(both, 1.7)[:, 1], probabilities(logits, 1.7))


def test_a_class_temperature_finds_the_factor_that_logits_were_multiplied_by():
    draw = np.random.default_rng(6)
    logits = draw.normal(0, 2, (4000, 5))
    labels = np.array([draw.choice(5, p=row) for row in class_probabilities(logits, 1.0)])
    assert fit_class_temperature(labels, 3.0 * logits) == pytest.approx(3.0, rel=0.06)
    with pytest.raises(ValueError, match="finite logits"):
        fit_class_temperature([0], [[np.nan, 1]])


@given(st.lists(st.lists(st.floats(-12, 12), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_mean_is_that_of_the_probabilities(rows):
    values = np.array(rows)
    means = expit(values).mean(1)
    np.testing.assert_allclose(mean_log_odds(values), np.log(means) - np.log1p(-means), atol=1e-6)


def test_the_mean_is_finite_where_probabilities_round_to_one_and_is_of_those_that_are_there():
    assert mean_log_odds([[800.0, 900.0]])[0] == pytest.approx(800 + np.log(2))
    assert mean_log_odds([[-800.0, -900.0]])[0] == pytest.approx(-800 - np.log(2))
    np.testing.assert_array_equal(mean_log_odds([[1.5, np.nan], [np.nan, np.nan]]), [1.5, np.nan])
