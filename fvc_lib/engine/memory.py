"""Plan the memory of a training: its budget, its micro-batch and its observers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice, device_memory_probe
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.engine.task import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory import (
    PREFLIGHT,
    DeviceMemory,
    EventDetail,
    MemoryBudget,
    MemoryObserver,
    NoObserver,
    frozen_garbage,
    memory_budget,
    memory_sharers,
    resident_bytes,
)

_logger = logging.getLogger(__name__)


@contextmanager
def training_memory(compute: ComputeDevice, observer: MemoryObserver | None) -> Iterator[MemoryObserver]:
    """Within the block, select the device's kernels, watch the accelerator and freeze the objects of the set-up.

    Frozen objects are left out of garbage collection. Yield ``observer``, or one that records nothing.
    """
    observer = observer or NoObserver()
    observer.event("device", compute.describe())
    probe = device_memory_probe(compute.device)
    if probe is not None:
        observer.watch_device(str(compute.device), probe)
    with devices.cuda_kernels(compute), frozen_garbage():
        try:
            yield observer
        finally:
            devices.release_cached_memory(compute.device)
            observer.at("report")  # tables and figures are not the training's


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
    """Return the micro-batch to begin with, and the predicted peak memory in bytes (None if it was not measured).

    The micro-batch is lowered if the measured step does not fit into the memory budget. With several ranks, each loads
    its share of an effective batch and may use its share of the budget. One rank measures for all.

    Raises:
        StoppedError: ``stop`` returned True while a step was measured.
        UsageError: this process alone holds more than ``mem_gb``.
    """
    if not config.memory_preflight:
        return settings.micro_batch, None
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
    budget, held = device_budget(config, compute), resident_bytes()
    if compute.device.type == "cpu" and config.mem_gb is not None and held >= budget.total_bytes:
        raise UsageError(
            f"mem_gb {config.mem_gb:g}: this process holds {held / 1e9:.2f} GB before it trains, and may use {budget}. "
            "Resume the run with a larger -p mem_gb, or with -p mem_gb none."
        )

    def tell(micro_batch: int) -> None:
        message = f"memory preflight: measuring a training step with micro-batch {micro_batch}"
        _logger.info(message)
        observer.event("measuring", message)

    observer.at(PREFLIGHT)
    try:
        report = preflight(request, budget=budget, stop=stop or (lambda: False), tell=tell)
    finally:
        observer.at("setup")
    _logger.log(logging.INFO if report.fits and not report.lowered else logging.WARNING, report.message())
    observer.event(
        "preflight",
        report.message(),
        predicted_peak_mb=None if report.peak_bytes is None else round(report.peak_bytes / 1e6, 2),
        budget_mb=round(budget.total_bytes / 1e6, 2),
        micro_batch_planned=report.micro_batch_planned,
        micro_batch=report.micro_batch,
    )
    # An effective batch smaller than the micro-batch is no reason to plan a smaller one.
    return report.micro_batch if report.lowered else settings.micro_batch, report.peak_bytes


class ControlMemory:
    """An observer that puts the control's name before every phase, such as ``control_train``."""

    def __init__(self, observer: MemoryObserver, name: str) -> None:
        self._observer = observer
        self.prefix = f"{name}_"

    def at(self, phase: str, **position: int | None) -> None:
        """Report ``phase`` with the control's name as prefix."""
        self._observer.at(self.prefix + phase, **position)

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Report an event unchanged."""
        self._observer.event(kind, message, **details)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Watch the accelerator ``device``, whose memory ``probe`` reads."""
        self._observer.watch_device(device, probe)


def device_budget(config: RunConfig, compute: ComputeDevice) -> MemoryBudget:
    """Return the memory that a training on ``compute`` may use.

    That is the GPU's memory on CUDA, main memory on a CPU, and the smaller of both on MPS.
    """
    probe = device_memory_probe(compute.device)
    if probe is None:
        return memory_budget(config.mem_gb)
    of_device = MemoryBudget(probe().total_bytes, f"{compute.name}'s memory")
    if compute.device.type == "cuda":
        return of_device if config.num_ranks > 1 else of_device.divided(memory_sharers())  # ranks have a GPU each
    # Apple's GPU uses main memory, whose limits count as well.
    return min(of_device, memory_budget(config.mem_gb), key=lambda budget: budget.total_bytes)
