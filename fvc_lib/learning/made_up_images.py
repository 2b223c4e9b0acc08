"""Training samples like real ones but for their pictures, of any size and without a file: to see what a step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fvc_lib.learning.joint_loss import joint_part
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.learning.task import Accumulator, Batch, LossSum, Outputs, Sample, Task
from fvc_lib.services.errors import UsageError


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
