"""Two trainings that take turns in one process, each charged with its own time only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds on the wall, of CPU by the training's own thread, and of CPU by all threads and finished children."""

    wall: float
    thread: float
    process: float

    def __add__(self, other: object) -> Spent:
        if not isinstance(other, Spent):
            return NotImplemented
        return Spent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Clock:
    """Runs between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._started = Spent(0, 0, 0)

    def start(self) -> None:
        """From now on time counts."""
        process, thread = time.process_time(), time.thread_time()
        self._started = Spent(time.perf_counter(), thread, process)

    def stop(self) -> Spent:
        """What passed. The wait for other threads is in their CPU time and in nothing else."""
        wall, thread = time.perf_counter(), time.thread_time()
        before = self._started
        return Spent(wall - before.wall, thread - before.thread, time.process_time() - before.process)


@dataclass
class Turns:
    """Given to an engine as ``stop``: it is asked before every step and after an epoch's last, and between two such
    questions lies one turn. Turns come in blocks, in the order ours, theirs, theirs, ours, so that a clock that drifts
    cheats nobody: what is compared is two blocks of ours with the two of theirs between them.

    Args:
        theirs: the other training, pausing at the same places.
        turns_per_block: of each side.
        around: entered while blocks of ours run, outside their time: what only they should be charged with.

    Attributes:
        ours: what each block took.
        their: the same of the other training.
    """

    theirs: Iterator[None]
    turns_per_block: int = 1
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    ours: list[Spent] = field(default_factory=list)
    their: list[Spent] = field(default_factory=list)
    _asked: int = 0
    _surrounding: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._clock = Clock()

    def __call__(self) -> bool:
        """The engine is about to begin a turn; never stops it."""
        if self._asked % self.turns_per_block == 0:
            self._change_sides(self._asked // self.turns_per_block)
        self._asked += 1
        return False

    def finish(self) -> None:
        """After the engine's last turn."""
        self._end_block()
        self._surrounding.close()
        if len(self.their) < len(self.ours):
            self._run_theirs()

    def _change_sides(self, block: int) -> None:
        if block:
            self._end_block()
        else:
            next(self.theirs)  # up to its first pause, as the engine has come to its own
        if block % 2:
            self._surrounding.close()
            for _ in range(2):
                self._run_theirs()
        if block % 2 or not block:
            self._surrounding.enter_context(self.around())
        self._clock.start()

    def _end_block(self) -> None:
        self.ours.append(self._clock.stop())

    def _run_theirs(self) -> None:
        clock = Clock()
        clock.start()
        for _ in range(self.turns_per_block):
            next(self.theirs, None)
        self.their.append(clock.stop())
