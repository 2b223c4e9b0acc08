"""``run.json`` and ``params.yaml``: what was asked, with which code, versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fvc_lib.execution.status import RunStatus, utc_now
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, new_run

RECORDED_PACKAGES = (
    "av", "duckdb", "kornia", "nbclient", "numpy", "papermill", "pandera", "plotly", "polars", "scikit-learn", "torch",
)  # fmt: skip
# Other versions of these, another processor or another number of threads add numbers up in another order.
BITS_DEPEND_ON = ("python", "numpy", "torch")


def begin_run(
    config: RunConfig, *, command: str, prepare: Callable[[RunPaths], Mapping[str, object]] | None = None
) -> RunPaths:
    """Create a run folder with its record, parameters and first status.

    Args:
        config: the run's parameters.
        command: what was typed.
        prepare: called with the new folder before it counts as a run; what it returns is recorded as well.

    Raises:
        UsageError: the experiment's name is not one folder name.
        OSError: the runs folder cannot be written.
    """
    run = new_run(Path(config.runs_dir), config.experiment, config.config_hash)
    write_text(run.params_yaml, config.to_yaml())
    RunStatus(run_id=run.run_id, started_utc=utc_now()).write(run)
    prepared = {} if prepare is None else prepare(run)
    record = {
        "run_id": run.run_id,
        "experiment": config.experiment,
        "config_hash": config.config_hash,
        "params": config.model_dump(mode="json"),
        **prepared,
        "attempts": [_attempt(command)],
    }
    # Last: a folder without run.json is a run that never began, and is listed nowhere.
    write_json(run.run_json, record)
    return run


def record_resumption(run: RunPaths, config: RunConfig, *, command: str) -> list[str]:
    """Add an attempt to ``run.json``, and keep what it changed (memory, device, workers) in ``params.yaml``.

    Where versions, processor or threads differ from the attempt before, the attempt's ``differs`` holds
    ``{name: [before, now]}`` and the record no longer claims that the resumed run is bit for bit the undisturbed one:
    ``bit_equal_resume`` is false, for good, with every reason in ``bit_equal_resume_because``.

    Returns:
        The differences, one readable clause each; for a warning.

    Raises:
        DataError: ``run.json`` is not readable.
    """
    now = _attempt(command)
    try:
        record = json.loads(run.run_json.read_text())
        before, then = _bits_depend_on(record["attempts"][-1]), _bits_depend_on(now)
        differs = {name: [before[name], then[name]] for name in then if name in before and before[name] != then[name]}
        clauses = [f"{name} {old} -> {new}" for name, (old, new) in differs.items()]
        if differs:
            now["differs"] = differs
            record["bit_equal_resume"] = False
            record["bit_equal_resume_because"] = [*record.get("bit_equal_resume_because", []), *clauses]
        record["attempts"].append(now)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
    write_text(run.params_yaml, config.to_yaml())
    write_json(run.run_json, record)
    return clauses


def _bits_depend_on(attempt: Mapping[str, Any]) -> dict[str, object]:
    """What a sum of floats depends on besides its numbers, as far as is known before torch has started."""
    versions, hardware = attempt["versions"], attempt["hardware"]
    threads = hardware.get("omp_num_threads") or hardware["cores"]
    return {
        **{name: versions.get(name) for name in BITS_DEPEND_ON},
        "threads": str(threads),
        "machine": hardware["machine"],
        # Attempts of an earlier version did not note it: that is no difference.
        **({"processor": hardware["processor"]} if hardware.get("processor") else {}),
    }


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
            "processor": _processor(),
            "cores": cores,
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def _processor() -> str | None:
    """The model's name; the same library picks other instructions on another model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


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
