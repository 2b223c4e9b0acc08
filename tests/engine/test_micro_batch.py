import pytest
from hypothesis import given, strategies as st

from fvc_lib.engine.oom_detection import MicroBatchChange, MicroBatchPlan


def train(plan, fits, first=0):
    """Steps ``first`` on, of which step i can hold ``fits[i]`` samples; what each was done with."""
    used = []
    for step in range(first, len(fits)):
        micro_batch = plan.current
        while micro_batch > fits[step]:
            micro_batch //= 2
        assert plan.fitted(step, micro_batch) == (micro_batch < [plan.planned, *used][-1])
        used.append(micro_batch)
    return used


def test_without_an_out_of_memory_it_stays_as_planned():
    plan = MicroBatchPlan(8)
    assert train(plan, [8, 9, 100]) == [8, 8, 8]
    assert plan.changes == [MicroBatchChange(0, 8)]


def test_a_halving_stays_and_is_recorded_with_its_step():
    plan = MicroBatchPlan(8)
    assert train(plan, [8, 3, 8, 8]) == [8, 2, 2, 2]
    assert plan.changes == [MicroBatchChange(0, 8), MicroBatchChange(1, 2)]


@given(planned=st.integers(1, 16), fits=st.lists(st.integers(1, 16), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_a_resumed_training_uses_what_an_undisturbed_one_does(planned, fits, cut):
    plan = MicroBatchPlan(planned)
    used = train(plan, fits)
    assert all(1 <= micro_batch <= planned for micro_batch in used)
    cut = min(cut, len(fits))
    first, second = MicroBatchPlan(planned), MicroBatchPlan(planned)
    before = train(first, fits[:cut])
    assert second.resumed(first.to_document(), cut) is None
    assert second == first
    for step, fitting in enumerate(fits[cut:], cut):
        while second.current > fitting:
            second.fitted(step, second.current // 2)
        before.append(second.current)
    assert before == used


def test_a_resumed_training_may_plan_less_but_not_more():
    first = MicroBatchPlan(8)
    train(first, [4, 8])
    lower, higher = MicroBatchPlan(2), MicroBatchPlan(16)
    assert lower.resumed(first.to_document(), 2) == "micro-batch 8 -> 2 planned"
    assert (lower.current, lower.changes[-1]) == (2, MicroBatchChange(2, 2))
    assert higher.resumed(first.to_document(), 2) == "micro-batch 8 -> 16 planned"
    assert higher.current == 4


def test_an_out_of_memory_in_validation_lasts_to_the_end_of_its_pass():
    plan = MicroBatchPlan(8)
    assert plan.in_validation(3, 0) == 8
    plan.fitted_in_validation(3, 16, 2)
    assert [plan.in_validation(3, sample) for sample in (0, 8, 16, 24)] == [8, 8, 2, 2]
    assert plan.in_validation(6, 16) == 8
    assert plan.current == 8


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_a_document_is_plain_and_comes_back_also_from_older_checkpoints(micro_batch):
    plan = MicroBatchPlan(8)
    train(plan, [micro_batch, 8, 8])
    again = MicroBatchPlan(8)
    older = {"recovery_steps": 0, "quiet_steps": 2, "wait_steps": 0, "climbed": False}
    again.resumed({**plan.to_document(), **older}, 3)
    assert again == plan
