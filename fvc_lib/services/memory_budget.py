"""How much memory a run may use: the smallest limit that anybody has set, and who set it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_V1_FILES = ("memory.limit_in_bytes",)
_V2_FILES = ("memory.max", "memory.high")  # above the second nothing is killed, but everything waits
SHARE_VARIABLE = "FVC_MEM_SHARE"  # set by the runner for kernels that run at the same time; nobody else sets it


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes a run may use and who says so."""

    total_bytes: int
    origin: str

    def describe(self) -> str:
        """Like ``memory budget: 8.00 GB (SLURM_MEM_PER_NODE)``."""
        return f"memory budget: {self.total_bytes / 1e9:.2f} GB ({self.origin})"


@dataclass(frozen=True)
class MemoryShare:
    """One kernel's part of a budget that ``sharers`` kernels have together."""

    share_bytes: int
    sharers: int
    whole: MemoryBudget

    def as_text(self) -> str:
        """As it stands in ``SHARE_VARIABLE``."""
        return f"{self.share_bytes} {self.sharers} {self.whole.total_bytes} {self.whole.origin}"

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> MemoryShare | None:
        """The share that ``environ`` names; None where there is none."""
        parts = environ.get(SHARE_VARIABLE, "").split(" ", 3)
        if len(parts) != 4 or not all(part.isdecimal() for part in parts[:3]):
            return None
        share_bytes, sharers, whole_bytes = map(int, parts[:3])
        return cls(share_bytes, sharers, MemoryBudget(whole_bytes, parts[3]))

    @property
    def limit(self) -> MemoryBudget:
        """The share as a limit, with its origin in words."""
        whole = f"{self.whole.total_bytes / 1e9:.2f} GB ({self.whole.origin})"
        return MemoryBudget(self.share_bytes, f"1/{self.sharers} of {whole}, shared by {self.sharers} tasks")


def memory_budget(
    mem_gb: float | None = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> MemoryBudget:
    """The smallest of what was asked for (GB = 1e9 bytes), the control groups', SLURM's and the machine's limit.

    A kernel that runs beside others has its share of that (``MemoryShare``) as one more limit.

    Args:
        mem_gb: what was asked for; none: nothing was.
        environ: SLURM's variables and the share; none: this process's.
        root: the folder in which ``proc/self/cgroup`` and ``sys/fs/cgroup`` lie.
    """
    limits = [MemoryBudget(psutil.virtual_memory().total, "this machine's memory")]
    environ = os.environ if environ is None else environ
    limits.extend(_slurm_limits(environ))
    limits.extend(_cgroup_limits(root))
    if mem_gb is not None:
        limits.append(MemoryBudget(int(mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
    if share := MemoryShare.of(environ):
        limits.append(share.limit)
    return min(limits, key=lambda limit: limit.total_bytes)


def _slurm_limits(environ: Mapping[str, str]) -> Iterator[MemoryBudget]:
    """SLURM counts in MiB; 0 asks for all of a node and is no limit of its own."""
    per_node = _whole(environ.get("SLURM_MEM_PER_NODE"))
    if per_node:
        yield MemoryBudget(per_node << 20, "SLURM_MEM_PER_NODE")
    per_cpu, cpus = _whole(environ.get("SLURM_MEM_PER_CPU")), _whole(environ.get("SLURM_CPUS_ON_NODE"))
    if per_cpu and cpus:
        yield MemoryBudget((per_cpu * cpus) << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE")


def _cgroup_limits(root: Path) -> Iterator[MemoryBudget]:
    """Of this process's group and all that it lies in: a SLURM step's limit often stands on the job's group alone."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _limits_upwards(base, group, _V2_FILES)
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(base / "memory", group, _V1_FILES)


def _limits_upwards(base: Path, group: str, names: tuple[str, ...]) -> Iterator[MemoryBudget]:
    path = PurePosixPath("/", group)
    # Inside a container the group's path may lead outside what is mounted: then the mount's own root is the group.
    folders = [path, *path.parents] if ".." not in path.parts else [PurePosixPath("/")]
    for folder in folders:
        for name in names:
            try:
                text = base.joinpath(folder.relative_to("/"), name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < _UNLIMITED:
                yield MemoryBudget(int(text), f"control group {folder}, {name}")


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
