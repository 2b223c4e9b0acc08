"""Shards of a stage: who has which file, what a death costs, and what status says."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from fvc_lib import CHECKOUT
from fvc_lib.execution.run.shards import (
    Shard,
    ShardRecord,
    read_shard,
    record_path,
    shards_line,
)
from fvc_lib.services.errors import UsageError

# Begins as ``run_notebooks.py shard`` does, on files that are only names. One of them kills the whole process, as the
# kernel does when memory ends; another one that runs beside it makes that hard to see.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def work(name):
    if name == "killer":
        time.sleep(0.2)
        os.kill(int(os.environ["TO_KILL"]), signal.SIGKILL)
        time.sleep(60)
    Path(os.environ["DONE"], name).touch()
    return name

if __name__ == "__main__":
    from fvc_lib.execution.run.shards import Shard, work_on
    from fvc_lib.services.isolated_workers import run_isolated
    from fvc_lib.services.run_paths import RunPaths
    os.environ["TO_KILL"] = str(os.getpid())
    with work_on(Path(sys.argv[1]), "01_data_index", Shard(0, 1)) as at_work:
        todo = [name for name in sys.argv[2:] if not Path(os.environ["DONE"], name).exists()]
        for number, answer in enumerate(run_isolated("looked_at:work", todo, workers=2), start=1):
            at_work.report(number, len(todo))
            print(todo[answer.position], answer.failure)
"""


@given(st.text(), st.integers(1, 50))
def test_a_file_is_in_one_shard_of_any_number_of_them(path, of):
    assert sum(Shard(number, of).has(path) for number in range(of)) == 1


@pytest.mark.parametrize("text", ["3", "3/3", "-1/2", "a/b", "1/", "/2"])
def test_a_shard_that_cannot_be_meant_is_refused(text):
    with pytest.raises(UsageError, match="wanted NUMBER/OF"):
        Shard.named(text)


@pytest.mark.fault(43)
def test_a_file_that_kills_its_shard_is_found_and_given_up_and_the_rest_is_done(tmp_path):
    (tmp_path / "looked_at.py").write_text(PROGRAM)
    (tmp_path / "done").mkdir()
    files = ["a", "b", "killer", "c", "d"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(tmp_path))),
        "DONE": str(tmp_path / "done"),
    }
    record, states = record_path(tmp_path, "01_data_index", Shard(0, 1)), []
    for _ in range(4):
        command = [sys.executable, str(tmp_path / "looked_at.py"), str(tmp_path), *files]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        states.append((done.returncode, read_shard(record)))
    assert [code for code, _ in states] == [-signal.SIGKILL] * 3 + [0], done.stderr
    assert "killer" in states[1][1].in_hand  # noted from the second start on
    assert (states[2][1].in_hand, set(states[2][1].alone)) == (["killer"], set(states[1][1].in_hand))
    assert (states[3][1].given_up, states[3][1].state, states[3][1].alone) == (["killer"], "done", [])
    assert "killer crashed" in done.stdout
    assert {path.name for path in (tmp_path / "done").iterdir()} == {"a", "b", "c", "d"}


def test_status_shows_the_shards_that_are_done_and_the_files_given_up(tmp_path):
    assert shards_line(tmp_path, "03_augmentation", 4) == "03_augmentation shards: 0 of 4 done"
    records = (
        ShardRecord("done", 100, 100),
        ShardRecord("running", 50, 100, given_up=["bad.mp4"]),
        ShardRecord("done"),
    )
    for number, record in enumerate(records):
        path = record_path(tmp_path, "03_augmentation", Shard(number, 4))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(record)))
    record_path(tmp_path, "03_augmentation", Shard(3, 4)).write_text("{torn")
    line = shards_line(tmp_path, "03_augmentation", 4)
    for fact in ("2 of 4 done", "150 of 200 files", "1 rejected: bad.mp4"):
        assert fact in line
