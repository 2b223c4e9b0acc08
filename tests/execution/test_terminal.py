"""What a run shows: on a terminal one line per task that is redrawn in place, in a log plain lines now and then."""

import contextlib
import io
import os

import pytest

from fvc_lib.execution.run.runner import Terminal, duration, line_of
from fvc_lib.execution.run.session import Progress
from fvc_lib.execution.run.task import TaskProgress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Screen()


def task(key: str, done: int = 3, **more: float) -> TaskProgress:
    return TaskProgress(key, 65.0, int(1.5e9), Progress("steps", done, 40), int(2e9), **more)


def test_live_lines_are_erased_before_anything_else_is_written(screen):
    terminal = Terminal(screen)
    terminal.show([task("a", loss=0.31234, seconds_left=245.0), task("b")])
    first = "  a  65 s  steps 3/40  loss 0.3123  4:05 min left  memory 1.50 GB, peak 2.00"
    assert screen.getvalue() == f"{first}\n  b  65 s  steps 3/40  memory 1.50 GB, peak 2.00"
    screen.truncate(screen.seek(0))
    terminal.line("stays")
    assert screen.getvalue() == "\r\x1b[1A\x1b[Jstays\n"
    screen.truncate(screen.seek(0))
    terminal.show([task("x" * 300)])
    terminal.show([])
    assert screen.getvalue() == f"  {'x' * 97}\r\x1b[J"


def test_names_that_would_move_the_cursor_are_shown_harmlessly():
    assert not {"\x1b", "\r", "\n"} & set(line_of(TaskProgress("fold\x1b[2J\r\n", 1.0, 0, None)))


def test_a_log_gets_a_plain_line_for_each_task_every_thirty_seconds():
    now, stream = 1000.0, io.StringIO()
    terminal = Terminal(stream, clock=lambda: now)
    for second in range(95):
        now = 1000.0 + second
        terminal.show([task("a"), *([task("b")] if second >= 20 else [])])
    terminal.line("done")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["a", "b", "a", "b", "a", "done"]
    assert not {"\r", "\x1b"} & set(stream.getvalue())


def test_durations_are_as_precise_as_anyone_can_use():
    assert [duration(s) for s in (0.4, 99.4, 100, 5999, 6000)] == ["0 s", "99 s", "1:40 min", "99:59 min", "1:40 h"]


def test_a_reader_who_has_left_ends_nothing():
    """As with ``run_notebooks.py --resume latest | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    terminal = Terminal(stream)
    for _ in range(3):
        terminal.line("nobody reads this")
    with contextlib.suppress(BrokenPipeError):
        stream.close()
