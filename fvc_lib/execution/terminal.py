"""What a run says on the terminal: one live line where someone watches, plain lines where a log is written."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from fvc_lib.execution.progress import Progress

PLAIN_INTERVAL_SECONDS = 30.0


class Terminal:
    """Writes lines, and between them the current task's progress."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._drawn = 0
        self._last_plain = time.monotonic()

    def line(self, text: str) -> None:
        """Write one line that stays."""
        self._wipe()
        print(text, file=self._stream, flush=True)

    def progress(self, key: str, elapsed_seconds: float, rss_bytes: int, progress: Progress | None) -> None:
        """Show where a task is: redrawn in place when live, else a line every 30 s without carriage returns."""
        text = f"  {key}  {elapsed_seconds:5.0f} s  {rss_bytes / 1e9:4.2f} GB"
        if progress is not None:
            text += f"  {progress.what} {progress.done}/{progress.total}"
        if self._live:
            self._wipe()
            print(text, end="", file=self._stream, flush=True)
            self._drawn = len(text)
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_SECONDS:
            self._last_plain = time.monotonic()
            print(text, file=self._stream, flush=True)

    def _wipe(self) -> None:
        if self._drawn:
            print("\r" + " " * self._drawn + "\r", end="", file=self._stream)
            self._drawn = 0
