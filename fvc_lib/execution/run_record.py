"""``run.json`` and ``params.yaml``: what was asked, with which code, versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from fvc_lib.execution.status import RunStatus, utc_now
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, new_run

RECORDED_PACKAGES = (
    "av", "duckdb", "kornia", "nbclient", "numpy", "papermill", "pandera", "plotly", "polars", "scikit-learn", "torch",
)  # fmt: skip


def begin_run(config: RunConfig, *, command: str) -> RunPaths:
    """Create a run folder with its record, parameters and first status.

    Raises:
        UsageError: the experiment's name is not one folder name.
        OSError: the runs folder cannot be written.
    """
    run = new_run(Path(config.runs_dir), config.experiment, config.config_hash)
    write_text(run.params_yaml, config.to_yaml())
    RunStatus(run_id=run.run_id, started_utc=utc_now()).write(run)
    record = {
        "run_id": run.run_id,
        "experiment": config.experiment,
        "config_hash": config.config_hash,
        "params": config.model_dump(mode="json"),
        "attempts": [_attempt(command)],
    }
    # Last: a folder without run.json is a run that never began, and is listed nowhere.
    write_json(run.run_json, record)
    return run


def record_resumption(run: RunPaths, config: RunConfig, *, command: str) -> None:
    """Add an attempt to ``run.json``, and keep what it changed (memory, device, workers) in ``params.yaml``.

    Raises:
        DataError: ``run.json`` is not readable.
    """
    try:
        record = json.loads(run.run_json.read_text())
        record["attempts"].append(_attempt(command))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
    write_text(run.params_yaml, config.to_yaml())
    write_json(run.run_json, record)


def _attempt(command: str) -> dict[str, object]:
    """When, how, with which code and on what machine an attempt began."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "started_utc": utc_now(),
        "command": command,
        "code": _git_state(),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cores": cores,
            "memory_bytes": psutil.virtual_memory().total,
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _git_state() -> dict[str, object]:
    """Commit and whether the checkout differs from it; nulls outside a git checkout."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    changes = git("status", "--porcelain")
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed_since_commit": None if changes is None else bool(changes),
    }
