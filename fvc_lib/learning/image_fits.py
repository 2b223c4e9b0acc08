"""What batch sizes and resolutions fit the machine, measured with a run's own images, network and settings."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from fvc_lib.learning.device import resolve_device
from fvc_lib.learning.image_training import image_split_training, read_image_parts
from fvc_lib.learning.made_up_images import requests_on_made_up_images
from fvc_lib.learning.measured_fits import measure_fits, seconds_per_sample
from fvc_lib.learning.measured_fits_tables import fits_table
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.learning.training_memory import device_budget
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_observer import PREFLIGHT, MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import write_table
from fvc_lib.services.task_tables import MEASURED_FITS


def measured_image_fits(
    paths: RunPaths,
    config: RunConfig,
    *,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Measure as ``measure_fits`` does and write ``tables/measured_fits.parquet``; without rows if not asked for.

    Args:
        paths: the run; its tables of images are read.
        config: its parameters; ``measure_fits`` says whether to measure.
        memory: told that what is taken now is of measuring, not of the training.
        stop: asked before each row.
        progress: called with (rows done, rows).

    Raises:
        StoppedError: ``stop`` said so; what was measured is kept.
        UsageError, DataError: as ``train_images``.
    """
    fits = (
        fits_table([]) if not config.measure_fits else _measured(paths, config, memory or NoObserver(), stop, progress)
    )
    write_table(fits, MEASURED_FITS, paths.measured_fits)
    return fits


def _measured(
    paths: RunPaths,
    config: RunConfig,
    observer: MemoryObserver,
    stop: Callable[[], bool] | None,
    progress: Callable[[int, int], None] | None,
) -> pl.DataFrame:
    root, parts = read_image_parts(paths, config)
    training = image_split_training(root, parts, config)
    compute, settings = resolve_device(config.device, config.amp), training.settings
    request = StepRequest(
        training.task,
        settings.micro_batch,
        settings.effective_batch_size,
        device=compute.device.type,
        amp=config.amp,
        gradient_checkpointing=settings.gradient_checkpointing,
        num_workers=settings.num_workers,
    )
    observer.at(PREFLIGHT)
    try:
        return measure_fits(
            requests_on_made_up_images(request, config.image_size),
            batch_size=settings.micro_batch,
            image_size=config.image_size,
            num_samples=len(parts.train),
            budget=device_budget(config, compute),
            loading_seconds=seconds_per_sample(training.task.training_data),
            store=paths.measured_steps,
            progress=progress,
            stop=stop,
        )
    finally:
        observer.at("setup")
