"""A SLURM job written down as a batch script: settings as ``#SBATCH`` lines, then a call of a script of ``slurm/``.

The same file runs under plain bash, where the ``#SBATCH`` lines are comments.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm.jobs import PIPELINE, SlurmJob
from fvc_lib.execution.slurm.site import SITE_VARIABLE, Site
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths


def script_path(job: SlurmJob, run: RunPaths) -> Path:
    """Where the job's script lies in the run."""
    return run.slurm / f"{job.name}.sh"


def render(job: SlurmJob, run: RunPaths, site: Site, *, home: Path = CHECKOUT, folder: Path | None = None) -> str:
    """The text of ``job``'s batch script.

    Args:
        job: the job.
        run: the run that it works on.
        site: the cluster's settings.
        home: the checkout that holds ``run_notebooks.py`` and ``slurm/``.
        folder: where the job starts, so that relative paths mean what they meant; None: here.

    Raises:
        UsageError: a path holds a line break, or a backslash, which SLURM cannot take in the name of a log.
    """
    folder = Path.cwd() if folder is None else folder
    options = "\n".join(_lines(job, run, site, folder))
    title, call = _title(job), _call(job, run, home)
    python = site.python or sys.executable
    again = f"sbatch {shlex.quote(str(script_path(job, run)))}"
    return (
        f"#!/usr/bin/env bash\n"
        f"# {title} of {run.run_id}.\n"
        f"# Written by run_notebooks.py --executor slurm with the settings of {_plain(site.path)}.\n"
        f"# By hand: {again}, or without SLURM: bash in place of sbatch{' [FOLD...]' if job.folds else ''}\n"
        f"{options}\n\n"
        f"export FVC_HOME={shlex.quote(_plain(home))} FVC_PYTHON={shlex.quote(_plain(python))}\n"
        f"export {SITE_VARIABLE}={shlex.quote(_plain(site.path))} FVC_TIME_SECONDS={site.time_seconds}\n"
        f"{call}\n"
    )


def _title(job: SlurmJob) -> str:
    if job.folds is not None:
        return f"{job.name}, one fold per task of an array,"
    if job.name == PIPELINE:
        return "The whole pipeline"
    return ", ".join(job.stages)


def _call(job: SlurmJob, run: RunPaths, home: Path) -> str:
    root, scripts = shlex.quote(_plain(run.root)), _plain(home / "slurm")
    if job.folds is not None:
        folds = " ".join(map(str, job.folds))
        script = shlex.quote(f"{scripts}/folds.sh")
        return f'[ $# -gt 0 ] || set -- {folds}\nexec bash {script} {root} {job.stages[0]} "$@"'
    if job.name == PIPELINE:
        return f"exec bash {shlex.quote(f'{scripts}/pipeline.sh')} {root} {job.at_once}"
    return f"exec bash {shlex.quote(f'{scripts}/stages.sh')} {root} {' '.join(job.stages)}"


def _lines(job: SlurmJob, run: RunPaths, site: Site, folder: Path) -> Iterator[str]:
    """The ``#SBATCH`` lines; those that say nothing are left out."""
    partition = site.partition_training if job.trains and site.partition_training else site.partition
    log = f"{job.name}.%A_%a.out" if job.folds is not None else f"{job.name}.%j.out"
    yield f"# memory: {_plain(job.memory_why)}"
    options = {
        "job-name": job.name,
        "comment": run.run_id,
        "array": _array(job.folds, site.max_array_tasks),
        "chdir": str(folder),
        "output": f"{_no_pattern(run.slurm)}/{log}",
        "account": site.account,
        "partition": partition,
        "qos": site.qos,
        "time": site.time,
        "signal": f"B:USR1@{site.signal_seconds}",
        "nodes": str(job.nodes),
        "ntasks": str(job.ranks),
        "ntasks-per-node": str(-(-job.ranks // job.nodes)) if job.nodes > 1 else "",
        "cpus-per-task": str(job.cpus),
        "mem": f"{job.memory_mib}M",
        "gres": "gpu:" + (f"{site.gpu_type}:" if site.gpu_type else "") + str(job.gpus) if job.gpus else "",
    }
    yield from (f"#SBATCH --{name}={sbatch_quoted(value)}" for name, value in options.items() if value)
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {sbatch_quoted(option)}" for option in site.extra)


def _array(folds: Sequence[int] | None, at_once: int | None) -> str:
    """``0-4``, ``0,2-3`` or with a limit ``0-4%2``; empty for no array."""
    if not folds:
        return ""
    ranges: list[list[int]] = []
    for fold in folds:
        if ranges and fold == ranges[-1][1] + 1:
            ranges[-1][1] = fold
        else:
            ranges.append([fold, fold])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return text if at_once is None else f"{text}%{at_once}"


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
