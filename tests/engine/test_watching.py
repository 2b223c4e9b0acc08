"""What a training passes on says where it was: the model's and its control's apart, a test in no epoch."""

from __future__ import annotations

import pytest

from fvc_lib.engine.memory import ControlMemory
from fvc_lib.engine.oom_detection import MemoryState, MicroBatchPlan, OutOfMemory
from fvc_lib.engine.training_state import TrainingState, TrainingWatch
from fvc_lib.services.memory import NoObserver


class Places(NoObserver):
    """Keeps where it was told the training is."""

    def __init__(self):
        self.places = []

    def at(self, phase, *, epoch=None, batch_idx=None, global_step=None):
        self.places.append((phase, epoch, batch_idx, global_step))


@pytest.fixture
def places():
    return Places()


def watch(memory, oom_folder=None):
    made = TrainingWatch(metrics=None, memory=memory, oom_folder=oom_folder)
    made.state = TrainingState(MicroBatchPlan(8, 8), epochs_done=2, batches_done=1, step=21)
    return made


def test_the_controls_out_of_memory_files_bear_its_name(places, tmp_path):
    for memory in (places, ControlMemory(places, "control")):
        for where in ("forward", "validation"):
            watch(memory, tmp_path).out_of_memory(OutOfMemory(where, MemoryState(""), 8, 4, {}, 8))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000021_control_train_forward_1.json", "step_000021_control_validation_validation_1.json",
        "step_000021_train_forward_1.json", "step_000021_validation_validation_1.json",
    ]  # fmt: skip
