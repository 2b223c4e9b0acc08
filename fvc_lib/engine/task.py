"""Define the interface between a task (a training problem) and the engine (the code that trains).

A task supplies data sets, a model, a loss and accumulators, which collect outputs and compute metrics. An effective
batch has the samples of one optimizer step. A micro-batch is the part of it that is in memory at once. A rank is one of
the processes that train a model together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """One example of a data set.

    ``sample_id`` names the sample in messages and tables. ``tensors`` has its tensors by name, without a batch
    dimension.
    """

    sample_id: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Several samples: their ids, and their tensors by name, stacked along the first dimension."""

    sample_ids: tuple[str, ...]
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def part(self, start: int, stop: int) -> Batch:
        """Return the samples ``start`` to ``stop`` - 1 as a batch whose tensors are views, not copies."""
        views = {name: tensor[start:stop] for name, tensor in self.tensors.items()}
        return Batch(self.sample_ids[start:stop], views)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on ``device``."""
        if device.type == "cpu":
            return self
        there = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return Batch(self.sample_ids, there)

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors in page-locked memory. torch's data loader calls this."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return Batch(self.sample_ids, pinned)


def stack_samples(samples: Sequence[Sample]) -> Batch:
    """Return ``samples`` as a batch. All samples must have tensors of equal names and shapes."""
    names = samples[0].tensors
    tensors = {name: torch.stack([sample.tensors[name] for sample in samples]) for name in names}
    return Batch(tuple(sample.sample_id for sample in samples), tensors)


@dataclass(frozen=True)
class LossSum:
    """The loss of a batch as two numbers: the weighted sum over samples, and the sum of the weights.

    Such sums can be added over micro-batches. Means cannot, if the weights of the micro-batches differ. Arithmetic
    changes the mean (``total / weight``). ``2 * loss`` doubles the mean. ``loss + penalty`` adds a number, or the mean
    of another loss, to the mean. ``float(loss)`` returns the mean.
    """

    total: Tensor  # scalar with a gradient
    weight: Tensor  # scalar without a gradient

    def __mul__(self, factor: float | Tensor) -> LossSum:
        return LossSum(self.total * factor, self.weight)

    def __add__(self, penalty: float | Tensor | LossSum) -> LossSum:
        added = penalty.total / penalty.weight if isinstance(penalty, LossSum) else penalty
        return LossSum(self.total + added * self.weight, self.weight)

    def __float__(self) -> float:
        return float(self.total.detach() / self.weight)

    __rmul__, __radd__ = __mul__, __add__


class LossMean:
    """A running weighted mean of losses: the sum of losses and the sum of weights over all added batches."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def update(self, loss: LossSum) -> None:
        """Add the loss of one batch."""
        self.total += float(loss.total.detach())
        self.weight += float(loss.weight.detach())

    def add(self, other: LossMean) -> None:
        """Add the sums of ``other`` to this object's sums."""
        self.total += other.total
        self.weight += other.weight

    @property
    def is_usable(self) -> bool:
        """Return whether the sum of losses is finite and the sum of weights positive, so that a step can be taken."""
        return math.isfinite(self.total) and self.weight > 0

    def mean(self) -> float:
        """Return the sum of losses divided by the sum of weights; NaN if the sum of weights is zero."""
        return self.total / self.weight if self.weight else math.nan


class SampleColumns:
    """A table of samples for accumulators: ids and tensors by name, with one row per added sample."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._parts: dict[str, list[Tensor]] = {}

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Return the ids of all samples, in the order in which they were added."""
        return tuple(self._ids)

    def add(self, sample_ids: Sequence[str], columns: Mapping[str, Tensor]) -> None:
        """Append one row per sample in ``sample_ids``.

        ``columns`` has tensors by name; their first dimension is the samples. They are stored on the CPU, detached.
        """
        self._ids.extend(sample_ids)
        for name, rows in columns.items():
            self._parts.setdefault(name, []).append(rows.detach().cpu())

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def column(self, name: str) -> Tensor:
        """Return the tensor ``name`` of all N samples, (N, ...); raise ``KeyError`` if no sample has it."""
        return torch.cat(self._parts[name])

    def to_document(self) -> dict[str, Any]:
        """Return the table as a dict that ``add_document`` reads: ``ids``, and ``columns`` with CPU tensors by name."""
        return {"ids": list(self._ids), "columns": {name: self.column(name) for name in self._parts}}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Append the samples of ``document``, which ``to_document`` of another table returned."""
        self.add(document["ids"], document["columns"])


class SampleSet(Protocol):
    """A data set whose samples are read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class Accumulator(Protocol):
    """Collect a model's outputs over batches, and compute metrics from them."""

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the outputs of one batch, by name. They are on the CPU and have no gradient."""

    def compute(self) -> dict[str, float]:
        """Return the metrics over all added batches, by name."""

    def to_document(self) -> dict[str, Any]:
        """Return all collected data as a dict that can be sent to another process.

        It may hold CPU tensors, numbers, text, and lists and dicts of them. Store values per sample in the order of the
        samples. Store a float sum as one number per batch, not as a total. Then ``add_document``, called in the order
        of the samples, gives the same metrics, to the bit, as a single pass.
        """

    def add_document(self, document: Mapping[str, Any], /) -> None:
        """Append ``document``, the data that ``to_document`` of another accumulator returned.

        Its samples follow those that were added before.
        """


class Task(Protocol):
    """The interface of a training problem that the engine can train.

    A loss is returned as two sums: of weighted losses, and of their weights. So the loss of a batch is the same if the
    batch is computed in parts.
    """

    @property
    def training_data(self) -> SampleSet:
        """Return the samples that the model learns from."""

    @property
    def validation_data(self) -> SampleSet:
        """Return the samples whose loss chooses the best epoch; never the test data."""

    def build_model(self) -> nn.Module:
        """Return a newly initialised model. The engine has seeded all random generators before the call."""

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the model's outputs by name; the first dimension of every tensor is the batch."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted loss of ``outputs``, summed over the batch, and the sum of the samples' weights."""

    def new_accumulator(self) -> Accumulator:
        """Return an empty accumulator for one pass over the validation data."""


@runtime_checkable
class JointLoss(Protocol):
    """A task that also compares the samples of an effective batch with one another, as contrastive losses do.

    Such a loss cannot be computed from one micro-batch (the part of an effective batch that is in memory at once).
    The engine therefore collects the outputs ``joint_outputs`` of the effective batch over all micro-batches and ranks.
    It computes their loss and sends the gradient back through every micro-batch (L. Gao et al., "Scaling deep
    contrastive learning batch size under memory limited setup", 2021). So the gradients do not depend on the split.
    ``forward`` must draw the same random numbers when it is called again from the same random state.

    The loss must be a sum over samples, where the term of a sample compares it with all others.
    """

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs of ``forward`` that are compared: float tensors (B, ...).

        If it is empty, no outputs are compared and the task has no joint loss.
        """

    @property
    def joint_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors in ``Batch`` that the joint loss needs, such as labels."""

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], /) -> Tensor:
        """Return the loss summed over the B samples, a scalar.

        Args:
            model: its parameters may enter the loss, such as a temperature, and then receive gradients.
            outputs: the ``joint_outputs`` of all B samples of the effective batch.
            tensors: the ``joint_tensors`` of all B samples.
        """


@runtime_checkable
class FollowsEpochs(Protocol):
    """A task whose set of trainable parameters depends on the epoch: for example, only the head at first."""

    def begin_epoch(self, model: nn.Module, epoch: int, /) -> None:
        """Set ``requires_grad`` of all parameters of ``model`` for ``epoch`` (0-based).

        The result must depend only on ``epoch``, not on how ``requires_grad`` was set before. The engine calls this at
        the beginning of every epoch, and when a training resumes within an epoch.
        ``build_model`` must return a model with ``requires_grad=True`` for every parameter that any epoch trains.
        """


@runtime_checkable
class EpochSampleSet(Protocol):
    """A data set whose samples differ from epoch to epoch, as with augmentation."""

    def at_epoch(self, epoch: int, /) -> SampleSet:
        """Return the data set with the samples of ``epoch`` (0-based).

        For one epoch the samples must be equal in every process, and after a resume. The number and order of the
        samples must be the same in all epochs.
        """
