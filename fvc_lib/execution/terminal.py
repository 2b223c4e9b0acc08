"""What a run says on the terminal: live lines where someone watches, plain lines where a log is written."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from fvc_lib.execution.task_run import TaskProgress

PLAIN_INTERVAL_SECONDS = 30.0


class Terminal:
    """Writes lines that stay and, below them where someone watches, one live line per running task.

    Every method may be called from any thread. A live line is never wider than the terminal is at that moment, so that
    one line of text is one line on the screen, and going up again by as many lines as were drawn finds the first. When
    the window was resized meanwhile nobody knows how it shows them: they are left, and drawn anew below.

    Args:
        stream: where to write; none: standard output.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._lock = threading.RLock()
        self._drawn = 0  # live lines on the screen; the cursor stands at the end of the last
        self._drawn_size = os.terminal_size((0, 0))
        self._last_plain: dict[str, float] = {}
        self._gone = False

    def line(self, text: str) -> None:
        """Write one line that stays, in the place of the live lines, which the next ``show`` draws again below."""
        with self._lock:
            self._write(self._erased() + text + "\n")

    def show(self, tasks: Sequence[TaskProgress]) -> None:
        """Show where each running task is: redrawn in place, else a line each every 30 s without carriage returns."""
        with self._lock:
            if self._live:
                self._write(self._erased() + self._drawing([line_of(task) for task in tasks]))
                return
            now = self._clock()
            self._last_plain = {task.key: self._last_plain.get(task.key, now) for task in tasks}
            for task in tasks:
                if now - self._last_plain[task.key] >= PLAIN_INTERVAL_SECONDS:
                    self._last_plain[task.key] = now
                    self._write(line_of(task) + "\n")

    def _erased(self) -> str:
        """What takes the live lines off the screen; the next text begins where the first of them did."""
        drawn, self._drawn = self._drawn, 0
        if not drawn:
            return ""
        if self._size() != self._drawn_size:
            return "\n"
        up = f"\x1b[{drawn - 1}A" if drawn > 1 else ""
        return f"\r{up}\x1b[J"

    def _drawing(self, lines: list[str]) -> str:
        self._drawn_size = size = self._size()
        # The last column stays free: a character there makes some terminals wrap. More lines than the screen has
        # could not be reached again.
        lines = [text[: max(1, size.columns - 1)] for text in lines[: max(1, size.lines - 1)]]
        self._drawn = len(lines)
        return "\n".join(lines)

    def _size(self) -> os.terminal_size:
        """As it is now: the window may have been resized since the last drawing."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # no descriptor: an editor's console
            size = shutil.get_terminal_size()
        return size if size.columns > 0 and size.lines > 0 else os.terminal_size((80, 24))

    def _write(self, text: str) -> None:
        if not text or self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # who read it has left (`| head`), or the window was closed: that ends no run
            self._gone = True


def line_of(task: TaskProgress) -> str:
    """One task's line, without an end of line: what matters most stands first, where a narrow terminal cuts last."""
    parts = [task.key, duration(task.elapsed_seconds)]
    if task.progress is not None:
        parts.append(f"{task.progress.what} {task.progress.done}/{task.progress.total}")
    if task.loss is not None:
        parts.append(f"loss {task.loss:.4g}")
    if task.seconds_left is not None:
        parts.append(f"{duration(task.seconds_left)} left")
    parts.append(f"memory {task.rss_bytes / 1e9:.2f} GB, peak {max(task.peak_rss_bytes, task.rss_bytes) / 1e9:.2f}")
    return "  " + "  ".join(_printable(part) for part in parts)


def duration(seconds: float) -> str:
    """``42 s``, ``3:05 min`` or ``2:03 h``: as precise as anyone can use."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _printable(text: str) -> str:
    """``text`` without what would move the cursor; a character that is not one column wide is told as ``?``."""
    return "".join(char if _one_column(char) else "?" for char in text)


def _one_column(char: str) -> bool:
    wide = unicodedata.east_asian_width(char) in "WF"
    return char.isprintable() and not wide and not unicodedata.combining(char)
