"""How much memory there is, how much is used, and a log of it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import psutil

from fvc_lib.services.metric_log import JsonLines

SAMPLE_INTERVAL_SECONDS = 1.0
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes a run may use and who says so."""

    total_bytes: int
    origin: str


def memory_budget(mem_gb: float | None = None) -> MemoryBudget:
    """The smallest of what was asked for (GB = 1e9 bytes), the control group's, SLURM's and the machine's limit."""
    limits = [MemoryBudget(psutil.virtual_memory().total, "this machine's memory")]
    if mem_gb is not None:
        limits.append(MemoryBudget(int(mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
    if os.environ.get("SLURM_MEM_PER_NODE", "").isdecimal():
        limits.append(MemoryBudget(int(os.environ["SLURM_MEM_PER_NODE"]) << 20, "SLURM_MEM_PER_NODE"))
    limits.extend(MemoryBudget(limit, "the control group's limit") for limit in _cgroup_limits())
    return min(limits, key=lambda limit: limit.total_bytes)


def _cgroup_limits() -> list[int]:
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        name = None
        if not controllers:
            name, base = "memory.max", root
        elif "memory" in controllers.split(","):
            name, base = "memory.limit_in_bytes", root / "memory"
        if name is None:
            continue
        # Inside a container the group's path may not be visible: its own root is then the group.
        for folder in (base / group.lstrip("/"), base):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < _UNLIMITED:
                limits.append(int(text))
    return limits


@dataclass(frozen=True)
class Position:
    """Where in a stage a sample was taken."""

    phase: str = "setup"
    epoch: int | None = None
    batch_idx: int | None = None
    global_step: int | None = None


class MemorySampler:
    """Writes one line a second to ``memory/<stage>.jsonl`` from a thread, and one whenever the phase changes.

    On a CPU ``allocated_mb`` is this process with its children (resident set size); ``rss_mb`` is the process alone.
    MB are 1e6 bytes.
    """

    def __init__(
        self, path: Path, *, mem_gb: float | None = None, interval_seconds: float = SAMPLE_INTERVAL_SECONDS
    ) -> None:
        self.budget = memory_budget(mem_gb)
        self.peak_bytes = 0
        self._position = Position()
        self._interval_seconds = interval_seconds
        self._lines = JsonLines(path)
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # the thread and the stage both sample; one writes at a time
        self._thread = threading.Thread(target=self._run, name="fvc-memory", daemon=True)
        self._thread.start()

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """Say where the stage is; a new phase is sampled at once, so that short phases leave a line too."""
        changed = phase != self._position.phase
        self._position = replace(self._position, phase=phase, epoch=epoch, batch_idx=batch_idx, global_step=global_step)
        if changed:
            self.sample()

    def sample(self) -> None:
        """Take one sample and append it."""
        with self._lock:
            rss, tree = self._resident_bytes()
            self.peak_bytes = max(self.peak_bytes, tree)
            total = self.budget.total_bytes
            self._lines.append(
                {
                    "timestamp": round(time.time(), 3),
                    "phase": self._position.phase,
                    "epoch": self._position.epoch,
                    "batch_idx": self._position.batch_idx,
                    "global_step": self._position.global_step,
                    "allocated_mb": round(tree / 1e6, 2),
                    "reserved_mb": round(tree / 1e6, 2),
                    "max_allocated_mb": round(self.peak_bytes / 1e6, 2),
                    "total_memory_mb": round(total / 1e6, 2),
                    "usage_percent": round(100 * tree / total, 2),
                    "free_mb": round((total - tree) / 1e6, 2),
                    "device": "cpu",
                    "rank": 0,
                    "rss_mb": round(rss / 1e6, 2),
                }
            )

    def close(self) -> None:
        """Take a last sample and stop; harmless when repeated."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.sample()
            self._lines.close()

    def _resident_bytes(self) -> tuple[int, int]:
        rss = self._process.memory_info().rss
        tree = rss
        for child in self._process.children(recursive=True):
            try:
                tree += child.memory_info().rss
            except psutil.Error:
                continue
        return rss, tree

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            try:
                self.sample()
            except OSError:
                # A full disk must not end the stage for want of a memory line; the metric log reports the disk.
                continue

    def __enter__(self) -> MemorySampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
