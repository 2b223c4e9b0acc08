"""Submit a run's jobs to SLURM, and read its queue."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm.job_scripts import Site, SlurmJob, render, script_path
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tasks import AUGMENTATION


class SubmittedJob(BaseModel):
    """One submitted job."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job_id: str  # SLURM's number; of an array that of all its tasks
    name: str  # of the job and its script
    stages: tuple[str, ...]  # that it runs
    folds: tuple[int, ...] | None = None  # the tasks of the array; None: no array
    shards: int = 0  # of its stage, the tasks of the array; 0: they are folds
    after: tuple[str, ...] = ()  # the job ids it waits for

    def task_of(self, fold: int | None) -> str:
        """Return the work of the job, or of its array task ``fold``: a task's key, a shard, or stages with commas."""
        if self.shards:
            return f"{self.stages[0]}_shard_{fold}"
        return ",".join(self.stages) if self.folds is None else stage_key(self.stages[0], fold)


def submitted_jobs(run: RunPaths) -> list[SubmittedJob]:
    """Return all jobs that were ever submitted for ``run``, oldest first.

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


def _submitted_json(run: RunPaths) -> Path:
    return run.slurm / "submitted.json"


_SECONDS = 60


class SlurmError(FvcError):
    """A command of SLURM is missing, failed or does not answer. Exit code 2."""

    exit_code = 2


def has_command(name: str) -> bool:
    """Return whether this machine has the command ``name``."""
    return shutil.which(name) is not None


def output_of(command: Sequence[str]) -> str:
    """Return the output of ``command`` without the last line end.

    Raises:
        SlurmError: it is missing, failed, or gave no answer within a minute.
    """
    # Drop variables that change the output or come from an enclosing job.
    dropped = re.compile(r"SQUEUE_|SLURM_(?!CONF$|CLUSTERS$)")
    environ = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environ, timeout=_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]}: not found. Run this where SLURM's commands are, or without --executor slurm."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]}: no answer within {_SECONDS} s. Is the cluster well? Try `sinfo`.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode} and said: {said}")
    return done.stdout.rstrip("\n")


# The states of a job that has ended, as squeue writes them.
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """The state of one job or array task."""

    job_id: str  # ``12``, or ``12_3`` of an array
    name: str  # the job's
    task: str  # what it works on: a task's key, or stages joined by a comma
    state: str  # SLURM's word: ``PENDING``, ``RUNNING``, ``COMPLETED`` and so on
    reason: str  # why it waits or ended so, in SLURM's word; empty: it gives none
    nodes: str  # where it runs; empty: nowhere yet

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.state in ENDED

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes else ""
        return f"job {self.job_id} ({self.name}): {self.state}{where}{f' ({self.reason})' if self.reason else ''}"


def job_states(run: RunPaths, *, must_answer: bool = False) -> list[JobState]:
    """Return the jobs of ``run`` that the queue still knows; none if it does not answer, unless it ``must_answer``.

    Raises:
        DataError: the record of the submitted jobs is damaged.
        SlurmError: the queue does not answer, and must.
    """
    jobs = submitted_jobs(run)
    if not jobs or not has_command("squeue"):
        return []
    ids = ",".join(job.job_id for job in jobs)
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i|%T|%N|%r"]
    try:
        return parse_queue(output_of(command), jobs)
    except SlurmError as error:  # SLURM has forgotten a job, or does not answer
        if must_answer and "Invalid job id" not in str(error):
            raise
        return []


def parse_queue(text: str, jobs: Sequence[SubmittedJob]) -> list[JobState]:
    """Parse the output of ``squeue --array --format=%i|%T|%N|%r``; drop lines of other jobs."""
    found = []
    for line in text.splitlines():
        job_id, state, nodes, reason = (part.strip() for part in [*line.split("|", 3), "", "", ""][:4])
        known = _known(job_id, jobs)
        if known is not None and state:
            job, fold = known
            reason = "" if reason in {"None", "(null)"} else reason
            found.append(JobState(job_id, job.name, job.task_of(fold), state, reason, nodes))
    return found


def _known(job_id: str, jobs: Sequence[SubmittedJob]) -> tuple[SubmittedJob, int | None] | None:
    """Return the job of ``12`` or ``12_3``, and its fold; None for tasks not yet split off (``12_[4-9]``)."""
    match = re.fullmatch(r"(\d+)(?:_(\d+))?", job_id)
    if match is None:
        return None
    fold = None if match[2] is None else int(match[2])
    for job in jobs:
        if job.job_id == match[1] and (job.folds is None) == (fold is None):
            return job, fold
    return None


def sbatch_command(job: SlurmJob, run: RunPaths, ids: Mapping[str, str], after_clips: Sequence[str] = ()) -> list[str]:
    """Return the command that submits ``job``.

    Args:
        job: the job.
        run: its run.
        ids: the ids of the jobs that it needs.
        after_clips: ids of other runs' jobs for whose end a job that makes clips waits.
    """
    command = ["sbatch", "--parsable"]
    waits = [f"afterok:{':'.join(ids[need] for need in job.needs)}"] if job.needs else []
    ended = [*(ids[name] for name in job.after), *(after_clips if AUGMENTATION in job.stages else ())]
    waits += [f"afterany:{':'.join(ended)}"] if ended else []
    if waits:
        command += [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"]
    return [*command, str(script_path(job, run))]


def describe(jobs: Sequence[SlurmJob], run: RunPaths, site: Site) -> str:
    """Return the scripts and commands of ``submit``, for ``--dry-run``."""
    ids = {job.name: f"<id of {job.name}>" for job in jobs}
    parts = []
    for job in jobs:
        command = " ".join(word if "<id" in word else shlex.quote(word) for word in sbatch_command(job, run, ids))
        parts.append(f"==> {script_path(job, run)}\n{render(job, run, site)}==> {command}\n")
    return "\n".join(parts) if parts else "nothing to submit: every task is finished\n"


def clips_job(run: RunPaths) -> str:
    """Return the id of the unfinished job that makes the clips of ``run``, or an empty text."""
    alive = {state.job_id.partition("_")[0] for state in job_states(run) if not state.ended}
    ids = [job.job_id for job in submitted_jobs(run) if AUGMENTATION in job.stages and job.job_id in alive]
    return ids[-1] if ids else ""


def refuse_without_sbatch() -> None:
    """Check that jobs can be submitted from here.

    Raises:
        SlurmError: they cannot.
    """
    if not has_command("sbatch"):
        raise SlurmError("sbatch: not found. Run this where SLURM's commands are, or without --executor slurm.")


def refuse_silent_cluster() -> None:
    """Check that jobs can be submitted from here and that the cluster answers, before anything is begun for them.

    Raises:
        SlurmError: they cannot, or it does not.
    """
    refuse_without_sbatch()
    if has_command("squeue"):
        try:
            output_of(["squeue", "--noheader", "--me", "--format=%i"])
        except SlurmError as error:
            raise SlurmError(
                f"{str(error).splitlines()[0].rstrip('.')}. The cluster does not answer from here: try sinfo, or run "
                "without --executor slurm."
            ) from error


def submit(
    jobs: Sequence[SlurmJob], run: RunPaths, site: Site, *, home: Path = CHECKOUT, after_clips: Sequence[str] = ()
) -> list[SubmittedJob]:
    """Write the scripts into the run and submit them in order; all of them, or none. ``after_clips``: see
    ``sbatch_command``.

    Raises:
        UsageError: jobs of this run still wait or run.
        SlurmError: sbatch is missing or refused a job; what was submitted before is cancelled.
        OSError: the run folder cannot be written.
    """
    texts = {job.name: render(job, run, site, home=home) for job in jobs}
    if jobs:
        refuse_without_sbatch()
    _refuse_second_submission(run)
    run.slurm.mkdir(exist_ok=True)  # where the logs go, too: a job whose log cannot be opened dies without a word
    for job in jobs:
        write_text(script_path(job, run), texts[job.name])
    done: list[SubmittedJob] = []
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            ids[job.name] = _submit_one(job, run, ids, after_clips)
            after = tuple(ids[name] for name in (*job.needs, *job.after))
            named = {"job_id": ids[job.name], "name": job.name, "stages": job.stages, "folds": job.folds}
            done.append(SubmittedJob(**named, shards=job.shards, after=after))
        every = [*submitted_jobs(run), *done]
        write_json(_submitted_json(run), {"jobs": [job.model_dump(mode="json") for job in every]})
    except (SlurmError, OSError, DataError) as error:
        raise SlurmError(
            _after_failure(error, done, jobs[len(done)] if len(done) < len(jobs) else None, site)
        ) from error
    return done


def submission_text(job: SlurmJob, handed_in: SubmittedJob) -> str:
    """Return one line on a submitted job."""
    after = f" after {', '.join(handed_in.after)}" if handed_in.after else ""
    tasks = "" if job.folds is None else f", {len(job.folds)} {'shards' if job.shards else 'folds'}"
    return f"job {handed_in.job_id}{after}: {job.name}{tasks}, {job.memory_mib} MiB"


def _refuse_second_submission(run: RunPaths) -> None:
    """Two jobs would work on the same tasks, and one of each pair end with an error."""
    alive = [state for state in job_states(run, must_answer=True) if not state.ended]
    if alive:
        ids = " ".join(sorted({state.job_id.partition("_")[0] for state in alive}, key=int))
        raise UsageError(
            f"{run.run_id}: jobs of it still wait or run: {'; '.join(map(str, alive[:5]))}. Wait for them, or end them "
            f"with: scancel {ids}"
        )


def _submit_one(job: SlurmJob, run: RunPaths, ids: Mapping[str, str], after_clips: Sequence[str]) -> str:
    answer = output_of(sbatch_command(job, run, ids, after_clips))
    job_id = answer.splitlines()[-1].partition(";")[0] if answer else ""  # a cluster's name may follow
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch answered {answer!r}, wanted a job's number.")
    return job_id


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
