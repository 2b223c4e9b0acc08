"""Take one real step on a small batch before a long training: show the network, shapes, loss and gradient norm.

The step uses the code of the training (``step``), on a separate network with separate random draws. So it changes
nothing for a training that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.step import BatchTransaction, finish_gradients
from fvc_lib.engine.task import Batch, Task, stack_samples
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class FirstStep:
    """The results of one step on ``batch``."""

    network: str  # class of the network
    parts: tuple[tuple[str, str, int], ...]  # its children: name, class, number of trainable parameters
    tensors: tuple[tuple[str, str, str], ...]  # inputs and outputs: name, shape, dtype
    batch: Batch  # the samples, on the CPU
    loss: float  # mean over the batch, before the step
    gradient_norm: float  # L2 norm over all parameters, before clipping
    setup: tuple[str, ...]  # lines about device and precision

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(number for _, _, number in self.parts)

    def sentence(self) -> str:
        """Describe the step in one line."""
        return (
            f"one step of {self.network} ({self.num_parameters:,} parameters) on {len(self.batch)} samples: "
            f"loss {self.loss:.3f}, gradient norm {self.gradient_norm:.3f}"
        )

    def network_table(self) -> pl.DataFrame:
        """Return a table of the network's children, with columns part, class and parameters (trainable ones)."""
        import polars as pl  # the engine itself does without

        return pl.DataFrame(list(self.parts), schema=["part", "class", "parameters"], orient="row")

    def tensor_table(self) -> pl.DataFrame:
        """Return a table of inputs and outputs, with columns tensor, shape and dtype."""
        import polars as pl

        return pl.DataFrame(list(self.tensors), schema=["tensor", "shape", "dtype"], orient="row")


def first_step(task: Task, config: RunConfig, *, num_samples: int = 4) -> FirstStep:
    """Build the task's network, run one forward and backward pass on a small batch, and return the results.

    Args:
        task: the task to train.
        config: gives device, precision and seed. The caller's random generators are restored afterwards.
        num_samples: size of the batch, whose samples are spread evenly over the training data. Capped at their number.

    Raises:
        DataError: there is no training sample.
        UsageError: the requested device is not available.
    """
    compute = resolve_device(config.device, config.amp)
    data = task.training_data
    if not len(data):
        raise DataError("training data: got no sample, wanted at least one. Look at the folds and the clip store.")
    number = min(num_samples, len(data))
    with forked_random_state(stable_seed("first step", config.seed), compute.device):
        model = task.build_model().to(compute.device).train()
        batch = stack_samples([data[place * len(data) // number] for place in range(number)])
        there, precision = batch.to(compute.device), Precision(compute)
        with torch.no_grad(), precision.autocast():
            outputs = task.forward(model, there)
        result = BatchTransaction(task, model, precision, compute.device).gradients(there, number)
        scale = float(precision.scaler.get_scale()) if precision.scales_losses else 1.0
        norm = finish_gradients(model.parameters(), result.num_samples / (result.loss.weight * scale), math.inf)
    shown = [*_described("in", batch.tensors), *_described("out", outputs)]
    network, setup = type(model).__name__, (compute.describe(),)
    return FirstStep(network, _parts(model), tuple(shown), batch, result.loss.mean(), float(norm), setup)


def _described(way: str, tensors: dict[str, Tensor]) -> list[tuple[str, str, str]]:
    return [
        (f"{way}: {name}", " × ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def _parts(model: nn.Module) -> tuple[tuple[str, str, int], ...]:
    parts = [
        (name, type(part).__name__, sum(each.numel() for each in part.parameters() if each.requires_grad))
        for name, part in model.named_children()
    ]
    own = sum(each.numel() for each in model.parameters(recurse=False) if each.requires_grad)
    return tuple([*parts, ("own", "parameters", own)] if own else parts)
