"""``status.json``: the truth about every stage, written by the runner alone, readable at any moment."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths

RunState = Literal["running", "done", "failed", "interrupted", "requeue"]
StageState = Literal["pending", "running", "done", "failed", "interrupted"]


class StageError(BaseModel):
    """The error that ended a stage, and the number in the ``In [n]`` of the cell it came from."""

    name: str
    message: str
    cell: int | None = None


class StageStatus(BaseModel):
    """One task's truth, of its last attempt. Times are UTC and inform; durations come from a monotonic clock.

    Attributes:
        state: where it stands.
        attempts: how often it was begun.
        reason: why it runs, or what ended it, in words.
        exit_code: FVC's, of README's table.
        peak_rss_bytes: of the kernel and its children.
        last_step: what its progress said last, for example ``steps 12/40``.
        last_metric: what it measured last, for example ``loss 0.31 at step 12 of epoch 3``.
        killed_by: the signal that ended the kernel, for example ``SIGKILL``.
        oom_kills: how often the system killed for memory meanwhile.
        next_setting: what to try next, as options of the command line.
        error: the exception that ended it.
        host: where it ran.
        job_id: SLURM's, ``123`` or ``123_4``.
    """

    model_config = ConfigDict(extra="ignore")

    state: StageState = "pending"
    attempts: int = 0
    reason: str | None = None
    started_utc: str | None = None
    finished_utc: str | None = None
    duration_seconds: float | None = None
    exit_code: int | None = None
    peak_rss_bytes: int | None = None
    last_step: str | None = None
    last_metric: str | None = None
    killed_by: str | None = None
    oom_kills: int | None = None
    next_setting: str | None = None
    host: str | None = None
    job_id: str | None = None
    error: StageError | None = None


class RunStatus(BaseModel):
    """The whole run's truth."""

    model_config = ConfigDict(extra="ignore")

    run_id: str
    state: RunState = "running"
    attempt: int = 1
    started_utc: str
    finished_utc: str | None = None
    duration_seconds: float | None = None  # summed over attempts
    peak_rss_bytes: int | None = None
    exit_code: int | None = None
    runner_pid: int | None = None
    runner_host: str | None = None
    stages: dict[str, StageStatus] = Field(default_factory=dict)

    def stage(self, key: str) -> StageStatus:
        """The status of task ``key``, made when it is new."""
        return self.stages.setdefault(key, StageStatus())

    def write(self, run: RunPaths) -> None:
        """Replace ``status.json`` atomically."""
        document: dict[str, Any] = self.model_dump(mode="json")
        write_json(run.status_json, document)


def read_status(run: RunPaths) -> RunStatus:
    """The status as it was last written.

    Raises:
        DataError: missing or not ours; names the file.
    """
    try:
        return RunStatus(**json.loads(run.status_json.read_text()))
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise DataError(f"{run.status_json}: cannot be read as a run's status: {error}. Start a new run.") from error


def utc_now() -> str:
    """Now, as ISO 8601 UTC with seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
