"""``status.json``: the state of every stage, readable at any moment.

Each task has its own file (``status/<key>.json``), which only the process that runs it writes. ``status.json`` has them
all in one document, and the state of the whole run. If the two differ, the task's own file counts.
"""

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.execution.plan.plan import PlannedTask
from fvc_lib.execution.plan.stages import Task
from fvc_lib.execution.run.lock import is_task_worked_on, is_worked_on
from fvc_lib.services.atomic_files import utc_now
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import document_damage, write_document
from fvc_lib.services.run_paths import RunPaths

# "waiting": what is left belongs to jobs that have not begun; "interactive": begun from a notebook, no runner has it.
RunState = Literal["running", "done", "failed", "interrupted", "requeue", "waiting", "interactive"]
StageState = Literal["pending", "running", "done", "failed", "interrupted"]


class StageError(BaseModel):
    """The error that ended a stage."""

    name: str
    message: str
    cell: int | None = None  # the number in its ``In [n]``
    exit_code: int | None = None  # of its class, where that is one of ours


class StageStatus(BaseModel):
    """The state of one task's last attempt. Times are UTC; durations come from a monotonic clock."""

    model_config = ConfigDict(extra="ignore")

    state: StageState = "pending"  # where it stands
    attempts: int = 0  # how often it was begun
    reason: str | None = None  # why it runs, or what ended it, in words
    started_utc: str | None = None
    finished_utc: str | None = None
    duration_seconds: float | None = None
    exit_code: int | None = None  # FVC's, of README's table
    peak_rss_bytes: int | None = None  # of the kernel and its children
    last_step: str | None = None  # what its progress said last, for example ``steps 12/40``
    last_metric: str | None = None  # what it measured last, for example ``loss 0.31 at step 12 of epoch 3``
    killed_by: str | None = None  # the signal that ended the kernel, for example ``SIGKILL``
    oom_kills: int | None = None  # how often the system killed for memory meanwhile
    advice: str | None = None  # what to change before the next try, a sentence
    host: str | None = None  # where it ran
    job_id: str | None = None  # SLURM's, ``123`` or ``123_4``
    error: StageError | None = None  # the exception that ended it


class RunStatus(BaseModel):
    """The state of a run; if it is ``shared``, ``state`` and the fields after it follow from the tasks."""

    model_config = ConfigDict(extra="ignore")

    run_id: str
    state: RunState = "running"
    attempt: int = 1  # how often a runner has begun on it, from 1
    started_utc: str
    finished_utc: str | None = None
    duration_seconds: float | None = None  # at work, summed over attempts; of jobs what their tasks took, together
    peak_rss_bytes: int | None = None
    exit_code: int | None = None
    runner_pid: int | None = None
    runner_host: str | None = None
    shared: bool = False  # jobs work on it, each on tasks of its own; no process has it as a whole
    stages: dict[str, StageStatus] = Field(default_factory=dict)

    def stage(self, key: str) -> StageStatus:
        """Return the status of task ``key``; add it if it is new."""
        return self.stages.setdefault(key, StageStatus())

    def write(self, run: RunPaths) -> None:
        """Replace ``status.json`` atomically."""
        write_document(run.status_json, self.model_dump(mode="json"))


def read_status(run: RunPaths) -> RunStatus:
    """Return the run's status: the document, updated by each task's own file.

    Raises:
        DataError: missing or not ours; names the file.
    """
    try:
        document = json.loads(run.status_json.read_text())
        status = RunStatus(**document)
    except FileNotFoundError as error:
        if not run.run_json.is_file():
            raise DataError(f"{run.root}: no run: it has neither status.json nor run.json.") from error
        # Nothing depends on it: the stages' own records tell which are finished.
        status = RunStatus(run_id=run.run_id, state="interrupted", started_utc=utc_now())
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise DataError(
            f"{run.status_json}: cannot be read as a run's status: {error}. Delete it, then --resume."
        ) from error
    else:
        if damage := document_damage(run.status_json, document):
            raise DataError(damage)
    status.stages.update(read_parts(run))
    if status.shared:
        follow_tasks(status)
    return status


def read_parts(run: RunPaths) -> dict[str, StageStatus]:
    """Return the status of each task's own file, by key; damaged files are left out."""
    found = {}
    for path in sorted(run.task_status("").parent.glob("[!.]*.json")):
        try:
            document = json.loads(path.read_text())
            if not document_damage(path, document):
                found[path.stem] = StageStatus(**document)
        except (OSError, ValueError, TypeError, AttributeError, ValidationError):
            continue
    return found


def write_part(run: RunPaths, key: str, stage: StageStatus) -> None:
    """Replace the file of task ``key`` atomically."""
    write_document(run.task_status(key), stage.model_dump(mode="json"))


def follow_tasks(status: RunStatus) -> None:
    """Set the state of a ``shared`` run from its tasks' states."""
    stages = list(status.stages.values())
    if not stages:
        return
    bad = [stage for state in ("failed", "interrupted") for stage in stages if stage.state == state]
    at_work = any(stage.state == "running" for stage in stages)
    status.state, status.exit_code = "waiting", None
    if at_work:
        status.state = "running"
    elif bad:
        status.exit_code = bad[0].exit_code
        stopped: RunState = "requeue" if bad[0].exit_code == 75 else "interrupted"
        status.state = "failed" if bad[0].state == "failed" else stopped
    elif all(stage.state == "done" for stage in stages):
        status.state, status.exit_code = "done", 0
    ended = [stage.finished_utc for stage in stages if stage.finished_utc]
    status.finished_utc = None if status.state in ("running", "waiting") else max(ended, default=None)
    status.runner_pid = status.runner_host = None
    status.duration_seconds = round(sum(stage.duration_seconds or 0.0 for stage in stages), 3)
    status.peak_rss_bytes = max((stage.peak_rss_bytes or 0 for stage in stages), default=None)
    status.attempt = max(1, *(stage.attempts for stage in stages))


STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}


class StatusBook:
    """The status of a run, kept by the process that works on it; for one thread.

    Args:
        run: locked by this process.
        own: the keys of its tasks; None: the whole run.
    """

    def __init__(self, run: RunPaths, own: frozenset[str] | None = None) -> None:
        self._run = run
        self._own = own
        self._status = read_status(run)
        self._before = self._status.duration_seconds or 0.0
        self._started = time.monotonic()

    def stage(self, key: str) -> StageStatus:
        """Return a copy of a task's status."""
        return self._status.stage(key).model_copy(deep=True)

    def begin(self, plan: Sequence[PlannedTask]) -> None:
        """Write that this process begins to work on ``plan``."""
        status = self._status
        if any(stage.attempts for stage in status.stages.values()):
            status.attempt += 1
        status.shared = self._own is not None
        status.state, status.exit_code, status.finished_utc = "running", None, None
        status.runner_pid, status.runner_host = os.getpid(), platform.node()
        for planned in plan:
            self._begin_task(planned)
        for key, stage in status.stages.items():
            if stage.state == "running" and self._has(key):
                stage.state, stage.reason = "interrupted", "the runner died"
                self._write_part(key)
        self.publish()

    def put(self, key: str, stage: StageStatus) -> None:
        """Write the status of a task of this process into its own file; ``publish`` adds it to the document."""
        self._status.stages[key] = stage.model_copy(deep=True)
        self._write_part(key)

    def publish(self) -> None:
        """Write the document, again if a task's file has changed meanwhile."""
        parts = read_parts(self._run)
        while True:
            self._merge(parts)
            self._status.write(self._run)
            # In a shared run another job may have written its file and the document in between.
            again = read_parts(self._run) if self._status.shared else parts
            if again == parts:
                return
            parts = again

    def finish(self, exit_code: int) -> None:
        """Write how this process leaves the run."""
        status = self._status
        if not status.shared:
            all_done = all(stage.state == "done" for stage in status.stages.values())
            unfinished: RunState = STATE_OF_EXIT.get(exit_code, "failed" if exit_code else "interrupted")
            status.state = "done" if all_done and not exit_code else unfinished
            status.exit_code = exit_code
            status.finished_utc = utc_now()
            status.runner_pid = None
        self.publish()

    def _begin_task(self, planned: PlannedTask) -> None:
        key, before = planned.task.key, self._status.stages.get(planned.task.key)
        stage = self._status.stage(key)
        if planned.run or planned.redo:
            stage.state, stage.reason = "pending", planned.reason
            stage.error = stage.exit_code = None
        elif planned.finished_before and (before is None or self._has(key)):
            stage.state, stage.reason = "done", None
        # A task that no process has begun is in the document alone, unless it has a file from before.
        if (self._has(key) or planned.redo) and (self._own is not None or self._run.task_status(key).exists()):
            self._write_part(key)

    def _has(self, key: str) -> bool:
        return self._own is None or key in self._own

    def _write_part(self, key: str) -> None:
        write_part(self._run, key, self._status.stages[key])

    def _merge(self, parts: dict[str, StageStatus]) -> None:
        status = self._status
        status.stages.update(parts)
        if status.shared:
            follow_tasks(status)
            return
        status.duration_seconds = round(self._before + time.monotonic() - self._started, 3)
        peaks = [stage.peak_rss_bytes or 0 for stage in status.stages.values()]
        status.peak_rss_bytes = max(peaks, default=0) or status.peak_rss_bytes


def leave_to_jobs(run: RunPaths, tasks: Iterable[Task]) -> None:
    """Write that ``run`` waits for jobs that will work on ``tasks``. The caller holds the run's lock."""
    status = read_status(run)
    for task in tasks:
        stage = status.stage(task.key)
        stage.state, stage.reason, stage.error, stage.exit_code = "pending", "waits for its job", None, None
        if run.task_status(task.key).exists():
            write_part(run, task.key, stage)
    status.shared = True
    follow_tasks(status)
    status.write(run)


def status_now(run: RunPaths) -> RunStatus:
    """Return the status; what is said to run but whose process has gone is interrupted.

    Raises:
        DataError: there is none.
    """
    status = read_status(run)
    for key, stage in status.stages.items():
        if stage.state == "running" and not is_task_worked_on(run, key):
            stage.state, stage.reason = "interrupted", "its runner is gone; --resume goes on"
    if status.shared:
        follow_tasks(status)
    elif status.state == "running" and not is_worked_on(run):
        status.state = "interrupted"
    return status
