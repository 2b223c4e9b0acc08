"""What a run shows: on a terminal one line per task that is redrawn in place, in a log plain lines now and then."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator

import pytest

from fvc_lib.execution.run.runner import Terminal, duration, line_of
from fvc_lib.execution.run.session import Progress
from fvc_lib.execution.run.task import TaskProgress


def task(key: str, done: int = 3, **more: float) -> TaskProgress:
    return TaskProgress(key, 65.0, int(1.5e9), Progress("steps", done, 40), int(2e9), **more)


class Screen:
    """A pty as wide as told, and a small model of what stands on it after all that was written."""

    def __init__(self, columns: int, lines: int = 24) -> None:
        self.parent, child = pty.openpty()
        self.stream = os.fdopen(child, "w")
        self.resize(columns, lines)
        self._rows: list[str] = [""]
        self._row = self._column = 0

    def resize(self, columns: int, lines: int = 24) -> None:
        self.columns = columns
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def rows(self) -> list[str]:
        """The rows as they stand now, the empty ones at the end left out."""
        os.set_blocking(self.parent, False)
        data = b""
        while True:
            try:
                data += os.read(self.parent, 65536)
            except BlockingIOError:
                break
        for piece in re.findall(r"\x1b\[(\d*)([A-Z])|([^\x1b])", data.decode()):
            self._take(*piece)
        return [row.rstrip() for row in self._rows if row.strip()]

    def _take(self, count: str, command: str, char: str) -> None:
        if command == "A":
            self._row -= int(count)
            assert self._row >= 0
        elif command == "J":
            del self._rows[self._row + 1 :]
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif char == "\r":
            self._column = 0
        elif char == "\n":
            self._row, self._column = self._row + 1, 0
            self._rows += [""] * (self._row + 1 - len(self._rows))
        else:
            assert not command
            if self._column == self.columns:  # it wraps
                self._take("", "", "\n")
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + char + row[self._column + 1 :]
            self._column += 1


@pytest.fixture
def screen(monkeypatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    shown = Screen(100)
    yield shown
    shown.stream.close()
    os.close(shown.parent)


def test_each_running_task_has_one_line_that_is_redrawn_in_place(screen):
    terminal = Terminal(screen.stream)
    for done in range(5):
        terminal.show([task("fold_0", done, loss=0.31234, seconds_left=245.0), task("fold_1", done)])
    assert screen.rows() == [
        "  fold_0  65 s  steps 4/40  loss 0.3123  4:05 min left  memory 1.50 GB, peak 2.00",
        "  fold_1  65 s  steps 4/40  memory 1.50 GB, peak 2.00",
    ]
    terminal.show([task("fold_1", 9)])
    assert screen.rows() == ["  fold_1  65 s  steps 9/40  memory 1.50 GB, peak 2.00"]


def test_lines_that_stay_stand_above_the_live_ones_and_none_is_lost(screen):
    terminal = Terminal(screen.stream)
    terminal.line("first")
    terminal.show([task("a"), task("b"), task("c")])
    terminal.line("second")
    terminal.show([task("b"), task("c")])
    assert [row.split()[0] for row in screen.rows()] == ["first", "second", "b", "c"]
    terminal.show([])
    assert screen.rows() == ["first", "second"]


def test_a_narrow_terminal_cuts_lines_and_still_redraws_in_place(screen):
    screen.resize(20)
    terminal = Terminal(screen.stream)
    for done in range(4):
        terminal.show([task("a_rather_long_name_of_a_task", done), task("b" * 300, done)])
    assert screen.rows() == ["  a_rather_long_nam", "  " + "b" * 17]


def test_more_tasks_than_the_screen_has_lines_are_cut(screen):
    screen.resize(100, lines=4)
    terminal = Terminal(screen.stream)
    for _ in range(3):
        terminal.show([task(f"fold_{number}") for number in range(9)])
    assert [row.split()[0] for row in screen.rows()] == ["fold_0", "fold_1", "fold_2"]


def test_a_window_resized_meanwhile_loses_no_line(screen):
    terminal = Terminal(screen.stream)
    terminal.line("stays")
    terminal.show([task("a"), task("b")])
    screen.rows()
    screen.resize(30)
    terminal.show([task("a"), task("b")])
    terminal.show([task("c"), task("d")])
    rows = screen.rows()
    assert rows[0] == "stays"
    assert [row.split()[0] for row in rows[-2:]] == ["c", "d"]
    assert all(len(row) < 30 for row in rows[-2:])


def test_names_that_would_move_the_cursor_are_told_harmlessly():
    shown = line_of(TaskProgress("fold\x1b[2J\r\n界", 1.0, 0, None))
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\n" not in shown
    assert "界" not in shown


def test_a_log_gets_a_plain_line_for_each_task_every_thirty_seconds():
    now = 1000.0
    stream = io.StringIO()
    terminal = Terminal(stream, clock=lambda: now)
    for second in range(95):
        now = 1000.0 + second
        terminal.show([task("a"), *([task("b")] if second >= 20 else [])])
    terminal.line("done")
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["a", "b", "a", "b", "a", "done"]
    assert not {"\r", "\x1b"} & set(stream.getvalue())


def test_lines_of_many_threads_stay_whole(screen):
    stream = io.StringIO()
    terminal = Terminal(stream)
    threads = [threading.Thread(target=lambda n=n: [terminal.line(f"{n}" * 50) for _ in range(50)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stream.getvalue().split()) == sorted(f"{n}" * 50 for n in range(8) for _ in range(50))


def test_durations_are_as_precise_as_anyone_can_use():
    assert [duration(s) for s in (0.4, 99.4, 100, 5999, 6000, 100_000)] == [
        "0 s", "99 s", "1:40 min", "99:59 min", "1:40 h", "27:46 h",
    ]  # fmt: skip


def test_a_reader_who_has_left_ends_nothing():
    """As with ``run_notebooks.py --resume latest | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    terminal = Terminal(stream)
    for _ in range(3):
        terminal.line("nobody reads this")
    terminal.show([])
    with contextlib.suppress(BrokenPipeError):
        stream.close()
