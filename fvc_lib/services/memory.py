"""Determine the memory budget of a run, measure the memory of processes, and give advice after memory ran out."""

import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
# Limit files of control groups: two of version 2 (above ``memory.high`` processes only become slow), one of version 1.
_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
LIMIT_VARIABLE = "FVC_MEM_GB"  # holds ``mem_gb``; the runner sets it for kernels and their child processes
# How many processes share the budget; the runner sets it for kernels that run at the same time, a launcher for ranks.
SHARERS_VARIABLE = "FVC_MEMORY_SHARERS"


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a run may use, in bytes, and the limit that determines it."""

    total_bytes: int
    origin: str  # the limit that sets it, such as ``SLURM_MEM_PER_NODE``

    def describe(self) -> str:
        """Return a text for logs, such as ``memory budget: 8.00 GB (SLURM_MEM_PER_NODE)``."""
        return f"memory budget: {self}"

    def divided(self, sharers: int) -> "MemoryBudget":
        """Return the budget of one process if ``sharers`` processes divide this budget equally."""
        return self if sharers == 1 else MemoryBudget(self.total_bytes // sharers, f"1/{sharers} of {self}")

    def __str__(self) -> str:
        return f"{self.total_bytes / 1e9:.2f} GB ({self.origin})"


def memory_sharers(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that share the memory budget, including this one; at least 1.

    ``environ`` has the environment variables to read; None: those of this process.
    """
    return max(1, _whole((os.environ if environ is None else environ).get(SHARERS_VARIABLE)))


def memory_budget(
    mem_gb: float | None = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> MemoryBudget:
    """Return the memory budget of this process.

    It is the smallest limit among ``mem_gb``, the control groups, SLURM and the machine's memory. If several processes
    share it (``SHARERS_VARIABLE``), it is divided by their number.

    Args:
        mem_gb: limit chosen by the user, in units of 1e9 bytes; None: ``FVC_MEM_GB``, if set.
        environ: environment variables to read; None: this process's.
        root: folder that holds ``proc/self/cgroup`` and ``sys/fs/cgroup``.
    """
    environ = os.environ if environ is None else environ
    limits = [MemoryBudget(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory")]
    # SLURM's variables are in MiB. A value of 0 requests a whole node and is no limit.
    if per_node := _whole(environ.get("SLURM_MEM_PER_NODE")):
        limits.append(MemoryBudget(per_node << 20, "SLURM_MEM_PER_NODE"))
    if per_cpu := _whole(environ.get("SLURM_MEM_PER_CPU")) * _whole(environ.get("SLURM_CPUS_ON_NODE")):
        limits.append(MemoryBudget(per_cpu << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE"))
    limits.extend(_cgroup_limits(root))
    if mem_gb is None:
        with suppress(ValueError):
            mem_gb = float(environ.get(LIMIT_VARIABLE) or 0)
    if mem_gb:
        limits.append(MemoryBudget(int(mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
    return min(limits, key=lambda limit: limit.total_bytes).divided(memory_sharers(environ))


def _cgroup_limits(root: Path) -> Iterator[MemoryBudget]:
    """Yield the memory limits of this process's control group (cgroup) and of the groups that contain it.

    SLURM often sets a limit only on the job's group, which lies above the process's group.
    """
    for group, folder in control_groups(root):
        for name in _LIMIT_FILES:
            with suppress(OSError):
                text = (folder / name).read_text().strip()
                if text.isdecimal() and int(text) < _UNLIMITED:
                    yield MemoryBudget(int(text), f"control group {group}, {name}")


def control_groups(root: Path = Path("/")) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield (path, folder) for every control group that limits this process's memory, the innermost first.

    ``path`` is the name of the group, such as ``/slurm/job_1``; ``folder`` contains its limit files. ``root`` is the
    folder that holds ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 1 has one tree of folders per controller, version 2 a single tree for all controllers.
        tree = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        path = PurePosixPath("/", group)
        # Inside a container the group's path may lead outside the mount. Then the root of the mount is the group.
        groups = [path, *path.parents] if ".." not in path.parts else [PurePosixPath("/")]
        for group_path in groups:
            yield group_path, tree / group_path.relative_to("/")


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


# Measure the current and peak memory of a process and its children, cheaply enough to do so every second.

_PROC = Path("/proc")
_SHARE_SECONDS = 10.0
_forgotten_peak = 0  # the most this process held before its high-water mark was last reset


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of a process at one moment, in bytes."""

    rss_bytes: int  # the process's resident memory
    high_water_bytes: int  # its peak since the program started, or since ``reset_high_water``
    tree_bytes: int  # ``rss_bytes`` plus the memory of its descendants, without pages that they share


class ProcessTree:
    """A meter of the memory of the process ``pid`` (None: this one) together with its descendants.

    The result is the resident memory of the process, plus the pages of its descendants that no other process shares
    (``smaps_rollup``). A forked loader process shares almost all its pages with its parent: four idle children of a
    process of 540 MB have a resident memory of 540 MB each. Adding these numbers would count the same pages five times.

    Reading ``smaps_rollup`` for 540 MB takes 10 ms. So a child's shared bytes are read again only when its memory has
    changed by 5 MB, or after ten seconds.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._shared: dict[int, tuple[float, int, int]] = {}  # time, resident and shared bytes of each child

    def measure(self) -> ProcessMemory:
        """Return the current memory of the process and its descendants; all values are 0 if the process has ended."""
        rss, high_water = _resident_and_peak(self.pid)
        of_descendants = sum(self._own_bytes(pid) for pid in _descendants(self.pid))
        return ProcessMemory(rss, high_water, rss + of_descendants)

    def _own_bytes(self, pid: int) -> int:
        resident, _ = _resident_and_peak(pid)
        read_at, then, shared = self._shared.get(pid, (-_SHARE_SECONDS, 0, 0))
        if abs(resident - then) > 5_000_000 or time.monotonic() - read_at >= _SHARE_SECONDS:
            shared = _shared_bytes(pid)
            self._shared[pid] = time.monotonic(), resident, shared
        return max(0, resident - shared)


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    return _resident_and_peak(os.getpid())[0]


def own_bytes() -> int:
    """Return this process's resident memory minus the pages that it shares with other processes, in bytes."""
    return resident_bytes() - _shared_bytes(os.getpid())


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process since it started, in bytes."""
    return max(_forgotten_peak, _resident_and_peak(os.getpid())[1])


def reset_high_water() -> int:
    """Reset the kernel's peak of this process's resident memory to the current value, and return it in bytes.

    ``peak_rss_bytes`` still includes the peak before the reset. If the system cannot reset the peak, the old peak is
    returned.
    """
    global _forgotten_peak
    _forgotten_peak = peak_rss_bytes()
    with suppress(OSError):
        (_PROC / "self" / "clear_refs").write_text("5")
    return _resident_and_peak(os.getpid())[1]


def _resident_and_peak(pid: int) -> tuple[int, int]:
    """Return (resident memory, peak resident memory) of process ``pid`` in bytes; (0, 0) if it has ended."""
    if not _PROC.is_dir():
        import psutil

        with suppress(psutil.Error):
            rss = int(psutil.Process(pid).memory_info().rss)
            return rss, max(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:  # gone
        return 0, 0
    rss = _field_bytes(status, "VmRSS")
    return rss, max(rss, _field_bytes(status, "VmHWM"))


def _descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of process ``pid``.

    They are read from ``/proc``, because psutil would read every process of the machine. Without ``/proc`` (macOS) none
    are found.
    """
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
    except OSError:  # ended, another user's, or no such file: then nothing counts as shared
        return 0
    return _field_bytes(rollup, "Shared_Clean") + _field_bytes(rollup, "Shared_Dirty")


def _field_bytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def give_back_freed() -> None:
    """Release memory that was freed, but that the C library still holds, to the operating system (glibc only).

    Memory of small Python objects, which Python itself manages, is not given back.
    """
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


# An allocator reads its environment variables once, when it first starts, so the runner gives them to a kernel before
# there is one. If several are set, torch 2.13 reads the first in this order.
ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# For the CPU nothing is set. Settings of glibc were measured on steps of r2plus1d with 16 clips of 6 x 112 x 112.
# MALLOC_ARENA_MAX of 1 or 2, and thresholds of 4 to 32 MiB, did not change the peak (480-530 MB). It fell to 430 MB
# with MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ of 64 KiB to 1 MiB, or MALLOC_TOP_PAD_ of 64 MiB. But then a
# step took 2.3 to 2.8 times the processor time.


def allocator_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that must be set before torch starts, by name.

    They make the segments of torch's allocator expandable. After an out-of-memory error, batches change size. Without
    expandable segments, blocks of the old size would stay allocated. The dict is empty if the user has set one of
    ``ALLOC_CONF_NAMES``.

    Args:
        environ: environment variables to read; None: this process's.
    """
    environ = os.environ if environ is None else environ
    is_set = any(environ.get(name) for name in ALLOC_CONF_NAMES)
    return {} if is_set else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


PREFETCHED_BATCHES = 2  # effective batches per loader process that are being loaded or are ready for use


# The training engine reports to a ``MemoryObserver`` and opens no file itself.

EventDetail = str | int | float | bool | None
PREFLIGHT = "preflight"  # the phase that measures a step, whose memory the training itself does not need


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of an accelerator, such as a GPU, at one moment, in bytes."""

    allocated_bytes: int  # held by tensors
    reserved_bytes: int  # held by torch's allocator, cached blocks included
    max_allocated_bytes: int  # the most ``allocated_bytes`` has been
    total_bytes: int  # the device's memory, or the part that the process may use
    free_bytes: int  # memory that the driver could still give


class MemoryObserver(Protocol):
    """The interface of an object that receives the phases, steps and events of a training.

    ``MemorySampler`` implements it, and writes them to the memory log.
    """

    def at(
        self, phase: str, *, epoch: int | None = None, batch_idx: int | None = None, global_step: int | None = None
    ) -> None:
        """Receive the current phase, epoch, batch index and optimizer step of the training; None: not known.

        The phases are setup, preflight (one step is measured), train, validation, test, and report after the training.
        A control training (on shuffled labels, or to tell sources apart) has its name in front, such as
        ``control_train``.
        """
        return

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Record an event; ``message`` is a sentence, ``details`` are values by name.

        ``kind`` is one of these words:
        ``device``: the device of the training was chosen.
        ``preflight``: the memory of one step was measured.
        ``out_of_memory``: memory ran out.
        ``step_restored``: memory ran out in an optimizer step, and training went back to the last checkpoint.
        ``near_limit``: nearly all memory is in use.
        ``nonfinite``: a loss, gradient or evaluation had NaN or infinity.
        """
        return

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Begin to observe an accelerator's memory as well.

        ``device`` is its name in the log, such as ``cuda:0``; ``probe`` returns its memory at the time of the call.
        """
        return


class NoObserver(MemoryObserver):
    """An observer that records nothing."""


# The work that ran out of memory, in this order: a training step; one sample alone; a loss that compares all samples of
# an effective batch; the optimizer's step; loader processes; a step that the preflight measures; anything else.
RanOut = Literal["batch", "sample", "comparison", "optimizer_step", "loaders", "preflight", "elsewhere"]

_MORE = "more memory (mem_gb, MEMORY in slurm/site.conf, or a larger machine)"
_REMEDIES: dict[RanOut, str] = {
    "batch": "-p batch_size 1 or -p gradient_checkpointing true, which leave the result the same",
    "sample": "smaller samples (num_frames, fixed_size, image_size) in a new run, -p gradient_checkpointing true",
    "comparison": "a smaller effective_batch_size or embedding_size in a new run",
    "optimizer_step": "a smaller model in a new run",
    "loaders": "-p num_workers 0",
    "preflight": "-p memory_preflight false",
    "elsewhere": "fewer worker processes (-p workers 1, -p num_workers 0)",
}


def ran_out_in(phase: str) -> RanOut:
    """Return the kind of work that ran out of memory, such as ``batch``, for the function ``memory_advice``.

    ``phase`` is the phase of the training at that moment, such as ``train`` or ``preflight`` (``MemoryObserver.at``).
    """
    if phase.rpartition("_")[2] in ("train", "validation", "test"):
        return "batch"
    return "preflight" if phase == PREFLIGHT else "elsewhere"


def memory_advice(ran_out: RanOut) -> str:
    """Return a sentence that suggests parameters to change after the work ``ran_out`` ran out of memory."""
    return f"Next, try {_REMEDIES[ran_out]}; or {_MORE}."
