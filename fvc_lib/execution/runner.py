"""Runs the planned tasks one after another and keeps ``status.json`` true while it does.

The kernel does the work; this process stays small, watches it from outside, forwards signals and says what happened.
"""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fvc_lib.execution.fingerprint import fingerprint_of, record_finished
from fvc_lib.execution.kernel_engine import KernelOutcome, execute
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.progress import progress_path, read_progress
from fvc_lib.execution.session import ATTEMPT_VARIABLE
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import RunState, StageError, StageStatus, read_status, utc_now
from fvc_lib.execution.supervisor import KernelWatch
from fvc_lib.execution.terminal import Terminal
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths

STATE_OF_EXIT: dict[int, RunState] = {0: "done", 75: "requeue", 130: "interrupted", 143: "interrupted"}
# The names of our own errors as a notebook's record shows them, and what each makes a command leave with.
EXIT_OF_ERROR = {"UsageError": 2, "DataError": 3, "LeakageError": 3, "StoppedError": 75}


class Runner:
    """One run being worked on; only one process at a time may do so."""

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        notebooks: Mapping[str, Notebook],
        terminal: Terminal | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.notebooks = notebooks
        self.terminal = terminal or Terminal()
        self.status = read_status(run)
        self._watch: KernelWatch | None = None
        self._signals: list[int] = []

    def execute(self, plan: Sequence[PlannedTask]) -> int:
        """Run what ``plan`` says; returns the exit code. The first task that fails ends the run.

        Raises:
            UsageError: another process is at work on this run.
        """
        with _only_one(self.run), self._signals_noted():
            self._begin(plan)
            started = time.monotonic()
            before = self.status.duration_seconds or 0.0
            exit_code = 0
            for planned in plan:
                if not planned.run:
                    continue
                # A signal during a stage that ended well all the same still ends the run.
                exit_code = self._run_task(planned) or (_exit_of_signals(self._signals) if self._signals else 0)
                self.status.duration_seconds = round(before + time.monotonic() - started, 3)
                self.status.write(self.run)
                if exit_code:
                    break
            self._finish(exit_code)
            return exit_code

    def _begin(self, plan: Sequence[PlannedTask]) -> None:
        for stage in self.status.stages.values():
            if stage.state == "running":  # its runner died without a word
                stage.state, stage.reason = "interrupted", "the runner died"
        if self.status.state != "running" or any(stage.attempts for stage in self.status.stages.values()):
            self.status.attempt += 1
        self.status.state, self.status.exit_code, self.status.finished_utc = "running", None, None
        self.status.runner_pid, self.status.runner_host = os.getpid(), platform.node()
        for planned in plan:
            stage = self.status.stage(planned.task.key)
            if planned.run:
                stage.state, stage.reason, stage.error, stage.exit_code = (
                    "pending",
                    planned.reason,
                    None,
                    None,
                )
        self.status.write(self.run)

    def _finish(self, exit_code: int) -> None:
        self.status.state = STATE_OF_EXIT.get(exit_code, "failed")
        self.status.exit_code = exit_code
        self.status.finished_utc = utc_now()
        self.status.runner_pid = None
        self.status.write(self.run)

    def _run_task(self, planned: PlannedTask) -> int:
        task = planned.task
        stage = self.status.stage(task.key)
        stage.state, stage.started_utc, stage.finished_utc = "running", utc_now(), None
        stage.attempts += 1
        self.status.write(self.run)
        if planned.finished_before:
            self._set_aside(task)
        fingerprint = fingerprint_of(task, self.notebooks[task.stage.name], self.run, self.config)
        started = time.monotonic()
        outcome, watch = self._run_kernel(task, stage.attempts)
        self._judge(task, stage, outcome, watch)
        stage.duration_seconds = round(time.monotonic() - started, 3)
        stage.finished_utc = utc_now()
        stage.peak_rss_bytes = max(stage.peak_rss_bytes or 0, watch.peak_rss_bytes)
        self.status.peak_rss_bytes = max(self.status.peak_rss_bytes or 0, watch.peak_rss_bytes)
        progress = read_progress(progress_path(self.run, task.stage.name, task.fold))
        stage.last_step = None if progress is None else f"{progress.what} {progress.done}/{progress.total}"
        if stage.exit_code == 0:
            self.run.partial_notebook(task.stage.name, task.fold).replace(
                self.run.executed_notebook(task.stage.name, task.fold)
            )
            record_finished(task, fingerprint, self.run)
        self._say(task, stage)
        return stage.exit_code or 0

    def _run_kernel(self, task: Task, attempt: int) -> tuple[KernelOutcome, KernelWatch]:
        notebook = self.notebooks[task.stage.name]
        self._watch = watch = KernelWatch()
        ended = threading.Event()
        reporter = threading.Thread(target=self._report, args=(task, watch, ended), daemon=True)
        reporter.start()
        try:
            outcome = execute(
                notebook.path,
                self.run.partial_notebook(task.stage.name, task.fold),
                self._parameters(task, notebook),
                folder=notebook.path.parent,
                environment={
                    **os.environ,
                    ATTEMPT_VARIABLE: str(attempt),
                    "FVC_RUNS_DIR": self.config.runs_dir,
                },
                log=self._log(task),
                on_start=watch.start,
            )
        finally:
            watch.stop()
            ended.set()
            reporter.join()
            self._watch = None
        return outcome, watch

    def _log(self, task: Task) -> Path:
        self.run.logs.mkdir(exist_ok=True)
        return self.run.logs / f"{task.key}.log"

    def _parameters(self, task: Task, notebook: Notebook) -> dict[str, object]:
        values: dict[str, object] = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        if task.fold is not None:
            values["fold"] = task.fold
        return {name: values[name] for name in notebook.parameters if name in values}

    def _judge(self, task: Task, stage: StageStatus, outcome: KernelOutcome, watch: KernelWatch) -> None:
        """Turn how the kernel ended into state, reason, error and exit code."""
        if outcome.ok:
            missing = [str(p) for p in task.stage.outputs(self.run, task.fold) if not p.is_file()]
            if missing:
                stage.state, stage.exit_code = "failed", 1
                stage.error = StageError(
                    name="MissingOutput", message=f"the notebook ended without {', '.join(missing)}"
                )
            else:
                stage.state, stage.exit_code, stage.reason = "done", 0, None
            return
        if self._signals:
            stage.state, stage.exit_code = "interrupted", _exit_of_signals(self._signals)
            stage.reason = f"stopped by {signal.Signals(self._signals[0]).name}"
            return
        stage.state = "failed"
        if outcome.error is not None:
            stage.exit_code = EXIT_OF_ERROR.get(outcome.error.name, 1)
            stage.state = "interrupted" if stage.exit_code == 75 else "failed"
            stage.reason = "a cell failed"
            stage.error = StageError(**vars(outcome.error))
        else:
            stage.exit_code, stage.reason = watch.exit_code_of_death(outcome.return_code)

    def _set_aside(self, task: Task) -> None:
        """A stale result's fold checkpoints make room for new ones; nothing is deleted."""
        folder = self.run.fold_checkpoints(task.fold) if task.fold is not None else None
        if folder is not None and folder.is_dir():
            number = 1
            while (target := folder.with_name(f"{folder.name}.superseded_{number}")).exists():
                number += 1
            folder.rename(target)

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
        self.terminal.line(f"  to go on: python run_notebooks.py --resume {self.run.root}")

    def _report(self, task: Task, watch: KernelWatch, ended: threading.Event) -> None:
        started = time.monotonic()
        path = progress_path(self.run, task.stage.name, task.fold)
        while not ended.wait(0.5):
            self.terminal.progress(task.key, time.monotonic() - started, watch.peak_rss_bytes, read_progress(path))

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """First signal: the kernel saves and leaves. Second: it is killed. Signals reach only us, never the kernel."""
        del frame
        self._signals.append(number)
        if self._watch is not None:
            self._watch.signal_kernel(signal.SIGUSR1 if len(self._signals) == 1 else signal.SIGKILL)


def _exit_of_signals(numbers: Sequence[int]) -> int:
    if signal.SIGINT in numbers:
        return 130
    return 75 if len(numbers) == 1 else 143


@contextmanager
def _only_one(run: RunPaths) -> Iterator[None]:
    """Hold the run's lock; the operating system drops it when the process dies, however it dies."""
    path = run.root / "run.lock"
    with Path(path).open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise UsageError(
                f"{run.run_id}: another process is at work on this run ({stream.read().strip() or 'unknown'}). "
                "Wait for it, or stop it, then repeat the command."
            ) from error
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield
