import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.analysis.memory.findings import Growth, growth, mann_kendall_p, theil_sen_slope

SERIES = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=6)


def judged(*levels_mb: float) -> Growth:
    return growth(np.arange(1.0, len(levels_mb) + 1), np.array(levels_mb))


def around(level: float, count: int, deviation: float, seed: int) -> list[float]:
    return list(level + np.random.default_rng(seed).normal(0, deviation, count))


@given(SERIES)
def test_the_slope_is_the_median_of_all_pairs(values: list[float]) -> None:
    x = np.cumsum(np.arange(1.0, len(values) + 1))
    pairs = itertools.combinations(zip(x, values, strict=True), 2)
    naive = np.median([(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs])
    assert theil_sen_slope(x, np.array(values)) == pytest.approx(naive)


@given(st.permutations(range(6)))
def test_chance_is_the_share_of_all_orders_that_rise_as_much(order: list[int]) -> None:
    def rises(values: tuple[int, ...] | list[int]) -> int:
        return sum(np.sign(b - a) for a, b in itertools.combinations(values, 2))

    orders = list(itertools.permutations(range(6)))
    naive = sum(rises(other) >= rises(order) for other in orders) / len(orders)
    assert mann_kendall_p(np.array(order, float)) == pytest.approx(naive)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_flagged_through_noise(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 4, 12)
    found = judged(*(600 + 25 * np.arange(12) + noise))
    assert found.verdict == "leak"
    assert found.slope_mb == pytest.approx(25, abs=3)


def test_the_shortest_series_that_can_be_a_leak_is_five_epochs() -> None:
    assert judged(600, 620, 640, 660).verdict == "too few epochs"
    assert judged(600, 620, 640, 660, 680).verdict == "leak"


def test_a_large_process_that_leaks_slowly_is_found_over_many_epochs() -> None:
    assert judged(*(10_000 + 20.0 * np.arange(60))).verdict == "leak"
    assert judged(*(10_000 + 20.0 * np.arange(10))).verdict == "no leak"  # 2% so far: no trouble yet


def test_noise_around_a_level_is_seldom_taken_for_a_leak() -> None:
    flagged = [judged(*around(800, 8, 40, seed)).verdict == "leak" for seed in range(400)]
    assert np.mean(flagged) < 0.02


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_then_stays_flat_is_no_leak_wherever_it_comes(at: int, seed: int) -> None:
    levels = [*around(500, at, 1, seed), *around(700, 12 - at, 1, seed + 100)]
    assert judged(*levels).verdict == "no leak"


@pytest.mark.parametrize("levels", [(), (500,), (500, 600)])
def test_too_few_epochs_have_no_slope(levels: tuple[float, ...]) -> None:
    assert judged(*levels) == Growth(len(levels), None, None, None, "too few epochs")
