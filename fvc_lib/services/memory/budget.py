"""The memory budget of a run, and the memory that processes hold."""

import ctypes
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
        """Return the part of one of ``sharers`` processes."""
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
    """Return the smallest of ``mem_gb`` (GB = 1e9 bytes), the control groups', SLURM's and the machine's limit.

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
        mem_gb = _number(environ.get(LIMIT_VARIABLE))
    if mem_gb:
        limits.append(MemoryBudget(int(mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
    return min(limits, key=lambda limit: limit.total_bytes).divided(memory_sharers(environ))


def _slurm_limits(environ: Mapping[str, str]) -> Iterator[MemoryBudget]:
    """Yield SLURM's limits, which are in MiB; 0 asks for a whole node and is no limit."""
    per_node = _whole(environ.get("SLURM_MEM_PER_NODE"))
    if per_node:
        yield MemoryBudget(per_node << 20, "SLURM_MEM_PER_NODE")
    per_cpu, cpus = _whole(environ.get("SLURM_MEM_PER_CPU")), _whole(environ.get("SLURM_CPUS_ON_NODE"))
    if per_cpu and cpus:
        yield MemoryBudget((per_cpu * cpus) << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE")


def _cgroup_limits(root: Path) -> Iterator[MemoryBudget]:
    """Yield the limits of this process's control group and its parents; SLURM often limits the job's group alone."""
    for group, folder in control_groups(root):
        for name in _LIMIT_FILES:
            with suppress(OSError):
                text = (folder / name).read_text().strip()
                if text.isdecimal() and int(text) < _UNLIMITED:
                    yield MemoryBudget(int(text), f"control group {group}, {name}")


def control_groups(root: Path = Path("/")) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield path and folder of the control groups that limit this process's memory, the innermost first."""
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


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


# How much memory a process and its children hold and have held, cheaply enough to be asked every second.

_PROC = Path("/proc")
_SHARE_SECONDS = 10.0
_SHARE_BYTES = 5_000_000
_forgotten_peak = 0  # the most this process held before its high-water mark was last put back


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of a process at one moment."""

    rss_bytes: int  # the process's resident memory
    high_water_bytes: int  # the most that has been since the program started, or since ``reset_high_water``
    tree_bytes: int  # ``rss_bytes`` and what its descendants hold besides


class ProcessTree:
    """A process (``pid``; none: this one) with its descendants.

    A forked loader worker shares almost all its pages with its parent: four idle workers of a process of 540 MB show
    540 MB each. So of a child only the pages that are its own count (``smaps_rollup``), where that can be read; else
    its resident memory. PSS would still count a page shared with the parent nearly twice: in the parent as a whole, in
    the children as shares. Reading the page tables of 540 MB takes 10 ms, so how much a child shares is kept for ten
    seconds and taken off its resident memory; it is looked up again when the child has loaded or dropped files (a young
    one shares nothing yet, and 100 MB of torch's libraries two seconds later). What else a child comes to hold, shared
    with nobody, is in its resident memory already.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._shared: dict[int, _Share] = {}

    def measure(self) -> ProcessMemory:
        """Return the memory held now; zeros for a process that has ended."""
        rss, high_water, _ = _resident_peak_and_files(self.pid)
        children = _descendants(self.pid)
        self._shared = {pid: share for pid, share in self._shared.items() if pid in children}
        return ProcessMemory(rss, high_water, rss + sum(self._own_bytes(pid) for pid in children))

    def _own_bytes(self, pid: int) -> int:
        resident, _, files = _resident_peak_and_files(pid)
        share = self._shared.get(pid)
        if share is None or share.is_stale(resident, files):
            share = self._shared[pid] = _Share(time.monotonic(), files, _shared_bytes(pid))
        return max(0, resident - share.shared_bytes)


@dataclass(frozen=True)
class _Share:
    """The shared memory and mapped files of a child at one moment."""

    looked_up: float  # monotonic seconds
    file_bytes: int
    shared_bytes: int

    def is_stale(self, resident_bytes: int, file_bytes: int) -> bool:
        moved = abs(file_bytes - self.file_bytes) > _SHARE_BYTES or resident_bytes < self.shared_bytes
        return moved or time.monotonic() - self.looked_up >= _SHARE_SECONDS


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
    """Reset this process's high-water mark to its resident memory, and return it in bytes.

    ``peak_rss_bytes`` keeps the mark before. Where the system cannot reset it, it stays.
    """
    global _forgotten_peak
    _forgotten_peak = peak_rss_bytes()
    with suppress(OSError):
        (_PROC / "self" / "clear_refs").write_text("5")
    return _resident_peak_and_files(os.getpid())[1]


def resident_and_peak_bytes(pid: int) -> tuple[int, int]:
    """Return resident and peak memory of a process in bytes; zeros for one that has ended."""
    return _resident_peak_and_files(pid)[:2]


def _resident_peak_and_files(pid: int) -> tuple[int, int, int]:
    """Return resident memory, its peak and its mapped files in bytes; zeros for a process that has ended."""
    if not _PROC.is_dir():  # ru_maxrss survives exec, so it may be the parent's; on macOS there is nothing better
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return _resident_bytes(pid), peak if pid == os.getpid() else 0, 0
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:  # gone
        return 0, 0, 0
    rss, peak = _field_bytes(status, "VmRSS"), _field_bytes(status, "VmHWM")
    return rss, max(rss, peak), _field_bytes(status, "RssFile")


def _descendants(pid: int) -> set[int]:
    """Return all descendants, from /proc; psutil, its substitute, reads every process of the machine."""
    try:
        found = waiting = _children(pid)
    except OSError:
        import psutil  # for systems without /proc

        try:
            return {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            return set()
    while waiting:
        below: set[int] = set()
        for parent in waiting:
            with suppress(OSError):  # gone meanwhile
                below |= _children(parent)
        waiting = below - found
        found = found | waiting
    return found


def _children(pid: int) -> set[int]:
    tasks = _PROC / str(pid) / "task"
    return {int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()}


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # gone meanwhile
        return 0


def _shared_bytes(pid: int) -> int:
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # gone, another user's, or no such file: then all it shows counts as its own
        return 0
    return _field_bytes(rollup, "Shared_Clean") + _field_bytes(rollup, "Shared_Dirty")


def _field_bytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def give_back_freed() -> None:
    """Return freed memory of the C library to the system; small Python objects are not in it."""
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
