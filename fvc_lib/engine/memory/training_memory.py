"""A training's memory: policy, micro-batch and budget before it begins, and what observes it."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice, device_memory_probe, resolve_device
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.memory.preflight import PreflightReport, StepRequest, footprint_of, preflight
from fvc_lib.engine.task import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory import policy as memory_policy
from fvc_lib.services.memory.budget import (
    KERNEL_BYTES,
    SHARE_VARIABLE,
    MemoryBudget,
    MemoryShare,
    memory_budget,
    resident_bytes,
)
from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, MemoryObserver, MemoryPolicy, NoObserver
from fvc_lib.services.run_paths import RunPaths

_logger = logging.getLogger(__name__)
Measure = Callable[..., PreflightReport]  # ``preflight`` with all but the request, the budget and the baseline


def policy_of(compute: ComputeDevice, config: RunConfig) -> MemoryPolicy:
    """The memory policy of a training on ``compute`` with this run's parameters."""
    return devices.resolve_policy(compute, amp=config.amp, clear_cache_batches=config.clear_cache_batches)


def memory_setup(config: RunConfig) -> list[str]:
    """Lines for the start of a training: the policy of the device these parameters ask for, and what of it is active.

    Raises:
        UsageError: the requested device is not there.
    """
    policy = policy_of(resolve_device(config.device, config.amp), config)
    with devices.apply_policy(policy):
        return [*policy.describe(), *devices.verify_policy(policy)]


def refuse_impossible_budget(
    request: StepRequest, config: RunConfig, budget: MemoryBudget, resident_bytes: int, measure: Measure
) -> None:
    """Raise where ``mem_gb`` was given and this process holds more, on the CPU before its first step.

    A budget that is only somewhat too small is no reason to stop: the prediction may be off by a quarter, and a
    training that goes over its own budget harms nobody (the limits that kill are the system's).

    What could work is measured, which takes some seconds, as far as the machine's own limits let it.

    Raises:
        UsageError: names what is held, and the least that can work.
    """
    if not _is_mem_gb(config, budget):
        return
    held = footprint_of(request, resident_bytes).resident_bytes
    if held < budget.total_bytes:
        return
    who = f"each of {config.num_ranks} ranks" if config.num_ranks > 1 else "this process"
    limit = memory_budget(environ={name: text for name, text in os.environ.items() if name != SHARE_VARIABLE})
    share = f", {_gigabytes(budget.total_bytes)} for each rank" if config.num_ranks > 1 else ""
    raise UsageError(
        f"mem_gb {config.mem_gb:g}{share}: {who} holds {_gigabytes(held)} before it trains, so no training can keep "
        f"to that. {_least(request, config, limit, resident_bytes, measure)} Or take it away with -p mem_gb none: the "
        f"limit is then {_gigabytes(limit.total_bytes)} ({limit.origin})."
    )


def _is_mem_gb(config: RunConfig, budget: MemoryBudget) -> bool:
    """Whether ``budget`` is what ``mem_gb`` says, or one rank's share of it.

    Of kernels that run beside each other the runner shares the budget out; there it is the number of them to change.
    """
    if config.mem_gb is None:
        return False
    wanted_bytes, share = int(config.mem_gb * 1e9), MemoryShare.of(os.environ)
    if share is not None and share.share_bytes == budget.total_bytes:
        return config.num_ranks > 1 and share.whole.total_bytes == wanted_bytes
    return budget.total_bytes == wanted_bytes


def _least(request: StepRequest, config: RunConfig, limit: MemoryBudget, resident_bytes: int, measure: Measure) -> str:
    """With one sample at a time."""
    each = MemoryBudget(limit.total_bytes // config.num_ranks, limit.origin)
    report = measure(replace(request, micro_batch=1), budget=each, baseline_bytes=resident_bytes)
    if report.predicted_peak_bytes is None:
        return f"The least that can work could not be measured ({report.problem})."
    least = report.predicted_peak_bytes + report.reserved_bytes
    if config.num_ranks > 1:
        least = KERNEL_BYTES + config.num_ranks * least
    mem_gb = f"mem_gb {math.ceil(least / 1e8) / 10:g}"
    # Results do not depend on it, so it is no reason for a new run.
    return f"The least that can work is about {mem_gb}, with one sample at a time: resume the run with -p {mem_gb}."


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class TrainingMemory:
    """What a training, and the controls beside it, get for their memory."""

    policy: MemoryPolicy  # of the device
    observer: MemoryObserver  # hears where the model's training is
    oom_folder: Path  # where the context of an out-of-memory goes

    def observer_of(self, name: str) -> MemoryObserver:
        """Hears where the control called ``name`` is, under phases that begin so; the model's where that is empty."""
        return ControlMemory(self.observer, name) if name else self.observer


@contextmanager
def training_memory(
    paths: RunPaths,
    config: RunConfig,
    stage: str,
    fold: int | None,
    compute: ComputeDevice,
    observer: MemoryObserver | None,
    rank: int = 0,
) -> Iterator[TrainingMemory]:
    """The device's policy in force, the accelerator watched, the garbage of set-up frozen, and, where it was asked
    for, every allocation recorded (of rank 0); all of it undone at the end.

    Raises:
        UsageError: ``profile_memory`` needs a package that is not installed.
    """
    policy, observer = policy_of(compute, config), observer or NoObserver()
    observer.event("policy", "; ".join(policy.describe()), device=policy.device, amp_dtype=policy.amp_dtype,
                   tf32=policy.tf32, pin_memory=policy.pin_memory)  # fmt: skip
    probe = device_memory_probe(compute.device)
    if probe is not None:
        observer.watch_device(str(compute.device), probe)
    recording = (
        recorded_allocations(paths.memory_profiles(stage, fold), compute.device)
        if config.profile_memory and rank == 0
        else nullcontext()
    )
    made = None
    try:
        with devices.apply_policy(policy), recording as made, memory_policy.frozen_garbage():
            folder = paths.oom_contexts(stage, fold)
            oom_folder = folder / f"rank_{rank}" if rank else folder  # one writer each
            try:
                yield TrainingMemory(policy, observer, oom_folder)
            finally:
                devices.release_cached_memory(compute.device)
                # What a notebook's tables and figures take is not the training's.
                observer.at("report")
    finally:
        if made is not None:
            observer.event("recording", _how_to_look_at(made))


def planned_micro_batch(
    paths: RunPaths,
    config: RunConfig,
    task: Task,
    settings: EngineSettings,
    compute: ComputeDevice,
    observer: MemoryObserver,
    *,
    num_ranks: int = 1,
    stop: Callable[[], bool] | None = None,
) -> tuple[int, int | None, int]:
    """The micro-batch to begin with, lowered where the budget is too small, the predicted peak in bytes, and how many
    loader processes the budget has room for: no more than planned.

    Of several ranks each loads its share of an effective batch, and has its share of the budget
    (``memory.budget.MemoryShare``); one measures for all.

    The prediction is None where it was not asked for, or could not be made.

    Raises:
        StoppedError: ``stop`` said so while a step was measured.
        UsageError: this process alone holds more than was asked for with ``mem_gb``.
    """
    if not config.memory_preflight:
        return settings.micro_batch, None, settings.num_workers
    request = StepRequest(
        task,
        settings.micro_batch,
        -(-settings.effective_batch_size // num_ranks),
        compute,
        gradient_checkpointing=settings.gradient_checkpointing,
        num_workers=settings.num_workers,
        num_ranks=num_ranks,
        averages=settings.ema_decay > 0,
    )
    resident, budget = resident_bytes(), device_budget(config, compute)

    def tell(micro_batch: int) -> None:
        message = f"memory preflight: measuring a training step with micro-batch {micro_batch}"
        _logger.info(message)
        observer.event("measuring", message)

    measure = partial(preflight, store=paths.preflight, stop=stop or (lambda: False), tell=tell)
    observer.at(memory_policy.PREFLIGHT)
    try:
        if compute.device.type == "cpu":
            refuse_impossible_budget(request, config, budget, resident, measure)
        report = measure(request, budget=budget, baseline_bytes=resident)
    finally:
        observer.at("setup")
    lowered = report.micro_batch < report.micro_batch_planned
    pinned = policy_of(compute, config).pinned_bytes(report.found.batch_bytes, settings.num_workers)
    if pinned:
        host, told = memory_budget(config.mem_gb), logging.INFO
        advice = ""
        if resident + pinned > host.total_bytes:
            told, advice = logging.WARNING, f" {memory_policy.memory_advice('loaders')}"
        _logger.log(
            told,
            "batches that wait for the GPU take up to %.2f GB of page-locked main memory beside %.2f GB, of %.2f GB "
            "(%s).%s", pinned / 1e9, resident / 1e9, host.total_bytes / 1e9, host.origin, advice,
        )  # fmt: skip
    _logger.log(logging.INFO if report.fits and not lowered else logging.WARNING, report.message())
    largest = report.found.step_bytes.get(report.micro_batch)
    observer.event(
        "preflight",
        report.message(),
        predicted_peak_mb=_megabytes(report.predicted_peak_bytes),
        budget_mb=_megabytes(report.budget.total_bytes),
        micro_batch_planned=report.micro_batch_planned,
        micro_batch=report.micro_batch,
        measured_step_mb=_megabytes(largest),
        pinned_mb=_megabytes(pinned),
        baseline_mb=_megabytes(report.footprint.resident_bytes),
        reused=report.reused,
    )
    # An effective batch smaller than the micro-batch is no reason to plan a smaller one.
    micro_batch = report.micro_batch if lowered else settings.micro_batch
    loaders = report.num_workers if report.num_workers < report.footprint.num_workers else settings.num_workers
    return micro_batch, report.predicted_peak_bytes, loaders


class ControlMemory:
    """Passes on where a control's training is, under phases of its own."""

    def __init__(self, observer: MemoryObserver, name: str) -> None:
        self._observer = observer
        self.prefix = f"{name}_"

    def at(self, phase: str, **position: int | None) -> None:
        """``train`` becomes ``control_train``."""
        self._observer.at(self.prefix + phase, **position)

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """As it is: the position tells whose it was."""
        self._observer.event(kind, message, **details)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """As it is."""
        self._observer.watch_device(device, probe)


def device_budget(config: RunConfig, compute: ComputeDevice) -> MemoryBudget:
    """What a training on ``compute`` may take: of an accelerator's memory, elsewhere of main memory."""
    probe = device_memory_probe(compute.device)
    if probe is None:
        return memory_budget(config.mem_gb)
    of_device = MemoryBudget(probe().total_bytes, f"{compute.name}'s memory")
    if compute.device.type == "cuda":
        return _shared(of_device, config)
    # Apple's GPU takes main memory, so that is planned, and what limits it counts as well.
    return min(of_device, memory_budget(config.mem_gb), key=lambda budget: budget.total_bytes)


def _shared(of_device: MemoryBudget, config: RunConfig) -> MemoryBudget:
    """The part of a GPU for one of several folds that train on it at once; ranks have a GPU each."""
    share = MemoryShare.of(os.environ)
    if share is None or config.num_ranks > 1:
        return of_device
    return MemoryBudget(of_device.total_bytes // share.sharers, f"1/{share.sharers} of {of_device.origin}")


def _megabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 1e6, 2)


# ----------------------------------------------------------------------------------------------------
# ``profile_memory``: every allocation of a training on record, with the line of code that made it. On CUDA torch's own
# history of its allocator, elsewhere memray, which writes as the training goes, so the recording of a training that is
# killed can still be read: ``python -m memray flamegraph --no-web FILE``.


# Of torch's history, the newest: some 100 bytes to 1 kB each in the file.
_MOST_CUDA_ENTRIES = 1_000_000


@contextmanager
def recorded_allocations(folder: Path, device: torch.device) -> Iterator[Path]:
    """Record every allocation from here to the end, of all threads, into the file that this gives.

    With memray a step takes 5 to 16 % longer and 0.1 to 0.2 MB of disk (frame_cnn and r2plus1d, 16 clips of
    6 x 112 x 112). Loader processes are not recorded.

    Args:
        folder: created; recordings of earlier attempts in it are left alone.
        device: ``cuda`` is recorded by torch, all others by memray.

    Raises:
        UsageError: memray is not installed, or something else is recording in this process; before any work.
    """
    cuda = device.type == "cuda"
    path = _free_path(folder, "snapshot", ".pickle") if cuda else _free_path(folder, "memray", ".bin")
    with _torch_history(path, device) if cuda else _memray_tracker(path):
        yield path
    _logger.info("%s", _how_to_look_at(path))


def _how_to_look_at(recording: Path) -> str:
    if recording.suffix == ".pickle":
        return (
            f"allocations on the GPU: {str(recording)!r}; drop the file on https://pytorch.org/memory_viz, which "
            "draws it in the browser and uploads nothing."
        )
    return (
        f"allocations: {str(recording)!r}; python -m memray flamegraph --no-web FILE makes a page of it, and "
        "python -m memray summary --sort-column 3 FILE a table of the functions that held most at the peak."
    )


@contextmanager
def _memray_tracker(path: Path) -> Iterator[None]:
    try:
        import memray
    except ImportError as error:
        raise UsageError(
            "profile_memory: on this device memray records the allocations, and it is not installed. Install it "
            "(pip install 'fvc_lib[profile]', or pip install memray; Linux and macOS only), or turn profile_memory off."
        ) from error

    path.parent.mkdir(parents=True, exist_ok=True)
    tracker = memray.Tracker(path)
    # Memray leaves out as many frames of the thread that started it as that had on its stack, counted from the bottom.
    # That hides memray's own command, but here it would hide the training: so a thread that has nothing to hide.
    with ThreadPoolExecutor(1, thread_name_prefix="fvc-memray") as thread:
        try:
            thread.submit(tracker.__enter__).result()
        except RuntimeError as error:  # one tracker at a time, and %%memray_flamegraph may be another
            raise UsageError(f"profile_memory: memray cannot start: {error}. Turn the other recording off.") from error
        try:
            yield
        finally:
            thread.submit(tracker.__exit__, None, None, None).result()


@contextmanager
def _torch_history(path: Path, device: torch.device) -> Iterator[None]:
    memory = torch.cuda.memory
    path.parent.mkdir(parents=True, exist_ok=True)
    memory._record_memory_history(max_entries=_MOST_CUDA_ENTRIES, device=device)
    try:
        yield
    finally:
        try:
            memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            _logger.warning("profile_memory: %s was not written: %s", path, error)
        memory._record_memory_history(enabled=None, device=device)


def _free_path(folder: Path, stem: str, suffix: str) -> Path:
    """A pid comes back after a reboot, so its recordings are counted."""
    names = (folder / f"{stem}_{os.getpid()}_{number}{suffix}" for number in itertools.count())
    return next(path for path in names if not path.exists())
