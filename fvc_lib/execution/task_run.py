"""One execution of one notebook: its kernel watched from outside, its end judged, its record in place.

Knows nothing of plans, locks or ``status.json``: whoever runs it does (``execution.runner``).
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fvc_lib import CHECKOUT
from fvc_lib.execution.end_lines import what_happened, what_next, where_it_was
from fvc_lib.execution.kernel_engine import KernelOutcome, execute
from fvc_lib.execution.kernel_log import never_started_hint, tail_of
from fvc_lib.execution.last_metric import last_metric
from fvc_lib.execution.memory_news import MemoryNews
from fvc_lib.execution.next_setting import after_another_death, after_memory_ended
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.progress import Progress, progress_path, read_progress
from fvc_lib.execution.rate import RateMeter
from fvc_lib.execution.session import ATTEMPT_VARIABLE
from fvc_lib.execution.stage_end import NEVER_STARTED, judge
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import StageStatus
from fvc_lib.execution.supervisor import KernelWatch
from fvc_lib.execution.told_record import tell_end
from fvc_lib.services.allocator_settings import allocator_environment
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_budget import memory_budget
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths

# Threads that wait asleep: by default they spin, and where another process wants a core too, training a small network
# on two busy cores took 21 and 53 ms a clip (two readings) instead of 6. What the user has set stands.
KERNEL_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
LOSS_SECONDS = 2.0


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` and what a kernel needs beside it before torch starts there; what the user has set stands."""
    return {**KERNEL_ENVIRONMENT, **allocator_environment(environ), **environ}


@dataclass(frozen=True)
class TaskProgress:
    """Where a task is, for the terminal.

    Attributes:
        key: the task's.
        elapsed_seconds: since it began.
        rss_bytes: what its kernel and the kernel's children hold now.
        progress: what it said last that it had done; None before it said anything.
        peak_rss_bytes: the most they held.
        loss: what it logged last.
        seconds_left: until what ``progress`` counts is done; None while nobody knows.
    """

    key: str
    elapsed_seconds: float
    rss_bytes: int
    progress: Progress | None
    peak_rss_bytes: int = 0
    loss: float | None = None
    seconds_left: float | None = None


class TaskRun:
    """Executes ``task`` once; ``execute`` may be called from any thread, the rest from any other meanwhile.

    Args:
        run: the run.
        config: its parameters.
        task: which stage, and fold.
        notebook: the stage's.
        attempt: which try this is, from 1.
        extra_environment: what this kernel gets beside the process's environment.
        say: gets each line that is for the terminal.
        told: what was said already in this run; shared by its tasks, so that five folds tell their policy once.
    """

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        task: Task,
        notebook: Notebook,
        *,
        attempt: int,
        extra_environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print,
        told: set[str] | None = None,
    ) -> None:
        self.run, self.config, self.task, self.notebook = run, config, task, notebook
        self._attempt = attempt
        self._extra = dict(extra_environment or {})
        self._watch = KernelWatch()
        self._redactor = Redactor({**os.environ, **self._extra})
        self._signals: list[int] = []
        self._started = time.monotonic()
        name, fold = task.stage.name, task.fold
        self._progress_path = progress_path(run, name, fold)
        self._progress_path.unlink(missing_ok=True)  # an earlier attempt's says nothing of this one
        self._rate, self._looked = RateMeter(), -LOSS_SECONDS
        self._last_loss: float | None = None
        self._news = MemoryNews(run.memory_events(name, fold), set() if told is None else told)
        self._say = say

    def execute(self, stage: StageStatus) -> None:
        """Run the notebook to its end and write into ``stage`` how it ended; of a success the record is renamed.

        Raises:
            OSError: the record or the log cannot be written.
        """
        self._started = time.monotonic()
        stage.host, stage.job_id = platform.node(), job_id(os.environ)
        outcome = self._run_kernel()
        name, fold = self.task.stage.name, self.task.fold
        kills, peak = self._watch.oom_kills(), self._watch.peak_rss_bytes
        _forget_last_attempt(stage)
        judge(stage, outcome, kills, peak, self.task.stage.outputs(self.run, fold), self._signals)
        stage.duration_seconds = round(time.monotonic() - self._started, 3)
        stage.peak_rss_bytes = peak
        progress = read_progress(self._progress_path)
        stage.last_step = None if progress is None else f"{progress.what} {progress.done}/{progress.total}"
        metric = last_metric(self.run.metrics(name, fold), self._attempt)
        stage.last_metric = None if metric is None else str(metric)
        if stage.exit_code == 0:
            self.run.partial_notebook(name, fold).replace(self.run.executed_notebook(name, fold))
        else:
            self._tell_end(stage)

    def _tell_end(self, stage: StageStatus) -> None:
        name, fold = self.task.stage.name, self.task.fold
        log_tail = ""
        if stage.error is not None and stage.error.name == NEVER_STARTED:
            log_tail = tail_of(self.run.stage_log(name, fold))
            stage.error.message += never_started_hint(log_tail)
        stage.next_setting = self._next_setting(stage)
        lines = [what_happened(stage), where_it_was(stage), what_next(self.run, stage)]
        tell_end(self.run.partial_notebook(name, fold), stage, [self._redactor.text(line) for line in lines], log_tail)

    def _next_setting(self, stage: StageStatus) -> str | None:
        """What the last attempt's end suggests; nothing where a message of its own says it better."""
        name, fold = self.task.stage.name, self.task.fold
        reads = self.notebook.parameters
        if stage.state == "interrupted":
            return None
        memory_error = stage.error is not None and "Memory" in stage.error.name
        if stage.exit_code == 137 or memory_error or stage.oom_kills:
            budget = memory_budget(self.config.mem_gb)
            if not stage.oom_kills and not memory_error and (stage.peak_rss_bytes or 0) < budget.total_bytes / 2:
                return None  # killed far below the limit, and nobody counted a kill for memory: rather by hand
            return after_memory_ended(self.config, reads, self.run.memory_events(name, fold), budget.total_bytes)
        return after_another_death(self.config, reads) if stage.exit_code == 138 else None

    def signal(self, number: int) -> None:
        """The first asks the kernel to save and leave, a second kills it. Terminal signals never reach the kernel."""
        self._signals.append(number)
        self._watch.signal_kernel(signal.SIGUSR1 if len(self._signals) == 1 else signal.SIGKILL)

    def snapshot(self) -> TaskProgress:
        """Where the task is now; tells what there is to tell of its memory."""
        for message in self._news:
            self._say(f"  {self.task.key}: {message}")
        now = time.monotonic()
        progress = read_progress(self._progress_path)
        if progress is not None:
            self._rate.see(now, progress.what, progress.done, progress.total)
        return TaskProgress(
            self.task.key,
            now - self._started,
            self._watch.rss_bytes,
            progress,
            self._watch.peak_rss_bytes,
            self._loss(now),
            None if progress is None else self._rate.seconds_left(now),
        )

    def _loss(self, now: float) -> float | None:
        """The last of this attempt, looked up every few seconds."""
        if now - self._looked >= LOSS_SECONDS:
            self._looked = now
            metric = last_metric(self.run.metrics(self.task.stage.name, self.task.fold), self._attempt)
            self._last_loss = metric.value if metric is not None and metric.metric == "loss" else None
        return self._last_loss

    def _run_kernel(self) -> KernelOutcome:
        name, fold = self.task.stage.name, self.task.fold
        self.run.logs.mkdir(exist_ok=True)
        # The code that the record speaks of, whatever is installed in this interpreter; children of the kernel as well.
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        attempt = {ATTEMPT_VARIABLE: str(self._attempt)}
        given = {"PYTHONPATH": path, **attempt, "FVC_RUNS_DIR": self.config.runs_dir, **self._extra}
        try:
            return execute(
                self.notebook.path,
                self.run.partial_notebook(name, fold),
                self._parameters(),
                folder=self.notebook.path.parent,
                environment={**kernel_environment(os.environ), **given},
                log=self.run.stage_log(name, fold),
                on_start=self._kernel_started,
                overflow=self.run.output_overflow(name, fold),
                root=self.run.root,
                redactor=self._redactor,
            )
        finally:
            self._watch.stop()

    def _kernel_started(self, pid: int) -> None:
        self._watch.start(pid)
        if self._signals:  # it came while the kernel started, which cannot handle one yet
            self._watch.signal_kernel(signal.SIGKILL)

    def _parameters(self) -> dict[str, object]:
        values: dict[str, object] = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        if self.task.fold is not None:
            values["fold"] = self.task.fold
        return {name: values[name] for name in self.notebook.parameters if name in values}


def job_id(environ: Mapping[str, str]) -> str | None:
    """SLURM's number of the job this process belongs to, ``123`` or of an array ``123_4``; None outside of one."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def _forget_last_attempt(stage: StageStatus) -> None:
    stage.error = stage.killed_by = stage.oom_kills = stage.next_setting = None
