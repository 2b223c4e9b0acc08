"""Several processes, ranks, that train one model: what they exchange, how they start and how they end.

Between two meetings a rank computes alone, with its own out-of-memory and its own errors. A meeting is one small
exchange; every larger exchange begins with one. A rank that cannot go on says so at its next meeting, and all ranks
raise its error. Nothing that may fail stands between a meeting and the exchange that it announces.

Micro-batches run without synchronisation. Gradients are summed once per step, after the last micro-batch of every rank.

On one machine ``torch.multiprocessing`` starts the ranks, on several nodes of a SLURM job ``srun`` does. Each rank
writes a file of JSON lines: where it is, what happened to it, and how it ended. Rank 0 writes the run's metric log
itself, so no checkpoint counts a step that was not logged.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from fvc_lib import CHECKOUT
from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.task import LossMean
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, MemoryObserver
from fvc_lib.services.stage_logs import JsonLines

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: large enough that latency does not count
# A rank that dies is noticed at once, because its connections close. This limit is for a rank that hangs or whose
# machine went away: no rank is so much slower than another.
PATIENCE_SECONDS = 600.0
_WATCH_SECONDS = 0.2
_DEVICE_SECONDS = 1.0
_END_SECONDS = 30.0  # after one rank failed the others have this long to notice
_STOPPED = frozenset([StoppedError.exit_code, -signal.SIGTERM, -signal.SIGUSR1])
# Events of one rank alone; all other events happen to every rank, and rank 0 reports them.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})
Progress = Callable[[int, int], None]
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class RankLostError(FvcError):
    """Another rank is gone and could not say why. A stage leaves with 75, so that its job is requeued."""

    exit_code = 75


class RankEndedError(RankLostError):
    """A rank was ended by a signal, or without a reason, on a machine that lives: it may well happen again."""

    exit_code = 1


class RankFailedError(FvcError):
    """Another rank ended with an error that is none of FVC's."""


# What ranks exchange.


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
        """Return what every rank says at ``place``, in the order of the ranks.

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
        """Exchange once. If several ranks failed, raise an error before a mere stop."""
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
        """Mark that the others are in this exchange: they learn of an error here only by the end of this process."""
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


# How ranks start and end.


@dataclass(frozen=True)
class RankPlace:
    """One process among the ranks of a training; ``local`` counts those of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """Return the place that torchrun's variables give, else srun's; without either, one rank alone.

    srun's variables count in a task of a step (``SLURM_STEP_ID`` is a number), not in a job's batch script.

    Raises:
        UsageError: the variables are incomplete or contradict each other.
    """
    environ = os.environ if environ is None else environ
    of_task = environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        if not of_task:
            return RankPlace()
    try:
        place = RankPlace(*(int(environ[name].partition("(")[0].partition(",")[0]) for name in names))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"ranks: the environment must have all of {', '.join(names)} as numbers: {error!r}."
        ) from error
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise UsageError(f"ranks: {place} cannot be: ranks count from 0 to the size, on every machine as well.")
    return place


@dataclass(frozen=True)
class Launch:
    """What the process that starts ranks gives each of them, as JSON in ``LAUNCH_VARIABLE``."""

    config: str  # the run's parameters, as JSON
    log: str  # file of the ranks' output; their files of JSON lines stand next to it
    attempt: int = 1
    network: Mapping[str, str] | None = None  # what the starting process would train; a rank refuses another network
    init_method: str = "env://"

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return this process's launch; None where torchrun, srun or a person started it."""
        text = os.environ.pop(LAUNCH_VARIABLE, "")  # not for this rank's own children
        return cls(**json.loads(text)) if text else None


def rank_file(log: str | Path, rank: int) -> Path:
    """Return the file in which ``rank`` writes how it is and how it ended."""
    return Path(log).with_name(f"{Path(log).stem}_{rank}.jsonl")


class RankFile(logging.Handler):
    """Write one rank's JSON lines: a memory observer, progress, warnings, and how the rank ended.

    Rank 0 writes everything, another rank only what happened to it alone.
    """

    prefix = ""  # as ``MemoryObserver`` has it

    def __init__(self, log: str, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._rank, self._writing = rank, threading.RLock()
        self._lines = JsonLines(rank_file(log, rank))
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._probed_at = -_DEVICE_SECONDS
        self.write("begun", {"pid": os.getpid(), "host": socket.gethostname()})

    def write(self, kind: str, value: Any) -> None:
        """Append one line."""
        with self._writing:
            self._lines.append({"kind": kind, "value": value})

    def at(self, phase: str, **position: int | None) -> None:
        """Write where the training is and, about once a second, the memory of its device."""
        if self._rank:
            return
        self.write("at", {"phase": phase, **position})
        if self._devices and time.monotonic() - self._probed_at >= _DEVICE_SECONDS:
            self._probed_at = time.monotonic()
            for device, probe in self._devices.items():
                self.write("device", {"device": device, "memory": vars(probe())})

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Write an event of this rank."""
        own = kind in _OWN_EVENTS or (kind == "nonfinite" and details.get("what") == "evaluation")
        if self._rank == 0 or own:
            text = f"rank {self._rank}: {message}" if self._rank else message
            self.write("event", {"kind": kind, "message": text, "details": details})

    def disk_full(self, message: str) -> None:
        """Write that the metric log's disk takes no more."""
        self.event("disk_full", message)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Remember rank 0's accelerator."""
        self._devices[device] = probe

    def progress(self, done: int, planned: int) -> None:
        """Write the number of steps."""
        self.write("progress", [done, planned])

    def emit(self, record: logging.LogRecord) -> None:
        """Write rank 0's warning; the other ranks have the same."""
        if self._rank == 0:
            self.write("warning", record.getMessage())

    def ended(self, error: BaseException) -> None:
        """Write why this rank ends."""
        self.write("ended", [type(error).__name__, str(error)])


class _RankFiles:
    """Pass on what ranks write; ``ends`` collects the class and message of their errors."""

    def __init__(self, log: Path, size: int, memory: MemoryObserver, progress: Progress | None) -> None:
        self.ends: dict[int, tuple[str, str]] = {}
        self._memory, self._progress = memory, progress
        self._devices: dict[str, DeviceMemory] = {}
        self._read = dict.fromkeys([rank_file(log, rank) for rank in range(size)], 0)  # bytes
        for path in self._read:
            path.unlink(missing_ok=True)  # an earlier attempt's

    @property
    def failed(self) -> bool:
        return any(name != StoppedError.__name__ for name, _ in self.ends.values())

    def take(self) -> None:
        for rank, (path, start) in enumerate(list(self._read.items())):
            with suppress(FileNotFoundError), path.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    with suppress(ValueError):  # torn by a full disk
                        self._pass_on(rank, **json.loads(line))

    def _pass_on(self, rank: int, kind: str, value: Any) -> None:
        if kind == "ended":
            self.ends[rank] = (value[0], value[1])
        elif kind == "at":
            self._memory.at(value.pop("phase"), **value)
        elif kind == "event":
            self._memory.event(value["kind"], value["message"], **value["details"])
        elif kind == "device":
            device, is_new = value["device"], value["device"] not in self._devices
            self._devices[device] = DeviceMemory(**value["memory"])
            if is_new:
                self._memory.watch_device(device, lambda: self._devices[device])
        elif kind == "warning":
            _logger.warning("%s", value)
        elif kind == "progress" and self._progress is not None:
            self._progress(*value)


def run_ranks(
    module: str,
    arguments: Sequence[str],
    size: int,
    launch: Launch,
    *,
    memory: MemoryObserver,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> None:
    """Run ``python -m module arguments`` as ``size`` ranks and wait for their end.

    The ranks are on this machine or, in a SLURM job with several nodes, spread over these as a step of the job. Each
    uses its share of the threads unless OMP_NUM_THREADS says otherwise. They end when this process does.

    Args:
        module: dotted name of the ranks' program.
        arguments: its arguments.
        size: number of ranks.
        launch: what each rank is given.
        memory: hears what the ranks write.
        stop: called again and again; True makes the ranks save and end.
        progress: called with (steps done, steps planned).

    Raises:
        StoppedError: the ranks were asked to stop; everything is saved.
        RankLostError: the ranks lost each other.
        RankEndedError: a rank was killed, or ended without a reason.
        FvcError: the error of a rank, of the same class.
    """
    log = Path(launch.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    nodes = min(size, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    files = _RankFiles(log, size, memory, progress)
    asked, signal_at, failed_at = False, 0.0, math.inf
    with TemporaryDirectory(prefix="fvc-ranks-") as folder:
        ranks = _started(module, arguments, size, nodes, launch, folder)
        try:
            while alive := [rank for rank in ranks if rank.exitcode is None]:
                wait_for_any([rank.sentinel for rank in alive], _WATCH_SECONDS)
                files.take()
                now = time.monotonic()
                if stop is not None and now >= signal_at and (asked or stop()):
                    asked, signal_at = True, now + 1  # again and again: srun may not have started its tasks yet
                    for rank in alive:
                        with suppress(ProcessLookupError):
                            os.kill(rank.pid, signal.SIGUSR1)
                # A rank that stopped may have to wait for rank 0's checkpoint; after a failure nobody waits long.
                if any(rank.exitcode not in {None, 0, StoppedError.exit_code} for rank in ranks) or files.failed:
                    failed_at = min(failed_at, now)
                if now - failed_at > _END_SECONDS:
                    break
        finally:
            codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
            _kill(ranks)
    files.take()
    if codes or files.ends:
        codes = {number: 128 - code if code > 128 else code for number, code in codes.items()}  # srun's 128 + signal
        raise _reason(files.ends, codes, log)


def _started(
    module: str, arguments: Sequence[str], size: int, nodes: int, launch: Launch, folder: str
) -> Sequence[Any]:
    """Start the ranks and return their processes; over several nodes there is one process, srun."""
    per_node = -(-size // nodes)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // per_node))
    variables = {"OMP_NUM_THREADS": threads, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    if nodes == 1:
        variables[LAUNCH_VARIABLE] = json.dumps(asdict(launch) | {"init_method": f"file://{folder}/ranks"})
        begin: Callable[..., None] = _become_rank
        given: tuple[Any, ...] = (module, list(arguments), launch.log, variables)
    else:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
        variables = {"OMP_NUM_THREADS": threads, "PYTHONPATH": path, "MASTER_PORT": str(port)}
        variables[LAUNCH_VARIABLE] = json.dumps(asdict(launch))
        # Ranks end together by themselves. With kill-on-bad-exit SLURM 22.05 repeats its order to a lost node that is
        # back, and ends the step of the same number of the job that was requeued meanwhile.
        step = [
            "srun", f"--nodes={nodes}", f"--ntasks={size}", f"--ntasks-per-node={per_node}", "--distribution=block",
            "--overlap", "--kill-on-bad-exit=0", "--quit-on-interrupt", "--input=none", "--mpi=none",
        ]  # fmt: skip
        command = [*step, sys.executable, "-m", module, *arguments]
        begin, given = _become_srun, (command, launch.log, variables)
    number = size if nodes == 1 else 1
    context = start_processes(begin, given, number, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
    return context.processes  # type: ignore[no-any-return]


def _become_rank(rank: int, module: str, arguments: list[str], log: str, variables: dict[str, str]) -> None:
    """Be ``python -m module arguments`` as ``rank``, until the process that started it ends."""
    _write_to(log)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    parent = parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # torch would only keep it for the starting process
        raise


def _become_srun(_: int, command: list[str], log: str, variables: dict[str, str]) -> None:
    """Be srun; torch has the system interrupt it when the process that started it dies."""
    _write_to(log)
    os.execvpe(command[0], command, {**os.environ, **variables})


def _write_to(log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)


def _kill(ranks: Sequence[Any]) -> None:
    """Kill what still runs of the ranks, with the processes that they started."""
    import psutil  # engine must load with torch and NumPy alone (tests/gpu)

    for rank in ranks:
        if rank.exitcode is None:
            with suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                for each in [*process.children(recursive=True), process]:
                    each.kill()
        rank.join()


def _reason(ends: Mapping[int, tuple[str, str]], codes: Mapping[int, int], log: Path) -> FvcError | StoppedError:
    """Return the error that explains the end: a rank that lost the others knows less than they."""
    lost, stopped = RankLostError.__name__, StoppedError.__name__
    known = sorted((ends[rank] for rank in sorted(ends)), key=lambda end: (end[0] == lost, end[0] == stopped))
    if known and known[0][0] != lost:
        return error_named(*known[0])
    if _STOPPED & set(codes.values()):  # a signal ends a rank that has nothing to save yet
        return StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    killed = [f"rank {rank} was ended by {signal.strsignal(-code)}" for rank, code in codes.items() if code < 0]
    if killed:
        return RankEndedError(
            f"{', '.join(killed)} (for want of memory, most often); the other ranks end with it. The last checkpoint "
            f"stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    if known:
        return RankLostError(known[0][1])
    return RankEndedError(f"the ranks ended with exit codes {dict(codes)} and gave no reason; {log} says why.")
