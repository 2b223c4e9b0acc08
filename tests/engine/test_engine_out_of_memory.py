import math

import pytest
import torch

from fvc_lib.engine.step import MemoryExhaustedError
from tests.kits.engine_kit import EndsOnce, StepsEnd, draining, same_end, tight, weight_distance
from tests.kits.task_kit import each_task

SETTINGS = {"micro_batch": 8, "learning_rate": 1e-4}
# Adam turns any gradient into a step of the size of the learning rate, also the rounding error of a zero sum. So
# weights that began at zero differ by more than their gradients.
BOUND = {"video": 1e-6, "image": 1e-6, "video_text": 1e-6}
PLACES = [
    ("video", "backward"), ("video", "validation"), ("video_text", "joint_loss"),
    *(pytest.param(*place, marks=pytest.mark.long) for place in (
        ("image", "forward"), ("video_text", "validation"), ("video_text", "backward"))),
]  # fmt: skip


def alike(metric, wanted):
    return metric == wanted or math.isclose(metric, wanted, rel_tol=1e-5, abs_tol=1e-6)


@pytest.mark.fault(16, 17, 18)
@pytest.mark.parametrize(("kind", "where"), PLACES, indirect=["kind"])
def test_memory_that_ends_at_any_call_leaves_the_result(make_engine, tasks, observer, where, tally):
    """End memory at the call k = 1, 2, ... until a training has fewer than k calls."""
    task = tasks.sized(rows=14)()
    settings = {**SETTINGS, "epochs": 2 if where == "validation" or tasks.kind == "video" else 1}
    whole = make_engine("whole", task=tight(task), **settings).fit()
    for number in range(1, 100):
        ends = EndsOnce(where, number)
        state = make_engine(f"at {number}", task=tight(task, ends), memory=observer, **settings).fit()
        if ends.calls < number:
            break
        assert weight_distance(state.best_model, whole.best_model) < BOUND[tasks.kind]
        assert state.step == whole.step
        for record, wanted in zip(state.history, whole.history, strict=True):
            assert all(alike(record.validation[name], value) for name, value in wanted.validation.items())
            assert record.train_loss == pytest.approx(wanted.train_loss, rel=1e-6)
        if where == "validation":  # validation is repeated unchanged, so results are equal to the bit
            assert same_end(state, whole)
        else:
            assert state.micro_batch < 8
        tally.add(survived=1)
    assert number > 2
    assert len(observer.of("out_of_memory")) == number - 1
    assert {details["where"] for details in observer.of("out_of_memory")} == {where}


@pytest.mark.fault(16)
@each_task(long=("image", "video_text"))
def test_a_kill_after_a_back_off_resumes_with_the_smaller_micro_batch(make_engine, tasks):
    task = tasks()
    whole = make_engine("whole", task=tight(task, EndsOnce("forward", 2)), micro_batch=8).fit()

    class Killed(BaseException):
        pass

    def kill(done, planned):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        make_engine("parts", task=tight(task, EndsOnce("forward", 2)), micro_batch=8, progress=kill).fit()
    state = make_engine("parts", task=tight(task), micro_batch=8).fit()
    assert same_end(state, whole)
    assert state.micro_batches.changes == whole.micro_batches.changes


@pytest.mark.fault(19)
@pytest.mark.parametrize("call", [5, *(pytest.param(call, marks=pytest.mark.long) for call in (1, 2))])
@each_task(long=("image", "video_text"))
def test_memory_that_ends_in_the_optimizers_step_goes_back_to_a_checkpoint(make_engine, observer, monkeypatch, call):
    whole = make_engine("whole").fit()
    with monkeypatch.context() as patch:
        steps = StepsEnd(patch, {call})
        state = make_engine("lost", memory=observer).fit()
    assert same_end(state, whole)
    assert state.step == whole.step == 9
    (event,) = observer.of("step_restored")
    assert event == {"to_step": 0 if call < 4 else 3, "lost_steps": (call - 1) % 3}
    assert steps.count == 9 + 1 + event["lost_steps"]
    assert observer.of("out_of_memory")[0]["where"] == "optimizer_step"


@pytest.mark.fault(19, 20)
@each_task(long=("image", "video_text"))
def test_a_step_that_never_fits_ends_with_the_checkpoint_and_what_to_try(make_engine, monkeypatch):
    with monkeypatch.context() as patch:
        StepsEnd(patch, set(range(2, 100)))
        with pytest.raises(MemoryExhaustedError, match=r"step 0, and not for the first.*checkpoint stands.*smaller"):
            make_engine().fit()
    assert same_end(make_engine().fit(), make_engine("whole").fit())


@pytest.mark.fault(20)
def test_memory_that_ends_while_loading_ends_with_the_checkpoint_and_what_to_try(make_engine, tasks, observer):
    class Hungry:
        def __init__(self, data):
            self.data, self.count = data, 0

        def __len__(self):
            return len(self.data)

        def __getitems__(self, indices):
            self.count += 1
            return torch.empty(1 << 55, dtype=torch.uint8) if self.count == 3 else [self.data[i] for i in indices]

    task = draining(tasks())
    task.training_data = Hungry(task.training_data)
    with pytest.raises(
        MemoryExhaustedError, match=r"after step 2, outside of a forward.*checkpoint stands. .*-p num_workers 0"
    ):
        make_engine(task=task, memory=observer).fit()
    assert observer.of("out_of_memory")[0]["where"] == "elsewhere"
    assert same_end(make_engine().fit(), make_engine("whole").fit())
