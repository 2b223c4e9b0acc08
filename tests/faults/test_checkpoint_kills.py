"""Rows 2 and 4: a process is killed at every change it makes to the disk while it writes a checkpoint."""

import json
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from fvc_lib.services.checkpoint_files import BEST, LATEST, PREVIOUS
from tests.faults import checkpoint_lives as lives
from tests.faults.forked import run


def recorded(act, before: Path, tmp_path: Path) -> tuple[list[tuple[str, str]], Path]:
    """Return the operations of one undisturbed life and the folder it leaves."""
    after = shutil.copytree(before, tmp_path / "undisturbed")
    assert run(lives.live, act, after, tmp_path / "operations.json") == (0, "")
    return [tuple(operation) for operation in json.loads((tmp_path / "operations.json").read_text())], after


@pytest.fixture
def epochs(tmp_path: Path) -> Path:
    lives.three_epochs(tmp_path / "before")
    return tmp_path / "before"


def contents(path: Path) -> dict[str, bytes]:
    """Return the files; the previous checkpoint may be an older or a newer one after a kill."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != PREVIOUS}


@pytest.mark.fault(2)
def test_every_file_is_on_the_disk_before_its_name_and_its_name_before_the_next_file(epochs, tmp_path):
    operations, _ = recorded(lives.SAVES["a better epoch"][0], epochs, tmp_path)
    moved = [name for what, name in operations if what == "replace"]
    assert moved == [LATEST, f"{LATEST}~", f"{BEST}~"]
    for name in {*moved} - {LATEST}:
        steps = " ".join(what for what, of in operations if of == name)
        # A library writes the best model, which is not watched here.
        written = "" if name == f"{BEST}~" else r"open( write)+ open write "
        assert re.fullmatch(rf"({written}fsync replace ?)+", steps), name
    for here, following in pairwise(operations):
        assert here[0] != "replace" or here[1] == LATEST or following == ("fsync", "undisturbed")


@pytest.mark.fault(2, 4)
@pytest.mark.parametrize("save", ["a better epoch", pytest.param("mid-epoch", marks=pytest.mark.long)])
def test_a_kill_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(save, epochs, tmp_path, tally):
    act, step = lives.SAVES[save]
    operations, after = recorded(act, epochs, tmp_path)
    whole = lives.loaded(after).step
    path, left = tmp_path / "killed", set()
    first = [n for n, here in enumerate(operations) if here[0] != "write" or operations[n - 1 : n] != [here]]
    halves = [(n + 1, half) for n in first for half in (False, True) if operations[n][0] == "write" or not half]
    for number, after_half in halves:
        shutil.copytree(epochs, path)
        code, said = run(lives.live, act, path, tmp_path / "operations.json", number, after_half)
        assert code == -signal.SIGKILL, said
        left.add(lives.loaded(path).step)
        assert left <= {30, step}, f"operation {number}: {operations[number - 1]}"
        act(path)  # the next life does it again
        assert contents(path) == contents(after)
        assert lives.loaded(path).step == whole
        shutil.rmtree(path)
        tally.add(survived=1)
    assert left == {30, step}
