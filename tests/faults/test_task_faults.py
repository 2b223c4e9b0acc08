"""Rows 2 to 6, 11 and 24 for every task: what becomes of its checkpoints, and of its training."""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fvc_lib.services.checkpoint_files import BEST, LATEST, CheckpointFolder, CheckpointWriteError, load_weights
from fvc_lib.services.errors import StoppedError
from tests.faults import engine_lives as lives
from tests.faults.checkpoint_lives import same
from tests.faults.disks import small_tmpfs
from tests.faults.forked import run
from tests.kits.engine_kit import same_end, stop_after
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


@pytest.mark.long
@pytest.mark.fault(11)
@pytest.mark.parametrize("step", [1, 4])
@each_task()
def test_a_full_disk_is_named_and_the_training_goes_on_when_there_is_room(make_engine, tmp_path, step, tally):
    whole = make_engine("whole").fit()
    with small_tmpfs(tmp_path / "disk", "64m") as disk:

        def fill(done, planned):
            if done == step:
                disk.fill()

        with pytest.raises(CheckpointWriteError, match=re.escape(f"free on the disk of '{disk.folder}")):
            make_engine("disk/fold", checkpoint_seconds=0, progress=fill).fit()
        disk.make_room()
        assert same_end(make_engine("disk/fold", checkpoint_seconds=0).fit(), whole)
    tally.add(survived=1)


@pytest.mark.long
@pytest.mark.fault(24)
@each_task()
def test_a_flipped_bit_is_noticed_and_the_training_goes_on_from_the_checkpoint_before(
    make_engine, tmp_path, caplog, tally
):
    whole = make_engine("whole").fit()
    with pytest.raises(StoppedError):
        make_engine("stopped", stop=stop_after(9)).fit()
    stopped, chance = tmp_path / "stopped", random.Random(24)
    for number in range(5):
        folder = f"flipped {number}"
        shutil.copytree(stopped, tmp_path / folder)
        latest = tmp_path / folder / LATEST
        content = bytearray(latest.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        latest.write_bytes(content)
        caplog.clear()
        engine = make_engine(folder)
        assert same_end(engine.fit(), whole)
        assert "is damaged" in caplog.text
        assert len(engine.log.values("train", "loss")) == 3  # of nine: from the end of the second epoch
        tally.add(survived=1)
