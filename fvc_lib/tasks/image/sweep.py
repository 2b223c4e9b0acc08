"""Batch-size and resolution sweep: the memory preflight of steps with made-up images, one resolution after the other.

Its child processes run a few real steps of the run's own network, and may run out of memory: that is a result. The
batch size in memory changes time and memory only; the effective batch, and so the result, stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import polars as pl
import psutil
import torch
from torch import nn

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.memory.preflight import PreflightReport, StepRequest, preflight
from fvc_lib.engine.memory.training_memory import device_budget
from fvc_lib.engine.task import Accumulator, Batch, LossSum, Outputs, Sample, Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory_policy import SWEEP, MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import BATCH_SIZE_SWEEP, check_table, write_table
from fvc_lib.tasks.image.training import image_split_training, read_image_parts

LARGEST_BATCH = 32
IMAGE_SIZES = (112, 160, 224, 384, 512, 1024)


def batch_size_sweep(
    paths: RunPaths,
    config: RunConfig,
    *,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Measure batch sizes at the run's resolution and resolutions with its batch size; write the table of them.

    Without ``config.batch_size_sweep`` nothing is measured or written, and the table is empty. What was measured is
    kept, so a sweep that was stopped goes on.

    Args:
        paths: the run; its tables of images are read.
        config: its parameters.
        memory: hears that the sweep, and not the training, takes memory now.
        stop: called before each resolution.
        progress: called with (resolutions done, resolutions).

    Returns:
        Rows of ``BATCH_SIZE_SWEEP``. ``fits`` is whether the predicted peak of the whole training is within the budget,
        null where it is not known; ``seconds_per_epoch`` is of computing alone.

    Raises:
        StoppedError: ``stop`` said so.
        UsageError, DataError: as ``train_images``.
    """
    rows: list[dict[str, object]] = []
    if config.batch_size_sweep:
        observer = memory or NoObserver()
        observer.at(SWEEP)
        try:
            rows = _measured(paths, config, stop or (lambda: False), progress or (lambda done, planned: None))
        finally:
            observer.at("setup")
    schema = {name: column.dtype.type for name, column in BATCH_SIZE_SWEEP.columns.items()}
    table = check_table(pl.DataFrame(rows, schema=schema, orient="row"), BATCH_SIZE_SWEEP, "batch-size sweep")
    if config.batch_size_sweep:
        write_table(table, BATCH_SIZE_SWEEP, paths.batch_size_sweep)
    return table


def recommended(sweep: pl.DataFrame) -> str:
    """The fastest batch size that fits at the run's resolution and the largest resolution that fits, in one sentence.

    Of batch sizes within 5 % of the fastest the smallest: memory that is not needed is room for everything else.
    """
    by_batch, by_size = (
        sweep.filter((pl.col("varied") == varied) & pl.col("fits").fill_null(value=False))
        for varied in ("batch_size", "image_size")
    )
    if sweep.is_empty():
        return "No sweep was made: -p batch_size_sweep true measures which batch sizes and resolutions fit."
    if by_batch.is_empty():
        return "No batch size that was tried fits at this resolution: lower image_size, or give the run more memory."
    nearly_fastest = by_batch.filter(pl.col("seconds_per_epoch") <= 1.05 * pl.col("seconds_per_epoch").min())
    row = nearly_fastest.sort("batch_size").row(0, named=True)
    beside = by_size.sort("image_size").row(-1, named=True) if by_size.height else None
    sizes = f" Up to {beside['image_size']} pixels fit with batch_size {beside['batch_size']}." if beside else ""
    return (
        f"Take batch_size {row['batch_size']} at {row['image_size']} pixels: {row['seconds_per_epoch']:.3g} s of "
        f"computing per epoch, predicted peak {row['peak_bytes'] / 1e9:.2f} GB. The result stays the same.{sizes}"
    )


def _measured(
    paths: RunPaths, config: RunConfig, stop: Callable[[], bool], progress: Callable[[int, int], None]
) -> list[dict[str, object]]:
    root, parts = read_image_parts(paths, config)
    training = image_split_training(root, parts, config)
    compute, settings = resolve_device(config.device, config.amp), training.settings
    sample, num_samples = training.task.training_data[0], len(parts.train)
    own, budget = config.image_size, device_budget(config, compute)
    sizes = sorted({*IMAGE_SIZES, own})
    rows: list[dict[str, object]] = []
    for number, image_size in enumerate((own, *sizes)):
        if stop():
            raise StoppedError("stopped as asked in the batch-size sweep; run the notebook again to go on.")
        largest = LARGEST_BATCH if number == 0 else settings.micro_batch
        effective = max(settings.effective_batch_size, LARGEST_BATCH)
        images = MadeUpImages(sample, own, image_size, effective * max(1, settings.num_workers))
        request = StepRequest(
            _OnMadeUpImages(training.task, images, images), largest, effective,
            device=compute.device.type, amp=config.amp, gradient_checkpointing=settings.gradient_checkpointing,
            num_workers=settings.num_workers,
        )  # fmt: skip
        held = int(psutil.Process().memory_info().rss)
        report = preflight(request, budget=budget, baseline_bytes=held, store=paths.measured_steps)
        batch_sizes = [1 << power for power in range(largest.bit_length())] if number == 0 else [largest]
        for batch_size in batch_sizes:
            row = {"varied": "batch_size" if number == 0 else "image_size", "batch_size": batch_size}
            result = _outcome(report, batch_size, num_samples)
            rows.append({**row, "image_size": image_size, **result, "device": compute.describe()})
        progress(number + 1, 1 + len(sizes))
    return [{name: row.get(name, "") for name in BATCH_SIZE_SWEEP.columns} for row in rows]


def _outcome(report: PreflightReport, batch_size: int, num_samples: int) -> dict[str, object]:
    peak = report.peak_of(batch_size)
    if peak is None:
        known = bool(report.step_bytes_by_micro_batch) or report.micro_batch < batch_size  # larger than what fits
        return {"fits": False if known else None, "peak_bytes": None, "seconds_per_epoch": None,
                "detail": report.problem or "smaller batches show that it would not fit"}  # fmt: skip
    fits = peak + report.reserved_bytes <= report.budget_bytes
    seconds = report.seconds_per_sample[batch_size] * num_samples
    detail = "" if fits else f"over the budget of {report.budget_bytes / 1e9:.2f} GB ({report.budget_origin})"
    return {"fits": fits, "peak_bytes": peak, "seconds_per_epoch": seconds, "detail": detail}


@dataclass(frozen=True)
class MadeUpImages:
    """``num_samples`` times ``sample``, its pictures of ``own_size`` pixels grey and of ``image_size``: what a step
    takes does not depend on what it sees.
    """

    sample: Sample
    own_size: int
    image_size: int
    num_samples: int

    classes = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Sample:
        tensors = dict(self.sample.tensors)
        for name, tensor in tensors.items():
            if tensor.ndim >= 2 and tuple(tensor.shape[-2:]) == (self.own_size, self.own_size):
                grey = 0.5 if tensor.dtype.is_floating_point else 128
                shape = (*tensor.shape[:-2], self.image_size, self.image_size)
                tensors[name] = torch.full(shape, grey, dtype=tensor.dtype)
        return replace(self.sample, sample_id=f"made up {index}", tensors=tensors)


@dataclass(frozen=True)
class _OnMadeUpImages:
    """``task`` with other data."""

    task: Task
    training_data: MadeUpImages
    validation_data: MadeUpImages

    def build_model(self) -> nn.Module:
        return self.task.build_model()

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.task.forward(model, batch)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        return self.task.loss(outputs, batch)

    def new_accumulator(self) -> Accumulator:
        return self.task.new_accumulator()
