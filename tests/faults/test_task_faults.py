"""Rows 2 to 6 for every task: what becomes of its checkpoints, and of its training."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fvc_lib.services.checkpoint_files import BEST, CheckpointFolder, load_weights
from tests.faults import engine_lives as lives
from tests.faults.checkpoint_lives import same
from tests.faults.forked import run
from tests.kits.task_kit import each_task

OPERATIONS = 90  # of a few steps with a checkpoint after each; a whole training makes four times as many


@pytest.fixture(scope="module")
def known() -> dict[str, Path]:
    """Undisturbed trainings by task."""
    return {}


@pytest.fixture
def whole(tasks, known, tmp_path_factory) -> Path:
    if tasks.kind not in known:
        folder = tmp_path_factory.mktemp("whole")
        code, said = run(lives.train, tasks, folder, 1)
        assert code == 0, said
        known[tasks.kind] = folder
    return known[tasks.kind]


def assert_standing(folder: Path, scratch: Path) -> None:
    """What lies on the disk can be gone on from; looked at in a copy, because loading sweeps and repairs."""
    shutil.rmtree(scratch, ignore_errors=True)
    if not (folder / lives.CHECKPOINTS).exists():
        return
    shutil.copytree(folder / lives.CHECKPOINTS, scratch)
    complaints: list[str] = []
    checkpoint = CheckpointFolder(scratch, lives.BINDING, report=complaints.append).load()
    assert complaints == []
    assert not list(scratch.rglob("*.tmp"))
    if checkpoint is not None and checkpoint.best_epoch:
        assert same(load_weights(scratch / BEST), checkpoint.best_model)


def assert_same_end(folder: Path, whole: Path) -> None:
    """To the bit: weights, scores and every line of the metric log."""
    assert same(torch.load(folder / lives.RESULT), torch.load(whole / lives.RESULT))
    assert lives.metrics(folder) == lives.metrics(whole)


@pytest.mark.long
@pytest.mark.fault(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
@each_task()
def test_kills_at_any_change_of_a_checkpoint_change_nothing(tasks, whole, seed, tmp_path, tally):
    """Also two within one epoch, and between the latest checkpoint and the best model."""
    chance, folder = random.Random(seed), tmp_path / "killed"
    folder.mkdir()
    for attempt in range(1, 100):
        operation = chance.randint(1, OPERATIONS) if attempt <= 12 else 0
        code, said = run(lives.train_and_die, tasks, folder, attempt, operation, chance.random() < 0.5)
        if code == 0:
            break
        assert code == -signal.SIGKILL, said
        assert_standing(folder, tmp_path / "scratch")
        tally.add(survived=1)
    assert tally.survived > 2
    assert_same_end(folder, whole)


@pytest.mark.long
@pytest.mark.fault(5, 6)
@each_task()
def test_sigterm_at_any_change_of_a_checkpoint_ends_at_the_step_and_the_training_goes_on(tasks, whole, tmp_path, tally):
    chance, folder = random.Random(0), tmp_path / "stopped"
    folder.mkdir()
    for attempt in range(1, 100):
        operation = chance.randint(1, OPERATIONS) if attempt <= 6 else 0
        code, said = run(lives.train_and_be_stopped, tasks, folder, attempt, operation)
        if code == 0:
            break
        assert code == 75, said
        assert_standing(folder, tmp_path / "scratch")
        tally.add(survived=1)
    assert tally.survived > 1
    assert_same_end(folder, whole)
    assert lives.steps(folder) == list(range(1, 10))  # every step once
