"""Execute one notebook once: watch its kernel, judge how it ended, and leave its record in place.

Plans, locks and ``status.json`` are the runner's.
"""

import json
import os
import platform
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.stages import Notebook, Task
from fvc_lib.execution.run import exit_codes
from fvc_lib.execution.run.session import Progress, progress_path, read_progress
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


class RateMeter:
    """Estimates the time left from the pace of the last steps.

    Steps before this attempt do not count, because a resumed training begins in the middle.
    """

    def __init__(self) -> None:
        self._kind: tuple[str, int] | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=60)  # looked at twice a second: half a minute at least

    def see(self, now: float, what: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` were done at ``now`` (monotonic seconds)."""
        if (what, total) != self._kind or (self._samples and done < self._samples[-1][1]):
            self._kind = (what, total)
            self._samples.clear()
        if not self._samples or done > self._samples[-1][1]:
            self._samples.append((now, done))

    def seconds_left(self, now: float) -> float | None:
        """Return the estimate; None while too few steps were seen."""
        if self._kind is None or len(self._samples) < 2 or self._samples[-1][0] - self._samples[0][0] < 3.0:
            return None
        (began, at_first), (last, done) = self._samples[0], self._samples[-1]
        per_step = (last - began) / (done - at_first)
        # Of a step that takes longer than usual, no more than its usual time counts down.
        return max(0.0, (self._kind[1] - done) * per_step - min(now - last, per_step))


class MemoryNews:
    """New messages of a stage's memory log (``memory/events/<stage>.jsonl``), for the terminal.

    Args:
        path: the log; it may not exist yet.
        said: messages that were shown, shared by the tasks of a run, so that five folds show their policy once.
    """

    def __init__(self, path: Path, said: set[str]) -> None:
        self._path, self._said = path, said
        self._position = path.stat().st_size if path.is_file() else 0

    def __iter__(self) -> Iterator[str]:
        """Yield the messages written since the last call."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                lines = stream.read()
        except OSError:  # not there yet
            return
        whole = lines[: lines.rfind(b"\n") + 1]  # the last line may be half written
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                message = json.loads(line)["message"]
            except (ValueError, LookupError, TypeError):
                continue
            if isinstance(message, str) and message and message not in self._said:
                self._said.add(message)
                yield message


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
LOSS_SECONDS = 2.0


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the allocator's settings, which count before torch starts, and this code on the path."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    return {**KERNEL_ENVIRONMENT, **allocator_environment(environ), **environ, "PYTHONPATH": path}


@dataclass(frozen=True)
class TaskProgress:
    """The progress of a task, for the terminal."""

    key: str  # the task's
    elapsed_seconds: float  # since it began
    rss_bytes: int  # what its kernel and the kernel's children hold now
    progress: Progress | None  # what it said last that it had done; None before it said anything
    peak_rss_bytes: int = 0  # the most they held
    loss: float | None = None  # what it logged last
    seconds_left: float | None = None  # until what ``progress`` counts is done; None while nobody knows


class TaskRun:
    """Executes a task once. ``execute`` runs in a thread; other threads may call the other methods meanwhile.

    Args:
        run: the run.
        config: its parameters.
        task: the task.
        notebook: its notebook.
        attempt: from 1.
        extra_environment: variables that the kernel gets on top of this process's.
        say: called with each line for the terminal.
        said: see ``MemoryNews``.
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
        said: set[str] | None = None,
    ) -> None:
        self.run, self.config, self.task, self.notebook = run, config, task, notebook
        self._attempt = attempt
        self._extra = dict(extra_environment or {})
        self._watch = KernelWatch()
        self._signals: list[int] = []
        self._started = time.monotonic()
        name, fold = task.stage.name, task.fold
        self._progress_path = progress_path(run, name, fold)
        self._progress_path.unlink(missing_ok=True)  # an earlier attempt's says nothing of this one
        self._rate, self._looked = RateMeter(), -LOSS_SECONDS
        self._last_loss: float | None = None
        self._news = MemoryNews(run.memory_events(name, fold), set() if said is None else said)
        self._say = say

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

    def snapshot(self) -> TaskProgress:
        """Return the task's progress, and show new messages on its memory."""
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
        """Return the last loss of this attempt, read every two seconds."""
        if now - self._looked >= LOSS_SECONDS:
            self._looked = now
            row = last_metric(self.run.metrics(self.task.stage.name, self.task.fold), self._attempt)
            self._last_loss = row.get("value") if row is not None and row.get("metric") == "loss" else None
        return self._last_loss

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
