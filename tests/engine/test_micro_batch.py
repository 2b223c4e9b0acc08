import pytest
from hypothesis import given, strategies as st

from fvc_lib.engine.oom_detection import MicroBatchPlan


def changes(plan):
    return [(change.step, change.micro_batch) for change in plan.changes]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(0, 60))
def test_a_resumed_training_uses_what_an_undisturbed_one_does(fitting, cut):
    whole, first, second = MicroBatchPlan(16), MicroBatchPlan(16), MicroBatchPlan(16)
    for step, size in enumerate(fitting):
        whole.done(step, min(whole.current, size))
    for step, size in enumerate(fitting[:cut]):
        first.done(step, min(first.current, size))
    second.resume(first.to_document(), cut)
    assert second == first
    for step, size in enumerate(fitting[cut:], cut):
        second.done(step, min(second.current, size))
    assert (second, second.current) == (whole, min(16, *fitting))


@pytest.mark.parametrize(("planned", "wanted"), [(8, 4), (2, 2), (16, 16)])
def test_a_lowered_micro_batch_stays_unless_another_one_is_planned(planned, wanted):
    first, resumed = MicroBatchPlan(8), MicroBatchPlan(planned)
    first.done(3, 4)
    resumed.resume(first.to_document(), 7)
    assert resumed.current == wanted
    assert changes(resumed) == [(0, 8), (3, 4), (7, planned)][: 2 if planned == 8 else 3]
