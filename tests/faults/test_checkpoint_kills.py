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
from tests.faults.file_operations import WRITES
from tests.faults.forked import run
from tests.faults.table import Tally

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


@pytest.fixture
def best_of_another(epochs: Path) -> Path:
    """Killed between latest and best, or fallen back: the best model on the disk is not the checkpoint's."""
    lives.save(CheckpointFolder(epochs.parent / "other", lives.BINDING), 7, 70, 7)
    shutil.copyfile(epochs.parent / "other" / BEST, epochs / BEST)
    return epochs


def contents(path: Path) -> dict[str, bytes]:
    """The files; the previous checkpoint may be an older or a newer one after a kill."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != PREVIOUS}


def kills(operations: Operations, every_write: bool) -> Iterator[tuple[int, bool]]:
    """Operation (from 1) and whether after half of it; of a file's writes all, or the first only."""
    before = ("", "")
    for number, (what, name) in enumerate(operations, start=1):
        if every_write or what not in WRITES or before != (what, name):
            yield number, False
            if what in WRITES:
                yield number, True
        before = (what, name)


def killed_everywhere(
    act: Act, before: Path, tmp_path: Path, allowed: set[int | None], tally: Tally, *, every_write: bool = True
) -> None:
    """Before operation 1, 2, ... and halfway through the writes: what is left is a step of ``allowed``."""
    operations, after = recorded(act, before, tmp_path)
    path, left, newest = tmp_path / "killed", set(), lives.loaded(after)
    for number, after_half in kills(operations, every_write):
        put(before, path)
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
@pytest.mark.parametrize("every_write", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_kill_at_any_operation_of_an_epoch_s_end_leaves_latest_and_best_of_one_epoch(
    every_write, epochs, tmp_path, tally
):
    killed_everywhere(lives.save_a_better_epoch, epochs, tmp_path, {30, 40}, tally, every_write=every_write)


@pytest.mark.long
@pytest.mark.fault(2)
def test_a_kill_at_any_operation_of_a_save_in_mid_epoch_leaves_the_old_or_the_new(epochs, tmp_path, tally):
    killed_everywhere(lives.save_in_mid_epoch, epochs, tmp_path, {30, 35}, tally)


@pytest.mark.long
@pytest.mark.fault(2)
def test_a_kill_at_any_operation_of_the_first_save_leaves_nothing_or_all_of_it(tmp_path, tally):
    killed_everywhere(lives.first_save, tmp_path / "nothing", tmp_path, {None, 0}, tally)


@pytest.mark.long
@pytest.mark.fault(4)
def test_a_kill_at_any_operation_of_the_best_model_s_repair_loses_nothing(best_of_another, tmp_path, tally):
    killed_everywhere(lives.repair_the_best_model, best_of_another, tmp_path, {30}, tally)
