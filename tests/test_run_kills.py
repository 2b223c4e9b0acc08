"""The demo, killed twenty times on its way, once as the runner and once as its kernel: it ends as if it had not been.

``make kills`` (about a quarter of an hour). Meanwhile another thread reads ``status.json`` again and again: at no
moment may it say anything that is not so.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import psutil
import pytest

from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.status import read_status
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import PREDICTIONS, RESULTS, read_table
from tests.faults.small_runs import assert_nothing_is_redone, untruths

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("FVC_KILLS_SEED", "0"))
NUM_KILLS = int(os.environ.get("FVC_KILLS", "20"))
LONGEST_LIFE_SECONDS = float(os.environ.get("FVC_KILLS_LIFE_SECONDS", "20"))
JOBS = os.environ.get("FVC_KILLS_JOBS", "1")
NUM_FOLDS = 5
Kill = Callable[[subprocess.Popen[str], random.Random], bool]
pytestmark = [pytest.mark.long, pytest.mark.fault(1)]


@dataclass
class Machine:
    """A folder with runs, cache and data of its own, and the demo started in it."""

    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the demo, or go on with it, in a process group of its own."""
        names = {"FVC_RUNS_DIR": "runs", "FVC_CACHE_DIR": "cache", "FVC_DATA_DIR": "data"}
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "terminal.txt").open("a") as terminal:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "run_notebooks.py"), *arguments, "--jobs", JOBS],
                cwd=self.folder, text=True, stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **{name: str(self.folder / value) for name, value in names.items()}},
            )  # fmt: skip

    def begin(self) -> subprocess.Popen[str]:
        """A new run of the demo."""
        return self.start("--params", str(ROOT / "params" / "demo.yaml"))

    def go_on(self) -> subprocess.Popen[str]:
        """``--resume latest``, or a new run where the first was killed before it began one."""
        return self.start("--resume", "latest") if self.runs() else self.begin()

    def runs(self) -> list[RunPaths]:
        """Its runs; a kill must never leave a second one."""
        return list_runs(self.folder / "runs")

    def said(self) -> str:
        """What the terminal showed, for a failing test."""
        return (self.folder / "terminal.txt").read_text()[-4000:]


@dataclass
class Reader(threading.Thread):
    """Reads the status all the time and notes every untruth; how often it read is told at the end."""

    machine: Machine
    num_reads: int = 0
    untruths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        """Until ``ended``."""
        while not self.ended.wait(0.1):
            for run in self.machine.runs():
                json.loads(run.status_json.read_text())  # whole at every moment
                self.untruths += [f"{key}: {what}" for key, what in untruths(run)]
                self.num_reads += 1


def kernels_of(process: psutil.Process) -> list[psutil.Process]:
    """The kernels among a runner's descendants."""
    return [child for child in process.children(recursive=True) if any("kernel" in part for part in child.cmdline())]


def kill_runner(process: subprocess.Popen[str], generator: random.Random) -> bool:
    """The runner alone: its kernels have to notice by themselves."""
    os.kill(process.pid, signal.SIGKILL)
    return True


def kill_kernel(process: subprocess.Popen[str], generator: random.Random) -> bool:
    """One of its kernels, where there is one at this moment."""
    try:
        kernels = kernels_of(psutil.Process(process.pid))
        if kernels:
            generator.choice(kernels).kill()
    except psutil.NoSuchProcess:
        return False
    return bool(kernels)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    machine = Machine(tmp_path_factory.mktemp("undisturbed") / "machine")
    assert machine.begin().wait(3600) == 0, machine.said()
    return machine.runs()[0]


@pytest.mark.parametrize("kill", [kill_runner, kill_kernel], ids=["runner", "kernel"])
def test_the_demo_survives_twenty_kills_at_random_moments(undisturbed, tmp_path, kill, record_property):
    machine, generator = Machine(tmp_path / "machine"), random.Random(f"{kill.__name__} {SEED}")
    reader = Reader(machine)
    reader.start()
    num_kills, finished_before = 0, {}
    while num_kills < NUM_KILLS:
        process = machine.go_on()
        killed = live_and_die(process, kill, generator)
        process.wait(600)
        assert killed or process.returncode in (0, 137), machine.said()
        if process.returncode == 0:  # it came to its end first: one more run, from the start, for the kills left
            check_equal(machine.runs()[-1], undisturbed)
            machine, finished_before = Machine(tmp_path / f"machine {num_kills}"), {}
            reader.machine = machine
            continue
        num_kills += 1
        if kill is kill_kernel:
            assert process.returncode == 137, machine.said()
        for run in machine.runs():
            assert_nothing_is_redone(run, finished_before)
            wait_until(lambda run=run: not is_worked_on(run), "the dead runner's lock to expire")
    process = machine.go_on()
    assert process.wait(3600) == 0, machine.said()
    reader.ended.set()
    reader.join()
    record_property("status_reads", reader.num_reads)
    print(f"{kill.__name__}: {num_kills} kills, status read {reader.num_reads} times")
    assert reader.untruths == []
    assert reader.num_reads > 20 * NUM_KILLS
    (run,) = machine.runs()
    assert_nothing_is_redone(run, finished_before)
    check_equal(run, undisturbed)


def live_and_die(
    process: subprocess.Popen[str],
    kill: Callable[[subprocess.Popen[str], random.Random], bool],
    generator: random.Random,
) -> bool:
    """Let it live for a random time, then kill; False when it ended by itself first."""
    end = time.monotonic() + generator.uniform(0.2, LONGEST_LIFE_SECONDS)
    while process.poll() is None:
        if time.monotonic() >= end and kill(process, generator):
            return True
        time.sleep(0.02)
    return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def check_equal(run: RunPaths, undisturbed: RunPaths) -> None:
    """Predictions, results and metrics to the bit."""
    for fold in range(NUM_FOLDS):
        ours, theirs = (read_table(each.predictions(fold), PREDICTIONS) for each in (run, undisturbed))
        assert ours.equals(theirs), f"fold {fold}"
        assert metrics(run, fold).equals(metrics(undisturbed, fold)), f"metrics of fold {fold}"
    assert read_table(run.results, RESULTS).equals(read_table(undisturbed.results, RESULTS))
    assert read_status(run).state == "done"


def metrics(run: RunPaths, fold: int) -> pl.DataFrame:
    """What was measured, without when and in which attempt; a step that was repeated says the same again."""
    lines = run.metrics("04_fold_training", fold).read_text().splitlines()
    names = ("step", "epoch", "phase", "metric", "value")
    rows = set()
    for line in lines:
        try:
            rows.add(tuple(json.loads(line).get(name) for name in names))
        except ValueError:  # torn by a kill; its step was repeated, and said again
            continue
    return pl.DataFrame(sorted(rows, key=str), schema=list(names), orient="row", infer_schema_length=None)
