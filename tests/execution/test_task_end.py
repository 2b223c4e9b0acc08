"""What is told of a task's end: from what was measured last to the setting to try next."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import fvc_lib
from fvc_lib.execution.kernel_server import KernelServer
from fvc_lib.execution.papermill_engine import KernelOutcome
from fvc_lib.execution.run.status import StageError, StageStatus
from fvc_lib.execution.run.task import (
    TaskRun,
    advice_after,
    judge,
    kernel_environment,
    last_loss,
    oom_kills,
    what_next,
)
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory import memory_advice
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from tests.execution.conftest import wait_for


def test_the_last_whole_lines_of_this_attempt_tell_the_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for attempt, loss in ((1, 0.9), (2, 0.3125)):
        with MetricLog(path, run_id="r", fold=0, attempt=attempt) as log:
            log.log(step=11, epoch=2, phase="train", metrics={"loss": 0.5})
            log.log(step=12, epoch=3, phase="train", metrics={"loss": loss, "learning_rate": 0.001})
    with path.open("ab") as stream:
        stream.write(b'{"run_id":"r","step":13,"metric":"lo')
    assert last_loss(path, 2) == "loss 0.3125 (train) at step 12 of epoch 3"
    assert last_loss(path, 3) is None
    path.write_text('{"attempt": 2, "metric": "loss", "phase": "train", "step": 1, "epoch": 1}\n')
    assert last_loss(path, 2) == "loss nan (train) at step 1 of epoch 1"


ENDED = {"state": "failed", "exit_code": 137}
KILLED = {"oom_kills": 1}
EXHAUSTED = StageError(name="MemoryExhaustedError", message="", exit_code=1)


@pytest.mark.parametrize(
    ("phase", "stage", "config", "advice"),
    [
        ("train", KILLED, {}, "batch"),
        ("train", KILLED, {"model": "forensic_logistic"}, "elsewhere"),
        ("preflight", KILLED, {}, "preflight"),
        ("setup", {"peak_rss_bytes": 3 * 10**9}, {}, "elsewhere"),
        (None, KILLED, {}, "elsewhere"),
        ("train", {**KILLED, "error": EXHAUSTED}, {}, None),
        ("train", {"error": StageError(name="OutOfMemoryError", message=""), "exit_code": 1}, {}, "batch"),
        ("train", {"peak_rss_bytes": 10**9}, {}, None),  # killed far below the limit
        ("train", {"exit_code": 138}, {"num_workers": 2}, "loaders"),
        ("train", {"exit_code": 138}, {}, None),
        ("train", {"state": "interrupted", "exit_code": 75, "oom_kills": 1}, {}, None),
    ],
)
def test_each_kind_of_death_gets_one_sentence_of_advice(tmp_path, phase, stage, config, advice):
    samples, ended = tmp_path / "04.jsonl", StageStatus(**{**ENDED, **stage})
    if phase:
        samples.write_text('{"phase": "test"}\n' + json.dumps({"phase": phase}) + '\n{"torn')
    found = advice_after(ended, RunConfig(mem_gb=4, **{"model": "frame_cnn", **config}), samples, {})
    assert found == (None if advice is None else memory_advice(advice))
    told = what_next(RunPaths(tmp_path), ended.model_copy(update={"advice": found}))
    assert (f"# {found}" in told) == (found is not None)


@pytest.mark.parametrize(
    ("stage", "fork"),
    [
        ({"exit_code": 1}, False),
        ({"exit_code": 2}, True),
        ({"exit_code": 3}, True),
        ({"exit_code": 138}, False),
    ],
)
def test_every_end_names_the_command_that_goes_on(tmp_path, stage, fork):
    run = RunPaths(tmp_path / "a run")
    line = what_next(run, StageStatus(state="failed", **stage))
    assert f"python run_notebooks.py --resume '{tmp_path}/a run'" in line
    assert ("--fork -p NAME VALUE" in line) == fork


def test_kills_for_memory_are_counted_in_the_own_group_or_the_nearest_above(tmp_path):
    assert oom_kills(tmp_path) is None
    write_text(tmp_path / "proc/self/cgroup", "0::/slurm/job_1/step_0\n")
    base = tmp_path / "sys/fs/cgroup"
    write_text(base / "slurm/job_1/memory.events", "low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    write_text(base / "slurm/job_1/step_0/memory.events", "oom 1\noom_kill 1\n")
    assert oom_kills(tmp_path) == 1


@pytest.mark.parametrize(
    ("return_code", "kills", "exit_code", "words"),
    [
        (-9, 1, 137, ["SIGKILL", "1.50 GB", "the system killed 1 "]),
        (-9, None, 137, ["SIGKILL", "most likely out of memory"]),
        (-9, 0, 137, ["SIGKILL", "by a person"]),
        (-11, 0, 138, ["SIGSEGV"]),
        (1, 0, 138, ["exit status 1"]),
    ],
)
def test_a_death_is_told_no_surer_than_it_is_known(return_code, kills, exit_code, words):
    stage = StageStatus()
    judge(stage, KernelOutcome(None, True, return_code), kills, int(1.5e9), (), ())
    assert (stage.state, stage.exit_code, stage.oom_kills) == ("failed", exit_code, kills)
    assert [word for word in words if word not in stage.reason] == []


SESSION = "from fvc_lib.execution.run.session import open_stage\nstage = open_stage('one', globals())"
SLEEP = "(folder / 'sleeping').write_text('')\nimport time\ntime.sleep(600)"
STUBBORN = "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + SLEEP


@pytest.fixture(scope="module", params=["own", "forked"])
def server(request):
    if request.param == "own":
        yield None
        return
    if sys.platform != "linux":
        pytest.skip("only Linux forks kernels")
    server = KernelServer(kernel_environment(os.environ))
    yield server
    server.close()


def begin_task(project, run, server) -> tuple[TaskRun, StageStatus, threading.Thread]:
    stage = StageStatus(attempts=1)
    planned, notebook = project.plan(run)[0], project.notebooks()["one"]
    task = TaskRun(run, project.config, planned.task, notebook, attempt=1, server=server)
    thread = threading.Thread(target=task.execute, args=(stage,))
    thread.start()
    return task, stage, thread


def test_a_task_that_is_asked_to_stop_is_told_as_stopped_and_not_as_failed(make_project, server):
    project = make_project(one=[SESSION, SLEEP, "output('one', '')"])
    run = project.begin()
    task, stage, thread = begin_task(project, run, server)
    wait_for((run.tables / "sleeping").exists, "the cell")
    task.signal(signal.SIGUSR1)
    thread.join()
    assert (stage.state, stage.exit_code, stage.error) == ("interrupted", 75, None)
    assert stage.reason == "stopped by SIGUSR1"
    cells = json.loads(run.partial_notebook("one").read_text())["cells"]
    states = [c["metadata"]["papermill"]["status"] for c in cells[1:]]
    assert states[-2:] == ["failed", "pending"]
    assert set(states[:-2]) == {"completed"}
    assert "<b>Stopped" in cells[0]["source"]
    assert "to go on: python run_notebooks.py --resume" in cells[0]["source"]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (StageError(name="DataError", message="", cell=1, exit_code=3), "failed", 3),
        (StageError(name="OutOfMemoryError", message="", cell=1), "failed", 1),
        (StageError(name="StoppedError", message="", cell=1, exit_code=75), "interrupted", 75),
        (StageError(name="RankFailedError", message="", cell=1, exit_code=1), "interrupted", 75),
        (StageError(name="KeyboardInterrupt", message="", cell=1), "interrupted", 75),
    ],
)
def test_after_a_signal_only_errors_that_it_cannot_have_caused_count(error, state, code):
    stage = StageStatus()
    judge(stage, KernelOutcome(error), 0, 0, (), (signal.SIGUSR1,))
    assert (stage.state, stage.exit_code) == (state, code)


# A signal in the kernel's own code, after a cell and before its answer.
BETWEEN = """
import types
helper = types.ModuleType("helper")
exec('''
import os, signal
def send_once(session, send, sent):
    def of_an_answer(*arguments, **options):
        if "execute_reply" in arguments:
            session.send = send
            sent.write_text("")
            os.kill(os.getpid(), signal.SIGUSR1)
        return send(*arguments, **options)
    session.send = of_an_answer
''', vars(helper))
session = get_ipython().kernel.session
helper.send_once(session, session.send, folder / "sent")
"""


def test_a_signal_between_two_cells_ends_the_next_and_not_the_kernels_answer(make_project, server):
    project = make_project(one=[SESSION, BETWEEN, SLEEP, "output('one', '')"])
    run = project.begin()
    _, stage, thread = begin_task(project, run, server)
    wait_for((run.tables / "sent").exists, "the signal")
    thread.join()
    assert (stage.state, stage.exit_code, stage.error.name) == ("interrupted", 75, "StoppedError")


def test_a_second_signal_kills_a_cell_that_does_not_listen(make_project, server):
    project = make_project(one=[STUBBORN])
    run = project.begin()
    task, stage, thread = begin_task(project, run, server)
    wait_for((run.tables / "sleeping").exists, "the cell")
    task.signal(signal.SIGTERM)
    time.sleep(0.3)
    assert thread.is_alive()
    task.signal(signal.SIGTERM)
    thread.join()
    assert (stage.state, stage.exit_code, stage.killed_by) == ("interrupted", 143, "SIGKILL")
    assert "<b>Stopped" in json.loads(run.partial_notebook("one").read_text())["cells"][0]["source"]


def test_a_kernel_runs_the_code_of_its_runner_and_goes_before_it_when_memory_ends(make_project, monkeypatch):
    """Whatever else is first on the path that the user set, or installed in this interpreter."""
    score = Path("/proc/self/oom_score_adj")
    look = f"score = Path('{score}').read_text() if Path('{score}').is_file() else ''"
    project = make_project(one=[look, "output('one', __import__('fvc_lib').__file__ + '\\n' + score)"])
    write_text(project.folder / "other/fvc_lib/__init__.py", "")
    monkeypatch.setenv("PYTHONPATH", str(project.folder / "other"))
    run = project.begin()
    assert project.execute(run)[0] == 0
    file, _, found = (run.tables / "one.txt").read_text().partition("\n")
    assert file == fvc_lib.__file__
    if score.is_file():
        assert int(found) == max(500, int(score.read_text()))
