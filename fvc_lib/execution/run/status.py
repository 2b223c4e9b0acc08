"""``status.json``: the state of a run and of each of its tasks, readable at any moment.

A task is one notebook of a run (a stage), or one fold of it. Processes lock the file before they change it, so that
jobs never overwrite each other's tasks.
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.execution.plan.plan import PlannedTask
from fvc_lib.execution.plan.stages import Task
from fvc_lib.execution.run.lock import is_task_worked_on, is_worked_on, record_held
from fvc_lib.services.atomic_files import utc_now
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import document_damage, write_document
from fvc_lib.services.run_paths import RunPaths

# "waiting": the remaining tasks belong to jobs that have not begun. "interactive": the run was begun from a notebook.
# "requeue": it was stopped and can be resumed.
RunState = Literal["running", "done", "failed", "interrupted", "requeue", "waiting", "interactive"]
StageState = Literal["pending", "running", "done", "failed", "interrupted"]
STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}


class StageError(BaseModel):
    """The error that ended a stage."""

    name: str
    message: str
    cell: int | None = None  # execution number of the cell: n in ``In [n]``
    exit_code: int | None = None  # attribute of its class; None for errors of other libraries


class StageStatus(BaseModel):
    """The state of one task's last attempt. Times are UTC; durations come from a monotonic clock."""

    model_config = ConfigDict(extra="ignore")

    state: StageState = "pending"
    attempts: int = 0  # number of starts
    reason: str | None = None  # why it runs, or what ended it
    started_utc: str | None = None
    finished_utc: str | None = None
    duration_seconds: float | None = None
    exit_code: int | None = None  # its meaning is in a table in README
    peak_rss_bytes: int | None = None  # of the kernel and its children
    last_step: str | None = None  # last progress, for example ``steps 12/40``
    last_metric: str | None = None  # last measurement, for example ``loss 0.31 at step 12 of epoch 3``
    killed_by: str | None = None  # the signal that ended the kernel, for example ``SIGKILL``
    oom_kills: int | None = None  # processes that the system killed for memory meanwhile
    advice: str | None = None  # what to change before the next try, a sentence
    host: str | None = None
    job_id: str | None = None  # of SLURM, ``123`` or ``123_4``
    error: StageError | None = None  # the exception that ended it


class RunStatus(BaseModel):
    """The state of a run. If it is ``shared``, ``follow_tasks`` computes the state from the tasks."""

    model_config = ConfigDict(extra="ignore")

    run_id: str
    state: RunState = "running"
    attempt: int = 1  # number of runners that have begun on it
    started_utc: str
    finished_utc: str | None = None
    duration_seconds: float | None = None  # at work, summed over attempts; of a shared run summed over tasks
    peak_rss_bytes: int | None = None
    exit_code: int | None = None
    runner_pid: int | None = None
    runner_host: str | None = None
    shared: bool = False  # whether several jobs work on it, each on other tasks
    stages: dict[str, StageStatus] = Field(default_factory=dict)

    def stage(self, key: str) -> StageStatus:
        """Return the status of task ``key``; add a pending one if there is none."""
        return self.stages.setdefault(key, StageStatus())

    def write(self, run: RunPaths) -> None:
        """Replace ``status.json`` atomically."""
        write_document(run.status_json, self.model_dump(mode="json"))

    def follow_tasks(self) -> None:
        """Set state, exit code, end, duration and attempt of a shared run from its tasks."""
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
        self.runner_pid = self.runner_host = None
        self.duration_seconds = round(sum(stage.duration_seconds or 0.0 for stage in stages), 3)
        self.attempt = max((stage.attempts for stage in stages), default=1) or 1


def read_status(run: RunPaths) -> RunStatus:
    """Return the status of ``run``.

    Raises:
        DataError: ``status.json`` cannot be read or is damaged, or there is no run.
    """
    try:
        document = json.loads(run.status_json.read_text())
        status = RunStatus(**document)
    except FileNotFoundError as error:
        if not run.run_json.is_file():
            raise DataError(f"{run.root}: no run: it has neither status.json nor run.json.") from error
        # Nothing depends on it: the stages' own records tell which are finished.
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
    """Yield the status of ``run`` to be changed, and write it after the block.

    Raises:
        DataError: as in ``read_status``, or another process keeps the file locked for too long.
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
    """Write the status of one task."""
    with updated_status(run) as status:
        status.stages[key] = stage


def begin_work(run: RunPaths, plan: Sequence[PlannedTask], own: frozenset[str] | None) -> None:
    """Write into ``status.json`` that this process begins to run ``plan``.

    Args:
        run: the run, which this process has locked.
        plan: every task of the run.
        own: keys of the tasks of this process; None: all.
    """
    with updated_status(run) as status:
        if any(stage.attempts for stage in status.stages.values()):
            status.attempt += 1
        status.shared = own is not None
        status.state, status.exit_code, status.finished_utc = "running", None, None
        status.runner_pid, status.runner_host = os.getpid(), platform.node()
        for planned in plan:
            key, is_new = planned.task.key, planned.task.key not in status.stages
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
    """Write into ``status.json`` how this process ended, and add ``seconds``, its duration."""
    with updated_status(run) as status:
        status.duration_seconds = round((status.duration_seconds or 0.0) + seconds, 3)
        all_done = all(stage.state == "done" for stage in status.stages.values())
        unfinished: RunState = STATE_OF_EXIT.get(exit_code, "failed" if exit_code else "interrupted")
        status.state = "done" if all_done and not exit_code else unfinished
        status.exit_code, status.finished_utc, status.runner_pid = exit_code, utc_now(), None


def leave_to_jobs(run: RunPaths, tasks: Iterable[Task]) -> None:
    """Write that ``run`` waits for jobs that will work on ``tasks``. The caller holds the run's lock."""
    with updated_status(run) as status:
        for task in tasks:
            stage = status.stage(task.key)
            stage.state, stage.reason, stage.error, stage.exit_code = "pending", "waits for its job", None, None
        status.shared = True


def status_now(run: RunPaths) -> RunStatus:
    """Return the status of ``run``; a running task or run without a living process becomes interrupted.

    Raises:
        DataError: as ``read_status``.
    """
    status = read_status(run)
    for key, stage in status.stages.items():
        if stage.state == "running" and not is_task_worked_on(run, key):
            stage.state, stage.reason = "interrupted", "its runner is gone; --resume goes on"
    if status.shared:
        status.follow_tasks()
    elif status.state == "running" and not is_worked_on(run):
        status.state = "interrupted"
    return status
