"""Find the memory budget of a run, and measure the memory that processes hold."""

import ctypes
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
# Of control groups of version 2 (above the second nothing is killed, but everything waits), and of version 1.
_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
LIMIT_VARIABLE = "FVC_MEM_GB"  # ``mem_gb``; the runner sets it for kernels and what they start
# How many processes share the budget; the runner sets it for kernels that run at the same time, a launcher for ranks.
SHARERS_VARIABLE = "FVC_MEMORY_SHARERS"


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a run may use."""

    total_bytes: int
    origin: str  # the limit that sets it, such as ``SLURM_MEM_PER_NODE``

    def describe(self) -> str:
        """Return a line such as ``memory budget: 8.00 GB (SLURM_MEM_PER_NODE)``."""
        return f"memory budget: {self}"

    def divided(self, sharers: int) -> Self:
        """Return the budget divided by ``sharers``, for one of that many processes."""
        if sharers == 1:
            return self
        return type(self)(self.total_bytes // sharers, f"1/{sharers} of {self}")

    def __str__(self) -> str:
        return f"{self.total_bytes / 1e9:.2f} GB ({self.origin})"


def memory_sharers(environ: Mapping[str, str] | None = None) -> int:
    """Return how many processes share the memory budget, this one included."""
    return max(1, _whole((os.environ if environ is None else environ).get(SHARERS_VARIABLE)))


def memory_budget(
    mem_gb: float | None = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> MemoryBudget:
    """Return the smallest limit of ``mem_gb`` (in 1e9 bytes), the control groups, SLURM and the machine.

    Processes that share the budget (``SHARERS_VARIABLE``) get equal parts of it.

    Args:
        mem_gb: limit chosen by the user; None: that of the environment, if any.
        environ: environment with SLURM's variables; None: this process's.
        root: folder that holds ``proc/self/cgroup`` and ``sys/fs/cgroup``.
    """
    environ = os.environ if environ is None else environ
    limits = [MemoryBudget(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory")]
    limits.extend(_slurm_limits(environ))
    limits.extend(_cgroup_limits(root))
    if mem_gb is None:
        with suppress(ValueError):
            mem_gb = float(environ.get(LIMIT_VARIABLE) or 0)
    if mem_gb:
        limits.append(MemoryBudget(int(mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
    return min(limits, key=lambda limit: limit.total_bytes).divided(memory_sharers(environ))


def _slurm_limits(environ: Mapping[str, str]) -> Iterator[MemoryBudget]:
    """Yield SLURM's limits, given in MiB. A value of 0 requests a whole node and is no limit."""
    per_cpu = _whole(environ.get("SLURM_MEM_PER_CPU")) * _whole(environ.get("SLURM_CPUS_ON_NODE"))
    limits = {
        "SLURM_MEM_PER_NODE": _whole(environ.get("SLURM_MEM_PER_NODE")),
        "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE": per_cpu,
    }
    yield from (MemoryBudget(limit << 20, origin) for origin, limit in limits.items() if limit)


def _cgroup_limits(root: Path) -> Iterator[MemoryBudget]:
    """Yield the limits of this process's control group and its parents; SLURM often limits the job's group alone."""
    for group, folder in control_groups(root):
        for name in _LIMIT_FILES:
            with suppress(OSError):
                text = (folder / name).read_text().strip()
                if text.isdecimal() and int(text) < _UNLIMITED:
                    yield MemoryBudget(int(text), f"control group {group}, {name}")


def control_groups(root: Path = Path("/")) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield (path, folder) of every control group that limits this process's memory, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 1 has a tree for each controller, version 2 one for all.
        tree = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        path = PurePosixPath("/", group)
        # Inside a container the group's path may lead outside what is mounted: then the mount's own root is the group.
        groups = [path, *path.parents] if ".." not in path.parts else [PurePosixPath("/")]
        yield from ((each, tree / each.relative_to("/")) for each in groups)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


# The memory that a process and its children hold and have held, cheaply enough to be read every second.

_PROC = Path("/proc")
_SHARE_SECONDS = 10.0
_SHARE_BYTES = 5_000_000
_forgotten_peak = 0  # the most this process held before its high-water mark was last reset


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of a process at one moment."""

    rss_bytes: int  # the process's resident memory
    high_water_bytes: int  # its peak since the program started, or since ``reset_high_water``
    tree_bytes: int  # ``rss_bytes`` and the memory of its descendants besides


class ProcessTree:
    """A process (``pid``; None: this one) with its descendants.

    A forked loader process shares almost all its pages with its parent: four idle children of a process of 540 MB show
    540 MB each. So a child counts without its shared pages (``smaps_rollup``). PSS (proportional set size) would still
    count a page shared with the parent nearly twice. Reading the page tables of 540 MB takes 10 ms, so a
    child's shared bytes are read again only after ten seconds, or when it has loaded or dropped files.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._shared: dict[int, tuple[float, int, int]] = {}  # time, mapped files and shared bytes of each child

    def measure(self) -> ProcessMemory:
        """Return the memory held now; zeros for a process that has ended."""
        rss, high_water, _ = _resident_peak_and_files(self.pid)
        children = _descendants(self.pid)
        self._shared = {pid: share for pid, share in self._shared.items() if pid in children}
        return ProcessMemory(rss, high_water, rss + sum(self._own_bytes(pid) for pid in children))

    def _own_bytes(self, pid: int) -> int:
        resident, _, files = _resident_peak_and_files(pid)
        read_at, files_then, shared = self._shared.get(pid, (-math.inf, 0, 0))
        has_moved = abs(files - files_then) > _SHARE_BYTES or resident < shared
        if has_moved or time.monotonic() - read_at >= _SHARE_SECONDS:
            shared = _shared_bytes(pid)
            self._shared[pid] = time.monotonic(), files, shared
        return max(0, resident - shared)


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    return _resident_peak_and_files(os.getpid())[0]


def own_bytes() -> int:
    """Return this process's resident memory without shared pages, in bytes."""
    return resident_bytes() - _shared_bytes(os.getpid())


def peak_rss_bytes() -> int:
    """Return this process's largest resident memory so far: VmHWM, or ``ru_maxrss`` without /proc."""
    return max(_forgotten_peak, _resident_peak_and_files(os.getpid())[1])


def reset_high_water() -> int:
    """Reset this process's high-water mark to its resident memory, and return the mark in bytes.

    ``peak_rss_bytes`` still considers the mark before. If the system cannot reset the mark, it stays.
    """
    global _forgotten_peak
    _forgotten_peak = peak_rss_bytes()
    with suppress(OSError):
        (_PROC / "self" / "clear_refs").write_text("5")
    return _resident_peak_and_files(os.getpid())[1]


def _resident_peak_and_files(pid: int) -> tuple[int, int, int]:
    """Return resident memory, its peak and its mapped files in bytes; zeros for a process that has ended."""
    if not _PROC.is_dir():
        import psutil

        with suppress(psutil.Error):
            rss = int(psutil.Process(pid).memory_info().rss)
            unit = 1 if sys.platform == "darwin" else 1024
            return rss, max(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), 0
        return 0, 0, 0
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:  # gone
        return 0, 0, 0
    rss, peak = _field_bytes(status, "VmRSS"), _field_bytes(status, "VmHWM")
    return rss, max(rss, peak), _field_bytes(status, "RssFile")


def _descendants(pid: int) -> set[int]:
    """Return the pids of all descendants, from /proc, since psutil would read every process of the machine."""
    if not _PROC.is_dir():
        import psutil

        with suppress(psutil.Error):
            return {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return set()
    descendants: set[int] = set()
    waiting = [pid]
    while waiting:
        with suppress(OSError):  # gone meanwhile
            for task in (_PROC / str(waiting.pop()) / "task").iterdir():
                children = {int(child) for child in (task / "children").read_text().split()}
                waiting += children - descendants
                descendants |= children
    return descendants


def _shared_bytes(pid: int) -> int:
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # gone, another user's, or no such file: then its resident memory counts as its own
        return 0
    return _field_bytes(rollup, "Shared_Clean") + _field_bytes(rollup, "Shared_Dirty")


def _field_bytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def give_back_freed() -> None:
    """Return freed memory of the C library to the system (glibc only); small Python objects are not included."""
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
