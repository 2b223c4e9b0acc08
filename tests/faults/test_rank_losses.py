"""Ranks that die, hang or fail while others wait for them: nobody waits for ever, and what was saved goes on."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistBackendError

from fvc_lib.engine.ranks import Ranks
from fvc_lib.services.errors import DataError
from tests.engine.test_engine_on_ranks import QUIET
from tests.kits.rank_kit import Training, run_ranks, same_result, start_ranks, train
from tests.kits.task_kit import TinyTasks, changed, each_task

SETTINGS = {**QUIET, "epochs": 2, "checkpoint_seconds": 0}  # a checkpoint after every step


@dataclass(frozen=True)
class Ending:
    """A task that calls ``how`` on one rank in its n-th training forward pass."""

    tasks: Any
    rank: int
    number: int
    how: Any

    def __call__(self, rank: int) -> Any:
        count = iter(range(1, 1_000))

        def end(model, batch):
            if model.training and rank == self.rank and next(count) == self.number:
                self.how()

        return changed(self.tasks(rank), _Ending, end=end)


class _Ending:
    def forward(self, model, batch):
        self.end(model, batch)
        return super().forward(model, batch)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def find_a_broken_clip():
    raise DataError("clip 'a#0' is damaged. Make it again.")


def have_a_bug():
    raise ZeroDivisionError("of rank 1 alone")


@pytest.fixture
def tasks(kind, pictures):
    return TinyTasks(kind, pictures, rows=14)


def ended(training: Training, size: int = 2) -> tuple[list[int], list[str]]:
    codes, said = zip(*run_ranks(size, train, training), strict=True)
    return list(codes), list(said)


def whole(tasks: Any, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    training = Training(tasks, folder, SETTINGS)
    assert ended(training)[0] == [0, 0]
    return training.found()


@pytest.mark.fault(3)
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
@each_task(long=("image", "video_text"))
def test_kill_9_of_one_rank_ends_the_others_and_the_training_goes_on_resume_equal(tasks, tmp_path, killed):
    undisturbed = whole(tasks, tmp_path / "whole")
    codes, said = ended(Training(Ending(tasks, killed, 3, be_killed), tmp_path, SETTINGS))
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1
    place = "compared" if tasks.kind == "video_text" else "gradients"
    assert f"RankLostError: the other ranks were lost at '{place}'" in said[1 - killed]
    again = Training(tasks, tmp_path, SETTINGS)
    assert ended(again)[0] == [0, 0]
    assert same_result(again.found(), undisturbed)
    assert again.found()["inexact_because"] == []
    steps = {line[0] for line in again.found()["lines"]}
    assert steps >= {3, 4}
    assert killed == 0 or 1 not in steps  # of a rank 0 that lives on at least the first step is saved


def fail_later(ranks: Ranks) -> None:
    """As nccl does: what was begun in one place raises in another."""
    ranks.meet("begin")  # else rank 1 may be gone before both are connected
    if ranks.rank:
        raise DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or network error\n...")
    ranks.meet("gradients")


def test_an_exchange_between_gpus_that_fails_later_is_a_lost_rank():
    (_, first), (code, second) = run_ranks(2, fail_later)
    assert code == 1
    assert "RankLostError: the other ranks were lost at 'an exchange between GPUs': NCCL error in" in second
    assert "RankLostError: the other ranks were lost at 'gradients'" in first


@pytest.mark.long
def test_a_rank_that_hangs_is_given_up(tasks, tmp_path):
    training = Training(Ending(tasks, 1, 2, be_stopped), tmp_path, SETTINGS)
    first, second = start_ranks(2, train, training, patience_seconds=15.0)
    code, said = first.end()
    second.process.kill()
    assert code == 1
    assert "RankLostError: the other ranks were lost at 'gradients'" in said
    assert second.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "size", "failing", "codes", "words"),
    [
        (find_a_broken_clip, 3, 0, [3, 3, 3], "rank 0 of 3: clip 'a#0' is damaged. Make it again."),
        (have_a_bug, 2, 1, [1, 1], "RankFailedError: rank 1 of 2: of rank 1 alone (ZeroDivisionError)"),
    ],
)
def test_an_error_on_one_rank_ends_all_and_the_others_name_it(tasks, tmp_path, how, size, failing, codes, words):
    found, said = ended(Training(Ending(tasks, failing, 2, how), tmp_path, SETTINGS), size)
    assert found == codes
    assert [words in text for text in said] == [rank != failing for rank in range(size)]


@pytest.mark.fault(13)
def test_a_folder_that_rank_0_cannot_write_stops_all_before_the_first_step(tasks, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    codes, said = ended(Training(Ending(tasks, 0, 1, have_a_bug), tmp_path, SETTINGS))
    assert codes == [1, 1]
    assert "CheckpointWriteError: checkpoint in " in said[0]
    assert "CheckpointWriteError: rank 0 of 2: checkpoint in " in said[1]
