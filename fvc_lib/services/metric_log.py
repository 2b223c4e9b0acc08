"""The metric log: JSON lines, one writer per file, readable while it grows and after any crash."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from types import TracebackType

COLUMNS = ("run_id", "ts", "step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt")
BACKLOG_LINES = 10_000
RETRY_SECONDS = 1.0
# A disk that takes nothing now and may later: full, over quota, ailing, or a file at its size limit.
_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
_DRAINED_AT_ONCE = 256
# Built once: json.dumps makes an encoder for every call that does not use its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_logger = logging.getLogger(__name__)


class JsonLines:
    """Appends one JSON object per line; each line reaches the operating system before ``append`` returns.

    Not fsynced per line (224 lines/s instead of 60,000); ``close`` fsyncs. A process that dies loses nothing it has
    appended; a machine that dies may tear the last line, which the next writer closes off.

    A disk that takes no more does not stop the writer: what was torn is taken back, lines wait in memory, the newest
    ``backlog_lines`` of them, and are written in order once the disk takes them again. What that loses is counted,
    logged, and told to ``on_trouble``. One thread at a time.

    Args:
        path: appended to; its folder is created when missing.
        on_trouble: told in one sentence when lines begin to wait, when they were written, and at the end about those
            that never were.
        backlog_lines: so many may wait.
        retry_seconds: at most so often is a disk in trouble tried again.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_trouble: Callable[[str], None] | None = None,
        backlog_lines: int = BACKLOG_LINES,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines_lost = 0
        self._on_trouble = on_trouble
        self._retry_seconds = retry_seconds
        self._retry_at = 0.0
        self._in_trouble = False
        self._waiting: deque[bytes] = deque(maxlen=backlog_lines)
        self._waited = 0
        self._problem = ""
        self._stream = path.open("ab", buffering=0)
        self._size = os.fstat(self._stream.fileno()).st_size
        self._torn = self._ends_torn()

    @property
    def lines_waiting(self) -> int:
        """Lines the disk has not taken yet."""
        return len(self._waiting)

    def append(self, row: Mapping[str, object]) -> None:
        """Write ``row`` as one line. NaN and infinities are refused: they are not JSON."""
        self.append_lines((_ENCODER.encode(row).encode() + b"\n",))

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
                self._retry_at = time.monotonic() + self._retry_seconds
                return
        self._end_trouble()

    def _begin_trouble(self) -> None:
        self._in_trouble = True
        self._retry_at = time.monotonic() + self._retry_seconds
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

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricLog:
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
        backlog_lines: int = BACKLOG_LINES,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._lines = JsonLines(path, on_trouble=on_trouble, backlog_lines=backlog_lines, retry_seconds=retry_seconds)
        self._head = f'{{"run_id":{encode_basestring_ascii(run_id)},"ts":'
        self._tail = f',"fold":{"null" if fold is None else int(fold)},"attempt":{int(attempt)}}}\n'

    @property
    def lines_waiting(self) -> int:
        """Lines the disk has not taken yet."""
        return self._lines.lines_waiting

    @property
    def lines_lost(self) -> int:
        """Lines that the disk never took and memory no longer holds."""
        return self._lines.lines_lost

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Append one line per metric, all in one write. ``phase`` is train, validation, selection, test or
        control.
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
        self._lines.append_lines(lines)

    def close(self) -> None:
        """Flush to the disk and close."""
        self._lines.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
