"""What batch sizes and resolutions fit the machine, measured with a run's own images, network and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import polars as pl

from fvc_lib.learning.device import resolve_device
from fvc_lib.learning.image_training import image_split_training, read_image_parts
from fvc_lib.learning.made_up_images import MadeUpImages, requests_on_made_up_images
from fvc_lib.learning.measured_fits import measure_fits, seconds_per_sample
from fvc_lib.learning.measured_fits_tables import fits_table
from fvc_lib.learning.preflight_plan import StepMeasurement
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.learning.preflight_store import PreflightStore, circumstances
from fvc_lib.learning.training_memory import device_budget
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_observer import FITS, MemoryObserver, NoObserver
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
    of_the_training = MeasuredStep(request, config.image_size)
    observer.at(FITS)
    try:
        return measure_fits(
            requests_on_made_up_images(request, config.image_size),
            batch_size=settings.micro_batch,
            image_size=config.image_size,
            num_samples=len(parts.train),
            budget=device_budget(config, compute),
            loading_seconds=seconds_per_sample(training.task.training_data),
            store=paths.measured_steps,
            keep=of_the_training.keep,
            progress=progress,
            stop=stop,
        )
    finally:
        of_the_training.tell(PreflightStore(paths.preflight))
        observer.at("setup")


class MeasuredStep:
    """Gathers from the rows what they say of the training's own step, so that its preflight need not ask again.

    Where memory is short that is more than a saving: the process has grown meanwhile, and there may be no room beside
    it to measure anything.

    Args:
        request: the training's step.
        image_size: side in pixels of its pictures.
    """

    def __init__(self, request: StepRequest, image_size: int) -> None:
        self._request, self._image_size = request, image_size
        self._found: StepMeasurement | None = None

    def keep(self, request: StepRequest, found: StepMeasurement) -> None:
        """Add what was found of a row, if it had pictures of this size and as many in an effective batch."""
        data = request.task.training_data
        same_size = isinstance(data, MadeUpImages) and data.image_size == self._image_size
        if same_size and request.window_size == self._request.window_size:
            known = self._found or found
            self._found = replace(
                known,
                step_bytes={**known.step_bytes, **found.step_bytes},
                failures={**known.failures, **found.failures},
                attempting=None,
            )

    def tell(self, store: PreflightStore) -> None:
        """Keep it as the preflight's own measurement, unless that has made one already."""
        if self._found is None or not (self._found.step_bytes or self._found.failures):
            return
        described = circumstances(self._request)
        key = sha256_of_json(described)
        if store.measurement(key) is None:
            store.keep_measurement(key, described, self._found)
