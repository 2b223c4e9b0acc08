"""Several detectors' probabilities as one: exact means, and weights that noise moves little."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from fvc_lib.metrics.combination import fit_stacking, mean_log_odds


@given(st.lists(st.lists(st.floats(-12, 12), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_mean_is_that_of_the_probabilities(rows):
    values = np.array(rows)
    means = expit(values).mean(1)
    np.testing.assert_allclose(mean_log_odds(values), np.log(means) - np.log1p(-means), atol=1e-6)


def test_the_mean_is_finite_where_probabilities_round_to_one_and_is_of_those_that_are_there():
    assert mean_log_odds([[800.0, 900.0]])[0] == pytest.approx(800 + np.log(2))
    assert mean_log_odds([[-800.0, -900.0]])[0] == pytest.approx(-800 - np.log(2))
    np.testing.assert_array_equal(mean_log_odds([[1.5, np.nan], [np.nan, np.nan]]), [1.5, np.nan])


def sample(num_videos: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and log odds of a good detector and of one that knows nothing."""
    generator = np.random.default_rng(seed)
    labels = np.arange(num_videos) % 2
    told = 3.0 * (labels - 0.5) + generator.normal(0, 1.2, num_videos)
    return labels, np.stack([told, generator.normal(0, 1.5, num_videos)], axis=1)


def test_a_detector_that_knows_nothing_loses_its_weight_as_videos_become_many():
    found = [fit_stacking(*sample(number), np.ones(number)).weights for number in (8, 80, 2000)]
    assert found[2][1] < 0.1 < found[2][0]
    assert found[0][1] > found[2][1]
    assert min(map(min, found)) >= 0


def test_of_one_class_or_of_no_video_nothing_is_learned():
    for labels, values in (([1, 1], [[3.0, -9.0], [2.0, -8.0]]), ([], np.empty((0, 2)))):
        found = fit_stacking(labels, values, np.ones(len(labels)))
        assert (found.weights.tolist(), found.intercept) == ([0.5, 0.5], 0.0)


def test_the_fit_is_that_of_another_solver_and_of_any_order():
    labels, values = sample(40, seed=3)
    votes = np.random.default_rng(1).uniform(0.2, 1, 40)
    scale = np.sqrt((values**2).mean())

    def loss(point: np.ndarray) -> float:
        margin = np.where(labels == 1, 1, -1) * (point[0] + values @ np.abs(point[1:]))
        away = scale * (np.abs(point[1:]) - 0.5)
        return float(-(votes * log_expit(margin)).sum() + 0.5 * (away @ away + point[0] ** 2))

    by_search = minimize(loss, [0.0, 0.5, 0.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x
    found = fit_stacking(labels, values, votes)
    np.testing.assert_allclose([found.intercept, *found.weights], [by_search[0], *np.abs(by_search[1:])], atol=1e-4)
    turned = fit_stacking(labels[::-1], values[::-1, ::-1], votes[::-1])
    np.testing.assert_allclose(turned.weights[::-1], found.weights, atol=1e-6)
    np.testing.assert_allclose(turned.intercept, found.intercept, atol=1e-6)
