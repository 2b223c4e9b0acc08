import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

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


def test_exact_and_normal_chance_agree_where_they_meet() -> None:
    values = np.random.default_rng(3).normal(0, 1, 40) + 0.03 * np.arange(40)
    assert mann_kendall_p(np.append(values, values[-1])) == pytest.approx(mann_kendall_p(values), abs=0.02)


def test_ties_are_no_evidence() -> None:
    assert mann_kendall_p(np.zeros(8)) >= 0.5
    assert mann_kendall_p(np.zeros(60)) >= 0.5


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


def test_caches_that_fill_are_no_leak() -> None:
    assert judged(*(700 - 200 * 0.4 ** np.arange(10.0))).verdict == "no leak"


def test_shrinking_memory_is_no_leak() -> None:
    assert judged(900, 860, 820, 780, 740, 700).verdict == "no leak"


def test_one_spike_moves_nothing() -> None:
    assert judged(600, 600, 600, 2000, 600, 600, 600).slope_mb == 0


@pytest.mark.parametrize("levels", [(), (500,), (500, 600)])
def test_too_few_epochs_have_no_slope(levels: tuple[float, ...]) -> None:
    assert judged(*levels) == Growth(len(levels), None, None, None, "too few epochs")


@settings(deadline=None, max_examples=5)
@given(st.integers(1500, 4000))
def test_thousands_of_epochs_are_judged_by_a_part_of_them(count: int) -> None:
    found = judged(*(600 + 3.0 * np.arange(count)))
    assert found.verdict == "leak"
    assert found.slope_mb == pytest.approx(3)
