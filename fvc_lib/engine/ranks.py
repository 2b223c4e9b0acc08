"""Exchange data between ranks, the processes that train one model together.

A meeting (``Ranks.meet``) is a small exchange between all ranks, and every larger exchange begins with a meeting.
Between two meetings a rank computes and handles errors alone. A rank that cannot continue sends its error at its next
meeting, and all ranks raise it. No code that may fail is executed between a meeting and the larger exchange after it.

Micro-batches (parts of a batch that are in memory at once) run without synchronisation. Gradients are summed once per
step, after the last micro-batch of every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pydoc import locate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fvc_lib.engine.task import LossMean
from fvc_lib.services.errors import FvcError, StoppedError

# Time limit of an exchange. The death of a rank is noticed at once, because its connections close. The limit is for a
# rank that hangs or has lost its machine. It is longer than a working rank ever waits for another one.
PATIENCE_SECONDS = 600.0
T = TypeVar("T")


class RankLostError(FvcError):
    """The error for a lost connection to another rank, if the reason is unknown.

    Its exit code is 75, with which a SLURM job requeues itself.
    """

    exit_code = 75


class RankEndedError(RankLostError):
    """The error for a rank that was ended by a signal, or that ended without giving a reason.

    The cause may be the training itself, such as a lack of memory, so a repetition might fail in the same way. The exit
    code is 1, with which a SLURM job does not requeue itself.
    """

    exit_code = 1


class RankFailedError(FvcError):
    """The error that other processes raise if a rank ended with an error of a class other than ``FvcError``."""


class Ranks:
    """The interface through which a rank exchanges data with all other ranks.

    This base class is for a training in a single process, where nothing is exchanged. All ranks must call the methods
    in the same order. ``rank`` is the index of this process, and ``size`` the number of ranks. Only rank 0 (the leader)
    reads and writes the run's files.
    """

    rank = 0
    size = 1

    def meet(self, place: str, *mine: Any) -> list[tuple[Any, ...]]:
        """Send the values ``mine`` to all ranks, and return a tuple of values per rank, in the order of the ranks.

        Values must be small and picklable. ``place`` names this exchange, and must be the same on all ranks.

        Raises:
            RankLostError: the connection to a rank was lost.
            FvcError: a rank cannot continue; the error has the class and message of that rank's error.
        """
        return [mine]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on every rank.

        The result must be picklable, with tensors on the CPU. ``place`` names this exchange, and must be the same on
        all ranks.
        """
        return make()

    def everyone(self, place: str, value: T) -> list[T]:
        """Send ``value`` to all ranks, and return the values of all ranks, in the order of the ranks.

        Values must be picklable, with tensors on the CPU. ``place`` names this exchange, and must be the same on all
        ranks.
        """
        return [value]

    def add_up(self, place: str, tensors: Sequence[Tensor]) -> None:
        """Replace each of ``tensors`` in place by its sum over the ranks, which is equal to the bit on all ranks.

        Call ``meet`` directly before. ``place`` names the exchange in error messages.
        """

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that sends an exception in its block to the other ranks, and raises it here.

        The other ranks raise it at their next meeting.
        """
        return nullcontext()


@dataclass(frozen=True)
class Agreement:
    """The micro-batch and the loss on which all ranks (processes) agree before they sum their gradients.

    ``GradientSum.agree`` returns it. It is the same on all ranks.

    Attributes:
        micro_batch: the smallest micro-batch (number of samples in memory at once) of any rank.
        settled: whether all ranks have gradients that were computed with this micro-batch.
        loss: the loss over the samples of all ranks.
    """

    micro_batch: int
    settled: bool
    loss: LossMean


class GradientSum:
    """Sum the gradients of ``model`` over all ranks, in the precision of the parameters.

    Call ``complete`` after the backward passes, then ``agree``, then ``sum``. A missing gradient of this rank counts as
    zeros. If no rank has a gradient for a parameter, the gradient stays None, as in a single process. The sums are made
    in place, so no exchange allocates memory. With a single rank nothing is done.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = [p for p in model.parameters() if p.requires_grad and ranks.size > 1]
        self._missing: list[int] = []  # indices of parameters without a gradient on this rank
        self._unreached: set[int] = set()  # indices of parameters without a gradient on any rank

    def complete(self) -> None:
        """Set the missing gradients of this rank to zeros.

        This is a separate step because it may run out of memory, which this rank can still handle alone.
        """
        self._missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        for number in self._missing:
            self._parameters[number].grad = torch.zeros_like(self._parameters[number])

    def agree(self, micro_batch: int, loss: LossMean) -> Agreement:
        """Exchange the micro-batches and losses of all ranks, and return the smallest micro-batch and the total loss.

        Losses are added in the order of the ranks, so the sum is equal to the bit on all ranks.

        Args:
            micro_batch: the micro-batch that this rank used.
            loss: the loss over this rank's samples.
        """
        rows = self._ranks.meet("gradients", micro_batch, loss.total, loss.weight, self._missing)
        total = LossMean()
        for _, its_total, its_weight, _ in rows:
            total.add(LossMean(its_total, its_weight))
        self._unreached = set.intersection(*(set(row[3]) for row in rows))
        sizes = [int(row[0]) for row in rows]
        return Agreement(min(sizes), min(sizes) == max(sizes), total)

    def sum(self) -> None:
        """Replace ``p.grad`` of every parameter ``p`` by its sum over all ranks.

        ``p.grad`` becomes None if no rank has a gradient for ``p``. Call ``complete`` and ``agree`` before.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]  # all have one
        self._ranks.add_up("gradients", gradients)
        for number in self._unreached:
            self._parameters[number].grad = None


class ProcessRanks(Ranks):
    """Ranks that run as separate processes and exchange data through torch.distributed's default process group.

    NCCL sums CUDA gradients. All other data goes through gloo, which notices a dead rank when its connection closes.

    Args:
        rank: index of this process, from 0.
        size: number of ranks.
        cuda: whether to sum gradients on the current CUDA device, through NCCL.
        init_method: address through which the ranks connect, as in ``torch.distributed.init_process_group``.
        patience_seconds: time limit of every exchange.

    Raises:
        RankLostError: the other ranks did not connect in time.
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
            # With its device nccl connects now: missing memory or a missing peer is noticed before any work.
            gpu = torch.device("cuda", torch.cuda.current_device()) if cuda else None
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=patience_seconds),
                device_id=gpu,
            )

    def meet(self, place: str, *mine: Any) -> list[tuple[Any, ...]]:
        """Send the values ``mine`` to all ranks, and return a tuple of values per rank, in the order of the ranks.

        ``place`` names this exchange, and must be the same on all ranks. If a rank has failed, its error is raised on
        all ranks. If some ranks failed and others were stopped, the error of a failed rank is raised.
        """
        rows = self._exchange(place, mine)
        failures = [(rank, *failure) for rank, (_, _, failure) in enumerate(rows) if failure]
        if failures:
            self._over = True
            rank, name, message = min(failures, key=lambda failure: failure[1].endswith(StoppedError.__name__))
            raise error_named(name, f"rank {rank} of {self.size}: {message}")
        if any(row[0] != place for row in rows):
            raise RuntimeError(f"ranks met at different places, {[row[0] for row in rows]}.")
        return [values for _, values, _ in rows]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on every rank; ``place`` names this exchange."""
        made = [make() if self.rank == 0 else None]
        self.meet(place)
        with _loss_noticed(place):
            dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
        return made[0]  # type: ignore[return-value]

    def everyone(self, place: str, value: T) -> list[T]:
        """Send ``value`` to all ranks, and return the values of all ranks, in the order of the ranks.

        ``place`` names this exchange.
        """
        return [row[0] for row in self.meet(place, value)]

    def add_up(self, place: str, tensors: Sequence[Tensor]) -> None:
        """Replace each of ``tensors`` in place by its sum over the ranks; ``place`` names this exchange."""
        with _loss_noticed(place):
            for sum_of_one in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                sum_of_one.wait()

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Send an exception in the block to the other ranks, and raise it here.

        The other ranks raise it at their next exchange.
        """
        try:
            with _loss_noticed("an exchange between GPUs", dist.DistBackendError):  # it fails after it was begun
                yield
        except BaseException as error:
            if not self._over and not isinstance(error, RankLostError):
                self._over = True
                with suppress(RankLostError):  # the others are gone as well
                    self._exchange("failure", (), described(error))
            raise

    def close(self) -> None:
        """Close the connections to the other ranks. All ranks must call this."""
        dist.destroy_process_group()

    def _exchange(self, place: str, values: tuple[Any, ...], failure: tuple[str, str] | None = None) -> list[Any]:
        rows: list[Any] = [None] * self.size
        with _loss_noticed(place):
            dist.all_gather_object(rows, (place, values, failure))
        return rows


@contextmanager
def _loss_noticed(place: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    try:
        yield
    except kind as error:  # RuntimeError: all that gloo, nccl and the store raise
        reason = str(error).partition(". This is typically")[0].partition("\n")[0]
        raise RankLostError(
            f"the other ranks were lost at {place!r}: {reason}. One of them has ended or hangs; its own log says why, "
            "unless it was killed (for memory, most often). The last checkpoint stands: resume."
        ) from error


def described(error: BaseException) -> tuple[str, str]:
    """Return (dotted name of the error's class, message); from these ``error_named`` makes the error again."""
    return f"{type(error).__module__}.{type(error).__qualname__}", str(error)


def error_named(name: str, message: str) -> FvcError | StoppedError:
    """Return a new error with the text ``message``, whose class is given by its dotted name ``name``.

    The class may be ``StoppedError``, ``FvcError`` or a subclass of ``FvcError``. For any other name, the error is a
    ``RankFailedError``.
    """
    kind: Any = locate(name)
    if issubclass(kind or Exception, FvcError | StoppedError):
        return kind(message)  # type: ignore[no-any-return]
    return RankFailedError(f"{message} ({name.rpartition('.')[2]})")
