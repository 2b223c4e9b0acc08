"""What a fold's training would take, found before there is a run: one step on made-up clips of the right shape.

Loads nothing of torch by itself: all is done in a child process, which writes nothing that stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import run_isolated, threads_of_a_fold
from fvc_lib.services.memory.budget import KERNEL_BYTES, MEASURING_BYTES, MemoryBudget, memory_budget
from fvc_lib.services.memory.policy import allocator_environment

if TYPE_CHECKING:
    from fvc_lib.engine.memory.preflight import StepRequest
    from fvc_lib.video.clips.clip_file import Pixels, Shape

TIME_LIMIT_SECONDS = 240.0
_PREDICT = "fvc_lib.tasks.video.dry_run_memory:predict"


class MadeUpClips:
    """Clips of one shape without a store: grey, because what a step takes does not depend on what it sees."""

    settings_hash = "made up"

    def __init__(self, num_frames: int, side: int) -> None:
        self._shape: Shape = (num_frames, 3, side, side)

    @property
    def shape(self) -> Shape:
        """(T, 3, S, S) of every clip."""
        return self._shape

    def has(self, video_id: str, augmentation_index: int, /) -> bool:
        """Every clip is there."""
        return True

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0, /) -> None:
        """Fill ``frames`` with grey."""
        frames.fill(128)


def measured_training_peak(config: RunConfig) -> int | None:
    """Bytes of main memory at the peak of one fold's training with ``config``: kernel, loader processes, ranks and the
    run's own preflight together.

    Takes about ten seconds. None where it cannot be measured: on a GPU, which takes main memory by its driver too, or
    where memory ended or the child took too long.
    """
    try:
        item = {
            "config": config.model_dump(mode="json"),
            "threads": threads_of_a_fold(config.num_trainings, config.num_ranks),
        }
        (answer,) = run_isolated(_PREDICT, [item], workers=1, timeout_seconds=TIME_LIMIT_SECONDS, memory_bytes=None)
    except (FvcError, OSError):
        return None
    return int(answer.value) if isinstance(answer.value, int) else None


def predict(item: Mapping[str, Any]) -> int | None:
    """In the child process: the peak in bytes of the training with ``item["config"]`` and so many ``threads``."""
    import torch

    torch.set_num_threads(item["threads"])
    os.environ.update(allocator_environment(os.environ))  # as the runner gives to a kernel, for the child that measures
    config = RunConfig(**item["config"])
    try:
        request = step_request(config)
        on_gpu = request.compute.device.type == "cuda"
    except FvcError:
        return None
    return None if on_gpu else _peak_in_main_memory(config, request)


def step_request(config: RunConfig) -> StepRequest:
    """The training step of ``config``'s first fold, on as many made-up clips as one effective batch.

    Raises:
        UsageError: there is no such model.
    """
    from fvc_lib.detectors.weights import without_folds
    from fvc_lib.engine.device import training_device
    from fvc_lib.engine.memory.preflight import StepRequest
    from fvc_lib.tasks.video.data import ClipDataset, ClipRow
    from fvc_lib.tasks.video.task import VideoTask, engine_settings

    settings = engine_settings(config, 0)
    rows = [ClipRow(f"v{number}", 0, number % 2) for number in range(max(2, config.effective_batch_size))]
    clips = ClipDataset(MadeUpClips(config.clips.num_frames, config.clips.side), rows)
    return StepRequest(
        VideoTask(clips, clips, config=config, weights=(1.0, 1.0), own=without_folds(config)),
        micro_batch=settings.micro_batch,
        effective_batch_size=settings.effective_batch_size,
        compute=training_device(config),
        gradient_checkpointing=config.gradient_checkpointing,
        num_workers=settings.num_workers,
        averages=settings.ema_decay > 0,
    )


def _peak_in_main_memory(config: RunConfig, request: StepRequest) -> int | None:
    """By the preflight itself, as if this process were the kernel that it stands for."""
    import psutil

    from fvc_lib.engine.memory.preflight import preflight

    held = int(psutil.Process().memory_info().rss)
    whole = memory_budget(config.mem_gb)
    budget = MemoryBudget(max(1, whole.total_bytes - max(0, KERNEL_BYTES - held)), whole.origin)
    report = preflight(request, budget=budget, baseline_bytes=held, store=None)
    peak = report.peak_bytes(report.micro_batch if config.memory_preflight else report.micro_batch_planned)
    if peak is None:
        return None
    training = peak - report.footprint.resident_bytes
    beside = [0]
    if config.memory_preflight:  # which runs beside the kernel, before it trains
        beside.append(MEASURING_BYTES + max(report.found.step_bytes.values(), default=0))
    if config.num_ranks > 1:
        return KERNEL_BYTES + config.num_ranks * (MEASURING_BYTES + training)
    return KERNEL_BYTES + max(training, *beside)
