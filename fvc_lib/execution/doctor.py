"""Check whether this machine can run FVC, and name a remedy for each problem."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from fvc_lib.execution.run.record import gpus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.home import IS_CHECKOUT
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.memory import memory_budget

CHILD_SECONDS = 60.0
_INSTALL = (
    "python -m pip install --requirement requirements.lock (with make: make setup)"
    if IS_CHECKOUT
    else "python -m pip install --force-reinstall fvc_lib, from the wheel or checkout that it came from"
)
_TRAINING_BYTES = 900_000_000  # one training of the smallest network
_LITTLE_DISK_BYTES = 5_000_000_000
State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked, for example ``torch on cuda``.
        state: ``ok``; ``warning``: a run works, but worse than it could; or ``problem``: a run fails.
        found: the observation in words, for example ``/home/me/runs: 12.3 GB free``.
        remedy: what to do about a warning or problem.
    """

    name: str
    state: State
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<7}  {self.name:<22}  {self.found}"
        return line if self.state == "ok" else f"{line}\n{'':<33}-> {self.remedy}"


def diagnose(config: RunConfig) -> list[Finding]:
    """Check packages, torch, disks and memory for a run with ``config``; return the findings in this order.

    The checks take a few seconds and leave no files.
    """
    return [finding for check in (packages, torch, disks, memory) for finding in check(config)]


def packages(config: RunConfig) -> Iterator[Finding]:
    """Check that all packages that FVC requires are installed, and yield one finding. ``config`` is not used."""
    required = [re.split(r"[^\w.-]", text)[0] for text in metadata.requires("fvc_lib") or () if "extra ==" not in text]
    missing = [name for name in required if not any(metadata.distributions(name=name))]
    found = f"not installed: {', '.join(missing)}" if missing else f"all {len(required)} are installed"
    yield Finding("packages", "problem" if missing else "ok", found, _INSTALL)


def torch(config: RunConfig) -> Iterator[Finding]:
    """Check that torch can compute on each device that a run may use, and yield one finding per device.

    Torch runs in a child process, because a broken driver may crash or hang a process.
    """
    devices = ["cpu", "cuda"] if config.device == "auto" and gpus() else [config.device.replace("auto", "cpu")]
    remedy = f"install a torch build or a driver for this device: {_INSTALL}; or avoid it: -p device cpu"
    for answer in run_isolated(
        f"{__name__}:probe_torch", devices, workers=1, timeout_seconds=CHILD_SECONDS, memory_bytes=None
    ):
        device = devices[answer.position]
        # With device auto a run falls back to the CPU.
        failed: State = "warning" if (device, config.device) == ("cuda", "auto") else "problem"
        found = answer.detail if answer.failure else f"torch {answer.value} computes"
        yield Finding(f"torch on {device}", failed if answer.failure else "ok", found, remedy)


def probe_torch(device: str) -> str:
    """Compute a small matrix product on ``device``, and return the version of torch."""
    import torch

    values = torch.ones(64, 64, device=device)
    (values @ values).sum().item()  # waits until the device has computed
    return str(torch.__version__)


def disks(config: RunConfig) -> Iterator[Finding]:
    """Check the folders of runs, of decoded clips and of the sample corpus, and yield one finding per folder.

    It is a problem if the folder cannot be written, and a warning if less than 5 GB are free. A missing folder is not
    created: the check uses its nearest parent that exists.
    """
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
        else:
            found = f"{folder}: {free / 1e9:.1f} GB free"
            yield Finding(name, "warning" if free < _LITTLE_DISK_BYTES else "ok", found, remedy)


def memory(config: RunConfig) -> Iterator[Finding]:
    """Check that the smallest training (0.9 GB) fits into the memory limit and the free memory; yield one finding.

    A limit that is too low is a problem. Too little free memory is a warning, because other programs may end.
    """
    budget, free = memory_budget(config.mem_gb), psutil.virtual_memory().available
    found = f"{budget.total_bytes / 1e9:.2f} GB may be used ({budget.origin}), {free / 1e9:.2f} GB are free"
    remedy = "a training takes 0.9 GB: ask for more (mem_gb, SLURM's --mem), or end other programs"
    too_little: State = "problem" if budget.total_bytes < _TRAINING_BYTES else "warning"
    yield Finding("memory", "ok" if min(budget.total_bytes, free) >= _TRAINING_BYTES else too_little, found, remedy)
