"""Children that are cheap to kill: forked from a process that has imported everything and computed nothing.

An interpreter that imports torch takes two seconds and more; one of these is there in a few milliseconds.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_PATIENCE_SECONDS = 300.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.forked", "tests.kits.rank_kit"])


@dataclass(frozen=True)
class Child:
    """A process that runs one function, and what it says."""

    process: BaseProcess
    said: Path

    def end(self) -> tuple[int, str]:
        """Wait for it: its exit code (negative: the signal that ended it) and its error output."""
        self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"the child hung; it said: {self.said.read_text()}")
        text = self.said.read_text()
        self.said.unlink()
        code = self.process.exitcode
        assert code is not None
        return code, text


def start(function: Callable[..., None], *arguments: Any) -> Child:
    """Run a function of an importable module in a child; an exception there is exit code 1."""
    descriptor, name = tempfile.mkstemp(suffix=".stderr")
    os.close(descriptor)
    process = CONTEXT.Process(target=_live, args=(name, function, arguments))
    process.start()
    return Child(process, Path(name))


def run(function: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """``start`` and ``end``."""
    return start(function, *arguments).end()


def _live(said: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # One thread, set before the first operation: a pool of threads would not survive a fork, nor repeat its sums.
    torch.set_num_threads(1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    function(*arguments)
