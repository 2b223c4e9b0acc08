"""The children of ``run_isolated`` without their start: forked from a process that has imported torch already.

A new interpreter spends two seconds of CPU on that, each child anew. What a child does, how it dies and what its parent
makes of that is the real thing. How a child is started is shown by the tests that do without this, those of
``isolated_workers`` first.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from fvc_lib.services import isolated_workers
from tests.faults.forked import CONTEXT


class ForkedInterpreter:
    """What ``subprocess.Popen`` gives, as far as ``isolated_workers`` uses it."""

    def __init__(self, command: Sequence[str], *, stderr: Any, env: Mapping[str, str], **_: object) -> None:
        items, write_items = os.pipe()
        read_answers, answers = os.pipe()
        said = Connection(os.dup(stderr.fileno()))
        own = [Connection(items, writable=False), Connection(answers, readable=False), said]
        self._process = CONTEXT.Process(target=_serve, args=(command[4:], dict(env), own))
        self._process.start()
        for end in own:
            end.close()
        self.stdin, self.stdout = os.fdopen(write_items, "wb", 0), os.fdopen(read_answers, "rb", 0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", seconds or 0)
        return self._process.exitcode


def _serve(arguments: list[str], environment: dict[str, str], own: list[Connection]) -> None:
    import torch

    torch.set_num_threads(1)
    os.setsid()
    for number, end in enumerate(own):
        os.dup2(end.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.argv = open(0, closefd=False), ["-c", *arguments]  # noqa: SIM115 - as long as the process
    isolated_workers.serve()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the children of ``run_isolated`` inside of the context."""

    class Forking:
        PIPE, TimeoutExpired, Popen = subprocess.PIPE, subprocess.TimeoutExpired, ForkedInterpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated_workers, "subprocess", Forking)
        yield


@pytest.fixture
def warm_workers() -> Iterator[None]:
    """Children of ``run_isolated`` are forked."""
    with forked_workers():
        yield
