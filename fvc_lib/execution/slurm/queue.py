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

from pydantic import BaseModel, ConfigDict

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm.job_scripts import Site, SlurmJob, render, script_path
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, stage_key


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
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's are ValueErrors
        raise DataError(f"{path}: not a list of jobs: {error!r}. Delete it; squeue knows them.") from error


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
        answer = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {answer}")
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
    reason: str  # why it waits or ended so, in SLURM's word; may be empty
    nodes: str  # where it runs; may be empty

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
    """Parse the output of ``squeue --array --format=%i|%T|%N|%r``; drop lines of other jobs.

    Array tasks that are not split off yet (``12_[4-9]``) are dropped as well.
    """
    states = []
    for match in re.finditer(r"^(\d+)(?:_(\d+))?\|([^|]+)\|([^|]*)\|(.*)$", text, re.MULTILINE):
        number, fold, state, nodes, reason = match.groups()
        for job in jobs:
            if job.job_id == number and (job.folds is None) == (fold is None):
                task = job.task_of(None if fold is None else int(fold))
                job_id = number if fold is None else f"{number}_{fold}"
                reason = "" if reason in {"None", "(null)"} else reason.strip()
                states.append(JobState(job_id, job.name, task, state.strip(), reason, nodes.strip()))
    return states


def sbatch_command(job: SlurmJob, run: RunPaths, ids: Mapping[str, str]) -> list[str]:
    """Return the command that submits ``job``; ``ids`` has the ids of the jobs before it, by name."""
    command = ["sbatch", "--parsable"]
    waits = [f"afterok:{':'.join(ids[need] for need in job.needs)}"] if job.needs else []
    waits += [f"afterany:{':'.join(ids[name] for name in job.after)}"] if job.after else []
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


def refuse_silent_cluster() -> None:
    """Check that the cluster answers, before a run begins that would wait for its jobs.

    Raises:
        SlurmError: sbatch is missing, or the queue does not answer.
    """
    if not has_command("sbatch"):
        raise SlurmError("sbatch: not found. Run this where SLURM's commands are, or without --executor slurm.")
    if has_command("squeue"):
        output_of(["squeue", "--noheader", "--me", "--format=%i"])


def submit(jobs: Sequence[SlurmJob], run: RunPaths, site: Site, *, home: Path = CHECKOUT) -> list[SubmittedJob]:
    """Write the scripts into the run and submit them in order; all of them, or none.

    Raises:
        UsageError: jobs of this run still wait or run.
        SlurmError: sbatch is missing or refused a job; the jobs submitted before it are cancelled.
        OSError: the run folder cannot be written.
    """
    if alive := [state for state in job_states(run, must_answer=True) if not state.ended]:
        ids = " ".join(sorted({state.job_id.partition("_")[0] for state in alive}, key=int))
        raise UsageError(f"{run.run_id}: {len(alive)} jobs of it still wait or run. Wait, or end them: scancel {ids}")
    texts = {script_path(job, run): render(job, run, site, home=home) for job in jobs}
    run.slurm.mkdir(exist_ok=True)  # SLURM writes the logs there, too, and drops a job whose log it cannot open
    for path, text in texts.items():
        write_text(path, text)
    submitted: list[SubmittedJob] = []
    try:
        for job in jobs:
            known = {each.name: each.job_id for each in submitted}
            answer = output_of(sbatch_command(job, run, known))
            job_id = answer.rpartition("\n")[2].partition(";")[0]  # a cluster's name may follow
            if not job_id.isdecimal():
                raise SlurmError(f"sbatch answered {answer!r}, wanted a job's number.")
            after = tuple(known[name] for name in (*job.needs, *job.after))
            submitted.append(
                SubmittedJob(job_id=job_id, name=job.name, stages=job.stages, folds=job.folds, shards=job.shards,
                             after=after)
            )  # fmt: skip
        every = [*submitted_jobs(run), *submitted]
        write_json(_submitted_json(run), {"jobs": [job.model_dump(mode="json") for job in every]})
    except (SlurmError, OSError, DataError) as error:
        ids = " ".join(job.job_id for job in submitted)
        fate = f"Jobs {ids}, submitted before, were cancelled." if ids else "Nothing was submitted."
        try:
            if ids:
                output_of(["scancel", *ids.split()])
        except SlurmError as second:
            fate = f"Jobs {ids} were submitted before and could not be cancelled ({second})."
        raise SlurmError(f"{error} {fate} The settings are in {site.path}.") from error
    return submitted


def submission_text(job: SlurmJob, submitted: SubmittedJob) -> str:
    """Return one line on a submitted job."""
    after = f" after {', '.join(submitted.after)}" if submitted.after else ""
    tasks = "" if job.folds is None else f", {len(job.folds)} {'shards' if job.shards else 'folds'}"
    return f"job {submitted.job_id}{after}: {job.name}{tasks}, {job.memory_mib} MiB"
