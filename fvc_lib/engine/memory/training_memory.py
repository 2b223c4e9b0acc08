"""A training's memory: policy, micro-batch and budget before it begins, and what observes it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from fvc_lib.engine.device import (
    ComputeDevice,
    apply_policy,
    device_memory_probe,
    release_cached_memory,
    resolve_device,
    resolve_policy,
    verify_policy,
)
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.memory.preflight import StepRequest, footprint_of, preflight
from fvc_lib.engine.memory.profile import recorded_allocations
from fvc_lib.engine.oom import OutOfMemoryFolder
from fvc_lib.engine.task import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory_budget import KERNEL_BYTES, SHARE_VARIABLE, MemoryBudget, MemoryShare, memory_budget
from fvc_lib.services.memory_policy import (
    PREFLIGHT,
    DeviceMemory,
    EventDetail,
    MemoryObserver,
    MemoryPolicy,
    NoObserver,
    frozen_garbage,
)
from fvc_lib.services.run_paths import RunPaths

_logger = logging.getLogger(__name__)


def policy_of(compute: ComputeDevice, config: RunConfig) -> MemoryPolicy:
    """The memory policy of a training on ``compute`` with this run's parameters."""
    return resolve_policy(compute, amp=config.amp, clear_cache_batches=config.clear_cache_batches)


def memory_setup(config: RunConfig) -> list[str]:
    """Lines for the start of a training: the policy of the device these parameters ask for, and what of it is active.

    Raises:
        UsageError: the requested device is not there.
    """
    policy = policy_of(resolve_device(config.device, config.amp), config)
    with apply_policy(policy):
        return [*policy.describe(), *verify_policy(policy)]


def refuse_impossible_budget(
    request: StepRequest, config: RunConfig, budget: MemoryBudget, resident_bytes: int, store: Path
) -> None:
    """Raise where ``mem_gb`` was given and this process holds more, on the CPU before its first step.

    A budget that is only somewhat too small is no reason to stop: the prediction may be off by a quarter, and a
    training that goes over its own budget harms nobody (the limits that kill are the system's).

    What could work is measured, which takes some seconds, as far as the machine's own limits let it.

    Args:
        request: of the training as planned.
        config: ``mem_gb``, and ``num_ranks``: each rank has its share.
        budget: of this process.
        resident_bytes: of this process now.
        store: the preflight's file.

    Raises:
        UsageError: names what is held, and the least that can work.
    """
    if not _asked_for(config, budget):
        return
    held = footprint_of(request, resident_bytes).resident_bytes
    if held < budget.total_bytes:
        return
    who = f"each of {config.num_ranks} ranks" if config.num_ranks > 1 else "this process"
    limit = memory_budget(environ={name: text for name, text in os.environ.items() if name != SHARE_VARIABLE})
    share = f", {_gigabytes(budget.total_bytes)} for each rank" if config.num_ranks > 1 else ""
    raise UsageError(
        f"mem_gb {config.mem_gb:g}{share}: {who} holds {_gigabytes(held)} before it trains, so no training can keep "
        f"to that. {_least(request, config, limit, resident_bytes, store)} Or leave mem_gb out: then the limit is "
        f"{_gigabytes(limit.total_bytes)} ({limit.origin})."
    )


def _asked_for(config: RunConfig, budget: MemoryBudget) -> bool:
    """Whether ``budget`` is what ``mem_gb`` says, or one rank's share of it.

    Of kernels that run beside each other the runner shares the budget out; there it is the number of them to change.
    """
    if config.mem_gb is None:
        return False
    asked, share = int(config.mem_gb * 1e9), MemoryShare.of(os.environ)
    if share is not None and share.share_bytes == budget.total_bytes:
        return config.num_ranks > 1 and share.whole.total_bytes == asked
    return budget.total_bytes == asked


def _least(request: StepRequest, config: RunConfig, limit: MemoryBudget, resident_bytes: int, store: Path) -> str:
    """With one sample at a time."""
    each = MemoryBudget(limit.total_bytes // config.num_ranks, limit.origin)
    report = preflight(replace(request, micro_batch=1), budget=each, baseline_bytes=resident_bytes, store=store)
    if report.predicted_peak_bytes is None:
        return f"The least that can work could not be measured ({report.problem})."
    least = report.predicted_peak_bytes + report.reserved_bytes
    if config.num_ranks > 1:
        least = KERNEL_BYTES + config.num_ranks * least
    mem_gb = f"mem_gb {math.ceil(least / 1e8) / 10:g}"
    # Results do not depend on it, so it is no reason for a new run.
    return f"The least that can work is about {mem_gb}, with one sample at a time; --resume RUN -p {mem_gb} goes on."


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class TrainingMemory:
    """What a training, and the control beside it, are told about memory.

    Attributes:
        policy: of the device.
        observer: hears where the model's training is.
        control_observer: the same for the control's, under phases that begin with ``control_``.
        oom_folder: where the context of an out-of-memory goes.
    """

    policy: MemoryPolicy
    observer: MemoryObserver
    control_observer: MemoryObserver
    oom_folder: OutOfMemoryFolder


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
        with apply_policy(policy), recording as made, frozen_garbage():
            folder = paths.oom_contexts(stage, fold)
            oom_folder = OutOfMemoryFolder(folder / f"rank_{rank}" if rank else folder)  # one writer each
            try:
                yield TrainingMemory(policy, observer, ControlMemory(observer), oom_folder)
            finally:
                release_cached_memory(compute.device)
                # What a recording's own reports and a notebook's tables and figures take is not the training's.
                observer.at("report")
    finally:
        if made is not None:
            observer.event("recording", made.describe())


def planned_micro_batch(
    paths: RunPaths,
    config: RunConfig,
    task: Task,
    settings: EngineSettings,
    compute: ComputeDevice,
    observer: MemoryObserver,
    *,
    num_ranks: int = 1,
) -> tuple[int, int | None]:
    """The micro-batch to begin with, lowered where the budget is too small, and the predicted peak in bytes.

    Of several ranks each loads its share of an effective batch, and has its share of the budget
    (``memory_budget.MemoryShare``); one measures for all.

    The prediction is None where it was not asked for, or could not be made.

    Raises:
        UsageError: this process alone holds more than was asked for with ``mem_gb``.
    """
    if not config.memory_preflight:
        return settings.micro_batch, None
    request = StepRequest(
        task,
        settings.micro_batch,
        -(-settings.effective_batch_size // num_ranks),
        device=compute.device.type,
        amp=config.amp,
        gradient_checkpointing=settings.gradient_checkpointing,
        num_workers=settings.num_workers,
        num_ranks=num_ranks,
    )
    resident, budget = _resident_bytes(), device_budget(config, compute)
    observer.at(PREFLIGHT)
    try:
        if compute.device.type == "cpu":
            refuse_impossible_budget(request, config, budget, resident, paths.preflight)
        report = preflight(request, budget=budget, baseline_bytes=resident, store=paths.preflight)
    finally:
        observer.at("setup")
    lowered = report.micro_batch < report.micro_batch_planned
    _logger.log(logging.INFO if report.fits and not lowered else logging.WARNING, report.message())
    largest = report.step_bytes_by_micro_batch.get(report.micro_batch)
    observer.event(
        "preflight",
        report.message(),
        predicted_peak_mb=_megabytes(report.predicted_peak_bytes),
        budget_mb=_megabytes(report.budget_bytes),
        micro_batch_planned=report.micro_batch_planned,
        micro_batch=report.micro_batch,
        measured_step_mb=_megabytes(largest),
        baseline_mb=_megabytes(report.baseline_bytes),
        reused=report.reused,
    )
    # An effective batch smaller than the micro-batch is no reason to plan a smaller one.
    return (report.micro_batch if lowered else settings.micro_batch), report.predicted_peak_bytes


class ControlMemory:
    """Passes on where the control's training is, under phases of its own."""

    prefix = "control_"

    def __init__(self, observer: MemoryObserver) -> None:
        self._observer = observer

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """``train`` becomes ``control_train``."""
        self._observer.at(self.prefix + phase, epoch=epoch, batch_idx=batch_idx, global_step=global_step)

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


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _megabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 1e6, 2)
