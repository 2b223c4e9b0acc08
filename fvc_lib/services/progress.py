"""Callbacks that report the progress of a long piece of work."""

from collections.abc import Callable
from typing import Protocol

# Receives the current part, and how much of it is done and in all; 0 and 0 where that is not known.
Tell = Callable[[str, int, int], None]


class Report(Protocol):
    """A callback for work in countable units."""

    def __call__(self, done: int, total: int, part: str = "") -> None:
        """Receive that ``done`` of ``total`` units are finished; ``part`` describes the next unit."""
        ...


def silent(_part: str, _done: int, _total: int) -> None:
    """Do nothing; the default for ``Tell``."""


def not_reported(done: int, total: int, part: str = "") -> None:
    """Do nothing; the default for ``Report``."""


def part_text(part: str, done: int, total: int) -> str:
    """Return a text such as ``judging windows, 40 of 120``; only ``part`` if ``total`` is 0."""
    return f"{part}, {done:,} of {total:,}" if total else part
