import numpy as np
import pytest

from fvc_lib.analysis.memory import judged_growth


def judged(*levels_mb: float) -> tuple[int, float | None, float | None, str]:
    return judged_growth(np.arange(1.0, len(levels_mb) + 1), np.array(levels_mb))


def around(level: float, count: int, deviation: float, seed: int) -> list[float]:
    return list(level + np.random.default_rng(seed).normal(0, deviation, count))


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_flagged_through_noise(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 4, 12)
    found = judged(*(600 + 25 * np.arange(12) + noise))
    assert found[3] == "leak"
    assert found[1] == pytest.approx(25, abs=3)


def test_the_shortest_series_that_can_be_a_leak_is_five_epochs() -> None:
    assert judged(600, 620, 640, 660)[3] == "too few epochs"
    assert judged(600, 620, 640, 660, 680)[3] == "leak"


def test_a_large_process_that_leaks_slowly_is_found_over_many_epochs() -> None:
    assert judged(*(10_000 + 20.0 * np.arange(60)))[3] == "leak"
    assert judged(*(10_000 + 20.0 * np.arange(10)))[3] == "no leak"  # 2% so far: no trouble yet


def test_noise_around_a_level_is_seldom_taken_for_a_leak() -> None:
    flagged = [judged(*around(800, 8, 40, seed))[3] == "leak" for seed in range(400)]
    assert np.mean(flagged) < 0.02


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_then_stays_flat_is_no_leak_wherever_it_comes(at: int, seed: int) -> None:
    levels = [*around(500, at, 1, seed), *around(700, 12 - at, 1, seed + 100)]
    assert judged(*levels)[3] == "no leak"


@pytest.mark.parametrize("levels", [(), (500,), (500, 600)])
def test_too_few_epochs_have_no_slope(levels: tuple[float, ...]) -> None:
    assert judged(*levels) == (len(levels), None, None, "too few epochs")
