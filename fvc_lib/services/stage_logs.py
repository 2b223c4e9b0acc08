"""Write the metric log and the memory log of a stage (the work of one notebook) while it runs.

A warning is logged before memory runs out. Logs are files of JSON lines. Only one process writes to a log. It can be
read while it grows and after a crash.
"""

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from fvc_lib.services.memory import (
    DeviceMemory,
    EventDetail,
    ProcessTree,
    memory_advice,
    memory_budget,
    ran_out_in,
    reset_high_water,
)

_logger = logging.getLogger(__name__)
COLUMNS = ("run_id", "ts", "step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt")
# Built once: json.dumps makes an encoder for every call that does not use its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _with_digest(body: bytes) -> bytes:
    """Return a JSON object as one line of text, with a field ``digest`` added and without a line feed.

    ``body`` is the object's text without the closing brace. The digest is the first 16 hexadecimal digits of the
    SHA-256 of ``body``.
    """
    return body + b',"digest":"' + hashlib.sha256(body).hexdigest()[:16].encode() + b'"}'


def checked_row(line: bytes) -> dict[str, Any]:
    """Check the digest in a line of a JSON Lines file, and return the line's JSON object as a dict.

    ``JsonLines.append`` writes such lines if ``digest`` is True.

    Raises:
        ValueError: the line is incomplete, damaged or has no digest.
    """
    if _with_digest(line.rpartition(b',"digest":"')[0]) != line.rstrip(b"\n"):
        raise ValueError("the line was changed after it was written")
    row: dict[str, Any] = json.loads(line)
    return row


class _Closing:
    """A base class whose objects call ``close`` at the end of a ``with`` block."""

    def close(self) -> None:
        """Close the files of the object; subclasses define this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(_Closing):
    """A writer that appends JSON objects to a file, one per line.

    A line reaches the operating system before ``append`` returns, so a process that dies loses no appended line. Only
    ``close`` calls fsync: with fsync after every line 224 lines/s are possible instead of 60,000. A machine that dies
    may leave an incomplete last line. The next writer of the file then begins a new line.

    A full disk does not stop the writer. Lines that the disk refuses are lost and counted. A warning is logged for the
    first lost line, and at the end a warning with their number. Use an object from one thread at a time.

    Args:
        path: the file to append to; its folder is created if missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines_lost = 0
        self._stream = path.open("a+b", buffering=0)
        self._is_torn = False  # whether the last line is incomplete
        if self._stream.tell():
            self._stream.seek(-1, os.SEEK_END)
            self._is_torn = self._stream.read() != b"\n"

    def append(self, row: Mapping[str, object], *, digest: bool = False) -> None:
        """Write ``row`` as one JSON line. If ``digest`` is True, a digest is added, which ``checked_row`` checks.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        line = _ENCODER.encode(row).encode()
        self.append_lines(((_with_digest(line[:-1]) if digest else line) + b"\n",))

    def append_lines(self, lines: Sequence[bytes]) -> None:
        """Write all ``lines`` in one write. A line is a JSON object in ASCII that ends with a line feed."""
        block = b"\n" * self._is_torn + b"".join(lines)
        done = 0
        try:
            while done < len(block):
                done += os.write(self._stream.fileno(), block[done:])
        except OSError as error:
            if not self.lines_lost:
                _logger.warning("%s: %s. Lines are lost until its disk has room.", self.path, error.strerror)
            # Nothing is lost of a line that was cut just before its line feed: the next write adds the line feed.
            self.lines_lost += block.count(b"\n", done + 1)
            self._is_torn = not block[:done].endswith(b"\n") if done else self._is_torn
        else:
            self._is_torn = False

    def close(self) -> None:
        """Flush to the disk and close the file; further calls do nothing."""
        if self._stream.closed:
            return
        with self._stream:
            try:
                os.fsync(self._stream.fileno())
            except OSError as error:
                _logger.warning("%s: %s: the last lines may be lost if the machine stops", self.path, error)
        if self.lines_lost:
            _logger.warning("%s: %s lines are lost, because its disk was full.", self.path, f"{self.lines_lost:,}")


class MetricLog(JsonLines):
    """A log of a stage's metrics. A line has one value of one metric, in the fields ``COLUMNS``.

    ``ts`` is the system time in seconds since 1970. The clock may be set back, so sort lines by ``step``. A value that
    is not finite is written as null, with ``flag`` set to ``nan``, ``inf`` or ``-inf``. ``run_id``, ``fold`` and
    ``attempt`` (number of the attempt at the stage) are written to every line. A full disk does not stop the stage:
    lines are lost, with a warning.
    """

    def __init__(self, path: Path, *, run_id: str, fold: int | None = None, attempt: int = 1) -> None:
        super().__init__(path)
        self._run_id, self._fold, self._attempt = run_id, fold, attempt

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Append one line per entry of ``metrics`` (values by name), all in one write.

        ``step`` counts optimizer steps, and ``epoch`` counts from 1. ``phase`` is, for example, train,
        validation, selection (temperature and threshold are chosen), test, or the name of a control training
        (``tasks.CONTROL_TRAININGS``).
        """
        now = round(time.time(), 3)
        lines = []
        for name, value in metrics.items():
            number = float(value)
            shown = (number, None) if math.isfinite(number) else (None, repr(number))
            row = (self._run_id, now, step, epoch, phase, name, *shown, self._fold, self._attempt)
            lines.append(_ENCODER.encode(dict(zip(COLUMNS, row, strict=True))).encode() + b"\n")
        self.append_lines(lines)


SAMPLE_INTERVAL_SECONDS = 1.0
WARN_PERCENT = 90.0


class MemorySampler(_Closing):
    """A thread that writes samples of the memory use to a file, once per interval and at every change of phase.

    A phase is a part of the stage, such as ``train``. A sample has one line with device ``cpu`` for this process, and
    one line per accelerator. The line for ``cpu`` has these fields, where 1 MB is 1e6 bytes:
    ``allocated_mb``: memory of this process and its child processes (``ProcessTree``).
    ``rss_mb``: resident memory of this process alone.
    ``total_memory_mb``: the memory budget.
    ``max_allocated_mb``: the peak since the phase began. It is the largest ``allocated_mb`` of the samples, or the peak
    that the kernel measured for this process between samples, if that is larger.

    ``timestamp`` is in seconds since 1970, and goes back if the clock is set back. ``elapsed_seconds`` is monotonic.

    A full disk does not end the stage: lines are lost, with a warning. After ``close`` nothing is written.

    Args:
        path: the file for samples.
        events: the file for events; None: events are not written.
        mem_gb: memory limit set by the user in units of 1e9 bytes, as in ``memory_budget``; None: not set.
        interval_seconds: time between two samples.
    """

    def __init__(
        self,
        path: Path,
        *,
        events: Path | None = None,
        mem_gb: float | None = None,
        interval_seconds: float = SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        self.budget = memory_budget(mem_gb)
        self.peak_bytes = 0
        self._opened: float | None = None  # the first line is at 0 s: readers recognise a new attempt by it
        self._position: dict[str, str | int | None] = {}
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._warned: set[str] = set()  # devices that came near their limit
        self._closed = False
        self._lock = threading.RLock()  # the thread and the stage both write; a sample may write an event
        self._tree = ProcessTree()
        self._events = None if events is None else JsonLines(events)
        self._lines = JsonLines(path)
        self._enter("setup")
        self._stop = threading.Event()
        self._interval_seconds = interval_seconds
        self.sample()
        self._thread = threading.Thread(target=self._run, name="fvc-memory", daemon=True)
        self._thread.start()

    def _enter(self, phase: str, **position: int | None) -> None:
        if phase != self._position.get("phase"):
            self._phase_peak_bytes, self._high_water_before = 0, reset_high_water()
        self._position = {"phase": phase, "epoch": None, "batch_idx": None, "global_step": None, **position}

    def at(self, phase: str, **position: int | None) -> None:
        """Set the current phase of the stage and the position in it, which are written with the next samples.

        ``position`` may have ``epoch``, ``batch_idx`` and ``global_step``. At a change of phase, one sample is taken
        before the change and one after it. So a peak is attributed to the phase that caused it.
        """
        with self._lock:
            is_new = phase != self._position["phase"]
            if is_new:
                self.sample()
            self._enter(phase, **position)
            if is_new:
                self.sample()

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Write an event of a training, such as memory near its limit, as one line to the events file.

        ``kind`` is one word, such as ``near_limit``; ``message`` is a sentence; ``details`` are values by name. Nothing
        happens if there is no events file.
        """
        flat = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in details.items()
        }
        with self._lock:
            if self._events is not None and not self._closed:
                self._events.append({**self._stamp(), "kind": kind, "message": message, "details": flat})

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Add an accelerator, such as a GPU, whose memory is written with every sample from now on.

        ``device`` is its name in the log, such as ``cuda:0``; ``probe`` returns its memory at the time of the call.
        """
        with self._lock:
            self._devices[device] = probe
            self.sample()

    def sample(self) -> None:
        """Append one sample of this process and one of every watched device."""
        with self._lock:
            if self._closed:
                return
            host = self._tree.measure()
            grown = host.high_water_bytes if host.high_water_bytes > self._high_water_before else 0
            self._phase_peak_bytes = max(self._phase_peak_bytes, host.tree_bytes, grown)
            self.peak_bytes = max(self.peak_bytes, self._phase_peak_bytes)
            used, total = host.tree_bytes, self.budget.total_bytes
            memory = DeviceMemory(used, used, self._phase_peak_bytes, total, total - used)
            self._write("cpu", memory, host.rss_bytes)
            for device, probe in self._devices.items():
                with suppress(RuntimeError):  # a device that failed, which the training itself reports
                    self._write(device, probe(), host.rss_bytes)

    def close(self) -> None:
        """Take a last sample, end the thread and close the files; further calls do nothing."""
        if self._closed:
            return
        self._stop.set()
        self._thread.join()
        with self._lock:
            self.sample()
            self._lines.close()
            self._closed = True
            if self._events is not None:
                self._events.close()

    def _write(self, device: str, memory: DeviceMemory, rss_bytes: int) -> None:
        stamp = self._stamp()
        elapsed = stamp.pop("elapsed_seconds")
        used = _megabytes(memory.allocated_bytes)
        total = _megabytes(memory.total_bytes)
        percent = round(100 * memory.allocated_bytes / memory.total_bytes, 2)
        row = {
            **stamp,
            "allocated_mb": used,
            "reserved_mb": _megabytes(memory.reserved_bytes),
            "max_allocated_mb": _megabytes(memory.max_allocated_bytes),
            "total_memory_mb": total,
            "usage_percent": percent,
            "free_mb": _megabytes(memory.free_bytes),
            "device": device,
            "rank": 0,
            "rss_mb": _megabytes(rss_bytes),
            "elapsed_seconds": elapsed,
        }
        self._lines.append(row)
        if percent > WARN_PERCENT and device not in self._warned:
            self._warned.add(device)
            advice = memory_advice(ran_out_in(str(self._position["phase"])))
            limit = self.budget.origin if device == "cpu" else "its memory"
            message = f"memory on {device} is at {percent:.0f} %: {used:,.0f} of {total:,.0f} MB ({limit}). {advice}"
            _logger.warning("%s", message)
            self.event("near_limit", message, usage_percent=percent, used_mb=used, budget_mb=total)

    def _stamp(self) -> dict[str, object]:
        now = time.monotonic()
        self._opened = now if self._opened is None else self._opened
        return {"timestamp": round(time.time(), 3), "elapsed_seconds": round(now - self._opened, 3), **self._position}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.sample()


def _megabytes(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 2)


# Callbacks that report the progress of a long piece of work.

# A callback with the arguments (part of the work, finished units, all units); 0 and 0 if the numbers are not known.
Tell = Callable[[str, int, int], None]


class Report(Protocol):
    """A callback that receives the progress of work in countable units."""

    def __call__(self, done: int, total: int, part: str = "", what: str = "") -> None:
        """Receive the progress: ``done`` of ``total`` units of work are finished.

        ``part`` describes the next unit. ``what`` names the units, such as ``videos``. It is left out if they are the
        units for which the callback was made.
        """


def silent(_part: str, _done: int, _total: int) -> None:
    """Do nothing; the default for a progress callback of the type ``Tell``."""


def not_reported(done: int, total: int, part: str = "", what: str = "") -> None:
    """Do nothing; the default for a progress callback of the type ``Report``."""


def part_text(part: str, done: int, total: int) -> str:
    """Return a text about the progress of a part of the work, such as ``judging windows, 40 of 120``.

    ``done`` and ``total`` count units. If ``total`` is 0, ``part`` is returned.
    """
    return f"{part}, {done:,} of {total:,}" if total else part
