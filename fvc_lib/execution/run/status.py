"""Read and write ``status.json``, the state of a run and of its tasks, and lock runs and tasks.

A task is one notebook of a run (a stage), or one fold of it. Processes lock ``status.json`` before they change it, so
that jobs never overwrite the status of each other's tasks. The locks come from the package ``filelock``. The operating
system frees the lock of a process that has died. On a file system without locks, the existence of a file is the lock.
Such a file stays behind if the host crashes.
"""

import contextlib
import json
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.stages import Task
from fvc_lib.services.atomic_files import utc_now
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.records.digests import document_damage, write_document
from fvc_lib.services.run_paths import RunPaths, is_held

_PATIENCE_SECONDS = 1.0  # how long to wait for a lock, because processes that only look take it for an instant
RECORD_SECONDS = 20.0  # how long to wait for another process that writes a record, which takes milliseconds
# "waiting": the remaining tasks belong to jobs that have not begun. "interactive": the run was begun from a notebook.
# "requeue": it was stopped and can be resumed.
RunState = Literal["running", "done", "failed", "interrupted", "requeue", "waiting", "interactive"]
StageState = Literal["pending", "running", "done", "failed", "interrupted"]
STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}


class StageError(BaseModel):
    """The exception that ended a task: its class name and message, the cell that raised it, and its exit code."""

    name: str
    message: str
    cell: int | None = None  # execution number of the cell, n in ``In [n]``; 0 or None if unknown
    exit_code: int | None = None  # attribute of the exception's class; None for errors of other libraries


@dataclass(frozen=True)
class KernelOutcome:
    """The end of a notebook's execution: success or the kind of failure. After a success all fields have defaults.

    There are three kinds of failure: a cell raised an exception, the kernel died, or the kernel never started.
    """

    error: StageError | None = None  # the exception that a cell raised; None if none did
    died: bool = False  # whether the kernel's process ended before the last cell
    return_code: int | None = None  # exit status of a kernel that died; -N if signal N killed it
    never_started: str | None = None  # the reason if no cell could run

    @property
    def exit_code(self) -> int:
        """The exit code of a command that runs only this notebook: 0 after a success, 1 if the kernel died.

        If a cell raised an exception, the code is the exception's ``exit_code``, or 1 if the exception has none.
        """
        return 1 if self.died else 0 if self.error is None else self.error.exit_code or 1


class StageStatus(BaseModel):
    """The state of one task's last attempt: when it ran, how far it came, and how it ended.

    Times are UTC. Durations come from a monotonic clock.
    """

    model_config = ConfigDict(extra="ignore")

    state: StageState = "pending"
    attempts: int = 0  # number of starts
    reason: str | None = None  # why the task runs, or what ended it
    started_utc: str | None = None
    finished_utc: str | None = None
    duration_seconds: float | None = None
    exit_code: int | None = None  # its meaning is in a table in README
    peak_rss_bytes: int | None = None  # of the kernel and its children
    last_step: str | None = None  # last progress, for example ``steps 12/40``
    last_metric: str | None = None  # last measurement, for example ``loss 0.31 at step 12 of epoch 3``
    killed_by: str | None = None  # the signal that ended the kernel, for example ``SIGKILL``
    oom_kills: int | None = None  # number of processes that the system killed for memory during the attempt
    advice: str | None = None  # a sentence that says what to change before the next attempt
    host: str | None = None
    job_id: str | None = None  # id of the SLURM job, ``123`` or ``123_4``
    error: StageError | None = None  # the exception that ended the task


class RunStatus(BaseModel):
    """The content of ``status.json``: the state of a run and of its tasks.

    For a run that several jobs share, ``follow_tasks`` computes the run's state from its tasks.
    """

    model_config = ConfigDict(extra="ignore")

    run_id: str
    state: RunState = "running"
    started_utc: str
    finished_utc: str | None = None
    duration_seconds: float | None = None  # sum over the attempts; for a shared run the sum over its tasks
    peak_rss_bytes: int | None = None  # the largest peak of a task
    exit_code: int | None = None
    shared: bool = False  # whether several jobs work on the run, each on different tasks
    stages: dict[str, StageStatus] = Field(default_factory=dict)  # by the tasks' keys

    def stage(self, key: str) -> StageStatus:
        """Return the status of the task ``key``. If there is none, add one with state ``pending``."""
        return self.stages.setdefault(key, StageStatus())

    def write(self, run: RunPaths) -> None:
        """Write this status into the ``status.json`` of ``run``, which is replaced atomically."""
        write_document(run.status_json, self.model_dump(mode="json"))

    def follow_tasks(self) -> None:
        """Compute state, exit code, time of the end and duration of a run from its tasks, and store them here.

        Runs that several jobs share need this. A running task makes the run ``running``; else a failed task makes it
        ``failed``; else an interrupted task makes it ``requeue`` (exit code 75) or ``interrupted``. Without such tasks,
        the run is ``done`` if all tasks are done, otherwise ``waiting``.
        """
        stages = list(self.stages.values())
        bad = [stage for state in ("failed", "interrupted") for stage in stages if stage.state == state]
        self.state, self.exit_code = "waiting", None
        if any(stage.state == "running" for stage in stages):
            self.state = "running"
        elif bad:
            self.exit_code = bad[0].exit_code
            stopped: RunState = "requeue" if bad[0].exit_code == 75 else "interrupted"
            self.state = "failed" if bad[0].state == "failed" else stopped
        elif stages and all(stage.state == "done" for stage in stages):
            self.state, self.exit_code = "done", 0
        ended = [stage.finished_utc for stage in stages if stage.finished_utc]
        self.finished_utc = None if self.state in ("running", "waiting") else max(ended, default=None)
        self.duration_seconds = round(sum(stage.duration_seconds or 0.0 for stage in stages), 3)


def read_status(run: RunPaths) -> RunStatus:
    """Read ``status.json``, and return the state of ``run`` and of its tasks.

    If the file is missing, the returned status has no tasks, and its state is ``interrupted``.

    Raises:
        DataError: ``status.json`` cannot be read or is damaged.
    """
    try:
        document = json.loads(run.status_json.read_text())
        status = RunStatus(**document)
    except FileNotFoundError:
        # The lost file does no harm: the records of the stages show which stages are finished.
        return RunStatus(run_id=run.run_id, state="interrupted", started_utc=utc_now())
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise DataError(
            f"{run.status_json}: cannot be read as a run's status: {error}. Delete it, then --resume."
        ) from error
    if damage := document_damage(run.status_json, document):
        raise DataError(damage)
    return status


@contextmanager
def updated_status(run: RunPaths) -> Iterator[RunStatus]:
    """Lock and read ``status.json`` of ``run``, yield the status, and write it after the block.

    The caller changes the yielded object in the block.

    Raises:
        DataError: the file cannot be read or is damaged, or another process keeps it locked for 20 s.
    """
    with record_held(run.status_json):
        status = read_status(run)
        yield status
        if status.shared:
            status.follow_tasks()
        peaks = [stage.peak_rss_bytes or 0 for stage in status.stages.values()]
        status.peak_rss_bytes = max(peaks, default=0) or status.peak_rss_bytes
        status.write(run)


def put_stage(run: RunPaths, key: str, stage: StageStatus) -> None:
    """Replace the status of the task ``key`` in ``status.json`` by ``stage``."""
    with updated_status(run) as status:
        status.stages[key] = stage


def begin_work(run: RunPaths, plan: Sequence[PlannedTask], own: frozenset[str] | None) -> None:
    """Write into ``status.json`` that this process begins to run ``plan``.

    Args:
        run: the run, which this process has locked.
        plan: every task of the run.
        own: keys of the tasks that this process may run; None: all tasks.
    """
    with updated_status(run) as status:
        status.shared = own is not None
        status.state, status.exit_code, status.finished_utc = "running", None, None
        for planned in plan:
            key = planned.task.key
            is_new = planned.task.key not in status.stages
            stage = status.stage(key)
            if planned.run or planned.redo:
                stage.state, stage.reason = "pending", planned.reason
                stage.error = stage.exit_code = None
            elif planned.finished_before and (is_new or own is None or key in own):
                stage.state, stage.reason = "done", None
        for key, stage in status.stages.items():
            if stage.state == "running" and (own is None or key in own):
                stage.state, stage.reason = "interrupted", "the runner died"


def end_work(run: RunPaths, exit_code: int, seconds: float) -> None:
    """Write into ``status.json`` how this process ended, and the run's state that follows from it.

    Args:
        run: the run.
        exit_code: the exit code of this process.
        seconds: how long this process worked on the run; added to the run's duration.
    """
    with updated_status(run) as status:
        status.duration_seconds = round((status.duration_seconds or 0.0) + seconds, 3)
        unfinished: RunState = STATE_OF_EXIT.get(exit_code, "failed" if exit_code else "interrupted")
        all_done = all(one.state == "done" for one in status.stages.values())
        status.state = "done" if all_done and not exit_code else unfinished
        status.exit_code, status.finished_utc = exit_code, utc_now()


def leave_to_jobs(run: RunPaths, tasks: Iterable[Task]) -> None:
    """Write into ``status.json`` that ``tasks`` wait for jobs of SLURM, and that several jobs share the run.

    The caller must hold the run's lock.
    """
    with updated_status(run) as status:
        for task in tasks:
            stage = status.stage(task.key)
            stage.state, stage.reason, stage.error, stage.exit_code = "pending", "waits for its job", None, None
        status.shared = True


def status_now(run: RunPaths) -> RunStatus:
    """Return the status of ``run``, corrected for processes that have died. ``status.json`` is not changed.

    A task or run that is recorded as running, but that no process works on, is returned as interrupted. A task that is
    recorded as done, but has no ``checkpoints/stage_<name>.json``, is returned as pending. There are two cases:

    - Its code or inputs changed while it ran. The run is returned as interrupted.
    - A user's notebook began to train it again. The run is returned as interactive, because a notebook holds no lock
      that shows whether it is still at work.

    Raises:
        DataError: ``status.json`` cannot be read or is damaged.
    """
    status = read_status(run)
    for key, stage in status.stages.items():
        if stage.state == "running" and not is_task_worked_on(run.root, key):
            stage.state, stage.reason = "interrupted", "its runner is gone; --resume goes on"
        elif stage.state == "done" and not (run.stage_checkpoint(key).exists() or is_task_worked_on(run.root, key)):
            status.state = "interrupted" if stage.reason else "interactive"
            stage.state = "pending"
            stage.reason = stage.reason or "trained again in a notebook; --resume goes on when that has ended"
    if status.shared:
        status.follow_tasks()
    elif status.state == "running" and not is_worked_on(run.root):
        status.state = "interrupted"
    return status


# Locks


@contextmanager
def run_lock(folder: Path, keys: Collection[str] | None = None) -> Iterator[None]:
    """Lock a run during the block, or only some of its tasks, so that other jobs can work on the other tasks.

    Args:
        folder: the run folder, or the output folder of ``predict``.
        keys: keys of the tasks to lock; None: lock the whole run.

    Raises:
        UsageError: another process has locked the run or one of the tasks; the message names the process.
        OSError: the run folder cannot be written.
    """
    run = RunPaths(folder)
    own = [_whole(folder)] if keys is None else [run.task_lock(key) for key in sorted(keys)]
    with contextlib.ExitStack() as held:
        for path in own:
            path.parent.mkdir(exist_ok=True)
            try:
                held.enter_context(FileLock(path, timeout=_PATIENCE_SECONDS))
            except Timeout as error:
                raise _refusal(path) from error
            with contextlib.suppress(OSError):  # a full disk does not keep `clean` from making room
                path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        # Check the other locks after taking ours, so that of two processes that start together at most one goes on.
        for path in _of_tasks(folder) if keys is None else [_whole(folder)]:
            if is_held(path, _PATIENCE_SECONDS):
                raise _refusal(path)
        yield


@contextmanager
def record_held(path: Path) -> Iterator[None]:
    """Lock the JSON file ``path`` during the block, so that no other process changes it meanwhile.

    Raises:
        DataError: another process has held the lock for 20 s.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=RECORD_SECONDS, poll_interval=0.02)
    try:
        lock.acquire()
    except Timeout as error:
        raise DataError(
            f"{path}: another process has been writing it for {RECORD_SECONDS:.0f} s. If its host is down, delete "
            f"{error.lock_file}."
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_worked_on(folder: Path) -> bool:
    """Return whether a process works on the run in ``folder`` or on one of its tasks, according to their locks.

    The result is also True if a lock file cannot be opened.
    """
    return any(is_held(path) for path in (_whole(folder), *_of_tasks(folder)))


def is_task_worked_on(folder: Path, key: str) -> bool:
    """Return whether a process works on the task ``key``, or on the whole run in ``folder``.

    This is read from their locks.
    """
    return is_held(RunPaths(folder).task_lock(key)) or is_held(_whole(folder))


def _whole(folder: Path) -> Path:
    return folder / "run.lock"


def _of_tasks(folder: Path) -> list[Path]:
    return sorted(RunPaths(folder).task_lock("").parent.glob("*.lock"))


def _refusal(path: Path) -> UsageError:
    owner = "unknown"
    with contextlib.suppress(OSError):  # the other process may have ended since, and deleted its lock
        owner = " on ".join(path.read_text().split()) or owner
    what = "this run" if path.name == "run.lock" else f"{path.stem} of this run"
    return UsageError(
        f"another process works on {what}: process {owner}. Wait for it or stop it, then repeat the command. "
        f"If that host is down, delete {path}."
    )
