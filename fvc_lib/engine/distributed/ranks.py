"""Several processes that train one model together: where they meet, what they exchange, how they end together.

Between two meetings a rank computes for itself, with its own out-of-memory and its own errors. A meeting is one small
exchange, and every exchange of something larger begins with one: whoever cannot go on says so at the next meeting,
wherever that is, and all stop with the same reason. Nothing that may fail stands between a meeting and the exchange it
announces, so no rank ever waits for one that has turned back.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
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

BUCKET_BYTES = 25 << 20  # what torch's DistributedDataParallel takes: large enough that latency does not count
# A rank that dies is noticed at once, because its connections close. This is for one that only hangs, or whose machine
# went away: no rank is so much slower than another.
PATIENCE_SECONDS = 600.0
_MEETING_BYTES = 8192  # of what one rank says at a meeting
# Below the ports that Linux gives to outgoing connections (32768 on), above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
T = TypeVar("T")
# The newer name of one exchange, which torch has since 2.12 or 2.13; the older one is to go.
_gather: Callable[[Tensor, Tensor], Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_logger = logging.getLogger(__name__)


class RankLostError(FvcError):
    """Another rank is gone, and it could not say why; the last checkpoint stands, and the same again goes on.

    A rank leaves with 1; a stage that lost a node with 75, so that its job is requeued.
    """

    exit_code = 75


class RankEndedError(RankLostError):
    """A rank was ended by a signal, or without a reason, on a machine that lives: it may well happen again."""

    exit_code = 1


class RankFailedError(FvcError):
    """Another rank ended with an error that is none of ours."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks have computed: with ``micro_batch``, the smallest of theirs, if it is ``settled``."""

    micro_batch: int
    settled: bool
    loss: LossMean


class OwnGradients:
    """One model's gradients, of a training in one process; ``GradientSum`` are those of several."""

    rank = 0  # this process
    num_ranks = 1

    def complete(self) -> None:
        """Make room for every gradient; may run out of memory."""

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """Say what this rank's share was computed with, and its loss; hear what all have.

        ``again``: this rank has no gradients yet, and all of them are to begin anew.
        """
        return Agreement(micro_batch, not again, loss)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank gives, in their order, on the CPU; a MemoryError on all of them where memory ended on one."""
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

    Every parameter that asks for a gradient takes part, those with none on this rank as zeros; a parameter that no rank
    reached keeps none, as in a single process. The buckets are made here, before anything depends on them. One exchange
    takes about ``bucket_bytes``.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._ranks, self.rank, self.num_ranks = ranks, ranks.rank, ranks.size
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._groups = _groups(self._parameters.values(), bucket_bytes)
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for group in self._groups:
            sizes[_kind(group[0])] = max(sizes.get(_kind(group[0]), 0), sum(each.numel() for each in group))
        self._buffers = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self._reached = [False] * len(self._parameters)
        self._any_missing = False
        self._unreached: list[str] = []

    def complete(self) -> None:
        """Zeros where this rank's share gave no gradient, made while an out-of-memory is still this rank's own."""
        self._reached = [parameter.grad is not None for parameter in self._parameters.values()]
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def agree(self, micro_batch: int, loss: LossMean, *, again: bool = False) -> Agreement:
        """One meeting; losses are added in the order of the ranks, so every rank has the same bits."""
        rows = self._ranks.meet("gradients", micro_batch, loss.total, loss.weight, not all(self._reached), again)
        total = LossMean()
        for _, its_total, its_weight, _, _ in rows:
            total.add(LossMean(its_total, its_weight))
        self._any_missing = any(row[3] for row in rows)
        sizes = [int(row[0]) for row in rows]
        return Agreement(min(sizes), min(sizes) == max(sizes) and not any(row[4] for row in rows), total)

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """One exchange."""
        return self._ranks.everyone("compared", value)

    def sum_compared(self, gradients: dict[str, Tensor] | None) -> bool:
        """One meeting, and an exchange per output."""
        rows = self._ranks.meet("compared gradients", gradients is not None)
        if gradients is None or not all(its_own for (its_own,) in rows):
            return False
        for gradient in gradients.values():
            self._ranks.add_up("compared gradients", gradient)
        return True

    def sum(self) -> None:
        """Bucket by bucket."""
        for group in self._groups:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]  # ``complete`` made all
            bucket = self._buffers[_kind(group[0])][: sum(gradient.numel() for gradient in gradients)]
            parts = torch.split(bucket, [gradient.numel() for gradient in gradients])
            views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(views, gradients)
            self._ranks.add_up("gradients", bucket)
            torch._foreach_copy_(gradients, views)
        if self._any_missing:
            self._drop_unreached()

    def _drop_unreached(self) -> None:
        reached = torch.tensor([float(reached) for reached in self._reached])
        self._ranks.add_up("gradients", reached)
        unreached = [name for name, count in zip(self._parameters, reached.tolist(), strict=True) if not count]
        for name in unreached:
            self._parameters[name].grad = None
        unreached = [name for name in unreached if self._parameters[name].requires_grad]  # none that is frozen for now
        if unreached and unreached != self._unreached:
            _logger.warning("no rank's loss reaches %d parameters: %s", len(unreached), ", ".join(unreached[:5]))
        self._unreached = unreached


def is_usable(loss: LossMean) -> bool:
    """Whether a step can be taken on the gradients of ``loss``."""
    return math.isfinite(loss.total) and loss.weight > 0


def _groups(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, together about ``bucket_bytes``; a larger one is alone."""
    groups: list[list[nn.Parameter]] = []
    for parameter in parameters:
        group = groups[-1] if groups else []
        held_bytes = sum(each.nbytes for each in group)
        if not group or _kind(parameter) != _kind(group[0]) or held_bytes + parameter.nbytes > bucket_bytes:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


class Ranks:
    """The processes of one training, seen from one of them. As it stands here it is a training in one process.

    All ranks call every method, in one order. Rank 0 leads: it alone reads and writes the run's files.
    """

    rank = 0  # this process
    size = 1  # how many there are

    def meet(self, place: str, *mine: float) -> list[tuple[float, ...]]:
        """What every rank says at ``place``, in the order of the ranks.

        Raises:
            RankLostError: one is gone.
            FvcError: one cannot go on; of the class that it gave, with its reason.
        """
        return [mine]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank: tensors, numbers, text, None, and lists and dicts of them."""
        return make()

    def everyone(self, place: str, value: T) -> list[T]:
        """Every rank's small ``value`` on every rank; a MemoryError on all where memory ended on one that packed it."""
        return [value]

    def to_leader(self, place: str, value: Any, take: Callable[[Any], None]) -> None:
        """Every other rank's ``value``, given to ``take`` on rank 0, one after the other in the order of the ranks."""

    def add_up(self, place: str, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks, the same bits on each; a meeting must stand before."""

    def shared_gradients(self, model: nn.Module) -> OwnGradients:
        """The exchange of ``model``'s gradients; the model is on its device."""
        return OwnGradients() if self.size == 1 else GradientSum(model, self)

    def telling(self) -> AbstractContextManager[None]:
        """An exception that leaves this context is told to the other ranks, at their next meeting."""
        return nullcontext()


def error_named(name: str, message: str) -> FvcError | StoppedError:
    """An error of ours by its class's name; ``RankFailedError`` where it is none of ours."""
    if name == StoppedError.__name__:
        return StoppedError(message)
    classes: list[type[FvcError]] = [FvcError]
    for known in classes:  # grows while it is walked through
        if known.__name__ == name:
            return known(message)
        classes.extend(known.__subclasses__())
    return RankFailedError(f"{message} ({name})")


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


@dataclass(frozen=True)
class RankPlace:
    """One process among the ranks of a training."""

    rank: int  # from 0
    size: int  # how many there are
    local_rank: int  # from 0 on this machine; which GPU it takes
    local_size: int  # how many share this machine's memory
    address: str = ""  # where rank 0 is; empty when there is one rank
    port: int = 0  # where it listens


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """The place that torchrun's variables give, else srun's; without either, one rank.

    srun's count where this process is a task of one (``SLURM_STEP_ID`` is set); in a job's batch script it is not.

    Raises:
        UsageError: the variables contradict each other or are incomplete.
    """
    environ = os.environ if environ is None else environ
    place = RankPlace(0, 1, 0, 1)
    try:
        if "RANK" in environ:
            size = int(environ["WORLD_SIZE"])
            local = int(environ.get("LOCAL_RANK", environ["RANK"])), int(environ.get("LOCAL_WORLD_SIZE", size))
            place = RankPlace(int(environ["RANK"]), size, *local, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        elif environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ:
            place = _of_srun(environ)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"ranks: the environment is incomplete ({error!r}). Start with torchrun or srun, which set all of RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or of SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, "
            "SLURM_STEP_NODELIST; or alone, with none of them."
        ) from error
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise UsageError(f"ranks: {place} cannot be: ranks count from 0 to the size, on every machine as well.")
    return place


def _of_srun(environ: Mapping[str, str]) -> RankPlace:
    size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    # One that no other step has, as far as may be: jobs that share a node mostly have neighbouring numbers.
    port = _FIRST_PORT + (job * 17 + step) % _NUM_PORTS
    counts: list[int] = []  # tasks of each node, of "2(x3),1"
    for part in filter(None, environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        count, _, times = part.rstrip(")").partition("(x")
        counts.extend([int(count)] * int(times or 1))
    node = int(environ.get("SLURM_NODEID", "0"))
    local_size = counts[node] if node < len(counts) else size
    # A node's name need not resolve on the node itself, and need not where there is no other.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    address = "127.0.0.1" if local_size == size else first_host(nodes)
    return RankPlace(int(environ["SLURM_PROCID"]), size, int(environ["SLURM_LOCALID"]), local_size, address, port)


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: ``gpu03`` of ``gpu[03-05,09],cpu1``, ``a-1-x`` of ``a-[1-2]-x``.

    Raises:
        ValueError: it names none.
    """
    text = re.split(r",(?![^\[]*\])", nodes.strip(), maxsplit=1)[0]
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", text)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"no host in the node list {nodes!r}")
    return host


def loopback() -> dict[str, str]:
    """What gloo must be told to meet on this machine's own device, where nobody else can reach it."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


class ProcessRanks(Ranks):
    """Ranks in processes of their own, over torch.distributed's default group.

    Meetings and everything but gradients of CUDA tensors go over gloo, which notices a dead peer when its connection
    closes. Nothing that is received is unpickled freely: values are loaded weights-only.

    Raises:
        RankLostError: the others did not come within ``patience_seconds``.
    """

    def __init__(self, rank: int, size: int, *, cuda: bool = False, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.rank = rank
        self.size = size
        self._over = False
        with _loss_noticed("setup"):
            backend, timeout = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=patience_seconds)
            # With its device nccl connects now, so that memory or a peer that it lacks is noticed before any work.
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, device_id=device)

    def meet(self, place: str, *mine: float) -> list[tuple[float, ...]]:
        """As ``Ranks.meet``: one small exchange. Of the ranks that cannot go on, one that was only stopped is last."""
        if self._over:
            raise RankLostError(f"this rank has left the others already and cannot meet them at {place!r}.")
        rows = self._exchange(place, list(mine))
        failures = [(rank, *said) for rank, (_, said, failed) in enumerate(rows) if failed]
        if failures:
            self._over = True
            rank, name, message = min(failures, key=lambda failure: failure[1] == StoppedError.__name__)
            raise error_named(name, f"rank {rank} of {self.size}: {message}")
        if any(row[0] != place for row in rows):
            raise RuntimeError(
                f"ranks came to different places, {[row[0] for row in rows]}: they do not run the same training"
            )
        return [tuple(said) for _, said, _ in rows]

    def from_leader(self, place: str, make: Callable[[], T]) -> T:
        """As ``Ranks.from_leader``."""
        value = make() if self.rank == 0 else None
        blob = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = int(self.meet(place, blob.numel())[0][0])
        with self._committed(place):
            if self.rank:
                blob = torch.empty(size, dtype=torch.uint8)
            dist.broadcast(blob, src=0)
        return value if self.rank == 0 else _unpacked(blob)  # type: ignore[return-value]

    def everyone(self, place: str, value: T) -> list[T]:
        """As ``Ranks.everyone``."""
        blob = None
        try:
            blob = _packed(value)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        sizes = [int(row[0]) for row in self.meet(place, -1 if blob is None else blob.numel())]
        if blob is None or -1 in sizes:
            raise MemoryError(f"memory ended on rank {sizes.index(-1)} at {place!r}")
        with self._committed(place):
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: blob.numel()] = blob
            heard = torch.empty(self.size * padded.numel(), dtype=torch.uint8)
            _gather(heard, padded)
        return [_unpacked(row[:size]) for row, size in zip(heard.view(self.size, -1), sizes, strict=True)]

    def to_leader(self, place: str, value: Any, take: Callable[[Any], None]) -> None:
        """As ``Ranks.to_leader``; rank 0 holds one at a time."""
        blob = _packed(value) if self.rank else torch.empty(0, dtype=torch.uint8)
        sizes = [int(row[0]) for row in self.meet(place, blob.numel())]
        with self._committed(place):
            if self.rank:
                dist.send(blob, dst=0)
                return
            for rank in range(1, self.size):
                blob = torch.empty(sizes[rank], dtype=torch.uint8)
                dist.recv(blob, src=rank)
                take(_unpacked(blob))

    def add_up(self, place: str, tensor: Tensor) -> None:
        """As ``Ranks.add_up``."""
        with self._committed(place):
            dist.all_reduce(tensor)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """As ``Ranks.telling``."""
        try:
            with _loss_noticed("an exchange between GPUs", dist.DistBackendError):  # which fails after it was begun
                yield
        except BaseException as error:
            if not self._over and not isinstance(error, RankLostError):
                self._over = True
                message = str(error).encode(errors="replace")[: _MEETING_BYTES // 2].decode(errors="ignore")
                with suppress(RankLostError):  # the others are gone as well
                    self._exchange("failure", [type(error).__name__, message], failed=True)
            raise

    def close(self) -> None:
        """Leave the group; only where all ranks do."""
        dist.destroy_process_group()

    def _exchange(self, place: str, said: list[Any], *, failed: bool = False) -> list[tuple[str, list[Any], bool]]:
        """``place``, ``said`` and ``failed`` of every rank."""
        text = json.dumps([place, said, failed], ensure_ascii=False).encode().ljust(_MEETING_BYTES)
        heard = torch.empty(self.size * _MEETING_BYTES, dtype=torch.uint8)
        with _loss_noticed(place):
            _gather(heard, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return [json.loads(row.numpy().tobytes()) for row in heard.view(self.size, -1)]

    @contextmanager
    def _committed(self, place: str) -> Iterator[None]:
        """The others are in the same exchange: an error in here cannot be told to them, only this process's end can."""
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
