"""What a run says on the terminal: live lines where someone watches, plain lines where a log is written."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from fvc_lib.execution.progress import Progress

if TYPE_CHECKING:
    from fvc_lib.execution.task_run import TaskProgress

PLAIN_INTERVAL_SECONDS = 30.0


class Terminal:
    """Writes lines that stay and, below them where someone watches, one live line per running task.

    Every method may be called from any thread. A line is never wider than the terminal is at that moment, so that one
    line of text is one line on the screen and going up again by as many lines as were drawn finds the first.

    Args:
        stream: where to write; none: standard output.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._clock = clock
        self._lock = threading.RLock()
        self._drawn = 0  # live lines on the screen; the cursor stands at the end of the last
        self._shown: list[str] = []
        self._last_plain: dict[str, float] = {}

    def line(self, text: str) -> None:
        """Write one line that stays; live lines are drawn again below it."""
        with self._lock:
            self._write(self._erased() + text + "\n" + self._drawing())

    def show(self, tasks: Sequence[TaskProgress]) -> None:
        """Show where each running task is: redrawn in place, else a line each every 30 s without carriage returns."""
        with self._lock:
            if self._live:
                erased = self._erased()
                self._shown = [line_of(task) for task in tasks]
                self._write(erased + self._drawing())
                return
            now = self._clock()
            self._last_plain = {task.key: self._last_plain.get(task.key, now) for task in tasks}
            for task in tasks:
                if now - self._last_plain[task.key] >= PLAIN_INTERVAL_SECONDS:
                    self._last_plain[task.key] = now
                    self._write(line_of(task) + "\n")

    def progress(self, key: str, elapsed_seconds: float, rss_bytes: int, progress: Progress | None) -> None:
        """Show one task; superseded by ``show``."""
        from fvc_lib.execution.task_run import TaskProgress

        self.show([TaskProgress(key, elapsed_seconds, rss_bytes, progress)])

    def _erased(self) -> str:
        """What takes the live lines off the screen; the next text begins where the first of them did."""
        if not self._drawn:
            return ""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        self._drawn = 0
        return f"\r{up}\x1b[J"

    def _drawing(self) -> str:
        if not (self._live and self._shown):
            return ""
        size = shutil.get_terminal_size()
        # The last column stays free: a character there makes some terminals wrap. More lines than the screen has
        # could not be reached again.
        lines = [text[: max(1, size.columns - 1)] for text in self._shown[: max(1, size.lines - 1)]]
        self._drawn = len(lines)
        return "\n".join(lines)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


def line_of(task: TaskProgress) -> str:
    """One task's line, without an end of line."""
    text = f"  {task.key}  {task.elapsed_seconds:5.0f} s  {task.rss_bytes / 1e9:4.2f} GB"
    if task.progress is not None:
        text += f"  {task.progress.what} {task.progress.done}/{task.progress.total}"
    return text
