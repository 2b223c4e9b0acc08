"""The time that is left: from the pace of this attempt, without jumps."""

import itertools
import random

import pytest

from fvc_lib.execution.run.task import RateMeter


def watch(times, total=100, first=0):
    """What is told after each step that is done at ``times``."""
    meter, told = RateMeter(), []
    for done, now in enumerate(times, first):
        meter.see(now, "steps", done, total)
        told.append(meter.seconds_left(now))
    return told


def test_a_steady_pace_is_told_exactly():
    told = watch([2.0 * step for step in range(51)])
    assert told[:2] == [None, None]
    assert told[50] == pytest.approx(100.0)


def test_a_noisy_pace_makes_no_jumps():
    generator = random.Random(0)
    times = list(itertools.accumulate(generator.uniform(0.5, 1.5) for _ in range(80)))
    told = [left for left in watch(times) if left is not None][15:]
    assert max(abs(a - b) for a, b in itertools.pairwise(told)) < 6


def test_one_step_that_hangs_does_not_run_the_clock_down():
    meter = RateMeter()
    for step in range(21):
        meter.see(float(step), "steps", step, 40)
    assert meter.seconds_left(20.0) == pytest.approx(20.0)
    assert meter.seconds_left(500.0) == pytest.approx(19.0)


def test_a_slower_pace_is_noticed_within_the_window():
    fast = [0.1 * step for step in range(100)]
    slow = [fast[-1] + 3.0 * step for step in range(1, 100)]
    assert watch([*fast, *slow], total=300)[-1] == pytest.approx(101 * 3.0, rel=0.05)
