"""Which SLURM jobs a run was handed to: ``slurm/submitted.json``, the link between a run and a queue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, stage_key


class SubmittedJob(BaseModel):
    """One job as it was handed in.

    Attributes:
        job_id: SLURM's number; of an array that of all its tasks.
        name: of the job and its script.
        stages: that it runs.
        folds: the tasks of the array; None: no array.
        after: the job ids it waits for.
        cluster: where SLURM manages several; empty: the only one.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    job_id: str
    name: str
    stages: tuple[str, ...]
    folds: tuple[int, ...] | None = None
    after: tuple[str, ...] = ()
    cluster: str = ""
    submitted_utc: str = ""
    submitted_from: str = ""

    def task_of(self, fold: int | None) -> str:
        """What the job, or its array task ``fold``, works on: a task's key, or stages joined by a comma."""
        return ",".join(self.stages) if self.folds is None else stage_key(self.stages[0], fold)


def submitted_jobs(run: RunPaths) -> list[SubmittedJob]:
    """All jobs that were ever submitted for ``run``, oldest first; none where there were none.

    Raises:
        DataError: the file is damaged.
    """
    path = _submitted_json(run)
    try:
        return [SubmittedJob(**each) for each in json.loads(path.read_text())["jobs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(
            f"{path}: cannot be read as a list of jobs: {error!r}. Delete it; squeue knows them."
        ) from error


def remember(jobs: Sequence[SubmittedJob], run: RunPaths) -> None:
    """Add ``jobs`` to those that were submitted for ``run`` before.

    Raises:
        DataError: the file is damaged.
        OSError: it cannot be written.
    """
    every = [*submitted_jobs(run), *jobs]
    write_json(_submitted_json(run), {"jobs": [job.model_dump(mode="json") for job in every]})


def _submitted_json(run: RunPaths) -> Path:
    return run.slurm / "submitted.json"
