"""``status.json``: the truth about every stage, readable at any moment.

Each task has a file of its own (``status/<key>.json``), written by whoever runs it and nobody else; ``status.json`` is
all of them in one document beside what holds for the whole run. Where the two differ the task's own file counts, so
``read_status`` is true whoever wrote the document last. Who writes when: ``execution.status_book``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import temporary_of, write_json
from fvc_lib.services.config import RunConfig, read_params_file, resolve_config
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, stage_key

# "waiting": what is left belongs to jobs that have not begun; "by hand": begun from a notebook, no runner has it.
RunState = Literal["running", "done", "failed", "interrupted", "requeue", "waiting", "by hand"]
ATTEMPT_VARIABLE = "FVC_STAGE_ATTEMPT"  # set by the runner for its kernels: a notebook that has it is headless
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
    """The whole run's truth.

    Attributes:
        state: where it stands; while ``shared`` it follows from the tasks' states, as do the fields after it.
        attempt: how often a runner has begun on it, from 1.
        duration_seconds: at work, summed over attempts; of jobs what their tasks took, together.
        shared: jobs work on it, each on tasks of its own; no process has it as a whole.
    """

    model_config = ConfigDict(extra="ignore")

    run_id: str
    state: RunState = "running"
    attempt: int = 1
    started_utc: str
    finished_utc: str | None = None
    duration_seconds: float | None = None
    peak_rss_bytes: int | None = None
    exit_code: int | None = None
    runner_pid: int | None = None
    runner_host: str | None = None
    shared: bool = False
    stages: dict[str, StageStatus] = Field(default_factory=dict)

    def stage(self, key: str) -> StageStatus:
        """The status of task ``key``, made when it is new."""
        return self.stages.setdefault(key, StageStatus())

    def write(self, run: RunPaths) -> None:
        """Replace ``status.json`` atomically."""
        document: dict[str, Any] = self.model_dump(mode="json")
        write_json(run.status_json, document)


def read_status(run: RunPaths) -> RunStatus:
    """The run's status: the document, and over it each task's own file.

    Raises:
        DataError: missing or not ours; names the file.
    """
    try:
        status = RunStatus(**json.loads(run.status_json.read_text()))
    except FileNotFoundError as error:
        if not run.run_json.is_file():
            raise DataError(f"{run.root}: no run: it has neither status.json nor run.json.") from error
        # Lost, and nothing depends on it: what is finished stands in the stages' own records.
        status = RunStatus(run_id=run.run_id, state="interrupted", started_utc=utc_now())
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise DataError(
            f"{run.status_json}: cannot be read as a run's status: {error}. Delete it, then --resume."
        ) from error
    status.stages.update(read_parts(run))
    if status.shared:
        follow_tasks(status)
    return status


def run_config(run: RunPaths) -> RunConfig:
    """The configuration a run was started with, as it stands in its ``params.yaml``.

    Raises:
        UsageError: the file is missing or was edited into something invalid.
    """
    return resolve_config(read_params_file(run.params_yaml), environ={})


def read_parts(run: RunPaths) -> dict[str, StageStatus]:
    """Each task's own file, by key; one that cannot be read is left out: then the document has the last that could."""
    found = {}
    for path in sorted(run.task_status("").parent.glob("[!.]*.json")):
        try:
            found[path.stem] = StageStatus(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, ValidationError):
            continue
    return found


def write_part(run: RunPaths, key: str, stage: StageStatus) -> None:
    """Replace the file of task ``key`` atomically."""
    write_json(run.task_status(key), stage.model_dump(mode="json"))


def follow_tasks(status: RunStatus) -> None:
    """Set what holds for the whole of a ``shared`` run from its tasks' states."""
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


def utc_now() -> str:
    """Now, as ISO 8601 UTC with seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ----------------------------------------------------------------------------------------------------
# Progress that crosses from a kernel to whoever waits for it: one small file per task, replaced as work goes on.


WRITE_INTERVAL_SECONDS = 0.5

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Progress:
    """What a task is doing: ``done`` of ``total`` units of ``what``."""

    what: str
    done: int
    total: int


def progress_path(run: RunPaths, stage: str, fold: int | None) -> Path:
    """Where a task leaves its progress."""
    return run.logs / f"{stage_key(stage, fold)}.progress.json"


def read_progress(path: Path) -> Progress | None:
    """The latest progress; None before there is any."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_reporter(path: Path, what: str) -> Report:
    """A callback ``(done, total)`` that replaces ``path`` at most twice a second and at the end.

    Not fsynced: losing it in a power cut loses nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    last = -WRITE_INTERVAL_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < WRITE_INTERVAL_SECONDS:
            return
        last = now
        temporary = temporary_of(path)
        temporary.write_text(json.dumps(asdict(Progress(what, done, total))))
        temporary.replace(path)

    return report


def bar_reporter(what: str) -> Report:
    """A callback ``(done, total)`` that draws a bar in a live notebook or terminal."""
    from tqdm.auto import tqdm

    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc=what)
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
