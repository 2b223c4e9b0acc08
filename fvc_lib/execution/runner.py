"""Runs the planned tasks one after another and keeps ``status.json`` true while it does.

The kernel does the work; this process stays small, watches it from outside, forwards signals and says what happened.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from fvc_lib.execution.fingerprint import Fingerprint, fingerprint_of, record_finished
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.run_lock import run_lock
from fvc_lib.execution.stage_end import exit_code_of_signals
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import RunState, StageStatus, read_status, utc_now
from fvc_lib.execution.superseding import begin_fold_state, set_aside
from fvc_lib.execution.task_run import TaskRun
from fvc_lib.execution.terminal import Terminal
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths

STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}


class Runner:
    """One run being worked on; only one process at a time may do so."""

    def __init__(
        self, run: RunPaths, config: RunConfig, notebooks: Mapping[str, Notebook], terminal: Terminal | None = None
    ) -> None:
        self.run = run
        self.config = config
        self.notebooks = notebooks
        self.terminal = terminal or Terminal()
        self._at_work: TaskRun | None = None
        self._signals: list[int] = []
        self._taken_over = False
        self._told: set[str] = set()

    def execute(self, make_plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Run what ``make_plan`` says once the run is ours; returns the exit code. The first failure ends the run.

        Raises:
            UsageError: another process is at work on this run.
            OSError: the run folder cannot be written; the status says so where it still can.
        """
        with run_lock(self.run, say=self.terminal.line, on_lost=self._lost), self._signals_noted():
            plan = make_plan()
            self.status = read_status(self.run)
            self._begin(plan)
            exit_code = 1  # what an exception leaves behind
            try:
                exit_code = self._run_tasks(plan)
            finally:
                self._finish(exit_code)
            return 1 if self._taken_over else exit_code  # not 75: nobody is to requeue what another host works on

    def _begin(self, plan: Sequence[PlannedTask]) -> None:
        if any(stage.attempts for stage in self.status.stages.values()):
            self.status.attempt += 1
        for stage in self.status.stages.values():
            if stage.state == "running":  # its runner died without a word
                stage.state, stage.reason = "interrupted", "the runner died"
        self.status.state, self.status.exit_code, self.status.finished_utc = "running", None, None
        self.status.runner_pid, self.status.runner_host = os.getpid(), platform.node()
        # Before anything runs: a redo that fails half-way must not leave the old numbers standing as the run's own.
        set_aside(self.run, [planned.task for planned in plan if planned.run and planned.redo])
        for planned in plan:
            stage = self.status.stage(planned.task.key)
            if planned.run:
                stage.state, stage.reason = "pending", planned.reason
                stage.error = stage.exit_code = None
            elif planned.finished_before:
                stage.state, stage.reason = "done", None
        self._write_status()

    def _run_tasks(self, plan: Sequence[PlannedTask]) -> int:
        started = time.monotonic()
        before = self.status.duration_seconds or 0.0
        for planned in plan:
            if not planned.run:
                continue
            if self._signals:  # it came between two stages
                return exit_code_of_signals(self._signals)
            exit_code = self._run_task(planned.task)
            self.status.duration_seconds = round(before + time.monotonic() - started, 3)
            self._write_status()
            if exit_code:
                return exit_code
        return 0

    def _finish(self, exit_code: int) -> None:
        all_done = all(stage.state == "done" for stage in self.status.stages.values())
        unfinished: RunState = STATE_OF_EXIT.get(exit_code, "failed" if exit_code else "interrupted")
        self.status.state = "done" if all_done and not exit_code else unfinished
        self.status.exit_code = exit_code
        self.status.finished_utc = utc_now()
        self.status.runner_pid = None
        self._write_status()

    def _run_task(self, task: Task) -> int:
        begin_fold_state(self.run, task)
        stage = self.status.stage(task.key)
        stage.state, stage.started_utc, stage.finished_utc = "running", utc_now(), None
        stage.attempts += 1
        self._write_status()
        fingerprint = self._fingerprint(task)
        self._execute(task, stage)
        stage.finished_utc = utc_now()
        self.status.peak_rss_bytes = max(self.status.peak_rss_bytes or 0, stage.peak_rss_bytes or 0)
        if stage.exit_code == 0 and not self._taken_over:
            if self._fingerprint(task) == fingerprint:
                record_finished(task, fingerprint, self.run)
            else:
                self.terminal.line(f"  {task.key}: its code or inputs changed while it ran; --resume repeats it")
        self._say(task, stage)
        return stage.exit_code or 0

    def _execute(self, task: Task, stage: StageStatus) -> None:
        notebook = self.notebooks[task.stage.name]
        self._at_work = TaskRun(
            self.run, self.config, task, notebook, attempt=stage.attempts, say=self.terminal.line, told=self._told
        )
        ended = threading.Event()
        reporter = threading.Thread(target=self._report, args=(self._at_work, ended), daemon=True)
        reporter.start()
        try:
            self._at_work.execute(stage)
        finally:
            ended.set()
            reporter.join()
            self._at_work = None

    def _write_status(self) -> None:
        if not self._taken_over:
            self.status.write(self.run)

    def _fingerprint(self, task: Task) -> Fingerprint:
        return fingerprint_of(task, self.notebooks[task.stage.name], self.run, self.config)

    def _say(self, task: Task, stage: StageStatus) -> None:
        peak = f"{(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"
        self.terminal.line(f"{task.key:<28} {stage.state:<12} {stage.duration_seconds:7.1f} s  peak {peak}")
        if stage.state == "done":
            return
        what = stage.reason or ""
        if stage.error is not None:
            where = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
            what = f"{stage.error.name}: {stage.error.message}{where}"
        self.terminal.line(f"  what happened: {what}")
        self.terminal.line(f"  record: {self.run.partial_notebook(task.stage.name, task.fold)}")
        when = "to go on" if stage.state == "interrupted" else "once mended, go on"
        self.terminal.line(f"  {when}: python run_notebooks.py --resume {shlex.quote(str(self.run.root))}")

    def _report(self, at_work: TaskRun, ended: threading.Event) -> None:
        over = False
        while not over:
            over = ended.wait(0.5)
            now = at_work.snapshot()
            if not over:
                self.terminal.progress(now.key, now.elapsed_seconds, now.rss_bytes, now.progress)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _lost(self, message: str) -> None:
        """Another host took the run over while this process stood still: leave, and write nothing of its any more."""
        self._taken_over = True
        self.terminal.line(message)
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """What a task at work makes of it: ``TaskRun.signal``."""
        del frame
        self._signals.append(number)
        if self._at_work is not None:
            self._at_work.signal(number)
