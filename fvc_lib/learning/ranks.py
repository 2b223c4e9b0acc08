"""Several processes that train one model together: where they meet, what they tell each other, how they end together.

Between two meetings a rank computes for itself, with its own shortages of memory and its own errors. A meeting is one
small exchange, and every exchange of something larger begins with one: whoever cannot go on says so at the next
meeting, wherever that is, and all stop with the same reason. Nothing that may fail stands between a meeting and the
exchange it announces, so no rank ever waits for one that has turned back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from torch import nn

from fvc_lib.learning.shared_gradients import OwnGradients, SharedGradients
from fvc_lib.services.errors import FvcError, UsageError

T = TypeVar("T")


class RankLostError(FvcError):
    """Another rank is gone, and it could not say why."""


class RankFailedError(FvcError):
    """Another rank ended with an error that is none of ours."""


class Ranks(Protocol):
    """The processes of one training, seen from one of them. All ranks call every method but ``settle``, in one order.

    Attributes:
        rank: this process, from 0. Rank 0 leads: it alone reads and writes the run's files.
        size: how many there are.
    """

    rank: int
    size: int

    def meet(self, place: str, *mine: float) -> list[tuple[float, ...]]:
        """What every rank says at ``place``, in the order of the ranks.

        Raises:
            RankLostError: one is gone.
            FvcError: one cannot go on; of the class that it gave, with its reason.
        """
        ...

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank: tensors, numbers, text, None, and lists and dicts of them.

        Rank 0 settles before, since ``make`` may write what counts the steps told so far.
        """
        ...

    def settle(self) -> None:
        """On rank 0 alone: wait until what it told of the training so far is kept. It then writes what counts it.

        Raises:
            FvcError: nobody listens.
        """
        ...

    def everyone(self, place: str, value: T) -> list[T]:
        """Every rank's ``value`` on every rank: for what is small.

        Raises:
            MemoryError: memory ended on one rank while it packed its value; on all ranks.
        """
        ...

    def to_leader(self, place: str, value: Any, take: Callable[[Any], None]) -> None:
        """Every other rank's ``value``, given to ``take`` on rank 0, one after the other in the order of the ranks."""
        ...

    def shared_gradients(self, model: nn.Module) -> SharedGradients:
        """The exchange of ``model``'s gradients; the model is on its device."""
        ...

    def telling(self) -> AbstractContextManager[None]:
        """An exception that leaves this context is told to the other ranks, at their next meeting."""
        ...


class OneRank:
    """A training in one process: nobody to meet."""

    rank = 0
    size = 1

    def meet(self, place: str, *mine: float) -> list[tuple[float, ...]]:
        """One's own words."""
        del place
        return [mine]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """Made here."""
        del place
        return make()

    def settle(self) -> None:
        """What one process tells is kept when it has told it."""

    def everyone(self, place: str, value: T) -> list[T]:
        """One's own."""
        del place
        return [value]

    def to_leader(self, place: str, value: Any, take: Callable[[Any], None]) -> None:
        """There are no others."""

    def shared_gradients(self, model: nn.Module) -> SharedGradients:
        """One's own are all."""
        del model
        return OwnGradients()

    def telling(self) -> AbstractContextManager[None]:
        """There is nobody to tell."""
        return nullcontext()


def error_named(name: str, message: str) -> FvcError:
    """An error of ours by its class's name; ``RankFailedError`` where it is none of ours."""
    classes: list[type[FvcError]] = [FvcError]
    for known in classes:  # grows while it is walked through
        classes.extend(known.__subclasses__())
    found = next((known for known in classes if known.__name__ == name), None)
    return found(message) if found is not None else RankFailedError(f"{message} ({name})")


def refuse_unequal_ranks(ranks: Ranks, numerics: dict[str, str]) -> None:
    """Ranks that round otherwise would drift apart, each stepping on with weights of its own.

    Raises:
        UsageError: they are not of one kind.
    """
    for rank, other in enumerate(ranks.everyone("numerics", numerics)):
        differing = [f"{name} {mine} and {other[name]}" for name, mine in numerics.items() if mine != other[name]]
        if differing:
            raise UsageError(
                f"ranks {ranks.rank} and {rank} would compute otherwise: {'; '.join(differing)}. Start all ranks on "
                "machines of one kind, with as many threads (OMP_NUM_THREADS) and the same torch."
            )
