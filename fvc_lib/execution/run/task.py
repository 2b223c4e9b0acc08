"""Execute one task: run its notebook, watch the kernel, find out how it ended, write its record, and advise the user.

A task is one notebook of a run, or one fold of it. The record is the executed notebook. If a cell fails, the task's
exit code is the attribute ``exit_code`` of the exception, or 1 if there is none. If the kernel dies, the exit code is
137 (killed, mostly for memory) or 138 (any other cause).
"""

import html
import json
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from fvc_lib import CHECKOUT
from fvc_lib.execution.kernel_server import KernelServer
from fvc_lib.execution.run.session import progress_path, read_progress
from fvc_lib.execution.run.status import KernelOutcome, StageError, StageStatus
from fvc_lib.execution.stages import Notebook, Task
from fvc_lib.services.atomic_files import utc_now, write_bytes
from fvc_lib.services.config import DEFAULTS, RunConfig
from fvc_lib.services.errors import DataError, StoppedError, command_text
from fvc_lib.services.home import IS_CHECKOUT
from fvc_lib.services.memory import (
    ProcessTree,
    allocator_environment,
    control_groups,
    memory_advice,
    memory_budget,
    memory_sharers,
    ran_out_in,
)
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths

STOPPED = StoppedError.exit_code
SAMPLE_INTERVAL_SECONDS = 0.2
LEAST_SECONDS = 3.0  # how long a task must run before the remaining time is estimated
_LOOK_BYTES = 256_000
_LONGEST_MESSAGE = 2_000
ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill removes cells with it before it runs a notebook again


def kernel_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a kernel: those of ``environ``, and additions.

    The additions put this library first on PYTHONPATH, and set up the memory allocator that torch uses. Without a
    checkout they also name the folders of the cache and the sample corpus, if ``environ`` does not.
    """
    path = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    quiet = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # else ipykernel's debugger writes a warning into the first cell
    # A kernel works in the folder of the notebooks, where the default folders would be others than here.
    folders = {"FVC_CACHE_DIR": DEFAULTS["cache_dir"], "FVC_DATA_DIR": DEFAULTS["data_dir"]} if not IS_CHECKOUT else {}
    return {**quiet, **folders, **allocator_environment(environ), **environ, "PYTHONPATH": path}


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this process's SLURM job, ``123``, or ``123_4`` in an array; None outside a SLURM job."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this process's control group (cgroup) the system has killed for memory so far.

    The number comes from the innermost group that counts such kills. It is None if no group counts them.

    Args:
        root: the folder that contains ``proc`` and ``sys``; only tests name another than ``/``.
    """
    for _, folder in control_groups(root):
        for counter in ("memory.events", "memory.oom_control"):  # of version 2 and 1
            with suppress(OSError):
                if match := re.search(r"^oom_kill (\d+)", (folder / counter).read_text(), re.MULTILINE):
                    return int(match[1])
    return None


def rows_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows (dicts) in the last 256 kB of a JSONL file, from the last to the first.

    Lines that are incomplete or no JSON objects are skipped. A missing file has no rows.
    """
    with suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOOK_BYTES))
        for line in reversed(stream.read().splitlines()):
            with suppress(ValueError):
                if isinstance(row := json.loads(line), dict):
                    yield row


def last_loss(path: Path, attempt: int) -> str | None:
    """Return the last loss that a metric log has, as text such as ``loss 0.31 (train) at step 12 of epoch 3``.

    Args:
        path: the metric log, a JSONL file.
        attempt: number of the attempt, from 1; losses of other attempts are ignored.

    Returns:
        The text; a loss that is not finite is shown as ``nan``. None if the attempt has logged no loss.
    """
    for row in rows_from_the_end(path):
        if row.get("attempt") == attempt and row.get("metric") == "loss":
            value = float("nan") if row.get("value") is None else row["value"]
            return f"loss {value:.4g} ({row.get('phase')}) at step {row.get('step')} of epoch {row.get('epoch')}"
    return None


class KernelWatch:
    """A thread that measures the resident memory of a kernel's process and its children every 0.2 s, until ``stop``.

    Attributes:
        pid: process id of the kernel; None before ``start``.
        rss_bytes: the last measurement, the sum over the process and its children.
        peak_rss_bytes: the largest ``rss_bytes`` so far, or the peak of the kernel's process alone if that is larger.
            The operating system records the peak of the process (VmHWM on Linux), which includes short peaks between
            two measurements.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.rss_bytes = 0
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._oom_kills = oom_kills()
        self._thread = threading.Thread(target=self._watch, name="fvc-kernel-watch", daemon=True)

    def start(self, pid: int) -> None:
        """Begin watching process ``pid``."""
        self.pid, self._tree = pid, ProcessTree(pid)
        self._thread.start()

    def stop(self) -> None:
        """Stop measuring; does nothing if ``start`` was not called."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def signal_kernel(self, number: signal.Signals) -> None:
        """Send the signal ``number`` to the kernel's process, if the process exists."""
        if self.pid is not None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).send_signal(number)

    def oom_kills(self) -> int | None:
        """Return how many processes of the control group the system has killed for memory since this object was made.

        The number is None if the system does not count them; see the function ``oom_kills`` of this module.
        """
        now = oom_kills()
        return None if now is None or self._oom_kills is None else max(0, now - self._oom_kills)

    def _watch(self) -> None:
        while True:
            held = self._tree.measure()
            self.rss_bytes = held.tree_bytes
            self.peak_rss_bytes = max(self.peak_rss_bytes, held.tree_bytes, held.high_water_bytes)
            if self._stop.wait(SAMPLE_INTERVAL_SECONDS):
                return


class TaskRun:
    """One execution of a task: its notebook runs in a kernel, which is another process.

    ``execute`` is called in a thread. Meanwhile other threads may call the other methods.

    Args:
        run: the run.
        config: the run's parameters.
        task: the task.
        notebook: the task's notebook.
        attempt: the number of this attempt, from 1.
        extra_environment: variables that the kernel gets in addition to the variables of this process.
        server: the process that forks the kernel; None: the kernel is started as a new process.
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
        server: KernelServer | None = None,
    ) -> None:
        self.run, self.config, self.task, self.notebook = run, config, task, notebook
        self._attempt = attempt
        self._server = server
        self._extra = dict(extra_environment or {})
        self._watch = KernelWatch()
        self._signals: list[int] = []
        self._started = time.monotonic()
        name, fold = task.stage.name, task.fold
        self._record = run.partial_notebook(name, fold)
        self._metrics = run.metrics(name, fold)
        self._progress_path = progress_path(run, name, fold)
        self._progress_path.unlink(missing_ok=True)  # the file of an earlier attempt would be wrong
        self._cell = ""  # such as "cell 4/18"
        self._counted = ("", 0)  # name of the units that progress counts, and their total
        self._first = (0.0, 0)  # time of the first progress on these units, and number of units finished then

    def execute(self, stage: StageStatus) -> None:
        """Run the notebook, and write into ``stage`` how it ended.

        After a success the record (the executed notebook) gets its final name. Otherwise it keeps a provisional name,
        and a cell at its top explains what happened.

        Raises:
            OSError: the record or the log cannot be written.
        """
        stage.host, stage.job_id = platform.node(), job_id(os.environ)
        outcome = self._run_kernel()
        name, fold = self.task.stage.name, self.task.fold
        kills = self._watch.oom_kills()
        peak = self._watch.peak_rss_bytes
        judge(stage, outcome, kills, peak, self.task.stage.outputs(self.run, fold), self._signals)
        if stage.exit_code == 0:
            try:
                self.task.stage.check_outputs(self.run, fold)
            except DataError as error:
                stage.state, stage.exit_code, stage.reason = "failed", error.exit_code, "its tables do not fit"
                stage.error = StageError(name=type(error).__name__, message=str(error))
        stage.finished_utc = utc_now()
        stage.duration_seconds = round(time.monotonic() - self._started, 3)
        stage.peak_rss_bytes = peak
        progress = read_progress(self._progress_path)
        stage.last_step = None if progress is None else f"{progress.what} {progress.done}/{progress.total}"
        stage.last_metric = last_loss(self._metrics, self._attempt)
        if stage.exit_code == 0:
            self._record.replace(self.run.executed_notebook(name, fold))
        else:
            environ = {**os.environ, **self._extra}
            stage.advice = advice_after(stage, self.config, self.run.memory(name, fold), environ)
            record_end(self._record, [what_happened(stage), where_it_was(stage), what_next(self.run, stage)], stage)

    def signal(self, number: int) -> None:
        """Ask the kernel to save its work and end. If this method is called again, kill the kernel.

        ``number`` is the signal that this process has received. The task's exit code depends on it.
        """
        self._signals.append(number)
        self._watch.signal_kernel(signal.SIGUSR1 if len(self._signals) == 1 else signal.SIGKILL)

    def line(self) -> str:
        """Return the task's progress line: key, elapsed time, progress, remaining time, memory, and last loss.

        The most important parts come first, because a narrow terminal cuts the end.
        """
        now = time.monotonic()
        progress = read_progress(self._progress_path)
        parts = [self.task.key, _clock(now - self._started)]
        if progress is None or progress.done >= progress.total:
            parts.append(self._cell)
        else:
            parts.append(f"{progress.what} {progress.done}/{progress.total}")
            if (progress.what, progress.total) != self._counted:
                self._counted, self._first = (progress.what, progress.total), (now, progress.done)
            # Units that an earlier attempt has finished do not count for the speed.
            seconds = now - self._first[0]
            done = progress.done - self._first[1]
            if done and seconds >= LEAST_SECONDS:
                seconds_left = seconds / done * (progress.total - progress.done)
                parts.append(f"{_clock(seconds_left)} left")
        parts.append(f"{self._watch.rss_bytes / 1e9:.2f} GB, peak {self._watch.peak_rss_bytes / 1e9:.2f}")
        parts.append(last_loss(self._metrics, self._attempt) or "")
        line = f"  {'  '.join(filter(None, parts))}".rstrip()
        return "".join(char if char.isprintable() else "?" for char in line)

    def _run_kernel(self) -> KernelOutcome:
        from fvc_lib.execution.papermill_engine import KernelRequest, execute  # papermill takes a second to load

        given = {ATTEMPT_VARIABLE: str(self._attempt), "FVC_RUNS_DIR": self.config.runs_dir, **self._extra}
        environment = {**kernel_environment(os.environ), **given}
        request = KernelRequest(
            record=self._record,
            folder=self.notebook.path.parent,
            environment=environment,
            log=self.run.stage_log(self.task.stage.name, self.task.fold),
            server=self._server,
            on_start=self._kernel_started,
            on_cell=self._cell_begins,
        )
        values = {**self.config.model_dump(mode="json"), "run_dir": str(self.run.root)}
        values |= {} if self.task.fold is None else {"fold": self.task.fold}
        parameters = {name: values[name] for name in self.notebook.parameters if name in values}
        try:
            return execute(self.notebook.path, parameters, request)
        finally:
            self._watch.stop()

    def _cell_begins(self, number: int, total: int) -> None:
        self._cell = f"cell {number}/{total}"

    def _kernel_started(self, pid: int) -> None:
        self._watch.start(pid)
        with suppress(OSError):  # when memory ends, Linux shall kill a kernel before its runner
            score = Path(f"/proc/{pid}/oom_score_adj")
            score.write_text(str(max(500, int(score.read_text()))))
        if self._signals:  # a signal came while the kernel started; a starting kernel cannot handle signals
            self._watch.signal_kernel(signal.SIGKILL)


def _clock(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds as text, for example ``0:03:05``."""
    return str(timedelta(seconds=round(seconds)))


# How a task ended


def judge(
    stage: StageStatus,
    outcome: KernelOutcome,
    kills: int | None,
    peak_bytes: int,
    outputs: Sequence[Path],
    signals: Sequence[int],
) -> None:
    """Decide from the end of a task's kernel whether the task succeeded, and write the result into ``stage``.

    The result is the state, exit code, reason and error of the task.

    Args:
        stage: the task's status, which is changed.
        outcome: how the notebook's execution ended, from ``papermill_engine.execute``.
        kills: number of processes that the system killed for memory in the control group; None if unknown.
        peak_bytes: the peak resident memory of the kernel and its children, in bytes.
        outputs: files that must exist after a success; if one is missing, the task has failed.
        signals: the signals that were sent to the kernel, in order.
    """
    error, code = outcome.error, outcome.return_code or 0
    stage.oom_kills, stage.error = kills, None
    stage.killed_by = signal_name(-code) if outcome.died and code < 0 else None
    # A library may have raised an error because it was interrupted.
    is_own = error is not None and (error.exit_code not in (None, 1, STOPPED) or "Memory" in error.name)
    if error is not None and (is_own or not signals):
        stage.exit_code, stage.reason, stage.error = error.exit_code or 1, "a cell failed", error
        stage.state = "interrupted" if stage.exit_code == STOPPED else "failed"
    elif error is None and not outcome.died:
        stage.state, stage.exit_code, stage.reason = "done", 0, None
        if missing := [str(path) for path in outputs if not path.is_file()]:
            stage.state, stage.exit_code = "failed", 1
            stage.error = StageError(name="MissingOutput", message=f"the notebook ended without {', '.join(missing)}")
    elif signals:
        stage.state, stage.exit_code = "interrupted", exit_code_of_signals(signals)
        stage.reason = f"stopped by {signal_name(signals[0])}"
    elif outcome.never_started is not None and code != -signal.SIGKILL:
        stage.state, stage.exit_code, stage.reason = "failed", 138, "the kernel never started"
        message = f"{outcome.never_started}; its log says more. Does '{sys.executable} -m ipykernel --version' work?"
        stage.error = StageError(name="KernelNeverStarted", message=message)
    else:
        stage.state, stage.exit_code = "failed", 137 if code == -signal.SIGKILL else 138
        how = f"exit status {code}" if code >= 0 else signal_name(-code)
        stage.reason = f"kernel ended with {how} at {peak_bytes / 1e9:.2f} GB{_killed_text(kills)}"
        if stage.exit_code == 137 and not kills:
            stage.reason += ": most likely out of memory, or killed by a person" if kills is None else ": by a person"


def _killed_text(kills: int | None) -> str:
    return f"; the system killed {kills} processes of its control group for memory meanwhile" if kills else ""


def exit_code_of_signals(numbers: Sequence[int]) -> int:
    """Return the exit code of a stopped run: 130 after SIGINT (Ctrl-C), else 75 after one signal, 143 after more."""
    if signal.SIGINT in numbers:
        return 130
    return STOPPED if len(numbers) == 1 else 143


def signal_name(number: int) -> str:
    """Return the name of a signal, for example ``SIGKILL``; ``signal 35`` for a real-time signal."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def advice_after(stage: StageStatus, config: RunConfig, samples: Path, environ: Mapping[str, str]) -> str | None:
    """Return advice on what to change before the next attempt, mostly to save memory.

    Args:
        stage: how the task ended.
        config: the run's parameters.
        samples: the task's memory log; its last line has the phase in which the task died.
        environ: the kernel's environment variables.

    Returns:
        A sentence; None if nothing has to change, or if the error's message already has the advice.
    """
    memory_error = stage.error is not None and "Memory" in stage.error.name
    if stage.state == "interrupted":
        return None
    if stage.exit_code != 137 and not memory_error and not stage.oom_kills:
        return memory_advice("loaders") if stage.exit_code == 138 and config.num_workers > 0 else None
    limit = memory_budget(config.mem_gb, environ=environ).total_bytes
    if not stage.oom_kills and not memory_error and (stage.peak_rss_bytes or 0) < limit / 2:
        return None  # killed by a person, it seems
    if memory_sharers(environ) > 1:
        return "Next, train one fold at a time (--jobs 1)."
    if stage.error is not None and stage.error.exit_code is not None:
        return None
    ran_out = ran_out_in(next((str(row.get("phase")) for row in rows_from_the_end(samples)), ""))
    # A model on precomputed features has no batches, whose size the advice for batches would change.
    return memory_advice("elsewhere" if ran_out == "batch" and config.of_features else ran_out)


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """Return the lines that the terminal shows when ``task`` has ended.

    A success has one line. Otherwise there are three: what happened, where it happened, and the command that continues
    the run.
    """
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s"
    if stage.state == "done":
        return [f"{first}  peak {(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"]
    record = run.partial_notebook(task.stage.name, task.fold)
    log = run.stage_log(task.stage.name, task.fold)
    return [
        f"{first}  what happened: {what_happened(stage)}",
        f"  where: {where_it_was(stage)}; record: {record}; log: {log}",
        f"  {what_next(run, stage)}",
    ]


def what_happened(stage: StageStatus) -> str:
    """Return one line that names the error and its cell, or why the kernel ended; at most 2,000 characters."""
    what = stage.reason or "it ended"
    if stage.error is not None:
        place = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{place}{_killed_text(stage.oom_kills)}"
    line = " | ".join(part.strip() for part in what.splitlines() if part.strip())
    # The text of an error may hold control characters.
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} [...]"


def where_it_was(stage: StageStatus) -> str:
    """Return one line that shows how far the task came: last step, last metric and peak memory."""
    peak = f"peak memory {(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"
    return "; ".join([*filter(None, (stage.last_step, stage.last_metric)), peak])


def what_next(run: RunPaths, stage: StageStatus) -> str:
    """Return a line with the command that continues the run after the failed or stopped task with status ``stage``.

    If ``stage`` has advice, such as how to save memory, the line has it too.
    After a usage error or data error the line also has the command that begins a new run with other values.
    """
    submitted = stage.job_id and run.slurm.is_dir()
    command = command_text("--resume", run.root, *(["--executor", "slurm"] if submitted else []))
    if stage.advice:
        return f"to go on: {command}  # {stage.advice}"
    if stage.state == "interrupted" or stage.exit_code == 138:
        return f"to go on: {command}"
    fork = f"; with another value of what the results depend on, in a new run: {command} --fork -p NAME VALUE"
    return f"once mended, go on: {command}{fork if stage.exit_code in (2, 3) else ''}"


def record_end(record: Path, lines: Sequence[str], stage: StageStatus) -> None:
    """Insert a cell at the top of the executed notebook ``record`` that shows how the task ended.

    The cell has a title, which follows from ``stage``, and ``lines``. It has papermill's tag for errors, so papermill
    removes the cell when the notebook is executed again.
    """
    import nbformat  # a tenth of a second to load

    notebook = nbformat.from_dict(json.loads(record.read_text(encoding="utf-8", errors="replace")))
    title, color = ("Stopped", "#b26a00") if stage.state == "interrupted" else ("Failed", "#b71c1c")
    body = "<br>\n".join([f"<b>{title}</b>", *map(html.escape, lines)])
    source = f'<div style="border-left: 6px solid {color}; padding: 0.5em 1em">\n{body}\n</div>'
    banner = nbformat.v4.new_markdown_cell(source, metadata={"tags": [ERROR_MARKER_TAG]})
    notebook.cells.insert(0, banner)
    write_bytes(record, (json.dumps(notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
