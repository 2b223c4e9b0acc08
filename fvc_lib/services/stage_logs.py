"""What a stage writes while it works: its metric log and its memory log, with a warning before memory runs out.

JSON lines, one writer per file, readable while they grow and after any crash.
"""

import errno
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Self

from fvc_lib.services.memory.budget import ProcessTree, memory_budget, reset_high_water
from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, memory_advice, ran_out_in

_logger = logging.getLogger(__name__)
COLUMNS = ("run_id", "ts", "step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt")
BACKLOG_LINES = 10_000
RETRY_SECONDS = 1.0  # at most so often is a disk in trouble tried again
# A disk that takes nothing now and may later: full, over quota, ailing, or a file at its size limit.
_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
_DRAINED_AT_ONCE = 256
# Built once: json.dumps makes an encoder for every call that does not use its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _with_digest(body: bytes) -> bytes:
    """Return a line of JSON with the beginning of its SHA-256; ``body`` is the line without the closing brace."""
    return body + b',"digest":"' + hashlib.sha256(body).hexdigest()[:16].encode() + b'"}'


def checked_row(line: bytes) -> dict[str, Any]:
    """Return the row of a line that was appended with its digest; ``ValueError`` where it is torn or damaged."""
    if _with_digest(line.rpartition(b',"digest":"')[0]) != line.rstrip(b"\n"):
        raise ValueError("the line is not what was written")
    row: dict[str, Any] = json.loads(line)
    return row


class _Closing:
    """Closes itself at the end of a ``with`` block."""

    def close(self) -> None:
        """Write what is left and close."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(_Closing):
    """Appends one JSON object per line; each line reaches the operating system before ``append`` returns.

    Not fsynced per line (224 lines/s instead of 60,000); ``close`` fsyncs. A process that dies loses nothing it has
    appended; a machine that dies may tear the last line, which the next writer closes off.

    A disk that takes no more does not stop the writer: what was torn is taken back, lines wait in memory, the newest
    ``BACKLOG_LINES`` of them, and are written in order once the disk takes them again. What that loses is counted,
    logged, and told to ``on_trouble``. One thread at a time.

    Args:
        path: appended to; its folder is created when missing.
        on_trouble: told in one sentence when lines begin to wait, when they were written, and at the end about those
            that never were.
    """

    def __init__(self, path: Path, *, on_trouble: Callable[[str], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines_lost = 0
        self._on_trouble = on_trouble
        self._retry_at = 0.0
        self._in_trouble = False
        self._waiting: deque[bytes] = deque(maxlen=BACKLOG_LINES)
        self._waited = 0
        self._problem = ""
        self._stream = path.open("ab", buffering=0)
        self._size = os.fstat(self._stream.fileno()).st_size
        self._torn = self._ends_torn()

    @property
    def lines_waiting(self) -> int:
        """Lines the disk has not taken yet."""
        return len(self._waiting)

    def append(self, row: Mapping[str, object], *, digest: bool = False) -> None:
        """Write ``row`` as one line, on request with its digest (``checked_row``). NaN and infinities are refused."""
        line = _ENCODER.encode(row).encode()
        self.append_lines(((_with_digest(line[:-1]) if digest else line) + b"\n",))

    def append_lines(self, lines: Sequence[bytes]) -> None:
        """Write ready-made ``lines``, each one JSON object in ASCII with its line feed, in one go."""
        if not self._in_trouble:
            written = self._write(lines)
            if written == len(lines):
                return
            self._begin_trouble()
            lines = lines[written:]
        self._wait(lines)
        if time.monotonic() >= self._retry_at:
            self._drain()

    def close(self) -> None:
        """Write what waits, flush to the disk and close; harmless when repeated. A lost line is logged, not raised."""
        if self._stream.closed:
            return
        try:
            if self._in_trouble:
                self._drain()
            self._flush()
            if self._in_trouble and self._waiting:
                self.lines_lost += len(self._waiting)
                self._waiting.clear()
                self._tell(
                    logging.ERROR,
                    f"{self.path}: closed on a disk that takes no more ({self._problem}): {self.lines_lost:,} lines "
                    "are lost. Make room before the next run.",
                )
        finally:
            self._stream.close()

    def _flush(self) -> None:
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            if error.errno not in _DISK_TROUBLE:
                raise
            problem = f"{self.path}: {error.strerror} while flushing: the last lines may be lost if the machine stops."
            self._tell(logging.ERROR, problem)

    def _write(self, lines: Sequence[bytes]) -> int:
        """How many of ``lines`` the disk took, after closing off a torn end; part of a line is taken back."""
        block = b"".join((b"\n", *lines)) if self._torn else b"".join(lines)
        done = self._put(block)
        if done == len(block):
            self._size += done
            self._torn = False
            return len(lines)
        whole = block.rfind(b"\n", 0, done) + 1
        ends = block.count(b"\n", 0, whole)
        if whole and self._torn:
            ends -= 1
            self._torn = False
        self._size += whole
        if done > whole:
            self._take_back(done - whole)
        return ends

    def _put(self, block: bytes) -> int:
        """How many bytes of ``block`` the disk took."""
        descriptor, done = self._stream.fileno(), 0
        try:
            done = os.write(descriptor, block)
            while done < len(block):
                done += os.write(descriptor, memoryview(block)[done:])
        except OSError as error:
            if error.errno not in _DISK_TROUBLE:
                raise
            self._problem = error.strerror or str(error)
        return done

    def _take_back(self, num_bytes: int) -> None:
        """Cut off the part of a line that a full disk took; where that fails it is closed off before the next line."""
        try:
            os.ftruncate(self._stream.fileno(), self._size)
        except OSError:
            self._size += num_bytes
            self._torn = True

    def _wait(self, lines: Sequence[bytes]) -> None:
        room = (self._waiting.maxlen or 0) - len(self._waiting)
        self.lines_lost += max(0, len(lines) - room)
        self._waited += len(lines)
        self._waiting.extend(lines)

    def _drain(self) -> None:
        while self._waiting:
            some = tuple(islice(self._waiting, _DRAINED_AT_ONCE))
            written = self._write(some)
            for _ in range(written):
                self._waiting.popleft()
            if written != len(some):
                self._retry_at = time.monotonic() + RETRY_SECONDS
                return
        self._end_trouble()

    def _begin_trouble(self) -> None:
        self._in_trouble = True
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._tell(
            logging.WARNING,
            f"{self.path}: {self._problem}. Its lines wait in memory, the newest {self._waiting.maxlen:,} of them, "
            "until the disk takes them: make room. The work goes on.",
        )

    def _end_trouble(self) -> None:
        self._in_trouble = False
        lost = f"{self.lines_lost:,} lines are lost" if self.lines_lost else "none is lost"
        self._tell(logging.WARNING, f"{self.path}: the disk takes lines again; {self._waited:,} had to wait, {lost}.")
        self._waited = 0

    def _tell(self, level: int, message: str) -> None:
        _logger.log(level, "%s", message)
        if self._on_trouble is not None:
            self._on_trouble(message)

    def _ends_torn(self) -> bool:
        if not self._size:
            return False
        with self.path.open("rb") as stream:
            stream.seek(self._size - 1)
            return stream.read(1) != b"\n"


class MetricLog(JsonLines):
    """One stage's metrics as lines ``run_id ts step epoch phase metric value flag fold attempt``.

    ``ts`` is UTC seconds and only informs; order is by step. A value that is not finite is written as null with
    ``flag`` set to ``nan``, ``inf`` or ``-inf``. A full disk is survived as ``JsonLines`` says.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        fold: int | None = None,
        attempt: int = 1,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(path, on_trouble=on_trouble)
        self._head = f'{{"run_id":{encode_basestring_ascii(run_id)},"ts":'
        self._tail = f',"fold":{"null" if fold is None else int(fold)},"attempt":{int(attempt)}}}\n'

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Append one line per metric, all in one write. ``phase`` is train, validation, selection, test or
        one of ``tasks.CONTROL_TRAININGS``.
        """
        # Put together by hand: a general encoder takes twice as long as the write itself.
        head = (
            f'{self._head}{round(time.time(), 3)!r},"step":{int(step)},"epoch":{int(epoch)},'
            f'"phase":{encode_basestring_ascii(phase)},"metric":'
        )
        lines = []
        for name, value in metrics.items():
            number = float(value)
            shown = f'{number!r},"flag":null' if math.isfinite(number) else f'null,"flag":"{number!r}"'
            lines.append(f'{head}{encode_basestring_ascii(name)},"value":{shown}{self._tail}'.encode())
        self.append_lines(lines)


SAMPLE_INTERVAL_SECONDS = 1.0
WARN_PERCENT = 90.0
REARM_PERCENT = 85.0
_QUIET_SECONDS = 60.0
_POSITION = ("phase", "epoch", "batch_idx", "global_step")


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


class MemorySampler(_Closing):
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
        interval_seconds: float = SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        self.budget = memory_budget(mem_gb)
        self.peak_bytes = 0
        self._opened = math.nan  # the first line is at 0 s: readers recognise a new attempt by it
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
        self, phase: str, *, epoch: int | None = None, batch_idx: int | None = None, global_step: int | None = None
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
                "rank": 0,
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
            f"{memory_advice(ran_out_in(self._position[0]))}"
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
        if math.isnan(self._opened):
            self._opened = time.monotonic()
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
