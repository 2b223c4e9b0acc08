"""The time that is left: from the pace of this attempt, without jumps."""

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


def test_one_step_that_hangs_does_not_run_the_clock_down():
    meter = RateMeter()
    for step in range(21):
        meter.see(float(step), "steps", step, 40)
    assert meter.seconds_left(20.0) == pytest.approx(20.0)
    assert meter.seconds_left(500.0) == pytest.approx(19.0)
