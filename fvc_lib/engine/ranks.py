"""Exchanges between the processes, ranks, that train one model.

Between two meetings a rank computes alone, with its own out-of-memory and its own errors. A meeting is one small
exchange; every larger exchange begins with one. A rank that cannot go on says so at its next meeting, and all ranks
raise its error. Nothing that may fail stands between a meeting and the exchange that it announces.

Micro-batches run without synchronisation. Gradients are summed once per step, after the last micro-batch of every rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.task import LossMean
from fvc_lib.services.errors import FvcError, StoppedError, UsageError

BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: large enough that latency does not count
# A rank that dies is noticed at once, because its connections close. This limit is for a rank that hangs or whose
# machine went away: no rank is so much slower than another.
PATIENCE_SECONDS = 600.0
T = TypeVar("T")


class RankLostError(FvcError):
    """Another rank is gone and could not say why. A stage leaves with 75, so that its job is requeued."""

    exit_code = 75


class RankEndedError(RankLostError):
    """A rank was ended by a signal, or without a reason, on a machine that lives: it may well happen again."""

    exit_code = 1


class RankFailedError(FvcError):
    """Another rank ended with an error that is none of FVC's."""


@dataclass(frozen=True)
class Agreement:
    """The smallest ``micro_batch`` of all ranks, whether all used it (``settled``), and the loss over all."""

    micro_batch: int
    settled: bool
    loss: LossMean


class OwnGradients:
    """The gradients of one model that trains in one process. ``GradientSum`` is for several."""

    rank = 0
    num_ranks = 1

    def complete(self) -> None:
        """Make room for every gradient; may run out of memory."""

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """Exchange the micro-batch and the loss of each rank's share.

        ``again``: this rank has no gradients yet, and all ranks are to compute them again.
        """
        return Agreement(micro_batch, not again, loss)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's value, on the CPU; raise MemoryError on all ranks if one had no memory for its own."""
        return [value]

    def sum_compared(self, gradients: dict[str, Tensor] | None) -> bool:
        """Replace each of ``gradients`` by its sum over all ranks, the same bits on each.

        Return False, and sum nothing, if a rank gives None because it ran out of memory.
        """
        return gradients is not None

    def sum(self) -> None:
        """Replace ``p.grad`` by the sum over all ranks; None where no rank has a gradient."""


class GradientSum(OwnGradients):
    """Sum the gradients of several ranks, in the precision of the parameters.

    A parameter without a gradient on this rank counts as zeros; one that no rank's loss reaches keeps none, as in a
    single process. Buffers of about ``bucket_bytes`` are made here, so that no exchange allocates.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._ranks, self.rank, self.num_ranks = ranks, ranks.rank, ranks.size
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._groups = _groups(self._parameters, bucket_bytes)
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for group in self._groups:
            sizes[_kind(group[0])] = max(sizes.get(_kind(group[0]), 0), sum(each.numel() for each in group))
        self._buffers = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self._missing: list[int] = []  # parameters without a gradient, on this rank
        self._unreached: set[int] = set()  # and on all

    def complete(self) -> None:
        """Make zeros where this rank's share gave no gradient, while an out-of-memory is still its own."""
        self._missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        for number in self._missing:
            self._parameters[number].grad = torch.zeros_like(self._parameters[number])

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """Meet once; losses are added in the order of the ranks, so every rank has the same bits."""
        rows = self._ranks.meet("gradients", micro_batch, loss.total, loss.weight, again, self._missing)
        total = LossMean()
        for _, its_total, its_weight, _, _ in rows:
            total.add(LossMean(its_total, its_weight))
        self._unreached = set.intersection(*(set(row[4]) for row in rows))
        sizes = [int(row[0]) for row in rows]
        return Agreement(min(sizes), min(sizes) == max(sizes) and not any(row[3] for row in rows), total)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange the values."""
        return self._ranks.everyone("compared", value)

    def sum_compared(self, gradients: dict[str, Tensor] | None) -> bool:
        """Meet, then sum output by output."""
        rows = self._ranks.meet("compared gradients", gradients is not None)
        if gradients is None or not all(has_gradients for (has_gradients,) in rows):
            return False
        for gradient in gradients.values():
            self._ranks.add_up("compared gradients", gradient)
        return True

    def sum(self) -> None:
        """Sum bucket by bucket."""
        for group in self._groups:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]  # ``complete`` made all
            bucket = self._buffers[_kind(group[0])][: sum(gradient.numel() for gradient in gradients)]
            parts = torch.split(bucket, [gradient.numel() for gradient in gradients])
            views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(views, gradients)
            self._ranks.add_up("gradients", bucket)
            torch._foreach_copy_(gradients, views)
        for number in self._unreached:
            self._parameters[number].grad = None


def is_usable(loss: LossMean) -> bool:
    """Return whether a step can be taken on the gradients of ``loss``."""
    return math.isfinite(loss.total) and loss.weight > 0


def _groups(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group neighbours of one dtype and device, about ``bucket_bytes`` together; a larger parameter is alone."""
    groups: list[list[nn.Parameter]] = []
    for parameter in parameters:
        group = groups[-1] if groups else []
        num_bytes = sum(each.nbytes for each in group)
        if not group or _kind(parameter) != _kind(group[0]) or num_bytes + parameter.nbytes > bucket_bytes:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


class Ranks:
    """The processes of one training, seen from one of them. This class is a training in one process.

    All ranks call every method, in the same order. Rank 0 leads: it alone reads and writes the run's files.
    """

    rank = 0
    size = 1

    def meet(self, place: str, *mine: Any) -> list[tuple[Any, ...]]:
        """Return every rank's values at ``place``, in the order of the ranks.

        Raises:
            RankLostError: a rank is gone.
            FvcError: a rank cannot go on; of its error's class, with its message.
        """
        return [mine]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """Return rank 0's ``make()`` on every rank: tensors, numbers, text, None, and lists and dicts of them."""
        return make()

    def everyone(self, place: str, value: T) -> list[T]:
        """Return every rank's small ``value``; raise MemoryError on all ranks if one had no memory to pack its own."""
        return [value]

    def add_up(self, place: str, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks, the same bits on each; a meeting must stand before."""

    def shared_gradients(self, model: nn.Module) -> OwnGradients:
        """Return the exchange of ``model``'s gradients; the model is on its device."""
        return OwnGradients() if self.size == 1 else GradientSum(model, self)

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other ranks, at their next meeting, of an exception that leaves this context."""
        return nullcontext()


class ProcessRanks(Ranks):
    """Ranks in processes of their own, over torch.distributed's default group.

    Everything but gradients of CUDA tensors goes over gloo, which notices a dead rank when its connection closes.

    Args:
        rank: this process.
        size: number of ranks.
        cuda: sum gradients by nccl, on the current CUDA device.
        init_method: where the ranks meet, as in ``torch.distributed.init_process_group``.
        patience_seconds: limit of every exchange.

    Raises:
        RankLostError: the others did not come.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        cuda: bool = False,
        init_method: str = "env://",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.rank, self.size, self._over = rank, size, False
        with _loss_noticed("setup"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=patience_seconds),
                # With its device nccl connects now: missing memory or a missing peer is noticed before any work.
                device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
            )

    def meet(self, place: str, *mine: Any) -> list[tuple[Any, ...]]:
        """Exchange once. If several ranks failed, raise an error rather than a stop."""
        if self._over:
            raise RankLostError(f"this rank has left the others already and cannot meet them at {place!r}.")
        rows = self._exchange(place, mine)
        failures = [(rank, *failure) for rank, (_, _, failure) in enumerate(rows) if failure]
        if failures:
            self._over = True
            rank, name, message = min(failures, key=lambda failure: failure[1] == StoppedError.__name__)
            raise error_named(name, f"rank {rank} of {self.size}: {message}")
        if any(row[0] != place for row in rows):
            raise RuntimeError(
                f"ranks met at different places, {[row[0] for row in rows]}: they train different things"
            )
        return [values for _, values, _ in rows]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """Broadcast the packed value."""
        value = make() if self.rank == 0 else None
        blob = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = self.meet(place, blob.numel())[0][0]
        with self._committed(place):
            if self.rank:
                blob = torch.empty(size, dtype=torch.uint8)
            dist.broadcast(blob, src=0)
        return value if self.rank == 0 else _unpacked(blob)  # type: ignore[return-value]

    def everyone(self, place: str, value: T) -> list[T]:
        """Exchange the packed values at a meeting."""
        blob = None
        try:
            blob = _packed(value)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        blobs = [row[0] for row in self.meet(place, blob)]
        without = [rank for rank, each in enumerate(blobs) if each is None]
        if without:
            raise MemoryError(f"memory ended on rank {without[0]} at {place!r}")
        return [_unpacked(each) for each in blobs]

    def add_up(self, place: str, tensor: Tensor) -> None:
        """All-reduce."""
        with self._committed(place):
            dist.all_reduce(tensor)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Answer the others' next meeting with the error."""
        try:
            with _loss_noticed("an exchange between GPUs", dist.DistBackendError):  # it fails after it was begun
                yield
        except BaseException as error:
            if not self._over and not isinstance(error, RankLostError):
                self._over = True
                with suppress(RankLostError):  # the others are gone as well
                    self._exchange("failure", (), (type(error).__name__, str(error)))
            raise

    def close(self) -> None:
        """Leave the group; only where all ranks do."""
        dist.destroy_process_group()

    def _exchange(self, place: str, values: tuple[Any, ...], failure: tuple[str, str] | None = None) -> list[Any]:
        rows: list[Any] = [None] * self.size
        with _loss_noticed(place):
            dist.all_gather_object(rows, (place, values, failure))
        return rows

    @contextmanager
    def _committed(self, place: str) -> Iterator[None]:
        """Note that the others are in this exchange: an error here reaches them only by the end of this process."""
        over, self._over = self._over, True
        with _loss_noticed(place):
            yield
        self._over = over


@contextmanager
def _loss_noticed(place: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    try:
        yield
    except kind as error:  # RuntimeError: all that gloo, nccl and the store raise
        if is_out_of_memory(error):
            raise
        reason = str(error).partition(". This is typically")[0].partition("\n")[0]
        raise RankLostError(
            f"the other ranks were lost at {place!r}: {reason}. One of them has ended or hangs; its own log says why, "
            "unless it was killed (for memory, most often). The last checkpoint stands: resume."
        ) from error


def _packed(value: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def _unpacked(blob: Tensor) -> Any:
    return torch.load(io.BytesIO(blob.numpy().tobytes()), map_location="cpu", weights_only=True)


def error_named(name: str, message: str) -> FvcError | StoppedError:
    """Return FVC's error with this class name; ``RankFailedError`` where there is no such class."""
    if name == StoppedError.__name__:
        return StoppedError(message)
    classes: list[type[FvcError]] = [FvcError]
    for known in classes:  # grows while it is walked through
        if known.__name__ == name:
            return known(message)
        classes.extend(known.__subclasses__())
    return RankFailedError(f"{message} ({name})")


def refuse_unequal_ranks(ranks: Ranks, numerics: dict[str, str]) -> None:
    """Refuse ranks that round differently: their weights would drift apart.

    Raises:
        UsageError: they are not of one kind.
    """
    for rank, other in enumerate(ranks.everyone("numerics", numerics)):
        differing = [f"{name} {mine} and {other[name]}" for name, mine in numerics.items() if mine != other[name]]
        if differing:
            raise UsageError(
                f"ranks {ranks.rank} and {rank} round differently: {'; '.join(differing)}. Start all ranks on machines "
                "of one kind, with the same number of threads (OMP_NUM_THREADS) and the same torch."
            )
