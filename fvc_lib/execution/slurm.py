"""SLURM: turn a run's tasks into jobs with batch scripts, submit them, and read the queue.

A task is one notebook of a run (a stage), or one fold of it. Consecutive stages share a job. The folds of a stage are
an array of jobs, and so are its shards (shares of its files). If a task needs another task, its job depends on the
other task's job. ``slurm/site.conf`` has the cluster's settings; bash reads this file, here and in the jobs.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fvc_lib.execution.plan import all_needed
from fvc_lib.execution.stages import Task
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError, did_you_mean
from fvc_lib.services.home import HOME, SLURM
from fvc_lib.services.tasks import STAGES, Stage

SITE_VARIABLE = "FVC_SITE"
_COMMAND_SECONDS = 60
# The states of a job that has ended, as squeue writes them.
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


class SlurmError(FvcError):
    """Raised if a command of SLURM is missing, fails or does not answer. The exit code is 2."""

    exit_code = 2


# The site's settings


class Site(BaseModel):
    """The settings for jobs on a SLURM cluster, read from a file such as ``slurm/site.conf``.

    An empty text means that the setting is not set.

    Attributes:
        account: the account that pays for the jobs.
        partition: partition of the jobs.
        partition_training: partition of jobs that train networks, or that compute the verdicts of ``predict`` with
            trained networks; empty: ``partition``.
        time: time limit of a job, ``HH:MM:SS`` or ``D-HH:MM:SS``.
        signal_seconds: how long before the time limit SLURM warns the job, so that it saves and requeues itself.
        max_requeues: how often a job requeues itself.
        cpus: cores of each process.
        gpus: GPUs of each training process.
        ranks_per_node: how many of a training's processes share a node; None: all.
        memory: memory of each process, in MiB.
        shard_tasks: number of jobs that share a stage's files; 1: the stage's own job handles all files.
        extra: further options of ``sbatch``.
        setup: shell commands that a job runs before Python starts.
        python: the Python interpreter; empty: the interpreter that submits.
        path: the file that has these settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str = ""
    partition: str = ""
    partition_training: str = ""
    time: str = Field("04:00:00", pattern=r"^(\d+-)?\d+:\d\d:\d\d$")
    signal_seconds: int = Field(180, ge=1, le=65535)
    max_requeues: int = Field(20, ge=0)
    cpus: int = Field(2, ge=1)
    gpus: int = Field(0, ge=0)
    ranks_per_node: int | None = Field(None, ge=1)
    memory: int = Field(4096, ge=1)
    shard_tasks: int = Field(8, ge=1, le=10_000)
    extra: tuple[Annotated[str, Field(pattern="^--[a-z]")], ...] = ()
    setup: str = ""
    python: str = ""
    path: Path = SLURM / "site.conf"

    @property
    def seconds(self) -> int:
        """The time limit of a job, in seconds."""
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @model_validator(mode="after")
    def _time_is_longer_than_the_warning(self) -> Self:
        if self.seconds <= self.signal_seconds:
            raise ValueError(
                f"TIME={self.time} is not longer than SIGNAL_SECONDS={self.signal_seconds}: a job would requeue itself "
                "for ever. Give more time, or a later signal"
            )
        return self


def read_site(path: Path | None = None) -> Site:
    """Read a site file (the cluster's settings), and return its settings.

    The file assigns shell variables, such as ``TIME=04:00:00``. It is executed by bash, which computes their values.

    Args:
        path: the file; None: the file that ``FVC_SITE`` names, else ``site.conf`` in ``SLURM``.

    Raises:
        UsageError: bash cannot read the file, a key is unknown or a value is out of range.
    """
    path = (path or Path(os.environ.get(SITE_VARIABLE) or SLURM / "site.conf")).absolute()
    names = {name.upper(): name for name in Site.model_fields if name != "path"}
    show = "; ".join(f'printf "%s\\0" "${{{name}-}}"' for name in names)
    # Only variables that a site file may use, so that no other variable is taken for a setting.
    environ = {name: os.environ[name] for name in ("HOME", "PATH", "USER") if name in os.environ}
    done = subprocess.run(
        ["bash", "-ec", f'source "$0"; {show}', path], capture_output=True, text=True, check=False, env=environ
    )
    if done.returncode:
        raise UsageError(f"{path}: bash cannot read this site file: {done.stderr.strip()}")
    for name in re.findall(r"^\s*(\w+)=", path.read_text(), re.MULTILINE):
        if name not in names:
            raise UsageError(f"{path}: unknown setting {name}.{did_you_mean(name, names)}")
    settings = done.stdout.split("\0")
    values: dict[str, Any] = {field: value for field, value in zip(names.values(), settings, strict=False) if value}
    try:
        return Site(**{**values, "extra": tuple(shlex.split(values.get("extra", ""))), "path": path})
    except ValidationError as error:
        problems = []
        for item in error.errors():
            setting = ".".join(map(str, item["loc"])).upper()
            problems.append(f"{setting}: {item['msg']}")
        raise UsageError(f"{path}: {'; '.join(problems)}.") from error
    except ValueError as error:
        raise UsageError(f"{path}: EXTRA: {error}.") from error


# Jobs


class SlurmJob(BaseModel):
    """One SLURM job, or one array of jobs: what it runs, its resources, and the jobs that it depends on.

    ``job_id`` is empty until the job is submitted.
    """

    model_config = ConfigDict(frozen=True)

    name: str  # name of the script, and of the job in SLURM's queue
    stages: tuple[str, ...]  # names of the stages that the job runs, in this order
    folds: tuple[int, ...] | None = None  # numbers of the array's folds or shards, ascending; None: no array
    memory_mib: int = 0  # memory on each node
    cpus: int = 1  # cores of each process
    needs: tuple[str, ...] = ()  # names of the jobs (not arrays) that must succeed before this job begins
    after: tuple[str, ...] = ()  # names of the jobs (mostly arrays) that must end before it, even with a failure
    ranks: int = 1  # number of processes that share one fold's training
    nodes: int = 1  # number of nodes that the ranks are spread over
    gpus: int = 0  # number of GPUs on each node
    trains: bool = False  # whether a stage of the job trains
    shards: int = 0  # number of shards of the job's only stage, one per array task; 0: the array has folds
    command: tuple[str, ...] = ()  # arguments of run_notebooks.py if the job runs no stage, without a shard's number
    job_id: str = ""  # SLURM's id of the job, or of the whole array


def plan_jobs(
    tasks: Sequence[Task], config: RunConfig, site: Site, *, stages: Sequence[Stage] = STAGES
) -> list[SlurmJob]:
    """Return the jobs that run ``tasks``, sorted so that a job follows the jobs that it needs.

    A stage with folds becomes a job array with one array task per fold. The shards (shares of the files) of a stage
    become an array before the job of the stage's notebook. Stages without folds share a job as long as no array lies
    between them.

    A job that needs an array begins when the array has ended, even if SLURM reports that an array task failed. SLURM's
    report cannot be trusted: it counts a fold as failed if one of its processes was killed for memory, although the
    fold may have finished. So the job itself checks the folds when it begins. If one is unfinished, the job fails.

    Args:
        tasks: the tasks to run, in the order of ``tasks_in_order``.
        config: the run's parameters.
        site: the cluster's settings.
        stages: all stages that FVC has.
    """
    asked = list({task.stage.name: task.stage for task in tasks}.values())
    sharded = {stage.name for stage in asked if site.shard_tasks > 1 and stage.sharded(config)}
    groups = _groups(asked, stages, sharded)
    needs = {stage.name: stage.comes_after for stage in stages}
    jobs: list[SlurmJob] = []

    def add(job: SlurmJob) -> None:
        needed = set[str]().union(*(all_needed(needs, name) for name in job.stages))
        # Shards end before the notebook of their stage, which the other stages wait for.
        before = [other for other in jobs if not set(other.stages).isdisjoint(job.stages if other.shards else needed)]
        singles = tuple(other.name for other in before if other.folds is None)
        arrays = tuple(other.name for other in before if other.folds is not None)
        jobs.append(job.model_copy(update={"needs": singles, "after": arrays}))

    for group in groups:
        for stage in group:
            if stage.name in sharded:
                add(_job(f"{stage.name}_shards", [stage], config, site, shards=site.shard_tasks, ranks=1))
        # Names of jobs: 04_fold_training for one stage, 01_data_index_to_03_augmentation for several.
        name = group[0].name + (f"_to_{group[-1].name}" if len(group) > 1 else "")
        folds = sorted(task.fold for task in tasks if task.stage is group[0] and task.fold is not None)
        add(_job(name, group, config, site, folds=tuple(folds) if group[0].per_fold else None))
    return jobs


def _groups(asked: Sequence[Stage], stages: Sequence[Stage], sharded: Collection[str]) -> list[list[Stage]]:
    """Divide stages into jobs, and return one list of stages per job.

    The jobs are sorted by the number of job arrays that must end before them.

    Stages without folds share a job if the same number of arrays must end before them. A stage with folds gets a
    separate job. So does a stage without folds that trains and needs other stages.

    Args:
        asked: the stages to run, in the order of ``tasks_in_order``.
        stages: all stages that FVC has.
        sharded: names of the stages whose shards run as an array before their notebook.
    """
    by_name = {stage.name: stage for stage in stages}

    def level(stage: Stage) -> int:
        before = (level(by_name[need]) + by_name[need].per_fold for need in stage.comes_after)
        return max((arrays + (stage.name in sharded) for arrays in before), default=0)

    groups: dict[tuple[int, str], list[Stage]] = {}
    for stage in asked:
        alone = stage.per_fold or (stage.trains and stage.needs)
        groups.setdefault((level(stage), stage.name if alone else ""), []).append(stage)
    return [groups[key] for key in sorted(groups)]


def _job(
    name: str, group: Sequence[Stage], config: RunConfig, site: Site, *, folds: tuple[int, ...] | None = None,
    shards: int = 0, ranks: int | None = None,
) -> SlurmJob:  # fmt: skip
    """Return a job, without dependencies, that runs the stages ``group`` one after the other.

    Only a job that trains gets GPUs.

    Args:
        name: the job's name.
        group: the stages.
        config: the run's parameters.
        site: the cluster's settings.
        folds: numbers of the array's folds; None: no array of folds.
        shards: number of shards of the only stage, one per array task; 0: no array of shards.
        ranks: number of processes that share one training. None: ``num_ranks`` of the configuration if the job trains,
            else 1.
    """
    trains = any(stage.trains for stage in group)
    ranks = ranks or (config.num_ranks if trains else 1)
    nodes = -(-ranks // (site.ranks_per_node or ranks))
    processes = -(-ranks // nodes)
    return SlurmJob(
        name=name,
        stages=tuple(stage.name for stage in group),
        folds=tuple(range(shards)) if shards else folds,
        shards=shards,
        memory_mib=site.memory * processes,
        cpus=site.cpus,
        ranks=ranks,
        nodes=nodes,
        gpus=site.gpus * processes if trains else 0,
        trains=trains,
    )


def jobs_of_files(
    stage: Stage, config: RunConfig, site: Site, *, num_files: int, command: Sequence[str]
) -> list[SlurmJob]:
    """Return the jobs of a command, such as ``predict``, that computes whether given files are real or fake.

    Several files are divided into shards (shares), which become an array. A last job, after the array, runs the command
    for all files. A single file needs no array and gets only the last job.

    Args:
        stage: the stage whose memory, cores and GPUs the jobs get.
        config: the parameters.
        site: the cluster's settings.
        num_files: the number of files.
        command: arguments of run_notebooks.py; a job of the array also gets ``--shard`` and the number of its shard.
    """
    whole = _job(stage.name, [stage], config, site, ranks=1).model_copy(update={"command": tuple(command)})
    if (shards := min(site.shard_tasks, num_files)) < 2:
        return [whole]
    array = _job(f"{stage.name}_shards", [stage], config, site, shards=shards, ranks=1)
    array = array.model_copy(update={"command": (*command, "--shard")})
    return [array, whole.model_copy(update={"after": (array.name,)})]


# Batch scripts


def script_path(job: SlurmJob, folder: Path) -> Path:
    """Return the path of the job's batch script; ``folder`` is the run folder, or the output folder of ``predict``."""
    return folder / f"slurm/{job.name}.sh"


def render(job: SlurmJob, folder: Path, site: Site, *, home: Path = HOME) -> str:
    """Return the text of a job's batch script: settings as ``#SBATCH`` lines, then a call of a script in ``slurm/``.

    The script also runs without SLURM: for bash the settings are comments. The job starts in the current folder, so
    that relative paths keep their meaning.

    Args:
        job: the job.
        folder: the run folder, or the output folder of ``predict``.
        site: the cluster's settings.
        home: FVC's checkout, or the folder of an installed FVC that has ``slurm/``.

    Raises:
        UsageError: a path has a line break, or the folder's path has a backslash, which SLURM forbids in a log's path.
    """
    if "\\" in str(folder):
        raise UsageError(f"{str(folder)!r}: SLURM cannot write a log into a folder with a backslash in its name.")
    log = f"{job.name}.%A_%a.out" if job.folds is not None else f"{job.name}.%j.out"
    folds = ",".join(map(str, job.folds or ()))
    log_folder = str(folder).replace("%", "%%")
    options = {
        "job-name": job.name,
        "comment": folder.name,
        "array": folds,
        "chdir": str(Path.cwd()),
        "output": f"{log_folder}/slurm/{log}",
        "account": site.account,
        "partition": (job.trains and site.partition_training) or site.partition,
        "time": site.time,
        "signal": f"B:USR1@{site.signal_seconds}",
        "nodes": str(job.nodes),  # the notebook's kernel starts the ranks: on its node, or as a step over all nodes
        "ntasks": str(job.ranks),
        "ntasks-per-node": str(-(-job.ranks // job.nodes)) if job.nodes > 1 else "",
        "cpus-per-task": str(job.cpus),
        "mem": f"{job.memory_mib}M",
        "gres": f"gpu:{job.gpus}" if job.gpus else "",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={sbatch_quoted(value)}" for name, value in options.items() if value]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {sbatch_quoted(option)}" for option in site.extra)]
    variables = {
        "FVC_HOME": home, "FVC_PYTHON": site.python or sys.executable, SITE_VARIABLE: site.path,
        "FVC_TIME_SECONDS": site.seconds,
    }  # fmt: skip
    assignments = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
    lines += ["", f"export {assignments}"]
    if job.folds is not None:  # without SLURM, bash runs the folds or shards in its arguments, else all of them
        lines.append(f"[ $# -gt 0 ] || set -- {' '.join(map(str, job.folds))}")
    return "\n".join(["#!/usr/bin/env bash", *lines, f"exec bash {_call(job, folder, home / 'slurm')}", ""])


def _call(job: SlurmJob, folder: Path, scripts: Path) -> str:
    """Return the bash command that a job runs: a script in the folder ``scripts``, and its arguments.

    ``folder`` is the run folder, or the output folder of ``predict``.
    """

    def quoted(script: str, *words: object) -> str:
        return shlex.join(map(str, [scripts / script, *words]))

    if job.shards:
        command = job.command or ("shard", folder, job.stages[0])
        return f'{quoted("shards.sh", job.shards)} "$*" {shlex.join(map(str, command))}'
    if job.folds is not None:
        return f'{quoted("folds.sh", folder, job.stages[0])} "$@"'
    return quoted("command.sh", *job.command) if job.command else quoted("stages.sh", folder, *job.stages)


def sbatch_quoted(text: str) -> str:
    """Return ``text`` quoted as one word of an ``#SBATCH`` line.

    SLURM knows quotes on such a line, but does not expand variables.

    Raises:
        UsageError: ``text`` has a line break.
    """
    if "\n" in text or "\r" in text:
        raise UsageError(f"got {text!r}: a batch script cannot hold a name with a line break. Rename it.")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text, flags=re.ASCII):
        return text
    # Only within quotes does sbatch take a space that follows a backslash.
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


# Commands of SLURM


def output_of(command: Sequence[str]) -> str:
    """Run a command of SLURM, a list of words, and return its standard output without the last line end.

    Raises:
        SlurmError: the command is missing, failed, or did not end within a minute.
    """
    # Drop variables that change the output or come from an enclosing job.
    dropped = re.compile(r"SQUEUE_|SLURM_(?!CONF$|CLUSTERS$)")
    environ = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environ, timeout=_COMMAND_SECONDS,
            check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]}: not found. Run this where SLURM's commands are, or without --executor slurm."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]}: no answer within {_COMMAND_SECONDS} s. Try `sinfo`.") from error
    if done.returncode:
        answer = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {answer}")
    return done.stdout.rstrip("\n")


@dataclass(frozen=True)
class JobState:
    """The state of one job or array task, as ``squeue`` prints it."""

    job_id: str  # ``12`` for a job, ``12_3`` for task 3 of array 12
    name: str  # the job's name
    state: str  # ``PENDING``, ``RUNNING``, ``COMPLETED`` and so on
    nodes: str  # names of the nodes that it runs on; may be empty
    reason: str  # why it waits or how it ended; the text ``None`` if there is no reason

    @property
    def ended(self) -> bool:
        """Whether the job has ended, with success or not."""
        return self.state in ENDED

    def __str__(self) -> str:
        return f"job {self.job_id} ({self.name}): {self.state} {self.nodes} ({self.reason})"


def submitted_jobs(folder: Path) -> list[SlurmJob]:
    """Return all jobs that were ever submitted for the run in ``folder``, oldest first.

    Raises:
        DataError: the file ``submitted.json``, which lists the jobs, is damaged.
    """
    path = folder / "slurm/submitted.json"
    try:
        return [SlurmJob(**job) for job in json.loads(path.read_text())["jobs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        raise DataError(f"{path}: not a list of jobs: {error!r}. Delete it; squeue knows them.") from error


def job_states(folder: Path, *, must_answer: bool = False) -> list[JobState]:
    """Ask SLURM's command ``squeue`` for the states of the jobs of the run in ``folder``, and return them.

    Jobs that SLURM no longer lists are missing from the result. The list is empty if no job was submitted, or if this
    machine has no ``squeue``.

    Args:
        folder: the run folder.
        must_answer: True: raise an error if the queue does not answer. False: return an empty list then.

    Raises:
        DataError: the record of the submitted jobs is damaged.
        SlurmError: the queue does not answer, and ``must_answer`` is true.
    """
    jobs = submitted_jobs(folder)
    if not jobs or shutil.which("squeue") is None:
        return []
    ids = ",".join(job.job_id for job in jobs)
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i|%j|%T|%N|%r"]
    try:
        return [JobState(*line.split("|", 4)) for line in output_of(command).splitlines()]
    except SlurmError as error:  # SLURM has forgotten a job, or does not answer
        if must_answer and "Invalid job id" not in str(error):
            raise
        return []


def sbatch_command(job: SlurmJob, folder: Path, ids: Mapping[str, str]) -> list[str]:
    """Return the ``sbatch`` command that submits ``job`` with its dependencies.

    Args:
        job: the job, not yet submitted.
        folder: the run folder, or the output folder of ``predict``.
        ids: ``{name: SLURM's job id}`` of the jobs submitted before.
    """
    must_succeed = ":".join(ids[name] for name in job.needs)
    must_end = ":".join(ids[name] for name in job.after)
    waits = [f"afterok:{must_succeed}"] if job.needs else []
    waits += [f"afterany:{must_end}"] if job.after else []
    options = [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"] if waits else []
    return ["sbatch", "--parsable", *options, str(script_path(job, folder))]


def describe(jobs: Sequence[SlurmJob], folder: Path, site: Site) -> str:
    """Return the batch scripts and ``sbatch`` commands of ``jobs`` as one text, which ``--dry-run`` shows.

    Nothing is written or submitted. ``folder`` is the run folder, or the output folder of ``predict``; ``site`` has the
    cluster's settings. Job ids are not known yet and are shown as ``<id of NAME>``.
    """
    ids = {job.name: f"<id of {job.name}>" for job in jobs}
    parts = []
    for job in jobs:
        command = " ".join(word if "<id" in word else shlex.quote(word) for word in sbatch_command(job, folder, ids))
        parts.append(f"==> {script_path(job, folder)}\n{render(job, folder, site)}==> {command}\n")
    return "\n".join(parts) if parts else "nothing to submit: every task is finished\n"


def submit(jobs: Sequence[SlurmJob], folder: Path, site: Site, *, home: Path = HOME) -> list[SlurmJob]:
    """Write the batch scripts of ``jobs`` into ``folder/slurm``, and submit them in order.

    Args:
        jobs: the jobs; a job follows the jobs that it needs.
        folder: the run folder, or the output folder of ``predict``.
        site: the cluster's settings.
        home: FVC's checkout, or the folder of an installed FVC that has ``slurm/``.

    Returns:
        The jobs with ``job_id`` set. ``needs`` (jobs that must succeed before) and ``after`` (jobs that must end
        before) hold job ids instead of names.

    Raises:
        UsageError: jobs of this run still wait or run.
        SlurmError: sbatch is missing or refused a job; the jobs submitted before it are cancelled.
        OSError: the folder cannot be written.
    """
    if alive := {state.job_id.partition("_")[0] for state in job_states(folder, must_answer=True) if not state.ended}:
        raise UsageError(f"{folder.name}: jobs of it wait or run. Wait, or end them: scancel {' '.join(sorted(alive))}")
    texts = {script_path(job, folder): render(job, folder, site, home=home) for job in jobs}
    (folder / "slurm").mkdir(
        exist_ok=True
    )  # SLURM writes the logs there, too, and drops a job whose log it cannot open
    for path, text in texts.items():
        write_text(path, text)
    submitted: list[SlurmJob] = []
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            answer = output_of(sbatch_command(job, folder, ids))
            ids[job.name] = answer.rpartition("\n")[2].partition(";")[0]  # a cluster's name may follow
            needs, after = (tuple(ids[name] for name in names) for names in (job.needs, job.after))
            submitted.append(job.model_copy(update={"job_id": ids[job.name], "needs": needs, "after": after}))
        every = [job.model_dump(mode="json") for job in (*submitted_jobs(folder), *submitted)]
        write_json(folder / "slurm/submitted.json", {"jobs": every})
    except (SlurmError, OSError, DataError) as error:
        if ids:
            output_of(["scancel", *ids.values()])
        cancelled = f"Jobs {' '.join(ids.values())}, submitted before, were cancelled. " if ids else ""
        raise SlurmError(f"{error} {cancelled}The settings are in {site.path}.") from error
    return submitted


def submission_text(job: SlurmJob) -> str:
    """Return one line that describes a submitted job: id, dependencies, name, size of the array, and memory."""
    before = ", ".join((*job.needs, *job.after)) or "no other"
    return f"job {job.job_id} after {before}: {job.name}, tasks: {len(job.folds or (0,))}, each {job.memory_mib} MiB"
