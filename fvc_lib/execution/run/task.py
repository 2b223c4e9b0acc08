"""Execute one notebook once: watch its kernel, judge how it ended, and leave its record in place.

Plans, locks and ``status.json`` are the runner's.
"""

import os
import platform
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.stages import Notebook, Task
from fvc_lib.execution.run import exit_codes
from fvc_lib.execution.run.session import progress_path, read_progress
from fvc_lib.execution.run.status import StageStatus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory.budget import ProcessTree, control_groups
from fvc_lib.services.memory.policy import allocator_environment
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths

if TYPE_CHECKING:
    from fvc_lib.execution.papermill_engine import KernelOutcome

SAMPLE_INTERVAL_SECONDS = 0.2


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how often the system has killed for memory in this process's control group; None if nothing counts it.

    The nearest group that has a counter counts. ``root`` is the root of ``/proc`` and ``/sys``.
    """
    for _, folder in control_groups(root):
        for counter in ("memory.events", "memory.oom_control"):  # of version 2 and 1
            with suppress(OSError):
                if match := re.search(r"^oom_kill (\d+)", (folder / counter).read_text(), re.MULTILINE):
                    return int(match[1])
    return None


class KernelWatch:
    """Samples the resident memory of a process and its children in a thread until ``stop``.

    ``peak_rss_bytes`` is the largest of the sampled sum over the tree and the kernel's own high-water mark (VmHWM),
    which a stage resets when its phase changes.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.rss_bytes = 0  # now
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._oom_kills = oom_kills()
        self._thread = threading.Thread(target=self._watch, name="fvc-kernel-watch", daemon=True)

    def start(self, pid: int) -> None:
        """Begin watching process ``pid``."""
        self.pid, self._tree = pid, ProcessTree(pid)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; harmless when never started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def signal_kernel(self, number: signal.Signals) -> None:
        """Send a signal to the kernel's process, if it lives."""
        if self.pid is not None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).send_signal(number)

    def oom_kills(self) -> int | None:
        """Return how often the system has killed for memory since this watch was made; None if nothing counts it."""
        now = oom_kills()
        return None if now is None or self._oom_kills is None else max(0, now - self._oom_kills)

    def _watch(self) -> None:
        while True:
            held = self._tree.measure()
            self.rss_bytes = held.tree_bytes
            self.peak_rss_bytes = max(self.peak_rss_bytes, held.tree_bytes, held.high_water_bytes)
            if self._stop.wait(SAMPLE_INTERVAL_SECONDS):
                return


def last_metric(path: Path, attempt: int) -> dict[str, Any] | None:
    """Return the last row of the loss in ``attempt``, else its last row; None if it logged none."""
    newest = None
    for row in exit_codes.rows_from_the_end(path):
        if row.get("attempt") != attempt or not isinstance(row.get("value"), float | int | None):
            break
        if row.get("metric") == "loss":
            return row
        newest = newest or row
    return newest


def metric_text(row: Mapping[str, Any]) -> str:
    """Return such as ``loss 0.31 (train) at step 12 of epoch 3``."""
    value = "not a number" if row.get("value") is None else f"{row['value']:.4g}"
    return f"{row.get('metric')} {value} ({row.get('phase')}) at step {row.get('step')} of epoch {row.get('epoch')}"


KERNEL_ENVIRONMENT = {
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else ipykernel's debugger writes a warning into the first cell
}
LEAST_SECONDS = 3.0  # before the time left is estimated


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the allocator's settings, which count before torch starts, and this code on the path."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    return {**KERNEL_ENVIRONMENT, **allocator_environment(environ), **environ, "PYTHONPATH": path}


def duration(seconds: float) -> str:
    """Return such as ``42 s``, ``3:05 min`` or ``2:03 h``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class TaskRun:
    """Executes a task once. ``execute`` runs in a thread; other threads may call the other methods meanwhile.

    Args:
        run: the run.
        config: its parameters.
        task: the task.
        notebook: its notebook.
        attempt: from 1.
        extra_environment: variables that the kernel gets on top of this process's.
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
    ) -> None:
        self.run, self.config, self.task, self.notebook = run, config, task, notebook
        self._attempt = attempt
        self._extra = dict(extra_environment or {})
        self._watch = KernelWatch()
        self._signals: list[int] = []
        self._started = time.monotonic()
        name, fold = task.stage.name, task.fold
        self._progress_path = progress_path(run, name, fold)
        self._progress_path.unlink(missing_ok=True)  # an earlier attempt's does not count
        self._counted = ("", 0)  # the work that progress counts, and its total
        self._first = (0.0, 0)  # when it was first seen, and how much was done then

    def execute(self, stage: StageStatus) -> None:
        """Run the notebook and write into ``stage`` how it ended; rename the record after a success.

        Raises:
            OSError: the record or the log cannot be written.
        """
        self._started = time.monotonic()
        stage.host, stage.job_id = platform.node(), job_id(os.environ)
        outcome = self._run_kernel()
        name, fold = self.task.stage.name, self.task.fold
        kills, peak = self._watch.oom_kills(), self._watch.peak_rss_bytes
        stage.error = stage.killed_by = stage.advice = None
        exit_codes.judge(stage, outcome, kills, peak, self.task.stage.outputs(self.run, fold), self._signals)
        stage.duration_seconds = round(time.monotonic() - self._started, 3)
        stage.peak_rss_bytes = peak
        progress = read_progress(self._progress_path)
        stage.last_step = None if progress is None else f"{progress.what} {progress.done}/{progress.total}"
        metric = last_metric(self.run.metrics(name, fold), self._attempt)
        stage.last_metric = None if metric is None else metric_text(metric)
        if stage.exit_code == 0:
            self.run.partial_notebook(name, fold).replace(self.run.executed_notebook(name, fold))
            return
        environ = {**os.environ, **self._extra}
        stage.advice = exit_codes.advice_after(stage, self.config, self.run.memory(name, fold), environ)
        exit_codes.tell_end(self.run, self.task, stage)

    def signal(self, number: int) -> None:
        """Ask the kernel to save and leave, or kill it at the second call."""
        self._signals.append(number)
        self._watch.signal_kernel(signal.SIGUSR1 if len(self._signals) == 1 else signal.SIGKILL)

    def line(self) -> str:
        """Return the task's line for the terminal, the most important first, because a narrow one cuts the end."""
        now, progress = time.monotonic(), read_progress(self._progress_path)
        parts = [self.task.key, duration(now - self._started)]
        if progress is not None:
            parts.append(f"{progress.what} {progress.done}/{progress.total}")
            if self._counted != (progress.what, progress.total):
                self._counted, self._first = (progress.what, progress.total), (now, progress.done)
        metric = last_metric(self.run.metrics(self.task.stage.name, self.task.fold), self._attempt)
        if metric is not None and metric.get("metric") == "loss" and metric.get("value") is not None:
            parts.append(f"loss {metric['value']:.4g}")
        since, done = now - self._first[0], 0 if progress is None else progress.done - self._first[1]
        if progress is not None and done and since >= LEAST_SECONDS:  # the pace of this attempt
            parts.append(f"{duration(since / done * (progress.total - progress.done))} left")
        held = self._watch.rss_bytes
        parts.append(f"memory {held / 1e9:.2f} GB, peak {max(self._watch.peak_rss_bytes, held) / 1e9:.2f}")
        return "".join(char if char.isprintable() else "?" for char in f"  {'  '.join(parts)}")

    def _run_kernel(self) -> "KernelOutcome":
        from fvc_lib.execution.papermill_engine import KernelRequest, execute  # papermill takes a second to load

        name, fold = self.task.stage.name, self.task.fold
        given = {ATTEMPT_VARIABLE: str(self._attempt), "FVC_RUNS_DIR": self.config.runs_dir, **self._extra}
        request = KernelRequest(
            record=self.run.partial_notebook(name, fold),
            folder=self.notebook.path.parent,
            environment={**kernel_environment(os.environ), **given},
            log=self.run.stage_log(name, fold),
            on_start=self._kernel_started,
        )
        try:
            return execute(self.notebook.path, self._parameters(), request)
        finally:
            self._watch.stop()

    def _kernel_started(self, pid: int) -> None:
        self._watch.start(pid)
        with suppress(OSError):  # when memory ends, Linux shall kill a kernel before its runner
            score = Path(f"/proc/{pid}/oom_score_adj")
            score.write_text(str(max(500, int(score.read_text()))))
        if self._signals:  # it came while the kernel started, which cannot handle one yet
            self._watch.signal_kernel(signal.SIGKILL)

    def _parameters(self) -> dict[str, object]:
        values: dict[str, object] = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        if self.task.fold is not None:
            values["fold"] = self.task.fold
        return {name: values[name] for name in self.notebook.parameters if name in values}


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this process's SLURM job, ``123`` or in an array ``123_4``; None outside one."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None
