"""Turn a run's tasks into SLURM jobs: the cluster's settings, the jobs, and their batch scripts.

Stages in a row share a job. The folds of a stage are an array, and so are its shards. Needs become dependencies.
``slurm/site.conf`` has the cluster's settings. It is read as text here, and by the jobs' bash.
"""

import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.plan import all_needed
from fvc_lib.execution.plan.stages import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import STAGES, Stage

SITE_VARIABLE = "FVC_SITE"
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
_TIME = r"(\d+-)?\d+(:\d+){0,2}"
_TIME_WANTED = "wanted a time as SLURM reads it: minutes, HH:MM:SS or DAYS-HH:MM:SS"


class Site(BaseModel):
    """The settings of ``site.conf``, which explains each. Memory is in MiB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str = ""
    partition: str = ""
    partition_training: str = ""
    time: str = Field("04:00:00", pattern=rf"^{_TIME}$")
    signal_seconds: int = Field(180, ge=1, le=65535)
    max_requeues: int = Field(20, ge=0)
    cpus: int = Field(2, ge=1)
    gpus: int = Field(0, ge=0)
    ranks_per_node: int | None = Field(None, ge=1)
    rank_start_seconds: int = Field(40, ge=1)
    memory: int = Field(4096, ge=1)
    shard_tasks: int = Field(8, ge=1, le=10_000)
    extra: tuple[str, ...] = ()
    setup: str = ""
    python: str = ""
    path: Path = CHECKOUT / "slurm" / "site.conf"

    @field_validator(
        "signal_seconds", "max_requeues", "cpus", "gpus", "ranks_per_node", "rank_start_seconds", "memory",
        "shard_tasks", mode="before",
    )  # fmt: skip
    @classmethod
    def _plain_digits(cls, value: object) -> object:
        """Refuse ``1_0`` and ``20.0``, which bash does not take for numbers."""
        if isinstance(value, str) and not re.fullmatch(r"\d+", value, flags=re.ASCII):
            raise ValueError("wanted a whole number in digits")
        return value

    @model_validator(mode="after")
    def _time_is_longer_than_the_warning(self) -> Self:
        if seconds_of(self.time) <= self.signal_seconds:
            raise ValueError(
                f"TIME={self.time} is over before the signal that comes SIGNAL_SECONDS={self.signal_seconds} before "
                "its end: a job would requeue itself for ever. Give more time, or a later signal"
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


def site_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the site file: ``FVC_SITE``, else the checkout's."""
    environ = os.environ if environ is None else environ
    return Path(environ.get(SITE_VARIABLE) or CHECKOUT / "slurm" / "site.conf").absolute()


def read_site(path: Path | None = None) -> Site:
    """Return the settings in ``path``; None: in ``site_path()``.

    Raises:
        UsageError: the file is missing, a line is no plain ``KEY=value``, a key is unknown or a value out of range.
    """
    path = site_path() if path is None else path.absolute()
    try:
        text = path.read_bytes().decode()  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a site file: {error}. See slurm/site.conf.") from error
    if "\r" in text:
        raise UsageError(f"{path}: has line ends of Windows, which bash takes for a part of each value. Take them out.")
    assigned = {key.lower(): value for key, value in _assignments(text, path).items()}
    for name in assigned:
        if name not in Site.model_fields or name == "path":
            known = [field.upper() for field in Site.model_fields if field != "path"]
            raise UsageError(f"{path}: unknown setting {name.upper()}.{did_you_mean(name.upper(), known)}")
    values = {name: value for name, value in assigned.items() if value}
    try:
        extra = _options(values.pop("extra", ""), path)
        return Site(**values, extra=extra, path=path)
    except ValidationError as error:
        problems = "; ".join(
            f"{(name := str(item['loc'][0]).upper())}: got {item['input']!r}, "
            f"{_TIME_WANTED if name == 'TIME' else item['msg'].lower().removeprefix('value error, ')}"
            if item["loc"]
            else item["msg"]
            for item in error.errors()
        )
        raise UsageError(f"{path}: {problems}.") from error


def _assignments(text: str, path: Path) -> dict[str, str]:
    """Return the ``KEY=value`` words of ``text`` as bash assigns them; refuse anything else that bash would do."""
    if match := re.search(r"^\s*[A-Z_]+=[^\s'\"#]+#.*$", text, flags=re.MULTILINE):
        raise UsageError(f"{path}: got {match[0].strip()!r}; a value with # in it stands in single quotes.")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: dict[str, str] = {}
    try:
        for word in lexer:
            match = _ASSIGNMENT.fullmatch(word)
            if match is None:
                raise UsageError(
                    f"{path}: got {word!r}, wanted KEY=value, the key in capitals; a value with spaces stands in "
                    "single quotes."
                )
            found[match[1]] = match[2]
    except ValueError as error:
        raise UsageError(f"{path}: {error}: a quote is not closed before line {lexer.lineno}.") from error
    for key, value in found.items():
        if key != "SETUP" and re.search(r"[$`\n]|^~", value):  # bash might make something else of these
            raise UsageError(f"{path}: {key}: got {value!r}; only SETUP may hold $, `, ~ or several lines.")
    return found


def _options(text: str, path: Path) -> tuple[str, ...]:
    """Return options of sbatch such as ``--name=value``."""
    try:
        options = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{path}: EXTRA: {error} in {text!r}.") from error
    for option in options:
        if not re.match(r"--[a-z]", option):
            raise UsageError(f"{path}: EXTRA: got {option!r}, wanted long options of sbatch like --constraint=avx512.")
    return options


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
    tasks: Sequence[Task],
    config: RunConfig,
    site: Site,
    *,
    stages: Sequence[Stage] = STAGES,
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
    for group in groups:
        name = _job_name(group)
        before_of = {
            stage.name: {name_of[need] for need in all_needed(needs, stage.name) & name_of.keys()} - {name}
            for stage in group
        }
        before = set().union(*before_of.values())
        folds = _folds_of(group[0], tasks) if group[0].per_fold else None
        arrays = [
            _waiting(_shards_job(stage, config, site), before_of[stage.name], jobs)
            for stage in group
            if stage.name in sharded
        ]
        whole = _waiting(_job(name, group, config, site, folds=folds), before, jobs)
        jobs += [*arrays, replace(whole, after=(*whole.after, *(array.name for array in arrays)))]
    return jobs


def _waiting(job: SlurmJob, before: Collection[str], jobs: Sequence[SlurmJob]) -> SlurmJob:
    """Return ``job`` with the dependencies that ``before`` names among ``jobs``."""
    named = [each for each in jobs if each.name in before]
    needs = tuple(each.name for each in named if each.folds is None)
    return replace(job, needs=needs, after=tuple(each.name for each in named if each.folds is not None))


def _shards_job(stage: Stage, config: RunConfig, site: Site) -> SlurmJob:
    job = _job(
        f"{stage.name}_shards", [stage], config.model_copy(update={"num_ranks": 1}), site,
        folds=tuple(range(site.shard_tasks)),
    )  # fmt: skip
    return replace(job, shards=site.shard_tasks)


def jobs_of_files(
    stage: Stage,
    config: RunConfig,
    site: Site,
    *,
    num_files: int,
    command: Sequence[str],
    shard_option: str,
) -> list[SlurmJob]:
    """Return the jobs of a command about files: an array of shards if there are several, and one job after it.

    Args:
        stage: whose settings the jobs have.
        config: the parameters.
        site: the cluster's settings.
        num_files: how many files there are.
        command: of run_notebooks.py.
        shard_option: the option that names the shard.
    """
    shards = min(site.shard_tasks, num_files)
    whole = replace(
        _job(stage.name, [stage], config.model_copy(update={"num_ranks": 1}), site),
        command=tuple(command),
    )
    if shards < 2:
        return [whole]
    few = site.model_copy(update={"shard_tasks": shards})
    array = _shards_job(stage, config, few)
    return [replace(array, command=(*command, shard_option)), replace(whole, after=(array.name,))]


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
    """Only training is shared between ranks, gets GPUs and is done for several folds at once."""
    trains = any(stage.trains for stage in group)
    ranks = config.num_ranks if trains else 1
    nodes = -(-ranks // (site.ranks_per_node or ranks))
    on_a_node = -(-ranks // nodes)
    return SlurmJob(
        name=name,
        stages=tuple(stage.name for stage in group),
        folds=folds,
        memory_mib=site.memory * on_a_node * at_once,
        cpus=site.cpus * at_once,
        ranks=ranks,
        nodes=nodes,
        gpus=site.gpus * on_a_node * at_once if trains else 0,
        trains=trains,
        at_once=at_once,
    )


def _groups(tasks: Sequence[Task], stages: Sequence[Stage], sharded: Collection[str]) -> list[list[Stage]]:
    """Stages by how many arrays lie before them: those without folds together, those with folds, and one that trains
    after them, each alone. The shards of a stage (``sharded``: by name) begin after what it needs.
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
    """``04_fold_training``, or ``01_data_index_to_03_augmentation`` of several."""
    return group[0].name if len(group) == 1 else f"{group[0].name}_to_{group[-1].name}"


# A SLURM job written down as a batch script: settings as ``#SBATCH`` lines, then a call of a script of ``slurm/``.
# The same file runs under plain bash, where the ``#SBATCH`` lines are comments.


def script_path(job: SlurmJob, run: RunPaths) -> Path:
    """Where the job's script lies in the run."""
    return run.slurm / f"{job.name}.sh"


def render(job: SlurmJob, run: RunPaths, site: Site, *, home: Path = CHECKOUT, folder: Path | None = None) -> str:
    """Return the text of a job's batch script.

    ``home`` is the checkout, and ``folder`` where the job starts (None: here), so that relative paths mean what they
    meant.

    Raises:
        UsageError: a path holds a line break, or a backslash, which SLURM cannot take in the name of a log.
    """
    folder = Path.cwd() if folder is None else folder
    options = "\n".join(_lines(job, run, site, folder))
    title, call = _title(job), _call(job, run, home)
    python, seconds = site.python or sys.executable, seconds_of(site.time)
    again = f"sbatch {shlex.quote(str(script_path(job, run)))}"
    return (
        f"#!/usr/bin/env bash\n"
        f"# {title} of {run.run_id}.\n"
        f"# Written by run_notebooks.py --executor slurm with the settings of {_plain(site.path)}.\n"
        f"# By hand: {again}, or without SLURM: bash in place of sbatch{_of_bash(job)}\n"
        f"{options}\n\n"
        f"export FVC_HOME={shlex.quote(_plain(home))} FVC_PYTHON={shlex.quote(_plain(python))}\n"
        f"export {SITE_VARIABLE}={shlex.quote(_plain(site.path))} FVC_TIME_SECONDS={seconds}\n"
        f"{call}\n"
    )


def _of_bash(job: SlurmJob) -> str:
    return " [SHARD...]" if job.shards else " [FOLD...]" if job.folds else ""


def _title(job: SlurmJob) -> str:
    if job.shards:
        return f"{job.stages[0]}, one shard of its files per task of an array,"
    if job.folds is not None:
        return f"{job.name}, one fold per task of an array,"
    if job.name == PIPELINE:
        return "The whole pipeline"
    return ", ".join(job.stages)


def _call(job: SlurmJob, run: RunPaths, home: Path) -> str:
    root, scripts = shlex.quote(_plain(run.root)), _plain(home / "slurm")
    if job.folds is not None:
        named = f"[ $# -gt 0 ] || set -- {' '.join(map(str, job.folds))}"
        if job.shards:
            command = shlex.join(_plain(word) for word in job.command or ("shard", run.root, job.stages[0]))
            return f'{named}\nexec bash {shlex.quote(f"{scripts}/shards.sh")} {job.shards} "$*" {command}'
        return f'{named}\nexec bash {shlex.quote(f"{scripts}/folds.sh")} {root} {job.stages[0]} "$@"'
    if job.command:
        return f"exec bash {shlex.quote(f'{scripts}/command.sh')} {shlex.join(map(_plain, job.command))}"
    if job.name == PIPELINE:
        return f"exec bash {shlex.quote(f'{scripts}/pipeline.sh')} {root} {job.at_once}"
    return f"exec bash {shlex.quote(f'{scripts}/stages.sh')} {root} {' '.join(job.stages)}"


def _lines(job: SlurmJob, run: RunPaths, site: Site, folder: Path) -> Iterator[str]:
    """Yield the ``#SBATCH`` lines."""
    partition = site.partition_training if job.trains and site.partition_training else site.partition
    log = f"{job.name}.%A_%a.out" if job.folds is not None else f"{job.name}.%j.out"
    options = {
        "job-name": job.name,
        "comment": run.run_id,
        "array": _array(job.folds),
        "chdir": str(folder),
        "output": f"{_no_pattern(run.slurm)}/{log}",
        "account": site.account,
        "partition": partition,
        "time": site.time,
        "signal": f"B:USR1@{site.signal_seconds}",
        "nodes": str(job.nodes),  # the notebook's kernel starts the ranks: beside itself, or as a step over them all
        "ntasks": str(job.ranks),
        "ntasks-per-node": str(-(-job.ranks // job.nodes)) if job.nodes > 1 else "",
        "cpus-per-task": str(job.cpus),
        "mem": f"{job.memory_mib}M",
        "gres": f"gpu:{job.gpus}" if job.gpus else "",
    }
    yield from (f"#SBATCH --{name}={sbatch_quoted(value)}" for name, value in options.items() if value)
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {sbatch_quoted(option)}" for option in site.extra)


def _array(folds: Sequence[int] | None) -> str:
    """Return such as ``0-4`` or ``0,2-3``; empty for no array."""
    if not folds:
        return ""
    ranges: list[list[int]] = []
    for fold in folds:
        if ranges and fold == ranges[-1][1] + 1:
            ranges[-1][1] = fold
        else:
            ranges.append([fold, fold])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def sbatch_quoted(text: str) -> str:
    """``text`` as one word of an ``#SBATCH`` line, which knows quotes but expands nothing.

    Raises:
        UsageError: it holds a line break.
    """
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", _plain(text), flags=re.ASCII):
        return text
    # Only within quotes does sbatch take a space that follows a backslash.
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _no_pattern(path: Path) -> str:
    """``path`` for the name of a log, in which ``%`` begins a pattern and a backslash ends all patterns."""
    if "\\" in os.fspath(path):
        raise UsageError(f"{str(path)!r}: SLURM cannot write a log into a folder with a backslash in its name.")
    return os.fspath(path).replace("%", "%%")


def _plain(value: object) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise UsageError(f"got {text!r}: a batch script cannot hold a name with a line break. Rename it.")
    return text
