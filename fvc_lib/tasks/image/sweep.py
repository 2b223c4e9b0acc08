"""What batch sizes and resolutions fit the machine, measured with a run's own images, network and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import polars as pl
import torch
from torch import Tensor, nn

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.joint_loss import joint_part
from fvc_lib.engine.memory.preflight import PreflightStore, StepMeasurement, StepRequest, circumstances
from fvc_lib.engine.memory.sweep import fits_table, measure_fits, seconds_per_sample
from fvc_lib.engine.memory.training_memory import device_budget
from fvc_lib.engine.task import Accumulator, Batch, LossSum, Outputs, Sample, Task
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory_policy import FITS, MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import MEASURED_FITS, write_table
from fvc_lib.tasks.image.training import image_split_training, read_image_parts

# ----------------------------------------------------------------------------------------------------
# Training samples like real ones but for their pictures, of any size and without a file: to see what a step takes.


@dataclass(frozen=True)
class MadeUpImages:
    """``num_samples`` times ``sample``, its square pictures grey and of another size: what a step takes does not depend
    on what it sees.

    Attributes:
        sample: a real one, with tensors (..., S, S).
        own_size: S, its pictures' side in pixels.
        image_size: the side in pixels that they get.
        num_samples: how many there are.
    """

    sample: Sample
    own_size: int
    image_size: int
    num_samples: int

    classes = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        tensors = {name: self._resized(tensor) for name, tensor in self.sample.tensors.items()}
        return Sample(f"made up {index}", tensors)

    def _resized(self, tensor: Tensor) -> Tensor:
        if not self._is_picture(tensor):
            return tensor
        grey = 0.5 if tensor.dtype.is_floating_point else 128
        return torch.full((*tensor.shape[:-2], self.image_size, self.image_size), grey, dtype=tensor.dtype)

    def _is_picture(self, tensor: Tensor) -> bool:
        return tensor.ndim >= 2 and tuple(tensor.shape[-2:]) == (self.own_size, self.own_size)


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


def requests_on_made_up_images(request: StepRequest, image_size: int) -> Callable[[int, int], StepRequest]:
    """``make(batch_size, image_size)``: ``request``'s step with so many images at once, of so many pixels.

    The task is ``request``'s but for its data, of which one training sample is read. An effective batch smaller than
    the images at once becomes as large as they are.

    Args:
        request: of the training as planned.
        image_size: side in pixels of its pictures.

    Raises:
        UsageError: no tensor of its samples is such a picture, or the task compares samples with one another.
        FvcError: the first sample cannot be read.
    """
    if joint_part(request.task) is not None:
        raise UsageError(
            "measuring what fits: got a task that compares samples with one another, wanted one of images."
        )
    sample = request.task.training_data[0]
    like = MadeUpImages(sample, image_size, image_size, 1)
    if not any(like._is_picture(tensor) for tensor in sample.tensors.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sample.tensors.items())
        raise UsageError(f"measuring what fits: got samples of {shapes}, wanted pictures of {image_size} pixels.")

    def make(batch_size: int, image_size: int) -> StepRequest:
        effective = max(request.effective_batch_size, batch_size)
        # Of a window for each loader process, so that all of them are counted.
        images = replace(like, image_size=image_size, num_samples=effective * max(1, request.num_workers))
        task = _OnMadeUpImages(request.task, images, images)
        return replace(request, task=task, micro_batch=batch_size, effective_batch_size=effective)

    return make


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
