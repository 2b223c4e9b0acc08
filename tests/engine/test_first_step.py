"""The step before a training shows shapes, loss and gradient norm, and leaves nothing behind."""

import re

import pytest

from fvc_lib.engine.step import first_step
from fvc_lib.services.parameters import resolve_config
from tests.kits.task_kit import KINDS

ON_CPU = resolve_config({"device": "cpu", "amp": "off"}, environ={})


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_step_shows_shapes_loss_and_gradient_of_each_task(tasks):
    task = tasks()
    step = first_step(task, ON_CPU.model_copy(update={"seed": 3}))
    assert len(step.batch) == min(4, len(task.training_data))
    assert step.network["parameters"].sum() == sum(p.numel() for p in task.build_model().parameters())
    loss, norm = map(float, re.findall(r"(?:loss|norm) ([\d.]+)", step.lines[-1]))
    assert loss > 0
    assert norm > 0
    shapes = {name: shape for name, shape, _ in step.tensors.iter_rows()}
    for name, tensor in step.batch.tensors.items():
        assert shapes[f"in: {name}"] == " × ".join(map(str, tensor.shape))
    assert any(name.startswith("out: ") for name in shapes)
    assert first_step(task, ON_CPU.model_copy(update={"seed": 3})).lines == step.lines
