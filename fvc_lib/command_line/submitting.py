"""A run handed to SLURM instead of being worked on here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.predicted_memory import PredictedPeak
from fvc_lib.execution.run_lock import run_lock
from fvc_lib.execution.slurm.jobs import SlurmJob, plan_jobs, plan_one_job
from fvc_lib.execution.slurm.site import Site, read_site
from fvc_lib.execution.slurm.submission import describe, submit
from fvc_lib.execution.status_book import leave_to_jobs
from fvc_lib.execution.superseding import put_back, set_aside
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class HowToSubmit:
    """One job for all instead of one per fold (``one_job``), and how many folds that job runs at once (``jobs``)."""

    one_job: bool
    jobs: int


def run_to_be(config: RunConfig) -> RunPaths:
    """The run that a dry run speaks of; its folder is not made."""
    return RunPaths(Path(config.runs_dir) / config.experiment / "run_TO_BE")


def described(
    plan: Sequence[PlannedTask],
    config: RunConfig,
    run: RunPaths,
    predicted: Mapping[str, PredictedPeak],
    how: HowToSubmit,
) -> str:
    """The batch scripts and the commands that would submit them."""
    site = read_site()
    return describe(_jobs(plan, config, site, predicted, how), run, site)


def submitted(
    run: RunPaths,
    make_plan: Callable[[], Sequence[PlannedTask]],
    config: RunConfig,
    predicted: Mapping[str, PredictedPeak],
    how: HowToSubmit,
) -> Iterator[str]:
    """Submit what is left of ``run``; yields lines that tell what was submitted and how to watch it.

    Raises:
        UsageError: somebody is at work on the run, or the site's settings cannot be meant.
        SlurmError: SLURM is not here, or refused.
    """
    site = read_site()
    with run_lock(run):
        plan = make_plan()
        jobs = _jobs(plan, config, site, predicted, how)
        # A job goes on with what is unfinished; what is to be repeated must not look finished to it.
        moved = set_aside(run, [planned.task for planned in plan if planned.redo])
        leave_to_jobs(run, [planned.task for planned in plan if planned.run])
    yield f"run {run.root}"
    try:
        submitted_jobs = submit(jobs, run, site)
    except FvcError as error:
        put_back(moved)
        go_on = f"python run_notebooks.py --resume {shlex.quote(str(run.root))} --executor slurm"
        raise type(error)(f"{error} The run is there and waits: {go_on}") from error
    for job, handed_in in zip(jobs, submitted_jobs, strict=True):
        after = f" after {', '.join(handed_in.after)}" if handed_in.after else ""
        folds = "" if job.folds is None else f", {len(job.folds)} folds"
        yield f"  job {handed_in.job_id}{after}: {job.name}{folds}, {job.memory_mib} MiB ({job.memory_why})"
    if jobs:
        yield f"watch it: python run_notebooks.py status {run.root}"
    else:
        yield "nothing to submit: every task is finished"


def _jobs(
    plan: Sequence[PlannedTask],
    config: RunConfig,
    site: Site,
    predicted: Mapping[str, PredictedPeak],
    how: HowToSubmit,
) -> list[SlurmJob]:
    tasks = [planned.task for planned in plan if planned.run]
    if how.one_job:
        return plan_one_job(tasks, config, site, predicted, at_once=how.jobs)
    return plan_jobs(tasks, config, site, predicted)
