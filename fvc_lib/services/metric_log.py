"""The metric log: JSON lines, one writer per file, readable while it grows and after any crash."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

COLUMNS = ("run_id", "ts", "step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt")


class JsonLines:
    """Appends one JSON object per line; each line reaches the operating system before ``append`` returns.

    Not fsynced per line (224 lines/s instead of 60,000); ``close`` fsyncs. A process that dies loses nothing it has
    appended; a machine that dies may tear the last line, which the next writer closes off.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._stream = path.open("ab", buffering=0)
        if self._ends_torn():
            self._stream.write(b"\n")

    def append(self, row: Mapping[str, object]) -> None:
        """Write ``row`` as one line. NaN and infinities are refused: they are not JSON."""
        line = json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        written = self._stream.write(line)
        while written is not None and written < len(line):  # a full disk may take part of a line
            line = line[written:]
            written = self._stream.write(line)

    def close(self) -> None:
        """Flush to the disk and close; harmless when repeated."""
        if not self._stream.closed:
            os.fsync(self._stream.fileno())
            self._stream.close()

    def _ends_torn(self) -> bool:
        size = self.path.stat().st_size
        if not size:
            return False
        with self.path.open("rb") as stream:
            stream.seek(size - 1)
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
    ``flag`` set to ``nan``, ``inf`` or ``-inf``.
    """

    def __init__(self, path: Path, *, run_id: str, fold: int | None = None, attempt: int = 1) -> None:
        self._lines = JsonLines(path)
        self._run_id = run_id
        self._fold = fold
        self._attempt = attempt

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Append one line per metric. ``phase`` is train, validation, test or control."""
        for name, value in metrics.items():
            number = float(value)
            finite = math.isfinite(number)
            self._lines.append(
                {
                    "run_id": self._run_id,
                    "ts": round(time.time(), 3),
                    "step": step,
                    "epoch": epoch,
                    "phase": phase,
                    "metric": name,
                    "value": number if finite else None,
                    "flag": None if finite else str(number),
                    "fold": self._fold,
                    "attempt": self._attempt,
                }
            )

    def close(self) -> None:
        """Flush to the disk and close."""
        self._lines.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
