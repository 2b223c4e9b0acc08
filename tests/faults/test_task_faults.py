"""Rows 2 to 6 for every task: its training is killed or stopped at any change it makes to its checkpoints."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fvc_lib.services.checkpoint_files import CheckpointBinding
from tests.faults.checkpoint_lives import loaded
from tests.faults.file_operations import FileOperations
from tests.kits.engine_kit import draining
from tests.kits.rank_kit import Training, run_ranks, same_result, train
from tests.kits.task_kit import TinyTasks, each_task

OPERATIONS = 90  # of a few steps with a checkpoint after each; a whole training makes four times as many
ASKED: list[int] = []


@dataclass(frozen=True)
class Fault:
    """Send signal ``number`` to this process halfway in change ``operation`` of its checkpoints.

    Handle SIGTERM as a notebook's kernel does.
    """

    checkpoints: Path
    number: int
    operation: int

    def __call__(self, rank: int) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
        FileOperations(self.checkpoints, self.strike).begin()

    def strike(self, now: int, half: Callable[[], Any]) -> None:
        if now == self.operation:
            half()
            os.kill(os.getpid(), self.number)


def was_asked(rank: int) -> Callable[[], bool]:
    return lambda: bool(ASKED)


def drained(tasks: TinyTasks, rank: int) -> Any:
    return draining(tasks(rank))


@pytest.mark.long
@pytest.mark.fault(2, 3, 4, 5, 6)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
@each_task()
def test_an_end_at_any_change_of_a_checkpoint_changes_nothing(tasks, number, code, tmp_path, tally):
    """Also two within one epoch, and between the latest checkpoint and the best model."""
    folder, scratch, chance = tmp_path / "ended", tmp_path / "scratch", random.Random(int(number))
    checkpoints = folder / "checkpoints"

    def trained(folder: Path, operation: int = 0) -> dict[str, Any] | None:
        folder.mkdir(exist_ok=True)
        fault = Fault(folder / "checkpoints", number, operation)
        training = Training(partial(drained, tasks), folder, {"checkpoint_seconds": 0.0}, was_asked, fault)
        ((ended, said),) = run_ranks(1, train, training)
        assert ended in {0, code}, said
        return training.found() if ended == 0 else None

    wanted = trained(tmp_path / "whole")
    for attempt in range(1, 20):
        found = trained(folder, chance.randint(1, OPERATIONS) if attempt < 13 else 0)
        if found:
            break
        if checkpoints.exists():  # looked at in a copy, because loading sweeps and repairs
            loaded(shutil.copytree(checkpoints, scratch), CheckpointBinding({}, ""))
            shutil.rmtree(scratch)
        tally.add(survived=1)
    assert tally.survived > 1
    assert same_result(found, wanted)
