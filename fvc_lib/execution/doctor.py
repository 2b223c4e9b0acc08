"""Check whether this machine can run FVC, and name a remedy for each problem."""

import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from fvc_lib.execution.run.record import gpus
from fvc_lib.execution.slurm import SlurmError, has_command, output_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores, run_isolated
from fvc_lib.services.memory import memory_budget

CHILD_SECONDS = 60.0
_INSTALL = "python -m pip install --requirement requirements.lock (with make: make setup)"
_TRAINING_BYTES = 900_000_000  # one training of the smallest network
_LITTLE_DISK_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    ``warning``: a run works, but worse than it could. ``problem``: a run fails. Both have a ``remedy``.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    remedy: str = ""


def diagnose(config: RunConfig) -> list[Finding]:
    """Run all checks for a run with ``config``, and return their results.

    Takes a few seconds and changes nothing.
    """
    findings = [Finding("Python", "ok", f"{platform.python_version()}, {available_cores()} cores")]
    for check in (packages, torch, disks, memory, slurm):
        findings += check(config)
    return findings


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the terminal's lines: each finding with its remedy below it, and at the end whether a run will work."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        sign = finding.state.upper() if finding.state == "problem" else finding.state
        shown.append(f"{sign:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            shown.append(f"{'':<{width + 11}}-> {finding.remedy}")
    verdict = "A run would fail; solve the problems first." if exit_code(findings) else "A run will work."
    return [*shown, "", verdict]


def exit_code(findings: Sequence[Finding]) -> Literal[0, 1]:
    """Return 1 if a finding is a problem, else 0; warnings do not count."""
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def packages(config: RunConfig) -> Iterator[Finding]:
    """Check that the packages that FVC requires are installed."""
    required = [re.split(r"[^\w.-]", text)[0] for text in metadata.requires("fvc_lib") or () if "extra ==" not in text]
    if missing := [name for name in required if not any(metadata.distributions(name=name))]:
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}", _INSTALL)
    else:
        yield Finding("packages", "ok", f"all {len(required)} are installed")


def torch(config: RunConfig) -> Iterator[Finding]:
    """Import torch and compute on each device, in a child process, because a broken driver may crash or hang it."""
    (answer,) = run_isolated(
        f"{__name__}:probe_torch", [config.device], workers=1, timeout_seconds=CHILD_SECONDS, memory_bytes=None
    )
    if answer.failure:
        remedy = f"install torch again: {_INSTALL}; if only a GPU fails: -p device cpu"
        yield Finding("torch", "problem", f"import or a device failed: {answer.detail}", remedy)
        return
    version, devices, unused = answer.value["version"], answer.value["devices"], sorted(set(gpus()))
    yield Finding("torch", "ok", version)
    remedy = "install a torch build or a driver for this device, or avoid it: -p device cpu"
    for name, error in devices.items():
        yield Finding(f"device {name}", "problem" if error else "ok", error or "computes", remedy if error else "")
    if config.device != "cpu" and unused and not any(name.startswith("cuda") for name in devices):
        yield Finding("GPU", "warning", f"torch {version} does not see {', '.join(unused)}", remedy)
    if config.device != "auto" and not any(name.startswith(config.device) for name in devices):
        yield Finding("device", "problem", f"{config.device} is not available", "-p device auto uses what is here")


def probe_torch(device: str) -> dict[str, Any]:
    """Test a small matrix product on each device that ``device`` allows.

    Returns:
        ``version`` of torch, and ``devices``: the error by device name, empty where the product is right.
    """
    import torch

    names = ["cpu"]
    if device != "cpu" and torch.cuda.is_available():
        names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device != "cpu" and torch.backends.mps.is_available():
        names.append("mps")
    errors = {}
    for name in names:
        try:
            values = torch.ones(64, 64, device=name)
            errors[name] = "" if bool((values @ values == 64).all()) else "computes a wrong product"
        except RuntimeError as error:
            errors[name] = str(error).partition("\n")[0]
    return {"version": torch.__version__, "devices": errors}


def disks(config: RunConfig) -> Iterator[Finding]:
    """Check that FVC can write into its folders, and that 5 GB or more are free there."""
    folders = {"runs": config.runs_dir, "clips": config.cache_dir, "sample corpus": config.data_dir}
    remedy = "make room, or choose another folder: FVC_RUNS_DIR, FVC_CACHE_DIR, FVC_DATA_DIR"
    for what, text in folders.items():
        name, folder = f"disk for {what}", Path(text).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        try:
            with tempfile.TemporaryDirectory(dir=existing, prefix=".fvc-doctor-"):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            yield Finding(name, "problem", f"{folder}: cannot be written: {error.strerror}", remedy)
            continue
        is_little = free < _LITTLE_DISK_BYTES
        found = f"{folder}: {free / 1e9:.1f} GB free"
        yield Finding(name, "warning" if is_little else "ok", found, remedy if is_little else "")


def memory(config: RunConfig) -> Iterator[Finding]:
    """Check that the memory limit and the free memory suffice for the smallest training, 0.9 GB."""
    budget, free = memory_budget(config.mem_gb), psutil.virtual_memory().available
    found = f"{budget.total_bytes / 1e9:.2f} GB may be used ({budget.origin}), {free / 1e9:.2f} GB are free"
    remedy = "ask for more memory (mem_gb, SLURM's --mem, the container's limit), or end other programs"
    if budget.total_bytes < _TRAINING_BYTES:
        yield Finding("memory", "problem", f"{found}; a training takes {_TRAINING_BYTES / 1e9:.1f} GB or more", remedy)
    elif free < _TRAINING_BYTES:
        yield Finding("memory", "warning", found, remedy)
    else:
        yield Finding("memory", "ok", found)


def slurm(config: RunConfig) -> Iterator[Finding]:
    """Show the partitions of the cluster, if there is one."""
    if not has_command("sbatch"):
        yield Finding("SLURM", "ok", "not on this machine; --executor slurm needs a cluster's login node")
        return
    try:
        answer = output_of(["sinfo", "--noheader", "--format=%P %a, %l, %D nodes of %c cores and %m MB, %G"])
        yield Finding("SLURM", "ok", "; ".join(answer.replace(", (null)", "").splitlines()[:8]) or "no partition")
    except SlurmError as error:
        yield Finding("SLURM", "warning", str(error).splitlines()[0], "runs here work; ask the site about SLURM")
