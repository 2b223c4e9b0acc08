"""What a run shows: on a terminal one line per task that is redrawn in place, in a log plain lines now and then."""

import contextlib
import io
import os

import pytest

from fvc_lib.execution.run.runner import Terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Screen()


def test_live_lines_are_erased_before_anything_else_is_written(screen):
    terminal = Terminal(screen)
    terminal.show(["  a  65 s", "  b"])
    assert screen.getvalue() == "  a  65 s\n  b"
    screen.truncate(screen.seek(0))
    terminal.line("stays")
    assert screen.getvalue() == "\r\x1b[1A\x1b[Jstays\n"
    screen.truncate(screen.seek(0))
    terminal.show(["x" * 300])
    terminal.show([])
    assert screen.getvalue() == f"{'x' * 99}\r\x1b[J"


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
