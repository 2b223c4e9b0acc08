"""Ranks and whoever launched them: they end together, and what is saved has been told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fvc_lib.engine.distributed import launch as rank_launcher
from fvc_lib.engine.distributed import launch as rank_reports
from fvc_lib.engine.distributed.launch import LauncherSilentError, RankReports, ReportReader, launch_from_here
from fvc_lib.engine.watching import NoMetrics
from fvc_lib.services.checkpoints import LATEST, load_document
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory_policy import NoObserver
from fvc_lib.services.metric_log import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, elsewhere
from tests.kits import standin_srun

ROOT = Path(__file__).parents[2]
NUM_STEPS = 30
LAUNCHER = """
import sys
from pathlib import Path
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.services.config import RunConfig
from fvc_lib.services.metric_log import MetricLog
from fvc_lib.services.run_paths import RunPaths
paths, config = RunPaths(Path(sys.argv[1])), RunConfig.model_validate_json(sys.argv[2])
with MetricLog(paths.metrics("04_fold_training", 0), run_id=paths.run_id, fold=0) as log:
    train_fold(paths, config, 0, metric_log=log, progress=lambda done, planned: print(done, flush=True))
"""


@dataclass
class Launched:
    """A training in another process, and its ranks."""

    launcher: psutil.Popen
    ranks: list[psutil.Process]

    def has_ended(self) -> bool:
        """All of it, within a time that is only there to end a test that has failed."""
        _, alive = psutil.wait_procs(self.ranks, timeout=600)
        return not alive


@pytest.fixture
def launch(two_ranks):
    """``launch(steps)``: a training on two ranks that has told so many steps; ended in the end."""
    begun = []

    def start(steps):
        arguments = [str(two_ranks.paths.root), two_ranks.config.model_dump_json()]
        launcher = psutil.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        begun.append(Launched(launcher, []))
        while int(launcher.stdout.readline()) < steps:
            pass
        begun[-1].ranks = ranks_of_run(two_ranks.paths.root)
        assert len(begun[-1].ranks) == 2
        return begun[-1]

    yield start
    for training in begun:
        for process in (training.launcher, *training.ranks):
            if process.is_running():
                process.kill()
        training.launcher.wait()
        training.launcher.stdout.close()


@pytest.fixture
def two_ranks(tiny_training):
    """The small run on two ranks, which saves whenever it may."""
    return tiny_training.with_config(
        num_ranks=2, epochs=6, early_stopping_epochs=0, learning_rate=1e-4, memory_preflight=False,
        checkpoint_minutes=0, shuffled_label_control=False,
    )  # fmt: skip


@pytest.fixture
def under_srun(monkeypatch, tmp_path):
    """As in a SLURM job with two tasks, whose daemon keeps what srun leaves."""
    standin_srun.install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.setenv("SLURM_NTASKS", "2")


def ranks_of_run(root):
    """Whoever started them, and wherever they are."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[1:4] == ["-m", "fvc_lib.tasks.rank", str(root)]:
            found.append(process)
    return found


def steps_logged(paths):
    rows = [json.loads(line) for line in paths.metrics(STAGE, 0).read_text().splitlines()]
    return [row["step"] for row in rows if (row["phase"], row["metric"]) == ("train", "loss")]


def step_saved(paths):
    return load_document(paths.fold_checkpoints(0) / LATEST, 1)["step"]


def finish(tiny, paths):
    with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=2) as log:
        return train_fold(paths, tiny.config, 0, metric_log=log, attempt=2)


def srun_of(launcher):
    return next(child for child in launcher.children() if any("standin_srun" in part for part in child.cmdline()))


@pytest.mark.long
@pytest.mark.fault(1)
def test_ranks_under_srun_end_with_a_killed_kernel_and_no_step_is_saved_untold(two_ranks, under_srun, launch):
    """What ends a kernel ends its process group, srun in it: nobody is left to close the ranks' input.

    It hears nothing for a while before, in which the ranks could take many steps.
    """
    training = launch(steps=3)
    assert all(os.getsid(rank.pid) != training.launcher.pid for rank in training.ranks)
    os.killpg(training.launcher.pid, signal.SIGSTOP)
    time.sleep(2)
    os.killpg(training.launcher.pid, signal.SIGKILL)
    assert training.has_ended()
    logged = steps_logged(two_ranks.paths)
    assert logged == list(range(1, len(logged) + 1))
    assert 1 <= step_saved(two_ranks.paths) <= logged[-1] < NUM_STEPS


@pytest.mark.long
@pytest.mark.fault(1)
@pytest.mark.parametrize("steps", [1, 4])
def test_kill_9_of_the_kernel_leaves_no_gap_in_the_metric_log(two_ranks, under_srun, launch, tmp_path, steps):
    training = launch(steps)
    os.killpg(training.launcher.pid, signal.SIGKILL)
    assert training.has_ended()
    whole = elsewhere(two_ranks, tmp_path / "whole" / "run_1")
    finish(two_ranks, whole)
    outcome = finish(two_ranks, two_ranks.paths)
    assert steps_logged(whole) == list(range(1, NUM_STEPS + 1))
    assert metrics_of(two_ranks.paths) == metrics_of(whole)
    assert outcome.training.inexact_because == ()


def metrics_of(paths):
    """Lines that two attempts wrote must agree, and count once."""
    found = {}
    for row in map(json.loads, paths.metrics(STAGE, 0).read_text().splitlines()):
        key = (row["step"], row["epoch"], row["phase"], row["metric"])
        assert found.setdefault(key, row["value"]) == row["value"], key
    return found


@pytest.mark.long
@pytest.mark.fault(1)
def test_ranks_end_with_an_srun_that_is_killed_although_their_launcher_lives(under_srun, two_ranks, launch):
    training = launch(steps=1)
    srun_of(training.launcher).kill()
    assert training.has_ended()
    assert training.launcher.wait(60) == 1


@pytest.mark.slow
@pytest.mark.fault(1)
def test_a_launcher_that_fails_ends_the_ranks_under_srun(under_srun, two_ranks):
    """Its own error comes out, and srun has been asked first: killed at once it would have left them."""

    class Full:
        def log(self, **line):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        train_fold(two_ranks.paths, two_ranks.config, 0, metric_log=Full())
    assert psutil.wait_procs(ranks_of_run(two_ranks.paths.root), timeout=600)[1] == []


def test_ranks_that_are_told_to_stop_before_they_listen_were_stopped(two_ranks):
    """As by scancel, which reaches the ranks before their launcher asks them: there is nothing to save yet."""

    def stop():
        for rank in ranks_of_run(two_ranks.paths.root):
            rank.terminate()
        return False

    with pytest.raises(StoppedError, match="stopped as asked"):
        train_fold(two_ranks.paths, two_ranks.config, 0, metric_log=NoMetrics(), stop=stop)


@pytest.fixture
def listening():
    """``listening(lines)``: a rank's reports, whose launcher has taken so many lines and answers what they ask."""

    def make(taken):
        stream = io.StringIO()
        reports = RankReports(0, stream)
        reader = ReportReader(NoMetrics(), NoObserver(), None, answer=lambda number: reports.hear(f"{number}\n"))

        def launcher():
            heard = 0
            while heard < taken:
                for line in stream.getvalue().splitlines()[heard:]:
                    reader.take(line)
                    heard += 1

        thread = threading.Thread(target=launcher)
        thread.start()
        return reports, thread

    return make


def test_a_rank_settles_when_the_launcher_has_taken_all_it_was_told(listening):
    reports, launcher = listening(taken=4)
    for _ in range(2):
        reports.log(step=1, epoch=1, phase="train", metrics={"loss": 0.5})
        reports.settle()
    launcher.join()


def test_a_launcher_that_says_nothing_is_not_waited_for_for_ever(listening, monkeypatch):
    monkeypatch.setattr(rank_reports, "_ANSWER_SECONDS", 0.001)
    reports, launcher = listening(taken=1)
    reports.settle()
    launcher.join()
    with pytest.raises(LauncherSilentError, match="gave no answer"):
        reports.settle()


def test_a_launch_names_processes_that_live(two_ranks):
    with subprocess.Popen(["sleep", "60"]) as child:
        launch = launch_from_here(two_ranks.config, [child.pid])
        fields = json.loads(launch.to_line())
        assert RunConfig.model_validate_json(fields["config"]) == two_ranks.config
        assert [pid for pid, _ in launch.processes] == [os.getpid(), child.pid]
        assert all(rank_launcher._lives(pid, created) for pid, created in launch.processes)
        assert not rank_launcher._lives(child.pid, launch.processes[1][1] - 60)  # the number is another's now
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not rank_launcher._lives(*launch.processes[1])  # although nobody has waited for it
    assert not rank_launcher._lives(*launch.processes[1])


def test_a_rank_that_is_told_nothing_ends(two_ranks):
    command = [sys.executable, "-m", "fvc_lib.tasks.rank", str(two_ranks.paths.root), "--fold", "0"]
    done = subprocess.run(
        [*command, "--launched"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has ended before it said what to train" in done.stderr
