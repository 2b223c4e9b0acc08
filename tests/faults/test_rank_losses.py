"""Ranks that die, hang or fail while others wait for them: nobody waits for ever, and a resumed training goes on."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistBackendError

from fvc_lib.engine.ranks import Ranks
from fvc_lib.services.errors import DataError
from tests.engine.test_engine_on_ranks import QUIET
from tests.kits.engine_kit import tight
from tests.kits.rank_kit import Training, run_ranks, same_result, start_ranks, train
from tests.kits.task_kit import TinyTasks, each_task

SETTINGS = {**QUIET, "epochs": 2, "checkpoint_seconds": 0}  # a checkpoint after every step


@dataclass(frozen=True)
class Ending:
    """A task that raises an error or a signal on one rank in its n-th forward pass of training."""

    tasks: Any
    rank: int
    number: int
    how: Exception | signal.Signals

    def __call__(self, rank: int) -> Any:
        count = iter(range(1, 1_000))

        def end(kind: str) -> None:
            if kind == "forward" and rank == self.rank and next(count) == self.number:
                if isinstance(self.how, Exception):
                    raise self.how
                signal.raise_signal(self.how)

        return tight(self.tasks(rank), end, draws=False)


@pytest.fixture
def tasks(kind, pictures):
    return TinyTasks(kind, pictures, rows=14)


def ended(make_task: Any, folder: Path, size: int = 2) -> tuple[list[int], list[str], Training]:
    """Train on ranks; return their exit codes, their words and the training."""
    folder.mkdir(exist_ok=True)
    training = Training(make_task, folder, SETTINGS)
    codes, said = zip(*run_ranks(size, train, training), strict=True)
    return list(codes), list(said), training


@pytest.mark.fault(3)
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
@each_task(long=("image", "video_text"))
def test_kill_9_of_one_rank_ends_the_others_and_the_training_goes_on_resume_equal(tasks, tmp_path, killed):
    codes, _, undisturbed = ended(tasks, tmp_path / "whole")
    assert codes == [0, 0]
    codes, said, _ = ended(Ending(tasks, killed, 3, signal.SIGKILL), tmp_path)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1
    place = "compared" if tasks.kind == "video_text" else "gradients"
    assert f"RankLostError: the other ranks were lost at '{place}'" in said[1 - killed]
    codes, _, again = ended(tasks, tmp_path)
    assert codes == [0, 0]
    assert same_result(again.found(), undisturbed.found())
    assert again.found()["inexact_because"] == []
    steps = {line[0] for line in again.found()["lines"]}
    assert steps >= {3, 4}
    assert killed == 0 or 1 not in steps  # of a rank 0 that lives on at least the first step is saved


def fail_later(ranks: Ranks) -> None:
    """Fail as nccl does: an exchange that began in one place raises in another."""
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
    training = Training(Ending(tasks, 1, 2, signal.SIGSTOP), tmp_path, SETTINGS)
    first, second = start_ranks(2, train, training, patience_seconds=15.0)
    code, said = first.end()
    second.process.kill()
    assert code == 1
    assert "RankLostError: the other ranks were lost at 'gradients'" in said
    assert second.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "size", "failing", "code", "words"),
    [
        (DataError("clip 'a#0' is damaged."), 3, 0, 3, "rank 0 of 3: clip 'a#0' is damaged."),
        (ZeroDivisionError("alone"), 2, 1, 1, "RankFailedError: rank 1 of 2: alone (ZeroDivisionError)"),
    ],
)
def test_an_error_on_one_rank_ends_all_and_the_others_name_it(tasks, tmp_path, how, size, failing, code, words):
    codes, said, _ = ended(Ending(tasks, failing, 2, how), tmp_path, size)
    assert codes == [code] * size
    assert [words in text for text in said] == [rank != failing for rank in range(size)]
