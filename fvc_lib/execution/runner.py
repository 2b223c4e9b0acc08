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
from fvc_lib.execution.kernel_engine import KernelOutcome, execute
from fvc_lib.execution.memory_news import MemoryNews
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.progress import progress_path, read_progress
from fvc_lib.execution.run_lock import run_lock
from fvc_lib.execution.session import ATTEMPT_VARIABLE
from fvc_lib.execution.stage_end import exit_code_of_signals, judge
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import RunState, StageStatus, read_status, utc_now
from fvc_lib.execution.superseding import begin_fold_state, set_aside
from fvc_lib.execution.supervisor import KernelWatch
from fvc_lib.execution.terminal import Terminal
from fvc_lib.services.allocator_settings import allocator_environment
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths

STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}
# Threads that wait asleep: by default they spin, and where another process wants a core too, training a small network
# on two busy cores took 21 and 53 ms a clip (two readings) instead of 6. What the user has set stands.
KERNEL_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` and what a kernel needs beside it before torch starts there; what the user has set stands."""
    return {**KERNEL_ENVIRONMENT, **allocator_environment(environ), **environ}


class Runner:
    """One run being worked on; only one process at a time may do so."""

    def __init__(
        self, run: RunPaths, config: RunConfig, notebooks: Mapping[str, Notebook], terminal: Terminal | None = None
    ) -> None:
        self.run = run
        self.config = config
        self.notebooks = notebooks
        self.terminal = terminal or Terminal()
        self._watch: KernelWatch | None = None
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
        started = time.monotonic()
        outcome, watch = self._run_kernel(task, stage.attempts)
        judge(stage, outcome, watch, task.stage.outputs(self.run, task.fold), self._signals)
        stage.duration_seconds = round(time.monotonic() - started, 3)
        stage.finished_utc = utc_now()
        stage.peak_rss_bytes = watch.peak_rss_bytes
        self.status.peak_rss_bytes = max(self.status.peak_rss_bytes or 0, watch.peak_rss_bytes)
        progress = read_progress(progress_path(self.run, task.stage.name, task.fold))
        stage.last_step = None if progress is None else f"{progress.what} {progress.done}/{progress.total}"
        if stage.exit_code == 0 and not self._taken_over:
            name, fold = task.stage.name, task.fold
            self.run.partial_notebook(name, fold).replace(self.run.executed_notebook(name, fold))
            if self._fingerprint(task) == fingerprint:
                record_finished(task, fingerprint, self.run)
            else:
                self.terminal.line(f"  {task.key}: its code or inputs changed while it ran; --resume repeats it")
        self._say(task, stage)
        return stage.exit_code or 0

    def _write_status(self) -> None:
        if not self._taken_over:
            self.status.write(self.run)

    def _fingerprint(self, task: Task) -> Fingerprint:
        return fingerprint_of(task, self.notebooks[task.stage.name], self.run, self.config)

    def _run_kernel(self, task: Task, attempt: int) -> tuple[KernelOutcome, KernelWatch]:
        notebook = self.notebooks[task.stage.name]
        self._watch = watch = KernelWatch()
        ended = threading.Event()
        reporter = threading.Thread(target=self._report, args=(task, watch, ended), daemon=True)
        reporter.start()
        self.run.logs.mkdir(exist_ok=True)
        given = {ATTEMPT_VARIABLE: str(attempt), "FVC_RUNS_DIR": self.config.runs_dir}
        try:
            outcome = execute(
                notebook.path,
                self.run.partial_notebook(task.stage.name, task.fold),
                self._parameters(task, notebook),
                folder=notebook.path.parent,
                environment={**kernel_environment(os.environ), **given},
                log=self.run.logs / f"{task.key}.log",
                on_start=self._kernel_started,
            )
        finally:
            watch.stop()
            ended.set()
            reporter.join()
            self._watch = None
        return outcome, watch

    def _kernel_started(self, pid: int) -> None:
        if self._watch is not None:
            self._watch.start(pid)
            if self._signals:  # it came while the kernel started, which cannot handle one yet
                self._watch.signal_kernel(signal.SIGKILL)

    def _parameters(self, task: Task, notebook: Notebook) -> dict[str, object]:
        values: dict[str, object] = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        if task.fold is not None:
            values["fold"] = task.fold
        return {name: values[name] for name in notebook.parameters if name in values}

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

    def _report(self, task: Task, watch: KernelWatch, ended: threading.Event) -> None:
        started = time.monotonic()
        path = progress_path(self.run, task.stage.name, task.fold)
        news = MemoryNews(self.run.memory_events(task.stage.name, task.fold), self._told)
        over = False
        while not over:
            over = ended.wait(0.5)
            for message in news:
                self.terminal.line(f"  {task.key}: {message}")
            elapsed = time.monotonic() - started
            if not over:
                self.terminal.progress(task.key, elapsed, watch.peak_rss_bytes, read_progress(path))

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
        """First signal: the kernel saves and leaves. Second: it is killed. Terminal signals never reach the kernel."""
        del frame
        self._signals.append(number)
        if self._watch is not None:
            self._watch.signal_kernel(signal.SIGUSR1 if len(self._signals) == 1 else signal.SIGKILL)
