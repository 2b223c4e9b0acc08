"""What a run shows on a terminal."""

import contextlib
import os

from fvc_lib.execution.run.runner import Terminal


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
