"""Row 5: a signal in mid-step is a flag; the step is finished and saved, the process leaves with 75 and goes on."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.faults.conftest import STAGE, result_of, train_in_child

# The signal arrives while a layer of the network computes, in the middle of an optimizer step.
SIGNAL = """
import os, torch
left = {forwards}
def send(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.{name})
torch.nn.modules.module.register_module_forward_hook(lambda module, *_: send() if module.training and not list(
    module.children()) else None)
"""


@pytest.mark.long
@pytest.mark.fault(5)
def test_a_signal_in_mid_step_saves_at_the_step_s_end_and_leaves_with_75(tiny, undisturbed, tally):
    for attempt, (name, forwards) in enumerate((("SIGTERM", 40), ("SIGUSR1", 70)), start=1):
        stopped = train_in_child(tiny, attempt, SIGNAL.format(name=name, forwards=forwards))
        assert stopped.returncode == 75, stopped.stderr
        assert not tiny.paths.predictions(0).exists()
        assert (tiny.paths.fold_checkpoints(0) / "latest_checkpoint.pt").is_file()
        tally.add(survived=1)
    last = train_in_child(tiny, 3)
    assert last.returncode == 0, last.stderr
    assert result_of(tiny.paths) == undisturbed
    steps = Counter(row["step"] for row in train_lines(tiny) if row["metric"] == "loss")
    assert set(steps.values()) == {1}  # the step was finished and is not taken again


def train_lines(tiny):
    rows = map(json.loads, tiny.paths.metrics(STAGE, 0).read_text().splitlines())
    return [row for row in rows if row["phase"] == "train"]
