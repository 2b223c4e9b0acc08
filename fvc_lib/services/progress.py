"""How far a long piece of work is: what it tells, and what a bar, a progress file or a page is told."""

from collections.abc import Callable
from typing import Protocol

# The part that work is at, how much of the part is done and how much there is; 0 and 0 where that is not known.
Tell = Callable[[str, int, int], None]


class Report(Protocol):
    """What is told of work in countable units."""

    def __call__(self, done: int, total: int, part: str = "") -> None:
        """``done`` of ``total`` units are done; ``part`` says what is going on with the next one."""
        ...


def silent(_part: str, _done: int, _total: int) -> None:
    """Tells nobody of a part."""


def not_reported(done: int, total: int, part: str = "") -> None:
    """Do nothing; the default callback."""


def part_text(part: str, done: int, total: int) -> str:
    """``judging windows, 40 of 120``, or the part alone where no number is known."""
    return f"{part}, {done:,} of {total:,}" if total else part
