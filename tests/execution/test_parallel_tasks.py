"""Several kernels at once under one runner: who begins when, what a failure and a signal mean for the others."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.services import isolated_workers
from fvc_lib.services.run_paths import RunPaths
from tests.execution.conftest import PATIENCE_SECONDS, Project, start_runner, wait_for

ROOT = Path(__file__).parents[2]
# The most folds' cells that were at work at one moment, itself counted. One that has seen as many as are wanted tells
# the others, since they may look too late, and all stay a little longer, for one too many to be seen.
TOGETHER = """
import os
import time
from fvc_lib.services.memory import memory_budget
at_work = folder / "at_work"
at_work.mkdir(exist_ok=True)
(at_work / str(fold)).write_text("")
most, end = 0, time.monotonic() + {seconds}
while time.monotonic() < end:
    most = max(most, len(list(at_work.iterdir())))
    if most >= {wanted} and not (folder / "met").exists():
        (folder / "met").write_text("")
    if (folder / "met").exists():
        end = min(end, time.monotonic() + 0.3)
    time.sleep(0.01)
(at_work / str(fold)).unlink()
output(f"folds_{{fold}}", f"{{most}} {{os.environ.get('OMP_NUM_THREADS')}} {{memory_budget().total_bytes}}")
"""
STOPPABLE = """
import time
from fvc_lib.services.errors import StoppedError
import signal
def stop(number, frame):
    raise StoppedError("saved")
signal.signal(signal.SIGUSR1, {handler})
(folder / f"started_{{fold}}").write_text("")
while not (folder / "go").exists():
    time.sleep(0.02)
output(f"folds_{{fold}}", str(fold))
"""

Start = Callable[[RunPaths, Project, int], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a runner of its own process; none outlives the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(run: RunPaths, project: Project, jobs: int) -> subprocess.Popen[str]:
        begun.append(start_runner(run, project, jobs))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()


def states(run: RunPaths) -> dict[str, str]:
    return {key: stage.state for key, stage in read_status(run).stages.items()}


def folds(make_project: Callable[..., Project], source: str, num_folds: int) -> Project:
    return make_project(per_fold=("folds",), folds=[source]).with_config(num_folds=num_folds)


def two_running(make_project: Callable[..., Project], start: Start, handler: str, num_folds: int) -> tuple[Any, ...]:
    project = folds(make_project, STOPPABLE.format(handler=handler), num_folds)
    run = project.begin()
    runner = start(run, project, 2)
    wait_for(lambda: len(list(run.tables.glob("started_*"))) == 2, "two folds to start")
    return project, run, runner


def test_folds_run_at_once_as_many_as_there_are_jobs_each_with_an_equal_part_of_cores_and_memory(
    make_project, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(isolated_workers, "available_cores", lambda: 12)
    project = folds(make_project, TOGETHER.format(seconds=PATIENCE_SECONDS, wanted=2), 3).with_config(mem_gb=6.0)
    run = project.begin()
    assert project.execute(run, jobs=2)[0] == 0
    most, parts = zip(*((run.tables / f"folds_{fold}.txt").read_text().split(" ", 1) for fold in range(3)), strict=True)
    assert max(most) == "2"
    assert set(parts) == {"4 3000000000"}  # cores by folds, memory by jobs
    (run.tables / "folds_1.txt").unlink()
    assert [planned.task.key for planned in project.plan(run) if planned.run] == ["folds_fold_1"]


@pytest.mark.slow
def test_after_a_failure_what_runs_goes_on_to_its_end_and_nothing_new_begins(make_project):
    source = """
import json, time
if fold == 0:
    while not (folder / "started").exists():
        time.sleep(0.02)
    raise ValueError("fold 0 is bad")
(folder / "started").write_text("")
status = Path(run_dir) / "status.json"
while json.loads(status.read_text())["stages"]["folds_fold_0"]["state"] != "failed":
    time.sleep(0.02)
output(f"folds_{fold}", "whole")
"""
    project = folds(make_project, source, 3)
    run = project.begin()
    code, status, shown = project.execute(run, jobs=2)
    assert (code, status.state, status.exit_code) == (1, "failed", 1)
    assert states(run) == {"folds_fold_0": "failed", "folds_fold_1": "done", "folds_fold_2": "pending"}
    assert "nothing new begins" in shown
    assert [p.task.key for p in project.plan(run) if p.run] == ["folds_fold_0", "folds_fold_2"]


@pytest.mark.slow
def test_the_first_signal_asks_every_running_task_to_save_though_it_arrives_twice(make_project, start):
    _, run, runner = two_running(make_project, start, "stop", 3)
    # As a cluster does that tells the shell, which passes it on, and every process. One after the other while it stands
    # still: otherwise it would be up to the machine whether they come within the second that makes them one wish.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
        os.kill(runner.pid, number)
    shown, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 75, shown
    assert shown.count("running tasks save and leave") == 1
    assert states(run) == {"folds_fold_0": "interrupted", "folds_fold_1": "interrupted", "folds_fold_2": "pending"}
    assert read_status(run).state == "requeue"


@pytest.mark.slow
def test_the_second_signal_kills_them_all(make_project, start):
    _, run, runner = two_running(make_project, start, "signal.SIG_IGN", 2)
    kernels = psutil.Process(runner.pid).children()
    os.kill(runner.pid, signal.SIGINT)
    assert "at once" in runner.stdout.readline()
    assert "SIGINT: running tasks save and leave" in runner.stdout.readline()
    assert all(kernel.is_running() for kernel in kernels)
    os.kill(runner.pid, signal.SIGINT)
    shown, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 130, shown
    assert set(states(run).values()) == {"interrupted"}
    assert not any(kernel.is_running() for kernel in kernels)


@pytest.mark.slow
@pytest.mark.fault(1)
def test_a_runner_killed_with_several_kernels_leaves_none_and_its_run_goes_on(make_project, start):
    project, run, runner = two_running(make_project, start, "stop", 3)
    kernels = psutil.Process(runner.pid).children()
    assert len(kernels) == 2
    runner.kill()
    runner.communicate()
    _, alive = psutil.wait_procs(kernels, timeout=PATIENCE_SECONDS)
    assert not alive
    status = status_now(run)
    assert status.state == "interrupted"
    assert states(run) == {"folds_fold_0": "running", "folds_fold_1": "running", "folds_fold_2": "pending"}
    assert {stage.state for stage in status.stages.values()} == {"interrupted", "pending"}
    (run.tables / "go").write_text("")
    resumed = start(run, project, 2)
    shown, _ = resumed.communicate(timeout=PATIENCE_SECONDS)
    assert resumed.returncode == 0, shown
    status = read_status(run)
    assert status.state == "done"
    assert [stage.attempts for stage in status.stages.values()] == [2, 2, 1]
