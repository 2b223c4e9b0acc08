import itertools

import pytest
from hypothesis import given, strategies as st

from fvc_lib.engine.oom_detection import RECOVERY_STEPS, MicroBatchChange, MicroBatchPlan


def train(plan, fits, first=0):
    """Steps ``first`` on, of which step i can hold ``fits[i]`` samples; what each was done with."""
    used = []
    for step, fitting in enumerate(fits[first:], first):
        micro_batch = plan.to_try
        while micro_batch > fitting:
            micro_batch //= 2
        plan.done(step, micro_batch)
        assert plan.current == micro_batch
        used.append(micro_batch)
    return used


def changes(plan):
    return [(change.step, change.micro_batch) for change in plan.changes]


def test_a_halving_lasts_some_steps_then_the_plan_is_climbed_to_again():
    plan = MicroBatchPlan(8)
    used = train(plan, [8, 3, *[8] * 40])
    assert used == [8, *[2] * (1 + RECOVERY_STEPS), *[4] * (1 + RECOVERY_STEPS), *[8] * (39 - 2 * RECOVERY_STEPS)]
    assert changes(plan) == [(0, 8), (1, 2), (2 + RECOVERY_STEPS, 4), (3 + 2 * RECOVERY_STEPS, 8)]


@pytest.mark.parametrize("lasts", [0, 1, RECOVERY_STEPS - 1])
def test_a_limit_that_stays_is_tried_twice_as_late_each_time(lasts):
    """Also where a larger micro-batch goes well for some steps first."""
    plan, tried = MicroBatchPlan(8), []
    plan.done(0, 4)
    for step in range(1, 2000):
        larger = plan.to_try > 4
        if larger and (plan.current == 4):
            tried.append(step)
        plan.done(step, 4 if larger and step >= tried[-1] + lasts else plan.to_try)
    waits = [later - earlier - lasts for earlier, later in itertools.pairwise(tried)]
    assert waits == [1 + 2**n * RECOVERY_STEPS for n in range(1, len(waits) + 1)]
    assert len(tried) < 9


@given(planned=st.integers(1, 16), fits=st.lists(st.integers(1, 16), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_a_resumed_training_uses_what_an_undisturbed_one_does(planned, fits, cut):
    plan = MicroBatchPlan(planned)
    used = train(plan, fits)
    assert all(1 <= micro_batch <= planned for micro_batch in used)
    first, second = MicroBatchPlan(planned), MicroBatchPlan(planned)
    before = train(first, fits[:cut])
    second.resume(first.to_document(), cut)
    assert second == first
    assert before + train(second, fits, len(before)) == used


def test_a_resumed_training_may_plan_less_at_once_and_more_later():
    first = MicroBatchPlan(8)
    train(first, [4, *[8] * RECOVERY_STEPS])
    lower, higher = MicroBatchPlan(2), MicroBatchPlan(16)
    lower.resume(first.to_document(), 2)
    assert (lower.to_try, lower.changes[-1]) == (2, MicroBatchChange(2, 2))
    higher.resume(first.to_document(), 2)
    assert higher.to_try == 4
    assert train(higher, [16] * 100)[-1] == 16
