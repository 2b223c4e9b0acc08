"""Memory preflight: before a training, find a micro-batch (number of samples in memory at once) that fits into memory.

A child process trains two steps with the planned micro-batch, with the same code as the engine, and measures its
memory. If memory does not suffice, another child measures half as many samples, and so on. If the system kills a child,
the training is not affected.

Only missing memory lowers the micro-batch. If a measurement fails for another reason, such as its time limit, the
micro-batch is used unmeasured. The training itself halves it if memory runs out later.
"""

from __future__ import annotations

import base64
import logging
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice
from fvc_lib.engine.joint_loss import COMPARING
from fvc_lib.engine.loading import load_batches
from fvc_lib.engine.oom_detection import OutOfMemory, first_line, is_out_of_memory
from fvc_lib.engine.step import BatchTransaction, StepLostError, Stepper
from fvc_lib.engine.task import Task
from fvc_lib.engine.training_state import copy_weights
from fvc_lib.services import memory
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.memory import (
    PREFETCHED_BATCHES,
    PREFLIGHT,
    MemoryBudget,
    MemoryObserver,
    NoObserver,
    memory_advice,
)

if TYPE_CHECKING:
    from fvc_lib.engine.loop import EngineSettings
    from fvc_lib.services.config import RunConfig  # whose packages a GPU's machine need not have

_logger = logging.getLogger(__name__)
TIME_LIMIT_SECONDS = 120.0
_HEADROOM = 0.05  # share of the budget that a prediction must leave
_CHILD_BYTES = 260_000_000  # memory of the measuring process after its imports, before its first step
_LOADER_BYTES = 60_000_000  # memory of a loader process that it does not share with its parent, without its batches
_LEAST_ROOM_BYTES = 1 << 30
_STEPS = 2  # the first step allocates the optimizer's state; the second allocates on a fragmented heap
# Signals that end a child when memory runs out: it is killed by the system, aborted by a library, or reads memory that
# oneDNN could not allocate.
_MEMORY_DEATHS = ("SIGKILL", "SIGABRT", "SIGBUS", "SIGSEGV")


@dataclass(frozen=True)
class StepRequest:
    """The properties of a training step that determine how much memory it needs."""

    task: Task  # must be picklable, because a child process measures
    micro_batch: int  # planned number of samples in memory at once
    effective_batch_size: int  # samples per optimizer step, which are loaded together
    compute: ComputeDevice
    gradient_checkpointing: bool = False
    num_workers: int = 0  # loader processes

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples per optimizer step: ``effective_batch_size``, or all samples if fewer."""
        return min(self.effective_batch_size, len(self.task.training_data))


@dataclass(frozen=True)
class PreflightReport:
    """The result of measuring whether a training step fits into memory.

    It has the micro-batch (number of samples in memory at once) with which to begin the training, the peak memory that
    is predicted for it, and the memory budget.
    """

    micro_batch: int
    micro_batch_planned: int
    budget: MemoryBudget
    peak_bytes: int | None  # predicted peak memory with ``micro_batch``; None: not measured
    problem: str = ""  # why the peak was not measured

    @property
    def lowered(self) -> bool:
        """Return whether the micro-batch (number of samples in memory at once) is smaller than planned."""
        return self.micro_batch < self.micro_batch_planned

    @property
    def fits(self) -> bool:
        """Return whether the predicted peak leaves at least 5 % of the budget free; False if it was not measured."""
        return self.peak_bytes is not None and self.peak_bytes <= (1 - _HEADROOM) * self.budget.total_bytes

    def message(self) -> str:
        """Return a sentence about the chosen micro-batch and its peak memory, for the log and the notebook."""
        chosen = f"memory preflight: micro-batch {self.micro_batch} ({self.micro_batch_planned} planned)"
        if self.peak_bytes is None:
            return f"{chosen}, not measured: {self.problem}"
        measured = f"{chosen}, predicted peak {self.peak_bytes / 1e9:.2f} GB of {self.budget}"
        return measured if self.fits else f"{measured}, which is too much. {memory_advice('sample')}"


def preflight(
    request: StepRequest,
    *,
    budget: MemoryBudget,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    stop: Callable[[], bool] = lambda: False,
) -> PreflightReport:
    """Halve the planned micro-batch until a measured training step fits into ``budget``, and return the result.

    The micro-batch is the number of samples in memory at once. Call this before training, in the process that will
    train. If a measurement fails for another reason than memory, its micro-batch is returned. The micro-batch is 1 if
    one sample alone does not fit, or if the budget has no room for a measuring process. The report then says so.

    Args:
        request: the planned step.
        budget: memory that the training may use: the device's on CUDA, main memory on other devices.
        time_limit_seconds: time limit of one measurement.
        stop: called repeatedly during a measurement; if it returns True, the measurement ends.

    Raises:
        StoppedError: ``stop`` returned True.
    """
    planned = max(1, min(request.micro_batch, request.samples_per_step))
    device = request.compute.device
    devices.give_back_unused()  # otherwise unused memory of an earlier training would count as held
    held = _held(device)
    room = budget.total_bytes - held
    if device.type != "cuda" and room < _CHILD_BYTES:  # above the budget, the system may kill processes
        return PreflightReport(1, planned, budget, None, f"{budget} has no room for a process that measures")
    size = planned
    while True:
        _logger.info("memory preflight: measuring a training step with micro-batch %d", size)
        peak, problem = None, ""
        try:
            found = _measured(request, size, room, time_limit_seconds, stop)
        except FvcError as error:
            found = problem = str(error)
        if isinstance(found, int):
            peak = held + found
        elif found.startswith(COMPARING):  # a smaller micro-batch compares as many samples
            problem = f"memory ran out {found}; {memory_advice('comparison')}"
        elif size == 1 and not problem:
            problem = f"one sample alone ran out of memory: {found}; {memory_advice('sample')}"
        report = PreflightReport(size, planned, budget, peak, problem)
        if problem or report.fits or size == 1:
            return report
        size //= 2


def _measured(
    request: StepRequest, size: int, room_bytes: int, time_limit_seconds: float, stop: Callable[[], bool]
) -> int | str:
    """Measure the memory of a training step with ``size`` samples in memory at once, in a child process.

    ``request`` describes the step, and ``room_bytes`` is the memory that the budget leaves for the training. ``stop``
    is called repeatedly; if it returns True, the measurement ends.

    Returns:
        The peak memory in bytes that a training adds to its process. If memory ran out, the message of that error.

    Raises:
        FvcError: the measurement failed for another reason than memory.
        StoppedError: ``stop`` returned True.
    """

    def look() -> None:
        if stop():
            raise StoppedError("stopped as asked while memory was measured; resume the run to go on.")

    device = request.compute.device
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        job = pickle.dumps((request, size, torch.get_num_threads(), room_bytes, free_bytes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise FvcError(f"the task cannot be sent to another process: {error}") from error
    item = sys.path, base64.b64encode(job).decode()
    (answer,) = run_isolated(
        f"{__name__}:measure", [item], workers=1, timeout_seconds=time_limit_seconds, memory_bytes=None, look=look
    )
    if answer.failure == "crashed" and answer.detail.startswith(_MEMORY_DEATHS):
        return f"the measuring process died with {answer.detail}"
    if answer.failure:
        raise FvcError(answer.detail)
    found: int | str = answer.value
    return found


# --- Functions that a training calls


@contextmanager
def training_memory(compute: ComputeDevice, observer: MemoryObserver | None) -> Iterator[MemoryObserver]:
    """Prepare the process for a training within the block, and release the device's cached memory at its end.

    On a GPU, TF32 kernels are allowed or forbidden (``cuda_kernels``), and the memory is reported to ``observer``.

    Yields:
        ``observer``; if it is None, an observer that records nothing.
    """
    observer = observer or NoObserver()
    observer.event("device", compute.describe())
    probe = devices.device_memory_probe(compute.device)
    if probe is not None:
        observer.watch_device(str(compute.device), probe)
    with devices.cuda_kernels(compute):
        try:
            yield observer
        finally:
            devices.release_cached_memory(compute.device)
            observer.at("report")  # memory of tables and figures does not count as the training's


def planned_micro_batch(
    config: RunConfig,
    task: Task,
    settings: EngineSettings,
    compute: ComputeDevice,
    observer: MemoryObserver,
    *,
    num_ranks: int = 1,
    stop: Callable[[], bool] | None = None,
) -> tuple[int, int | None]:
    """Measure whether a training step fits into memory, and return the micro-batch with which to begin.

    If ``config`` has the memory preflight turned off, nothing is measured and the planned micro-batch is returned.

    Args:
        config: the run's configuration.
        task: the task to train; must be picklable.
        settings: settings of the training, which have the planned micro-batch.
        compute: device and precision.
        observer: observer of memory use; receives the phase (preflight) and an event with the result.
        num_ranks: number of ranks (training processes). One rank measures for all: its share of an effective batch,
            within its share of the memory budget.
        stop: called repeatedly; if it returns True, the measurement ends. None: not called.

    Returns:
        (micro-batch, peak): the number of samples in memory at once with which to begin, lowered if a step does not fit
        into the budget; and the predicted peak memory in bytes, None if it was not measured.

    Raises:
        StoppedError: ``stop`` returned True while a step was measured.
    """
    if not config.memory_preflight:
        return settings.micro_batch, None
    samples_of_rank = -(-settings.effective_batch_size // num_ranks)
    request = StepRequest(
        task, settings.micro_batch, samples_of_rank, compute, settings.gradient_checkpointing, settings.num_workers
    )

    observer.at(PREFLIGHT)
    try:
        budget = device_budget(config, compute)
        report = preflight(request, budget=budget, stop=stop or (lambda: False))
    finally:
        observer.at("setup")
    level = logging.INFO if report.fits and not report.lowered else logging.WARNING
    _logger.log(level, report.message())
    predicted_mb = None if report.peak_bytes is None else round(report.peak_bytes / 1e6, 2)
    observer.event(
        "preflight",
        report.message(),
        predicted_peak_mb=predicted_mb,
        budget_mb=round(budget.total_bytes / 1e6, 2),
        micro_batch_planned=report.micro_batch_planned,
        micro_batch=report.micro_batch,
    )
    # The report's micro-batch is at most an effective batch. Use it only if memory was the reason for lowering it.
    return report.micro_batch if report.lowered else settings.micro_batch, report.peak_bytes


def device_budget(config: RunConfig, compute: ComputeDevice) -> MemoryBudget:
    """Return the memory that this process may use for a training on ``compute``: GPU memory on CUDA, else main memory.

    Processes that share the memory get equal parts.
    """
    probe = devices.device_memory_probe(compute.device)
    if probe is None:
        return memory.memory_budget(config.mem_gb)
    of_device = MemoryBudget(probe().total_bytes, f"{compute.name}'s memory")
    # Every rank has a GPU to itself.
    return of_device if config.num_ranks > 1 else of_device.divided(memory.memory_sharers())


# --- Functions of the child process, which trains two steps and may die


def measure(item: tuple[list[str], str]) -> int | str:
    """Train two steps, and return the peak memory in bytes that a training adds to its process.

    The memory of loader processes is estimated and added. If memory runs out, the first line of the error is returned
    instead. ``_measured`` calls this function in a child process.

    Args:
        item: (folders to add to ``sys.path``, pickled arguments in base64).
    """
    with suppress(OSError):  # when memory ends, the system takes this process before any other; Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    folders, job = item
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    request, size, threads, room_bytes, free_bytes = pickle.loads(base64.b64decode(job))
    torch.set_num_threads(threads)
    device = request.compute.device
    if device.type != "cuda":
        # Allocations fail here once they exceed the room that the budget leaves, or a GiB. A control group that exceeds
        # its limit would lose all its processes.
        _limit_growth(max(_LEAST_ROOM_BYTES, room_bytes - memory.own_bytes()))
    memory.reset_high_water()
    before = _held(device)
    try:
        batch_bytes = _train_a_little(request, size)
    except (RuntimeError, MemoryError, StepLostError) as error:
        if not (isinstance(error, StepLostError) or is_out_of_memory(error)):
            raise
        return first_line(error)
    added = max(0, _held(device, peak=True) - before)
    if free_bytes is not None:  # the GPU's context is no tensor: only the driver knows its size
        context: int = free_bytes - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        return added + max(0, context)
    loaders: int = request.num_workers * (_LOADER_BYTES + PREFETCHED_BATCHES * batch_bytes)
    return added + loaders


def _held(device: torch.device, *, peak: bool = False) -> int:
    """Return the memory in bytes that this process uses now, or its largest value so far if ``peak`` is True.

    On CUDA it is the memory of tensors, on other devices the resident memory. On MPS the driver's current memory is
    added, because it is main memory as well.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    of_driver = torch.mps.driver_allocated_memory() if device.type == "mps" else 0
    return of_driver + (memory.peak_rss_bytes() if peak else memory.resident_bytes())


def _train_a_little(request: StepRequest, size: int) -> int:
    """Train two steps with ``size`` samples in memory at once, and return the size of an effective batch in bytes.

    The caller measures the memory of these steps, which use the engine's code. A copy of the weights is in memory
    during the steps, because a training also holds the weights of its best epoch. A step computes only two
    micro-batches. The second micro-batch needs the most memory, because the gradients of the first are in memory.
    Further micro-batches would not need more.
    """
    device, batch_bytes = request.compute.device, 0
    precision = devices.Precision(request.compute)
    # TF32 or not decides which kernels convolutions take, and so their workspace.
    with devices.cuda_kernels(request.compute), devices.deterministic_algorithms(device):
        model = request.task.build_model().to(device).train()
        if request.gradient_checkpointing:
            devices.recompute_activations(model)
        stepper = Stepper(model, precision, learning_rate=1e-6, weight_decay=0.0, max_gradient_norm=1.0)
        transaction = BatchTransaction(request.task, model, precision, device, report=_refuse)
        best_model = copy_weights(model)  # a training holds these too
        data, samples = request.task.training_data, request.samples_per_step
        rows = [range(start, start + samples) for start in range(0, _STEPS * samples, samples)]
        # Data that is too short is repeated.
        repeated = [[row % len(data) for row in of_step] for of_step in rows]
        for batch in load_batches(data, repeated, num_workers=0):
            batch_bytes = sum(tensor.nbytes for tensor in batch.tensors.values())
            part = batch.part(0, 2 * size)
            result = transaction.gradients(part, size, min(size, len(part)))
            if result.loss.is_usable:
                stepper.take(result, 1e-6)
        del best_model
    return batch_bytes


def _refuse(event: OutOfMemory) -> None:
    """Raise ``MemoryError`` for the out-of-memory error ``event``.

    ``BatchTransaction`` calls this before it would halve the micro-batch, so the measurement ends.
    """
    where = f"{COMPARING}: " if event.where == "joint_loss" else ""
    raise MemoryError(f"{where}{event.message}")


def _limit_growth(room_bytes: int) -> None:
    if sys.platform == "linux":
        # The sixth number counts text, data and stack, which RLIMIT_DATA limits.
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = data_pages * resource.getpagesize() + room_bytes
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
