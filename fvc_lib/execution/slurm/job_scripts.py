"""Turn a run's tasks into SLURM jobs: the cluster's settings, the jobs, and their batch scripts.

Stages in a row share a job. The folds of a stage are an array, and so are its shards. Needs become dependencies.
``slurm/site.conf`` has the cluster's settings; bash reads it, here and in the jobs.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.plan import all_needed
from fvc_lib.execution.plan.stages import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import STAGES, Stage

SITE_VARIABLE = "FVC_SITE"
_TIME = r"^(\d+-)?\d+(:\d+){0,2}$"  # minutes, HH:MM:SS or DAYS-HH:MM:SS


class Site(BaseModel):
    """The settings of ``site.conf``, which explains each. Memory is in MiB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str = ""
    partition: str = ""
    partition_training: str = ""
    time: str = Field("04:00:00", pattern=_TIME)
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
    path: Path = CHECKOUT / "slurm" / "site.conf"

    @model_validator(mode="after")
    def _time_is_longer_than_the_warning(self) -> Self:
        if seconds_of(self.time) <= self.signal_seconds:
            raise ValueError(
                f"TIME={self.time} is not longer than SIGNAL_SECONDS={self.signal_seconds}: a job would requeue itself "
                "for ever. Give more time, or a later signal"
            )
        return self


def seconds_of(time: str) -> int:
    """Return the seconds of a time written as MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def site_path() -> Path:
    """Return the site file: ``FVC_SITE``, else the checkout's."""
    return Path(os.environ.get(SITE_VARIABLE) or CHECKOUT / "slurm" / "site.conf").absolute()


def read_site(path: Path | None = None) -> Site:
    """Return the settings in a site file, as bash reads them.

    Args:
        path: the file; None: ``site_path()``.

    Raises:
        UsageError: bash cannot read the file, a key is unknown or a value is out of range.
    """
    path = site_path() if path is None else path.absolute()
    names = {name.upper(): name for name in Site.model_fields if name != "path"}
    show = "; ".join(f'printf "%s\\0" "${{{name}-}}"' for name in names)
    # Of this process's variables only those that a site file may use, so that none is taken for a setting.
    environ = {name: os.environ[name] for name in ("HOME", "PATH", "USER") if name in os.environ}
    done = subprocess.run(
        ["bash", "-ec", f'source "$0"; {show}', path], capture_output=True, text=True, check=False, env=environ
    )
    if done.returncode:
        raise UsageError(f"{path}: bash cannot read this site file: {done.stderr.strip()}")
    if b"\r" in path.read_bytes():  # bash takes them for a part of each value
        raise UsageError(f"{path}: has line ends of Windows. Take them out.")
    for name in re.findall(r"^\s*(\w+)=", path.read_text(), re.MULTILINE):
        if name not in names:
            raise UsageError(f"{path}: unknown setting {name}.{did_you_mean(name, names)}")
    values: dict[str, Any] = {
        field: value for field, value in zip(names.values(), done.stdout.split("\0"), strict=False) if value
    }
    try:
        return Site(**{**values, "extra": tuple(shlex.split(values.get("extra", ""))), "path": path})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])).upper()}: {item['msg']}" for item in error.errors()]
        raise UsageError(f"{path}: {'; '.join(problems)}.") from error
    except ValueError as error:
        raise UsageError(f"{path}: EXTRA: {error}.") from error


PIPELINE = "pipeline"


@dataclass(frozen=True)
class SlurmJob:
    """One job, or one array of jobs."""

    name: str  # of its script and in the queue
    stages: tuple[str, ...]  # in the order they run
    folds: tuple[int, ...] | None  # the tasks of the array, ascending; None: no array
    memory_mib: int  # on one node
    cpus: int  # of one process
    needs: tuple[str, ...] = ()  # names of the jobs, no arrays, that must have ended well before
    ranks: int = 1  # processes that share one fold's training; 1 where nothing is shared
    nodes: int = 1  # that the ranks are spread over
    gpus: int = 0  # on one node
    trains: bool = False  # whether a stage that fans out over folds is among its stages
    at_once: int = 1  # how many folds it runs at once, where it is no array
    shards: int = 0  # of its one stage, the tasks of the array; 0: that has none
    after: tuple[str, ...] = ()  # names of the jobs, mostly arrays, that must have ended, well or not
    command: tuple[str, ...] = ()  # of run_notebooks.py, if it is no stage; of a shard without its number


def plan_jobs(
    tasks: Sequence[Task], config: RunConfig, site: Site, *, stages: Sequence[Stage] = STAGES
) -> list[SlurmJob]:
    """Return the jobs that run ``tasks``, each after those it needs.

    Stages without folds share a job as long as no array lies between them. A stage with folds is an array with one
    task per fold. The shards of a stage are an array before the job of its notebook, which does what they left.
    A job that needs an array begins when that has ended, well or not: SLURM calls a fold failed in which it killed a
    process for memory, even if it finished. If a fold is not finished, the job that needs it says so and ends.
    """
    sharded = {stage.name for stage in _stages_of(tasks) if site.shard_tasks > 1 and stage.sharded(config)}
    groups = _groups(tasks, stages, sharded)
    name_of = {stage.name: _job_name(group) for group in groups for stage in group}
    needs = {stage.name: stage.comes_after for stage in stages}
    jobs: list[SlurmJob] = []

    def add(job: SlurmJob, needed: Collection[str], after: Sequence[str] = ()) -> None:
        before = [each for each in jobs if each.name in needed]
        singles = tuple(each.name for each in before if each.folds is None)
        arrays = tuple(each.name for each in before if each.folds is not None)
        jobs.append(replace(job, needs=singles, after=(*arrays, *after)))

    for group in groups:
        name = _job_name(group)
        before_of = {
            stage.name: {name_of[need] for need in all_needed(needs, stage.name) & name_of.keys()} - {name}
            for stage in group
        }
        shards = [_shards_job(stage, config, site) for stage in group if stage.name in sharded]
        for array in shards:
            add(array, before_of[array.stages[0]])
        folds = _folds_of(group[0], tasks) if group[0].per_fold else None
        whole = _job(name, group, config, site, folds=folds)
        add(whole, set().union(*before_of.values()), [array.name for array in shards])
    return jobs


def _shards_job(stage: Stage, config: RunConfig, site: Site) -> SlurmJob:
    one_rank, shards = config.model_copy(update={"num_ranks": 1}), site.shard_tasks
    job = _job(f"{stage.name}_shards", [stage], one_rank, site, folds=tuple(range(shards)))
    return replace(job, shards=shards)


def jobs_of_files(
    stage: Stage, config: RunConfig, site: Site, *, num_files: int, command: Sequence[str]
) -> list[SlurmJob]:
    """Return the jobs of a command about files: an array of shards if there are several, and one job after it.

    Args:
        stage: whose settings the jobs have.
        config: the parameters.
        site: the cluster's settings.
        num_files: how many files there are.
        command: of run_notebooks.py; a shard gets ``--shard`` and its number.
    """
    whole = _job(stage.name, [stage], config.model_copy(update={"num_ranks": 1}), site)
    whole = replace(whole, command=tuple(command))
    if (shards := min(site.shard_tasks, num_files)) < 2:
        return [whole]
    array = _shards_job(stage, config, site.model_copy(update={"shard_tasks": shards}))
    return [replace(array, command=(*command, "--shard")), replace(whole, after=(array.name,))]


def plan_one_job(tasks: Sequence[Task], config: RunConfig, site: Site, *, at_once: int = 1) -> list[SlurmJob]:
    """Return one job for all ``tasks`` that trains ``at_once`` folds at a time; none if there are no tasks.

    Raises:
        UsageError: several folds at once, each on the GPUs of several nodes, of which all would take the same.
    """
    if not tasks:
        return []
    used = _stages_of(tasks)
    folds = max((len(_folds_of(stage, tasks)) for stage in used if stage.per_fold), default=1)
    job = _job(PIPELINE, used, config, site, at_once=max(1, min(at_once, folds)))
    if job.at_once > 1 and job.nodes > 1 and job.gpus:
        raise UsageError(
            f"--one-job --jobs {at_once}: num_ranks {job.ranks} spreads every training over {job.nodes} nodes, and "
            "trainings at once would share their GPUs. Leave --one-job out, so that every fold is a job, or --jobs."
        )
    return [job]


def _job(
    name: str,
    group: Sequence[Stage],
    config: RunConfig,
    site: Site,
    *,
    folds: tuple[int, ...] | None = None,
    at_once: int = 1,
) -> SlurmJob:
    """Return a job for some stages; only training gets ranks, GPUs and several folds at once."""
    trains = any(stage.trains for stage in group)
    ranks = config.num_ranks if trains else 1
    nodes = -(-ranks // (site.ranks_per_node or ranks))
    processes = -(-ranks // nodes) * at_once
    return SlurmJob(
        name=name,
        stages=tuple(stage.name for stage in group),
        folds=folds,
        memory_mib=site.memory * processes,
        cpus=site.cpus * at_once,
        ranks=ranks,
        nodes=nodes,
        gpus=site.gpus * processes if trains else 0,
        trains=trains,
        at_once=at_once,
    )


def _groups(tasks: Sequence[Task], stages: Sequence[Stage], sharded: Collection[str]) -> list[list[Stage]]:
    """Return the stages of each job, in order of the number of arrays before it.

    Stages without folds are together. A stage with folds is alone, and so is one that trains after other stages. The
    shards of a stage (``sharded``: by name) begin after what it needs.
    """
    by_name = {stage.name: stage for stage in stages}

    def level(stage: Stage) -> int:
        before = (level(by_name[need]) + by_name[need].per_fold for need in stage.comes_after)
        return max((each + (stage.name in sharded) for each in before), default=0)

    groups: dict[tuple[int, str], list[Stage]] = {}
    for stage in _stages_of(tasks):
        alone = stage.per_fold or (stage.trains and stage.needs)
        groups.setdefault((level(stage), stage.name if alone else ""), []).append(stage)
    return [groups[key] for key in sorted(groups)]


def _folds_of(stage: Stage, tasks: Sequence[Task]) -> tuple[int, ...]:
    return tuple(sorted(task.fold for task in tasks if task.stage.name == stage.name and task.fold is not None))


def _stages_of(tasks: Sequence[Task]) -> list[Stage]:
    return list({task.stage.name: task.stage for task in tasks}.values())


def _job_name(group: Sequence[Stage]) -> str:
    """Return ``04_fold_training``, or ``01_data_index_to_03_augmentation`` for several stages."""
    return group[0].name if len(group) == 1 else f"{group[0].name}_to_{group[-1].name}"


def script_path(job: SlurmJob, run: RunPaths) -> Path:
    """Return the path of the job's script in the run folder."""
    return run.slurm / f"{job.name}.sh"


def render(job: SlurmJob, run: RunPaths, site: Site, *, home: Path = CHECKOUT, folder: Path | None = None) -> str:
    """Return a job's batch script: settings as ``#SBATCH`` lines, then a call of a script of ``slurm/``.

    Plain bash runs the same file; to it the settings are comments.

    Args:
        job: the job.
        run: its run.
        site: the cluster's settings.
        home: the checkout.
        folder: where the job starts, so that relative paths keep their meaning; None: here.

    Raises:
        UsageError: a path holds a line break, or a backslash, which SLURM cannot take in the name of a log.
    """
    if "\\" in str(run.slurm):
        raise UsageError(f"{str(run.slurm)!r}: SLURM cannot write a log into a folder with a backslash in its name.")
    log = f"{job.name}.%A_%a.out" if job.folds is not None else f"{job.name}.%j.out"
    options = {
        "job-name": job.name,
        "comment": run.run_id,
        "array": ",".join(map(str, job.folds or ())),
        "chdir": str(Path.cwd() if folder is None else folder),
        "output": f"{str(run.slurm).replace('%', '%%')}/{log}",
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
        "FVC_TIME_SECONDS": seconds_of(site.time),
    }  # fmt: skip
    lines += ["", f"export {' '.join(f'{name}={shlex.quote(str(value))}' for name, value in variables.items())}"]
    if job.folds is not None:  # without SLURM: the numbers that bash is given, or all
        lines.append(f"[ $# -gt 0 ] || set -- {' '.join(map(str, job.folds))}")
    return "\n".join(["#!/usr/bin/env bash", *lines, f"exec bash {_call(job, run, home / 'slurm')}", ""])


def _call(job: SlurmJob, run: RunPaths, scripts: Path) -> str:
    """Return the script of ``slurm/`` that a job runs, with its arguments, as words of bash."""
    script, words = "stages", [run.root, *job.stages]
    more = ""
    if job.shards:
        command = shlex.join(map(str, job.command or ("shard", run.root, job.stages[0])))
        return f'{shlex.quote(str(scripts / "shards.sh"))} {job.shards} "$*" {command}'
    if job.folds is not None:
        script, words, more = "folds", [run.root, job.stages[0]], ' "$@"'
    elif job.command:
        script, words = "command", list(job.command)
    elif job.name == PIPELINE:
        script, words = "pipeline", [run.root, str(job.at_once)]
    return shlex.join(map(str, [scripts / f"{script}.sh", *words])) + more


def sbatch_quoted(text: str) -> str:
    """Return ``text`` as one word of an ``#SBATCH`` line, which knows quotes but expands nothing.

    Raises:
        UsageError: it holds a line break.
    """
    if "\n" in text or "\r" in text:
        raise UsageError(f"got {text!r}: a batch script cannot hold a name with a line break. Rename it.")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text, flags=re.ASCII):
        return text
    # Only within quotes does sbatch take a space that follows a backslash.
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
