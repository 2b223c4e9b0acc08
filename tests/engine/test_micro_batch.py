import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvc_lib.engine.oom import MicroBatchChange, MicroBatchPlan


def train(plan, fits, first=0):
    """Steps ``first`` on, of which step i can hold ``fits[i]`` samples; what each was done with."""
    used = []
    for step in range(first, len(fits)):
        micro_batch = plan.at_step(step)
        while micro_batch > fits[step]:
            micro_batch //= 2
        plan.fitted(step, micro_batch)
        used.append(micro_batch)
    return used


def test_without_shortage_it_stays_as_planned():
    plan = MicroBatchPlan(8)
    assert train(plan, [8, 9, 100]) == [8, 8, 8]
    assert plan.changes == [MicroBatchChange(0, 8)]


def test_a_back_off_stays_and_is_recorded_with_its_step():
    plan = MicroBatchPlan(8)
    assert train(plan, [8, 3, 8, 8]) == [8, 2, 2, 2]
    assert plan.changes == [MicroBatchChange(0, 8), MicroBatchChange(1, 2)]


def test_after_quiet_steps_it_climbs_back_but_not_above_the_plan():
    plan = MicroBatchPlan(6, recovery_steps=2)
    assert train(plan, [1, *[9] * 12]) == [1, 1, 1, 2, 2, 4, 4, 6, 6, 6, 6, 6, 6]


def test_a_climb_that_fails_doubles_the_wait():
    plan = MicroBatchPlan(4, recovery_steps=1)
    used = train(plan, [2] * 16)
    assert used == [2] * 16
    tried = [change.step for change in plan.changes if change.micro_batch == 4]
    assert tried == [0, 2, 5, 10]  # waits of 1, 2, 4 quiet steps after the one that failed


@given(
    planned=st.integers(1, 16),
    recovery=st.integers(0, 3),
    fits=st.lists(st.integers(1, 16), min_size=1, max_size=30),
    cut=st.integers(0, 30),
)
def test_a_replay_and_a_resumed_training_use_what_the_first_did(planned, recovery, fits, cut):
    plan = MicroBatchPlan(planned, recovery)
    used = train(plan, fits)
    assert all(1 <= micro_batch <= planned for micro_batch in used)
    assert train(MicroBatchPlan(planned, replay=plan.changes), [100] * len(fits)) == used
    cut = min(cut, len(fits))
    first = MicroBatchPlan(planned, recovery)
    before = train(first, fits[:cut])
    second = MicroBatchPlan(planned, recovery)
    assert second.resumed(first.to_document(), cut) is None
    assert before + train(second, fits, first=cut) == used
    assert second.changes == plan.changes


def test_a_resumed_training_may_plan_less_but_not_more():
    first = MicroBatchPlan(8)
    train(first, [4, 8])
    lower, higher = MicroBatchPlan(2), MicroBatchPlan(16)
    assert lower.resumed(first.to_document(), 2) == "micro-batch 8 -> 2 planned"
    assert (lower.at_step(2), lower.changes[-1]) == (2, MicroBatchChange(2, 2))
    assert higher.resumed(first.to_document(), 2) == "micro-batch 8 -> 16 planned"
    assert higher.at_step(2) == 4


def test_a_shortage_in_validation_ends_with_its_pass():
    plan = MicroBatchPlan(8)
    assert plan.in_validation(3, 0) == 8
    plan.fitted_in_validation(3, 16, 2)
    assert [plan.in_validation(3, sample) for sample in (0, 8, 16, 24)] == [8, 8, 2, 2]
    assert plan.in_validation(6, 16) == 8
    assert plan.at_step(3) == 8
    replayed = MicroBatchPlan(8, replay=plan.changes)
    assert [replayed.in_validation(3, sample) for sample in (0, 16)] == [8, 2]


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_a_document_is_plain_and_comes_back(micro_batch):
    plan = MicroBatchPlan(8, 3)
    train(plan, [micro_batch, 8, 8])
    again = MicroBatchPlan(8, 3)
    again.resumed(plan.to_document(), 3)
    assert again == plan
