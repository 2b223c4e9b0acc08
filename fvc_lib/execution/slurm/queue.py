"""Handing a run's jobs to SLURM, and what its queue and its accounting say of them. Works without accounting."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm.job_scripts import Site, SlurmJob, render, script_path
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tasks import AUGMENTATION

# Which SLURM jobs a run was handed to: ``slurm/submitted.json``, the link between a run and a queue.


class SubmittedJob(BaseModel):
    """One job as it was handed in."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job_id: str  # SLURM's number; of an array that of all its tasks
    name: str  # of the job and its script
    stages: tuple[str, ...]  # that it runs
    folds: tuple[int, ...] | None = None  # the tasks of the array; None: no array
    shards: int = 0  # of its stage, the tasks of the array; 0: they are folds
    after: tuple[str, ...] = ()  # the job ids it waits for
    cluster: str = ""  # where SLURM manages several; empty: the only one

    def task_of(self, fold: int | None) -> str:
        """What the job, or its array task ``fold``, works on: a task's key, a shard, or stages joined by a comma."""
        if self.shards:
            return f"{self.stages[0]}_shard_{fold}"
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


def _submitted_json(run: RunPaths) -> Path:
    return run.slurm / "submitted.json"


# Calls of SLURM's own commands, and what a failing one said.

_SECONDS = 60


class SlurmError(FvcError):
    """A command of SLURM's is missing, failed or does not answer; the message holds what it said. Exit code 2."""

    exit_code = 2


def has_command(name: str) -> bool:
    """Whether this machine has SLURM's command ``name``."""
    return shutil.which(name) is not None


def _stays(name: str) -> bool:
    """Not SQUEUE_FORMAT and the like, which change how a command answers, nor what a surrounding job was told."""
    if name.startswith("SLURM_"):
        return name in {"SLURM_CONF", "SLURM_CLUSTERS"}
    return not name.startswith(("SQUEUE_", "SACCT_"))


def output_of(command: Sequence[str]) -> str:
    """What ``command`` printed, without the last line's end.

    Raises:
        SlurmError: it is missing, failed, or gave no answer within a minute.
    """
    environ = {name: value for name, value in os.environ.items() if _stays(name)}
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


# The states of a job that will do nothing more, as squeue and sacct write them.
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}


@dataclass(frozen=True)
class JobState:
    """Where one job or array task is."""

    job_id: str  # ``12``, or ``12_3`` of an array
    name: str  # the job's
    task: str  # what it works on: a task's key, or stages joined by a comma
    state: str  # SLURM's word: ``PENDING``, ``RUNNING``, ``COMPLETED`` and so on
    reason: str  # why it waits or ended so, in SLURM's word; empty: it gives none
    nodes: str  # where it runs; empty: nowhere yet

    @property
    def ended(self) -> bool:
        """Whether it will do nothing more."""
        return self.state in ENDED

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes else ""
        return f"job {self.job_id} ({self.name}): {self.state}{where}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class AccountedJob:
    """What the accounting knows of one job or array task, its last start alone."""

    job_id: str
    task: str
    state: str
    max_rss_bytes: int | None
    elapsed_seconds: float | None


def job_states(run: RunPaths, *, must_answer: bool = False) -> list[JobState]:
    """The jobs of ``run`` that SLURM's queue still knows; none where there is no queue or it does not answer.

    With ``must_answer`` a queue that is away is an error, for those who would take its silence for an empty one.

    Raises:
        DataError: the record of the submitted jobs is damaged.
        SlurmError: the queue does not answer, and must.
    """
    jobs = submitted_jobs(run)
    if not jobs or not has_command("squeue"):
        return []
    found: list[JobState] = []
    for cluster, here in _by_cluster(jobs):
        ids = ",".join(job.job_id for job in here)
        command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i|%T|%N|%r", *cluster]
        try:
            found.extend(parse_queue(output_of(command), here))
        except SlurmError as error:  # a job that SLURM has forgotten, or a cluster that is away
            if must_answer and "Invalid job id" not in str(error):
                raise
    return found


def parse_queue(text: str, jobs: Sequence[SubmittedJob]) -> list[JobState]:
    """``squeue --array --format=%i|%T|%N|%r`` read back; lines of other jobs are left out."""
    found = []
    for line in text.splitlines():
        job_id, state, nodes, reason = (part.strip() for part in [*line.split("|", 3), "", "", ""][:4])
        known = _known(job_id, jobs)
        if known is not None and state:
            job, fold = known
            reason = "" if reason in {"None", "(null)"} else reason
            found.append(JobState(job_id, job.name, job.task_of(fold), state, reason, nodes))
    return found


def read_accounting(run: RunPaths) -> list[AccountedJob]:
    """Ask sacct about the jobs of ``run`` and write the answer to ``slurm/accounting.json``.

    A cluster without accounting is nothing special: then there is no answer and no file.

    Raises:
        DataError: the record of the submitted jobs is damaged.
        OSError: the file cannot be written.
    """
    jobs = submitted_jobs(run)
    if not jobs or not has_command("sacct"):
        return []
    found: list[AccountedJob] = []
    for cluster, here in _by_cluster(jobs):
        ids = ",".join(job.job_id for job in here)
        fields = "--format=JobID,State,MaxRSS,ElapsedRaw"
        try:
            answer = output_of(["sacct", "--parsable2", "--noheader", "--noconvert", f"--jobs={ids}", fields, *cluster])
        except SlurmError:  # "Slurm accounting storage is disabled"
            continue
        found.extend(parse_accounting(answer, here))
    if found:
        write_json(run.slurm / "accounting.json", {"jobs": [vars(job) for job in found]})
    return found


def parse_accounting(text: str, jobs: Sequence[SubmittedJob]) -> list[AccountedJob]:
    """``sacct --parsable2 --noheader --format=JobID,State,MaxRSS,ElapsedRaw`` read back.

    A job has a line of its own and one per step (``12_0.batch``, ``12_0.0``), and only steps have a MaxRSS: a job's is
    the largest of its steps, which is the memory of its largest process group where several ran side by side.
    """
    states: dict[str, tuple[str, float | None]] = {}
    peaks: dict[str, int] = {}
    for line in text.splitlines():
        name, state, rss, elapsed = (part.strip() for part in [*line.split("|"), "", "", ""][:4])
        job_id, _, step = name.partition(".")
        if step:
            peak = _bytes_of(rss)
            if peak:  # 0: it was gone before it was sampled
                peaks[job_id] = max(peaks.get(job_id, 0), peak)
        elif state:
            states[job_id] = (state.split()[0], float(elapsed) if elapsed.isdecimal() else None)  # CANCELLED by 1000
    found = []
    for job_id, (state, seconds) in states.items():
        known = _known(job_id, jobs)
        if known is not None:
            job, fold = known
            found.append(AccountedJob(job_id, job.task_of(fold), state, peaks.get(job_id), seconds))
    return found


def _known(job_id: str, jobs: Sequence[SubmittedJob]) -> tuple[SubmittedJob, int | None] | None:
    """The job that ``12`` or ``12_3`` is of, and its fold; tasks not yet split off (``12_[4-9]``) are not told."""
    match = re.fullmatch(r"(\d+)(?:_(\d+))?", job_id)
    if match is None:
        return None
    fold = None if match[2] is None else int(match[2])
    for job in jobs:
        if job.job_id == match[1] and (job.folds is None) == (fold is None):
            return job, fold
    return None


def _by_cluster(jobs: Sequence[SubmittedJob]) -> Iterator[tuple[list[str], list[SubmittedJob]]]:
    """The option that names each cluster, and its jobs."""
    for name in dict.fromkeys(job.cluster for job in jobs):
        yield [f"--clusters={name}"] if name else [], [job for job in jobs if job.cluster == name]


def _bytes_of(text: str) -> int | None:
    """``123456K`` in bytes; SLURM's letters are powers of 1024, and a bare number is bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def sbatch_command(job: SlurmJob, run: RunPaths, ids: Mapping[str, str], after_clips: Sequence[str] = ()) -> list[str]:
    """The command that submits ``job``; ``ids`` has the job ids of those it needs, or what stands for them.

    ``after_clips`` are jobs of other runs whose end a job that makes clips waits for, well or not.
    """
    command = ["sbatch", "--parsable"]
    waits = [f"afterok:{':'.join(ids[need] for need in job.needs)}"] if job.needs else []
    ended = [*(ids[name] for name in job.after), *(after_clips if AUGMENTATION in job.stages else ())]
    waits += [f"afterany:{':'.join(ended)}"] if ended else []
    if waits:
        command += [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"]
    return [*command, str(script_path(job, run))]


def describe(jobs: Sequence[SlurmJob], run: RunPaths, site: Site) -> str:
    """What ``submit`` would write and run, for ``--dry-run``; writes nothing."""
    ids = {job.name: f"<id of {job.name}>" for job in jobs}
    parts = []
    for job in jobs:
        command = " ".join(word if "<id" in word else shlex.quote(word) for word in sbatch_command(job, run, ids))
        parts.append(f"==> {script_path(job, run)}\n{render(job, run, site)}==> {command}\n")
    return "\n".join(parts) if parts else "nothing to submit: every task is finished\n"


def clips_job(run: RunPaths) -> str:
    """The id of the job that makes the clips of ``run`` and has not ended, or nothing; errors as ``job_states``."""
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
            ids[job.name], cluster = _submit_one(job, run, ids, after_clips)
            after = tuple(ids[name] for name in (*job.needs, *job.after))
            named = {"job_id": ids[job.name], "name": job.name, "stages": job.stages, "folds": job.folds}
            done.append(SubmittedJob(**named, shards=job.shards, after=after, cluster=cluster))
        every = [*submitted_jobs(run), *done]
        write_json(_submitted_json(run), {"jobs": [job.model_dump(mode="json") for job in every]})
    except (SlurmError, OSError, DataError) as error:
        raise SlurmError(
            _after_failure(error, done, jobs[len(done)] if len(done) < len(jobs) else None, site)
        ) from error
    return done


def submission_text(job: SlurmJob, handed_in: SubmittedJob) -> str:
    """What was submitted, in a line."""
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


def _submit_one(job: SlurmJob, run: RunPaths, ids: Mapping[str, str], after_clips: Sequence[str]) -> tuple[str, str]:
    answer = output_of(sbatch_command(job, run, ids, after_clips))
    job_id, _, cluster = answer.splitlines()[-1].partition(";") if answer else ("", "", "")
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch answered {answer!r}, wanted a job's number.")
    return job_id, cluster


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
