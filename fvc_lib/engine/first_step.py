"""Take one real step on a small batch before a long training: show the network, shapes, loss and gradient norm.

The step uses the code of the training (``step``), but another network and other random draws. So a training that
follows is not affected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

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
    """The results of one step on ``batch``.

    Attributes:
        batch: the samples, on the CPU.
        lines: two sentences: on the device, and on the network with its loss and gradient norm.
        network: one row per child module: ``part`` (its name), ``class`` and ``parameters`` (number of trainable ones).
        tensors: one row per input and output: ``tensor`` (its name), ``shape`` and ``dtype``.
    """

    batch: Batch
    lines: tuple[str, ...]
    network: pl.DataFrame
    tensors: pl.DataFrame


def first_step(task: Task, config: RunConfig, *, num_samples: int = 4) -> FirstStep:
    """Build the task's network, run one forward and backward pass on a small batch, and return the results.

    Args:
        task: the task to train.
        config: gives device, precision and seed.
        num_samples: size of the batch, at most the number of training samples. The samples are spread evenly over the
            training data.

    Raises:
        DataError: there is no training sample.
        UsageError: the requested device is not available.
    """
    import polars as pl  # imported here, because the rest of the engine does not need it

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
    parts = [(name, type(part).__name__, _num_trained(part.parameters())) for name, part in model.named_children()]
    parts.append(("own", "parameters", _num_trained(model.parameters(recurse=False))))
    tensors = {f"in: {name}": tensor for name, tensor in batch.tensors.items()}
    tensors.update({f"out: {name}": tensor for name, tensor in outputs.items()})
    rows = [
        (name, " × ".join(map(str, tensor.shape)), str(tensor.dtype)[len("torch.") :])
        for name, tensor in tensors.items()
    ]
    trained = _num_trained(model.parameters())
    sentence = (
        f"one step of {type(model).__name__} ({trained:,} parameters) on {number} samples: "
        f"loss {result.loss.mean():.3f}, gradient norm {float(norm):.3f}"
    )
    network = pl.DataFrame(parts, schema=["part", "class", "parameters"], orient="row")
    shown = pl.DataFrame(rows, schema=["tensor", "shape", "dtype"], orient="row")
    return FirstStep(batch, (compute.describe(), sentence), network, shown)


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
