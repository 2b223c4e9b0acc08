"""Where a run stands, whatever its files say: "running" is believed of a lock that is held and of nothing else."""

import fcntl
import json
from pathlib import Path

import pytest

from fvc_lib.analysis.read.headline import NOT_ENDED, runs_table
from fvc_lib.analysis.read.runs import GONE, run_status
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def say(run: RunPaths, state: str, **stages: str) -> None:
    told = {key: {"state": each, "attempts": 1} for key, each in stages.items()}
    run.status_json.write_text(json.dumps({"state": state, "stages": told}))


def states(run: RunPaths) -> dict[str, object]:
    status = run_status(run)
    return {"run": status.get("state"), **{key: stage["state"] for key, stage in status["stages"].items()}}


def test_a_job_that_holds_one_tasks_lock_keeps_the_run_going(run):
    say(run, "running", a="running", b="running")
    lock = run.task_lock("b")
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert states(run) == {"run": "running", "a": GONE, "b": "running"}
    assert states(run)["run"] == GONE


def test_a_page_that_a_runners_kernel_makes_says_of_nothing_that_it_runs(run, monkeypatch):
    run = RunPaths(run.root / "runs" / "demo" / "run_20260101_000000_aaaaaaaa")
    run.root.mkdir(parents=True)
    write_document(run.run_json, {})
    stages = {"a": {"state": "running", "attempts": 1, "started_utc": "2026-01-01T00:00:00Z"}}
    run.status_json.write_text(json.dumps({"state": "running", "stages": stages}))
    with (run.root / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for attempt, word in (("", "running"), ("1", NOT_ENDED)):
            monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
            assert runs_table(run.root.parents[1]).frame["state"].to_list() == [word]
