import pytest

from fvc_lib.engine.oom_detection import MicroBatchPlan


def changes(plan):
    return [(change.step, change.micro_batch) for change in plan.changes]


@pytest.mark.parametrize(("planned", "wanted"), [(8, 4), (2, 2), (16, 16)])
def test_a_lowered_micro_batch_stays_unless_another_one_is_planned(planned, wanted):
    first, resumed = MicroBatchPlan(8), MicroBatchPlan(planned)
    first.done(3, 4)
    resumed.resume(first.to_document(), 7)
    assert resumed.current == wanted
    assert changes(resumed) == [(0, 8), (3, 4), (7, planned)][: 2 if planned == 8 else 3]
