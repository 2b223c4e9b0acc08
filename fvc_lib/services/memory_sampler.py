"""A log of the memory a stage uses, and a warning before it runs out."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from fvc_lib.services.memory_budget import ProcessTree, memory_budget, reset_high_water
from fvc_lib.services.memory_policy import FITS, PREFLIGHT, DeviceMemory, EventDetail
from fvc_lib.services.metric_log import JsonLines

SAMPLE_INTERVAL_SECONDS = 1.0
WARN_PERCENT = 90.0
REARM_PERCENT = 85.0
_QUIET_SECONDS = 60.0
_POSITION = ("phase", "epoch", "batch_idx", "global_step")

_logger = logging.getLogger(__name__)


class NearLimit:
    """Decides when nearness to a limit is worth a word: once, until it has gone away, and at most once a minute."""

    def __init__(self) -> None:
        self._armed = True
        self._last = -math.inf

    def crossed(self, usage_percent: float, now: float) -> bool:
        """Whether to warn; ``now`` is in monotonic seconds."""
        self._armed = self._armed or usage_percent < REARM_PERCENT
        if not self._armed or usage_percent <= WARN_PERCENT or now - self._last < _QUIET_SECONDS:
            return False
        self._armed, self._last = False, now
        return True


def _remedy(phase: str) -> str:
    """What would lower the memory of ``phase``: smaller batches help where there are any."""
    if phase.removeprefix("control_") in ("train", "validation", "test"):
        return "Next to try: a lower batch_size, then gradient_checkpointing true, then num_workers 0."
    if phase == PREFLIGHT:
        return "It is the measuring before the training: memory_preflight false spares it."
    if phase == FITS:
        return "It is the measuring of what fits: measure_fits false spares it."
    return "No batch is in memory here: give it more, with mem_gb or the job's limit."


class MemorySampler:
    """Writes a line a second to ``memory/<stage>.jsonl`` from a thread, and at both sides of every change of phase.

    The lines of device ``cpu`` are about this process: ``allocated_mb`` is it with its children (``ProcessTree``),
    ``rss_mb`` the process alone, ``total_memory_mb`` the budget, and ``max_allocated_mb`` the most since the phase
    began, with what the kernel saw of the process alone between two samples. For that its high-water mark is reset at
    every change of phase (``reset_high_water``, 0.15 ms). An accelerator that is watched has lines of its own beside
    them. MB are 1e6 bytes; ``timestamp`` is UTC seconds and may jump, ``elapsed_seconds`` is monotonic.

    A full disk never ends the stage: lines wait as ``JsonLines`` says, and a ``disk_full`` event tells of them. After
    ``close`` everything but ``peak_bytes`` falls silent.
    """

    prefix = ""  # as ``MemoryObserver`` has it

    def __init__(
        self,
        path: Path,
        *,
        events: Path | None = None,
        mem_gb: float | None = None,
        rank: int = 0,
        interval_seconds: float = SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        self.budget = memory_budget(mem_gb)
        self.peak_bytes = 0
        self._rank = rank
        self._opened = time.monotonic()
        self._position: tuple[str, int | None, int | None, int | None] = ("setup", None, None, None)
        self._tree = ProcessTree()
        self._phase_peak_bytes, self._high_water_before = 0, reset_high_water()
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._limits: dict[str, NearLimit] = {}
        self._lost_a_line = self._closed = False
        self._lock = threading.RLock()  # the thread and the stage both write; a sample may write an event
        self._events = None if events is None else JsonLines(events)
        self._lines = JsonLines(path, on_trouble=self.disk_full)
        self._stop = threading.Event()
        self._interval_seconds = interval_seconds
        self.sample()
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
        """Say where the stage is. A change of phase is sampled before and after: each peak belongs to its own phase."""
        position = (phase, epoch, batch_idx, global_step)
        if phase == self._position[0]:
            self._position = position
            return
        with self._lock:
            self.sample()
            self._position = position
            if not self._closed:
                self._phase_peak_bytes, self._high_water_before = 0, reset_high_water()
            self.sample()

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Write one line of what happened here to the events file, if there is one."""
        row = {**self._stamp(), "kind": kind, "message": message}
        flat = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in details.items()
        }
        with self._lock:
            self._append(self._events, {**row, "details": flat})

    def disk_full(self, message: str) -> None:
        """Write an event about a log whose disk takes no more, or takes lines again: ``JsonLines``'s ``on_trouble``."""
        self.event("disk_full", message)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """From now on sample an accelerator too; ``device`` is its name in the log, like ``cuda:0``."""
        with self._lock:
            self._devices[device] = probe
            self.sample()

    def sample(self) -> None:
        """Take one sample of the host and of every watched device, and append the lines."""
        with self._lock:
            if self._closed:
                return
            host = self._tree.measure()
            self._phase_peak_bytes = max(self._phase_peak_bytes, host.tree_bytes)
            if host.high_water_bytes > self._high_water_before:  # in this phase, between two samples maybe
                self._phase_peak_bytes = max(self._phase_peak_bytes, host.high_water_bytes)
            self.peak_bytes = max(self.peak_bytes, self._phase_peak_bytes)
            used, total = host.tree_bytes, self.budget.total_bytes
            memory = DeviceMemory(used, used, self._phase_peak_bytes, total, total - used)
            self._write("cpu", memory, host.rss_bytes, self.budget.origin)
            for device, probe in list(self._devices.items()):
                try:
                    memory = probe()
                except RuntimeError as error:  # a device that failed; the training tells of it, this only looks
                    del self._devices[device]
                    _logger.warning("memory of %s is no longer watched: %s", device, error)
                    continue
                self._write(device, memory, host.rss_bytes, f"what {device} can give this process")

    def close(self) -> None:
        """Take a last sample and stop; harmless when repeated."""
        if self._closed:
            return
        self._stop.set()
        self._thread.join()
        with self._lock:
            self.sample()
            self._close(self._lines)
            self._closed = True
            self._close(self._events)

    def _write(self, device: str, memory: DeviceMemory, rss_bytes: int, origin: str) -> None:
        stamp = self._stamp()
        elapsed_seconds = stamp.pop("elapsed_seconds")
        usage_percent = 100 * memory.allocated_bytes / memory.total_bytes
        self._append(
            self._lines,
            {
                **stamp,
                "allocated_mb": round(memory.allocated_bytes / 1e6, 2),
                "reserved_mb": round(memory.reserved_bytes / 1e6, 2),
                "max_allocated_mb": round(memory.max_allocated_bytes / 1e6, 2),
                "total_memory_mb": round(memory.total_bytes / 1e6, 2),
                "usage_percent": round(usage_percent, 2),
                "free_mb": round(memory.free_bytes / 1e6, 2),
                "device": device,
                "rank": self._rank,
                "rss_mb": round(rss_bytes / 1e6, 2),
                "elapsed_seconds": elapsed_seconds,
            },
        )
        if self._limits.setdefault(device, NearLimit()).crossed(usage_percent, time.monotonic()):
            self._warn(device, memory, usage_percent, origin)

    def _warn(self, device: str, memory: DeviceMemory, usage_percent: float, origin: str) -> None:
        used, budget = memory.allocated_bytes / 1e6, memory.total_bytes / 1e6
        whose = "this process and its children" if device == "cpu" else device
        message = (
            f"memory of {whose} is at {usage_percent:.0f} %: {used:,.0f} of {budget:,.0f} MB ({origin}). "
            f"{_remedy(self._position[0])}"
        )
        _logger.warning("%s", message)
        self.event(
            "near_limit",
            message,
            usage_percent=round(usage_percent, 2),
            used_mb=round(used, 2),
            budget_mb=round(budget, 2),
            device=device,
            origin=origin,
        )

    def _stamp(self) -> dict[str, object]:
        now = {"timestamp": round(time.time(), 3), "elapsed_seconds": round(time.monotonic() - self._opened, 3)}
        return {**now, **dict(zip(_POSITION, self._position, strict=True))}

    def _append(self, lines: JsonLines | None, row: Mapping[str, object]) -> None:
        if lines is None or self._closed:
            return
        try:
            lines.append(row)
        except OSError as error:  # not a full disk: a file server gone, a file system gone read-only
            if not self._lost_a_line:
                _logger.warning("memory log %s: %s; the stage goes on, these lines are lost", lines.path, error)
            self._lost_a_line = True

    def _close(self, lines: JsonLines | None) -> None:
        if lines is None:
            return
        try:
            lines.close()
        except OSError as error:
            _logger.warning("memory log %s: %s", lines.path, error)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.sample()

    def __enter__(self) -> MemorySampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
