"""Hands a run's jobs to SLURM, each after those it needs, and remembers what was handed in."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from fvc_lib import CHECKOUT
from fvc_lib.execution.run.status import utc_now
from fvc_lib.execution.slurm.jobs import SlurmJob, render, script_path
from fvc_lib.execution.slurm.queue import SlurmError, SubmittedJob, has_command, job_states, output_of, remember
from fvc_lib.execution.slurm.site import Site
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths


def sbatch_command(job: SlurmJob, run: RunPaths, ids: Mapping[str, str]) -> list[str]:
    """The command that submits ``job``; ``ids`` has the job ids of those it needs, or what stands for them."""
    command = ["sbatch", "--parsable"]
    if job.needs:
        command += [f"--dependency=afterok:{':'.join(ids[need] for need in job.needs)}", "--kill-on-invalid-dep=yes"]
    return [*command, str(script_path(job, run))]


def describe(jobs: Sequence[SlurmJob], run: RunPaths, site: Site, *, home: Path = CHECKOUT) -> str:
    """What ``submit`` would write and run, for ``--dry-run``; writes nothing."""
    ids = {job.name: f"<id of {job.name}>" for job in jobs}
    parts = []
    for job in jobs:
        command = " ".join(word if "<id" in word else shlex.quote(word) for word in sbatch_command(job, run, ids))
        parts.append(f"==> {script_path(job, run)}\n{render(job, run, site, home=home)}==> {command}\n")
    return "\n".join(parts) if parts else "nothing to submit: every task is finished\n"


def submit(jobs: Sequence[SlurmJob], run: RunPaths, site: Site, *, home: Path = CHECKOUT) -> list[SubmittedJob]:
    """Write the scripts into the run and submit them in order; all of them, or none.

    Raises:
        UsageError: jobs of this run still wait or run.
        SlurmError: sbatch is missing or refused a job; what was submitted before is cancelled.
        OSError: the run folder cannot be written.
    """
    texts = {job.name: render(job, run, site, home=home) for job in jobs}
    if jobs and not has_command("sbatch"):
        raise SlurmError("sbatch: not found. Run this where SLURM's commands are, or without --executor slurm.")
    _refuse_second_submission(run)
    run.slurm.mkdir(exist_ok=True)  # where the logs go, too: a job whose log cannot be opened dies without a word
    for job in jobs:
        write_text(script_path(job, run), texts[job.name])
    done: list[SubmittedJob] = []
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            ids[job.name], cluster = _submit_one(job, run, ids)
            done.append(_as_submitted(job, ids, cluster))
        remember(done, run)
    except (SlurmError, OSError, DataError) as error:
        raise SlurmError(
            _after_failure(error, done, jobs[len(done)] if len(done) < len(jobs) else None, site)
        ) from error
    return done


def _refuse_second_submission(run: RunPaths) -> None:
    """Two jobs would work on the same tasks, and one of each pair end with an error."""
    alive = [state for state in job_states(run, must_answer=True) if not state.ended]
    if alive:
        ids = " ".join(sorted({state.job_id.partition("_")[0] for state in alive}, key=int))
        raise UsageError(
            f"{run.run_id}: jobs of it still wait or run: {'; '.join(map(str, alive[:5]))}. Wait for them, or end them "
            f"with: scancel {ids}"
        )


def _submit_one(job: SlurmJob, run: RunPaths, ids: Mapping[str, str]) -> tuple[str, str]:
    answer = output_of(sbatch_command(job, run, ids))
    job_id, _, cluster = answer.splitlines()[-1].partition(";") if answer else ("", "", "")
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch answered {answer!r}, wanted a job's number.")
    return job_id, cluster


def _as_submitted(job: SlurmJob, ids: Mapping[str, str], cluster: str) -> SubmittedJob:
    return SubmittedJob(
        job_id=ids[job.name],
        name=job.name,
        stages=job.stages,
        folds=job.folds,
        after=tuple(ids[need] for need in job.needs),
        cluster=cluster,
        submitted_utc=utc_now(),
        submitted_from=socket.gethostname(),
    )


def _after_failure(error: Exception, done: Sequence[SubmittedJob], failed: SlurmJob | None, site: Site) -> str:
    """Cancel what was submitted, and say what happened, what became of it and where to look."""
    what = f"{failed.name}: {error}" if failed is not None else str(error)
    hint = f"The settings are in {site.path}; mend them."
    if not done:
        return f"{what} Nothing was submitted. {hint}"
    ids = [job.job_id for job in done]
    try:
        output_of(["scancel", *ids])
    except SlurmError as second:
        return f"{what} Jobs {' '.join(ids)} were submitted before and could not be cancelled ({second}). {hint}"
    return f"{what} Jobs {' '.join(ids)}, submitted before, were cancelled. {hint}"
