"""Rows 2 and 4: a process killed at every change it makes to the disk while it writes a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fvc_lib.services.checkpoint_files import BEST, LATEST, PREVIOUS, CheckpointFolder
from tests.faults import checkpoint_lives as lives
from tests.faults.forked import run

Act = Callable[[Path], None]
Operations = list[tuple[str, str]]


def recorded(act: Act, before: Path, tmp_path: Path) -> tuple[Operations, Path]:
    """The operations of one undisturbed life, and the folder it leaves."""
    after, report = tmp_path / "undisturbed", tmp_path / "operations.json"
    put(before, after)
    code, said = run(lives.record, act, after, report)
    assert code == 0, said
    return [(what, name) for what, name in json.loads(report.read_text())], after


def put(before: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if before.exists():
        shutil.copytree(before, path)


@pytest.fixture
def epochs(tmp_path: Path) -> Path:
    lives.three_epochs(tmp_path / "before")
    return tmp_path / "before"


def contents(path: Path) -> dict[str, bytes]:
    """The files; the previous checkpoint may be an older or a newer one after a kill."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != PREVIOUS}


def kills(operations: Operations) -> Iterator[tuple[int, bool]]:
    """The number of an operation (from 1) and whether the kill comes after half of it; of a file's writes the first."""
    before = ("", "")
    for number, (what, name) in enumerate(operations, start=1):
        if what != "write" or before != (what, name):
            yield number, False
            if what == "write":
                yield number, True
        before = (what, name)


@pytest.mark.fault(2)
def test_every_file_is_on_the_disk_before_its_name_and_its_name_before_the_next_file(epochs, tmp_path):
    operations, _ = recorded(lives.save_a_better_epoch, epochs, tmp_path)
    moved = [name for what, name in operations if what == "replace"]
    assert moved == [LATEST, f"{LATEST}~", f"{BEST}~"]
    for name in {*moved} - {LATEST}:
        own = " ".join(what for what, of in operations if of == name)
        # The best model is written by a library, past what is watched here.
        written = "" if name == f"{BEST}~" else r"open( write)+ open write "
        assert re.fullmatch(rf"({written}fsync replace ?)+", own), name
    for here, following in pairwise(operations):
        assert here[0] != "replace" or here[1] == LATEST or following == ("fsync", "undisturbed")


@pytest.mark.fault(2, 4)
@pytest.mark.parametrize(
    ("act", "allowed"),
    [
        (lives.save_a_better_epoch, {30, 40}),
        pytest.param(lives.save_in_mid_epoch, {30, 35}, marks=pytest.mark.long),
        pytest.param(lives.first_save, {None, 0}, marks=pytest.mark.long),
        pytest.param(lives.repair_the_best_model, {30}, marks=pytest.mark.long),
    ],
)
def test_a_kill_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(act, allowed, epochs, tmp_path, tally):
    if act is lives.first_save:
        shutil.rmtree(epochs)
    if act is lives.repair_the_best_model:  # the best model on the disk is another checkpoint's
        lives.save(CheckpointFolder(tmp_path / "other", lives.BINDING), 7, 70, 7)
        shutil.copyfile(tmp_path / "other" / BEST, epochs / BEST)
    operations, after = recorded(act, epochs, tmp_path)
    path, left, newest = tmp_path / "killed", set(), lives.loaded(after)
    for number, after_half in kills(operations):
        put(epochs, path)
        code, said = run(lives.die, act, path, number, after_half)
        assert code == -signal.SIGKILL, said
        checkpoint = lives.loaded(path) if path.exists() else None
        left.add(checkpoint.step if checkpoint else None)
        assert left <= allowed, f"operation {number}: {operations[number - 1]}"
        act(path)  # the next life does it again
        assert contents(path) == contents(after)
        assert lives.loaded(path).step == newest.step
        tally.add(survived=1)
    assert left == allowed
