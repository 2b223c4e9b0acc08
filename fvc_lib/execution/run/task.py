"""One execution of one notebook: its kernel watched from outside, its end judged, its record in place.

Knows nothing of plans, locks or ``status.json``: whoever runs it does (``execution.runner``).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.stages import Notebook, Task
from fvc_lib.execution.run import stage_end
from fvc_lib.execution.run.session import ATTEMPT_VARIABLE, Progress, progress_path, read_progress
from fvc_lib.execution.run.stage_end import KernelOutcome, KernelRequest, KernelWatch
from fvc_lib.execution.run.status import StageStatus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_budget import memory_budget
from fvc_lib.services.memory_policy import allocator_environment
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths

# What the terminal says when a task has ended: one line of a success, three of anything else.

_LONGEST_MESSAGE = 2_000


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """How ``task`` ended; of anything but a success also where it was and the command that goes on."""
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s"
    if stage.state == "done":
        return [f"{first}  peak {_peak(stage)}"]
    record, log = run.partial_notebook(task.stage.name, task.fold), run.stage_log(task.stage.name, task.fold)
    return [
        f"{first}  what happened: {what_happened(stage)}",
        f"  where: {where_it_was(stage)}; record: {record}; log: {log}",
        f"  {what_next(run, stage)}",
    ]


def what_happened(stage: StageStatus) -> str:
    """One line: the error and its cell, or what ended the kernel."""
    what = stage.reason or "it ended"
    if stage.error is not None:
        place = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{place}"
        if stage.oom_kills:
            what += f"; meanwhile the system killed for memory in its control group (count rose by {stage.oom_kills})"
    line = " | ".join(part.strip() for part in what.splitlines() if part.strip())
    # An error's text may hold what a terminal obeys, or what turns the text around.
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} [...]"


def where_it_was(stage: StageStatus) -> str:
    """One line: the last step and metric, and how much memory it held at most."""
    return "; ".join([*filter(None, (stage.last_step, stage.last_metric)), f"peak memory {_peak(stage)}"])


def what_next(run: RunPaths, stage: StageStatus) -> str:
    """One line with the exact command; after an error of usage also the one that changes a parameter."""
    command = f"python run_notebooks.py --resume {shlex.quote(str(run.root))}"
    if stage.state == "interrupted":
        return f"to go on: {command}"
    if stage.next_setting is None:
        when = "once mended, go on" if stage.exit_code != 138 else "to go on"
        # A run's own values never change; a corpus that could not be read may be mended where it is.
        if stage.exit_code != 2:
            return f"{when}: {command}"
        return (
            f"{when}: {command}; with another budget, device or number of workers: add -p NAME VALUE; with another "
            f"value of what the results depend on, in a new run: {command} --fork -p NAME VALUE"
        )
    if stage.next_setting.startswith("--mem"):
        return f"to go on: {command}  # {stage_end.meaning(stage.next_setting)} (SLURM: {stage.next_setting})"
    return f"to go on: {command} {stage.next_setting}  # {stage_end.meaning(stage.next_setting)}"


def _peak(stage: StageStatus) -> str:
    return f"{(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"


# The end of a kernel's log, which is all that is left of a kernel that never started.

TAIL_BYTES = 4_000
_TAIL_LINES = 20


def tail_of(path: Path) -> str:
    """The last lines of ``path``; empty where there are none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def never_started_hint(log_tail: str) -> str:
    """What the kernel said last, and what to do about it."""
    said = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = f"; it said last: {said[-1]}" if said else "; it said nothing"
    return f"{last}. Try '{sys.executable} -m ipykernel --version'; where that fails too, set the environment up again."


# How fast a task goes and when it will be done, from what its progress said in this attempt.

WINDOW_SECONDS = 120.0
_SHORTEST_SECONDS = 3.0
_SAMPLES = 240


class RateMeter:
    """Estimates what is left from the pace of the last two minutes.

    What was done before this attempt, or before ``what`` or ``total`` changed, counts for nothing: a resumed training
    begins in the middle.
    """

    def __init__(self) -> None:
        self._kind: tuple[str, int] | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def see(self, now: float, what: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` were done at ``now`` (monotonic seconds)."""
        going_back = bool(self._samples) and done < self._samples[-1][1]
        if (what, total) != self._kind or going_back:
            self._kind = (what, total)
            self._samples.clear()
        if not self._samples or done > self._samples[-1][1]:
            self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def seconds_left(self, now: float) -> float | None:
        """Until all is done; None while too little was seen to say."""
        if self._kind is None or len(self._samples) < 2:
            return None
        (began, at_first), (last, done) = self._samples[0], self._samples[-1]
        if last - began < _SHORTEST_SECONDS:
            return None
        per_step = (last - began) / (done - at_first)
        # A step that takes longer than usual is not done sooner: what has passed since the last one counts down only
        # as far as that step itself.
        return max(0.0, (self._kind[1] - done) * per_step - min(now - last, per_step))


# What a stage tells of its memory while it runs: policy, plan, warnings and out-of-memories, for the runner's terminal.


class MemoryNews:
    """Follows a stage's event log (``memory/events/<stage>.jsonl``) from where it ends now.

    Args:
        path: the log; it may not exist yet.
        told: messages told already, here and by others that share it; each is told once, so that a run of five folds
            tells its policy once.
    """

    def __init__(self, path: Path, told: set[str]) -> None:
        self._path = path
        self._told = told
        self._position = path.stat().st_size if path.is_file() else 0

    def __iter__(self) -> Iterator[str]:
        """Messages written since the last look. Lines that are no events are passed over."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                lines = stream.read()
        except OSError:  # not there yet, or a file server that is away: then at the next look
            return
        whole = lines[: lines.rfind(b"\n") + 1]  # the last line may be half written
        self._position += len(whole)
        for line in whole.splitlines():
            message = _message(line)
            if message and message not in self._told:
                self._told.add(message)
                yield message


def _message(line: bytes) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    message = event.get("message") if isinstance(event, dict) else None
    return message if isinstance(message, str) else ""


# What a stage measured last, read from the end of its metric log.


@dataclass(frozen=True)
class LastMetric:
    """One value of the log; ``loss`` where the newest step has one."""

    metric: str
    phase: str
    value: float | None
    step: int
    epoch: int

    def __str__(self) -> str:
        value = "not a number" if self.value is None else f"{self.value:.4g}"
        return f"{self.metric} {value} ({self.phase}) at step {self.step} of epoch {self.epoch}"


def last_metric(path: Path, attempt: int) -> LastMetric | None:
    """What attempt ``attempt`` logged last; None where it logged nothing or nothing that can be read.

    Only whole lines near the end are looked at: the last one may be half written.
    """
    newest: LastMetric | None = None
    for row in stage_end.rows_from_the_end(path):
        if row.get("attempt") != attempt:
            break
        found = _metric(row)
        if found is None:
            continue
        if newest is not None and (found.step, found.epoch) != (newest.step, newest.epoch):
            break
        if found.metric == "loss":
            return found
        newest = newest or found
    return newest


def _metric(row: dict[str, Any]) -> LastMetric | None:
    try:
        value = None if row["value"] is None else float(row["value"])
        return LastMetric(str(row["metric"]), str(row["phase"]), value, int(row["step"]), int(row["epoch"]))
    except (KeyError, TypeError, ValueError):
        return None


KERNEL_ENVIRONMENT = {
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else ipykernel's debugger writes a warning into the first cell
}
LOSS_SECONDS = 2.0
_ENGINE = "fvc_lib.execution.kernel.engine"


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
        stage_end.judge(stage, outcome, kills, peak, self.task.stage.outputs(self.run, fold), self._signals)
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
        if stage.error is not None and stage.error.name == stage_end.NEVER_STARTED:
            log_tail = tail_of(self.run.stage_log(name, fold))
            stage.error.message += never_started_hint(log_tail)
        stage.next_setting = self._next_setting(stage)
        lines = [what_happened(stage), where_it_was(stage), what_next(self.run, stage)]
        stage_end.tell_end(
            self.run.partial_notebook(name, fold), stage, [self._redactor.text(line) for line in lines], log_tail
        )

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
            return stage_end.after_memory_ended(
                self.config, reads, self.run.memory_events(name, fold), budget.total_bytes
            )
        return stage_end.after_another_death(self.config, reads) if stage.exit_code == 138 else None

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
        request = KernelRequest(
            record=self.run.partial_notebook(name, fold),
            root=self.run.root,
            folder=self.notebook.path.parent,
            environment={**kernel_environment(os.environ), **given},
            log=self.run.stage_log(name, fold),
            on_start=self._kernel_started,
            overflow=self.run.output_overflow(name, fold),
            redactor=self._redactor,
        )
        try:
            execute_with_papermill(self.notebook.path, self._parameters(), request)
        finally:
            self._watch.stop()
        if request.outcome is None:
            raise RuntimeError(f"{self.notebook.path}: papermill ended without the engine fvc")
        return request.outcome

    def _kernel_started(self, pid: int) -> None:
        self._watch.start(pid)
        if self._signals:  # it came while the kernel started, which cannot handle one yet
            self._watch.signal_kernel(signal.SIGKILL)

    def _parameters(self) -> dict[str, object]:
        values: dict[str, object] = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        if self.task.fold is not None:
            values["fold"] = self.task.fold
        return {name: values[name] for name in self.notebook.parameters if name in values}


def execute_with_papermill(notebook: Path, parameters: Mapping[str, object], request: KernelRequest) -> None:
    """Have papermill run ``notebook`` with ``parameters`` in the engine ``fvc``, which fills ``request.outcome``."""
    import papermill  # here: it loads its engines, ours among them, and ours imports the runner

    import_module(_ENGINE)  # registers itself, also where the package is not installed
    # It calls a parameter unknown whose annotation it cannot read (``float | None``); ours were checked before.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    papermill.execute_notebook(
        str(notebook).replace("{", "{{").replace("}", "}}"),  # papermill puts parameters into paths
        None,  # the record is the request's
        parameters=dict(parameters),
        engine_name="fvc",
        kernel_name="python3",
        language="python",
        progress_bar=False,
        request=request,
    )


def job_id(environ: Mapping[str, str]) -> str | None:
    """SLURM's number of the job this process belongs to, ``123`` or of an array ``123_4``; None outside of one."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def _forget_last_attempt(stage: StageStatus) -> None:
    stage.error = stage.killed_by = stage.oom_kills = stage.next_setting = None
