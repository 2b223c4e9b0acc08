"""Who writes a run's status, and when: one process its own tasks' files, and the document made of everybody's."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence

from fvc_lib.execution.plan.plan import PlannedTask
from fvc_lib.execution.plan.stages import Task
from fvc_lib.execution.run.lock import is_task_worked_on, is_worked_on
from fvc_lib.execution.run.status import (
    RunState,
    RunStatus,
    StageStatus,
    follow_tasks,
    read_parts,
    read_status,
    utc_now,
    write_part,
)
from fvc_lib.services.run_paths import RunPaths

STATE_OF_EXIT: dict[int, RunState] = {75: "requeue", 130: "interrupted", 143: "interrupted"}


class StatusBook:
    """The status as the process at work on a run keeps it; used from one thread.

    Args:
        run: the run, locked by this process.
        own: keys of the tasks this process has; None: the whole run.
        may_write: asked before each write: false once another process has taken the run over.
    """

    def __init__(
        self, run: RunPaths, own: frozenset[str] | None = None, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self._run = run
        self._own = own
        self._may_write = may_write
        self._status = read_status(run)
        self._before = self._status.duration_seconds or 0.0
        self._started = time.monotonic()

    def stage(self, key: str) -> StageStatus:
        """A copy of what was last put down of a task."""
        return self._status.stage(key).model_copy(deep=True)

    def begin(self, plan: Sequence[PlannedTask]) -> None:
        """Put down that this process begins on ``plan``."""
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
        """Put down where a task of this process is; ``publish`` tells it to who reads the document."""
        self._status.stages[key] = stage.model_copy(deep=True)
        self._write_part(key)

    def publish(self) -> None:
        """Write the document until no task's file has changed meanwhile."""
        if not self._may_write():
            return
        parts = read_parts(self._run)
        while True:
            self._merge(parts)
            self._status.write(self._run)
            # In a run that is shared another job may have replaced its file between the two, and the document before.
            again = read_parts(self._run) if self._status.shared else parts
            if again == parts:
                return
            parts = again

    def finish(self, exit_code: int) -> None:
        """Put down that this process leaves the run, and how."""
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
        # What no process has begun on stands in the document alone, unless a file from before says otherwise.
        if (self._has(key) or planned.redo) and (self._own is not None or self._run.task_status(key).exists()):
            self._write_part(key)

    def _has(self, key: str) -> bool:
        return self._own is None or key in self._own

    def _write_part(self, key: str) -> None:
        if self._may_write():
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
    """Put down that ``run`` waits for jobs that will each work on some of ``tasks``.

    For whoever holds the run's lock: nobody is at work on it, so what a task's file says of an attempt before is over.
    """
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
    """The status, corrected where a process said it was at work and is gone without a word.

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
