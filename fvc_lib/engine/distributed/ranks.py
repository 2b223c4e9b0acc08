"""Several processes that train one model together: where they meet, what they exchange, how they end together.

Between two meetings a rank computes for itself, with its own out-of-memory and its own errors. A meeting is one small
exchange, and every exchange of something larger begins with one: whoever cannot go on says so at the next meeting,
wherever that is, and all stop with the same reason. Nothing that may fail stands between a meeting and the exchange it
announces, so no rank ever waits for one that has turned back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fvc_lib.engine.task import LossMean
from fvc_lib.services.errors import FvcError, UsageError

BUCKET_BYTES = 25 << 20  # what torch's DistributedDataParallel takes: large enough that latency does not count
Meet = Callable[..., list[tuple[float, ...]]]
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class RankLostError(FvcError):
    """Another rank is gone, and it could not say why."""


class RankFailedError(FvcError):
    """Another rank ended with an error that is none of ours."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks have computed: with ``micro_batch``, the smallest of theirs, if it is ``settled``."""

    micro_batch: int
    settled: bool
    loss: LossMean


class OwnGradients:
    """One model's gradients, of a training in one process; ``GradientSum`` are those of several.

    Attributes:
        rank: this process, from 0.
    """

    rank = 0
    num_ranks = 1

    def complete(self) -> None:
        """Make room for every gradient; may run out of memory."""

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """Say what this rank's share was computed with, and its loss; hear what all have.

        ``again``: this rank has no gradients yet, and all of them are to begin anew.
        """
        return Agreement(micro_batch, not again, loss)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank gives, in the order of the ranks; tensors on the CPU.

        Raises:
            MemoryError: on all ranks, where memory ended on one.
        """
        return [value]

    def sum_compared(self, gradients: dict[str, Tensor] | None) -> bool:
        """Replace each of ``gradients`` by its sum over all ranks, the same bits on each.

        False, and nothing is summed, where a rank has none to give: its memory ended.
        """
        return gradients is not None

    def sum(self) -> None:
        """Replace ``p.grad`` by the sum over all ranks; None where no rank has one."""


class GradientSum(OwnGradients):
    """Of several ranks, in the precision of the parameters.

    Every parameter that asks for a gradient takes part, those with none on this rank as zeros; a parameter that no
    rank reached keeps none, as in a single process. The buckets are made here, before anything depends on them.

    Args:
        model: on its device.
        meet: as ``Ranks.meet``.
        add_up: replaces a tensor by its sum over the ranks, the same bits on each.
        bucket_bytes: one exchange is about so large.
        rank: this process.
        everyone: as ``Ranks.everyone``; needed by tasks that compare samples.
    """

    def __init__(
        self,
        model: nn.Module,
        meet: Meet,
        add_up: Callable[[str, Tensor], None],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        rank: int = 0,
        everyone: Callable[[str, dict[str, Any]], list[dict[str, Any]]] | None = None,
    ) -> None:
        self.rank = rank
        self._everyone = everyone
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._meet = meet
        self._add_up = add_up
        self._groups = list(_groups(self._parameters, bucket_bytes))
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for group in self._groups:
            key, size = _kind(group[0]), sum(parameter.numel() for parameter in group)
            if key not in self._buffers or self._buffers[key].numel() < size:
                self._buffers[key] = torch.empty(size, dtype=key[0], device=key[1])
        self._reached = [False] * len(named)
        self._any_missing = False
        self._unreached: list[str] | None = None
        self.num_ranks = len(meet("parameters", len(named), sum(p.numel() for p in self._parameters)))

    def complete(self) -> None:
        """Zeros where this rank's share gave no gradient, made while an out-of-memory is still this rank's own."""
        for index, parameter in enumerate(self._parameters):
            self._reached[index] = parameter.grad is not None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """One meeting; losses are added in the order of the ranks, so every rank has the same bits."""
        rows = self._meet("gradients", micro_batch, loss.total, loss.weight, not all(self._reached), again)
        total = LossMean()
        for _, its_total, its_weight, _, _ in rows:
            total.add(LossMean(its_total, its_weight))
        self._any_missing = any(row[3] for row in rows)
        sizes = [int(row[0]) for row in rows]
        return Agreement(min(sizes), min(sizes) == max(sizes) and not any(row[4] for row in rows), total)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """One exchange."""
        if self._everyone is None:
            raise RuntimeError("this exchange of gradients was made without a way to exchange anything else")
        return self._everyone("compared", value)

    def sum_compared(self, gradients: dict[str, Tensor] | None) -> bool:
        """One meeting, and an exchange per output."""
        rows = self._meet("compared gradients", gradients is not None)
        if gradients is None or not all(its_own for (its_own,) in rows):
            return False
        for gradient in gradients.values():
            self._add_up("compared gradients", gradient)
        return True

    def sum(self) -> None:
        """Bucket by bucket."""
        for group in self._groups:
            gradients = [_gradient(parameter) for parameter in group]
            bucket = self._buffers[_kind(group[0])][: sum(gradient.numel() for gradient in gradients)]
            parts = torch.split(bucket, [gradient.numel() for gradient in gradients])
            views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(views, gradients)
            self._add_up("gradients", bucket)
            torch._foreach_copy_(gradients, views)
        if self._any_missing:
            self._drop_unreached()

    def _drop_unreached(self) -> None:
        reached = torch.tensor([float(reached) for reached in self._reached])
        self._add_up("gradients", reached)
        unreached = []
        for name, parameter, count in zip(self._names, self._parameters, reached.tolist(), strict=True):
            if not count:
                parameter.grad = None
                if parameter.requires_grad:  # one that is frozen for now is not missed
                    unreached.append(name)
        if unreached != self._unreached and unreached:
            _logger.warning("no rank's loss reaches %d parameters: %s", len(unreached), ", ".join(unreached[:5]))
        self._unreached = unreached


def is_usable(loss: LossMean) -> bool:
    """Whether a step can be taken on the gradients of ``loss``."""
    return math.isfinite(loss.total) and loss.weight > 0


def _groups(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, together about ``bucket_bytes``; a larger one is alone."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if group and (_kind(parameter) != _kind(group[0]) or size + parameter.nbytes > bucket_bytes):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a gradient was to be summed before it was completed")
    return parameter.grad


class Ranks:
    """The processes of one training, seen from one of them. As it stands here it is a training in one process.

    All ranks call every method, in one order.

    Attributes:
        rank: this process, from 0. Rank 0 leads: it alone reads and writes the run's files.
        size: how many there are.
    """

    rank = 0
    size = 1

    def meet(self, place: str, *mine: float) -> list[tuple[float, ...]]:
        """What every rank says at ``place``, in the order of the ranks.

        Raises:
            RankLostError: one is gone.
            FvcError: one cannot go on; of the class that it gave, with its reason.
        """
        del place
        return [mine]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank: tensors, numbers, text, None, and lists and dicts of them."""
        del place
        return make()

    def everyone(self, place: str, value: T) -> list[T]:
        """Every rank's ``value`` on every rank: for what is small.

        Raises:
            MemoryError: memory ended on one rank while it packed its value; on all ranks.
        """
        del place
        return [value]

    def to_leader(self, place: str, value: Any, take: Callable[[Any], None]) -> None:
        """Every other rank's ``value``, given to ``take`` on rank 0, one after the other in the order of the ranks."""

    def shared_gradients(self, model: nn.Module) -> OwnGradients:
        """The exchange of ``model``'s gradients; the model is on its device."""
        del model
        return OwnGradients()

    def telling(self) -> AbstractContextManager[None]:
        """An exception that leaves this context is told to the other ranks, at their next meeting."""
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
