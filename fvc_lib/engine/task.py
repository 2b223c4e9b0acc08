"""The interface between a task and the engine (the code that trains).

A task gives the engine data sets, a model, a loss and accumulators (which gather what metrics need).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """One example: its id, which messages name, and its tensors by name, without a batch dimension."""

    sample_id: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Samples stacked along the first dimension of every tensor."""

    sample_ids: tuple[str, ...]
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def part(self, start: int, stop: int) -> Batch:
        """Return samples ``[start, stop)``, without a copy."""
        return Batch(self.sample_ids[start:stop], {name: t[start:stop] for name, t in self.tensors.items()})

    def to(self, device: torch.device) -> Batch:
        """Return the same samples on ``device``."""
        if device.type == "cpu":
            return self
        return Batch(self.sample_ids, {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()})

    def pin_memory(self) -> Batch:
        """Return the same samples in page-locked memory; the loader calls this."""
        return Batch(self.sample_ids, {name: t.pin_memory() for name, t in self.tensors.items()})


def stack_samples(samples: Sequence[Sample]) -> Batch:
    """Stack ``samples``, which must have tensors of equal names and shapes."""
    names = samples[0].tensors
    tensors = {name: torch.stack([sample.tensors[name] for sample in samples]) for name in names}
    return Batch(tuple(sample.sample_id for sample in samples), tensors)


@dataclass(frozen=True)
class LossSum:
    """A loss as two numbers: the weighted sum over samples, and the sum of the weights.

    They are stored separately because the mean of micro-batches' means is not the batch's mean when weights differ.
    """

    total: Tensor  # scalar, carries the gradient
    weight: Tensor  # scalar, carries none


class LossMean:
    """The weighted mean of all losses added so far; NaN while their weights sum to zero."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def update(self, loss: LossSum) -> None:
        """Add one batch."""
        self.total += float(loss.total.detach())
        self.weight += float(loss.weight.detach())

    def add(self, other: LossMean) -> None:
        """Add all losses of ``other``."""
        self.total += other.total
        self.weight += other.weight

    @property
    def is_usable(self) -> bool:
        """Whether the sum is finite and the weight positive, so that a step can be taken."""
        return math.isfinite(self.total) and self.weight > 0

    def mean(self) -> float:
        """Return the sum of losses divided by the sum of weights; NaN if the latter is zero."""
        return self.total / self.weight if self.weight else math.nan


class SampleColumns:
    """Ids and tensor rows of samples, in the order in which they were added, for use in an accumulator."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._parts: dict[str, list[Tensor]] = {}

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The ids of all samples, in the order in which they were added."""
        return tuple(self._ids)

    def add(self, sample_ids: Sequence[str], columns: Mapping[str, Tensor]) -> None:
        """Add samples; ``columns`` has one row per sample in each tensor, which is stored without its graph."""
        self._ids.extend(sample_ids)
        for name, rows in columns.items():
            self._parts.setdefault(name, []).append(rows.detach().cpu())

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def column(self, name: str) -> Tensor:
        """Return all rows of tensor ``name``, (N, ...); ``KeyError`` if none was added."""
        return torch.cat(self._parts[name])

    def to_document(self) -> dict[str, Any]:
        """See ``Accumulator``."""
        return {"ids": list(self._ids), "columns": {name: self.column(name) for name in self._parts}}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """See ``Accumulator``."""
        self.add(document["ids"], document["columns"])


class SampleSet(Protocol):
    """A map-style data set."""

    @property
    def classes(self) -> Sequence[int] | None:
        """(N,) the class of each sample, for balanced sampling; None if the data has no classes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class Accumulator(Protocol):
    """Gather outputs over batches and compute metrics from them. The tensors are on the CPU and carry no gradient."""

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch."""

    def compute(self) -> dict[str, float]:
        """Return the metrics by name over all batches added."""

    def to_document(self) -> dict[str, Any]:
        """Return everything added, for another process: CPU tensors, numbers, text, and lists and dicts of them.

        Keep values per sample, in order, and keep a rounded sum per batch. Then ``add_document``, called in the order
        of the samples, gives the metrics of a single pass to the bit.
        """

    def add_document(self, document: Mapping[str, Any], /) -> None:
        """Add the ``to_document`` of another accumulator of the same class, after all samples added so far."""


class Task(Protocol):
    """A training problem for the engine.

    Losses are sums with weights, so that a batch may be split without changing the result.
    """

    @property
    def training_data(self) -> SampleSet:
        """The samples that the model learns from."""

    @property
    def validation_data(self) -> SampleSet:
        """The samples whose loss chooses the best epoch; never the test data."""

    def build_model(self) -> nn.Module:
        """Return a newly initialised model. The engine has seeded all random generators before the call."""

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return outputs by name; the first dimension of every tensor is the batch."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted loss, summed over the batch, and the sum of the weights."""

    def new_accumulator(self) -> Accumulator:
        """Return an empty accumulator for one pass over the validation data."""


@runtime_checkable
class JointLoss(Protocol):
    """A task that also compares the samples of an effective batch with one another, as contrastive losses do.

    Such a loss cannot be computed from one micro-batch (the part of an effective batch that is in memory at once).
    The engine therefore collects the named outputs of the whole effective batch, over all micro-batches and ranks. It
    computes their loss and sends the gradient back through every micro-batch (L. Gao et al., "Scaling deep contrastive
    learning batch size under memory limited setup", 2021). So the gradients do not depend on how the batch is split.
    ``forward`` must draw the same random numbers when it is called again from the same random state.

    The loss must be a sum over samples, where the term of a sample compares it with all others. Every rank computes
    the terms of its own samples, some rows at a time, so no process holds a B x B matrix.
    """

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of ``forward`` that are compared: float, (B, ...). Empty: nothing is compared."""

    @property
    def joint_tensors(self) -> tuple[str, ...]:
        """Names of the tensors of ``Batch`` that the joint loss needs, such as labels."""

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range, /) -> Tensor:
        """Return the loss summed over samples ``[rows.start, rows.stop)``, a scalar.

        Args:
            model: its parameters may enter the loss, such as a temperature, and then receive gradients.
            outputs: the ``joint_outputs`` of all B samples of the effective batch.
            tensors: the ``joint_tensors`` of all B samples.
            rows: the samples whose terms are summed. Use memory of the order len(rows) x B, not B x B.
        """


@runtime_checkable
class BoundedGradients(Protocol):
    """A module that changes its gradients after they were summed over a whole effective batch and all ranks.

    In its backward pass a module sees only the gradients of one micro-batch of one rank.
    """

    def bound_gradients(self) -> None:
        """Change ``p.grad`` (may be None) of this module's parameters in place, the same way on every rank."""


@runtime_checkable
class FollowsEpochs(Protocol):
    """A task whose trainable parameters change from epoch to epoch."""

    def begin_epoch(self, model: nn.Module, epoch: int, /) -> None:
        """Set ``requires_grad`` of all parameters for ``epoch`` (0-based), whatever the current values are.

        The engine calls this at the beginning of every epoch, and when a training resumes within an epoch.
        ``build_model`` must return ``requires_grad=True`` for every parameter that is trained in any epoch.
        """


@dataclass(frozen=True)
class Stream:
    """The positions of samples in shards (files that are read from beginning to end).

    Attributes:
        shards: (N,) int64, number of the shard that holds each sample.
        places: (N,) int64, position of each sample within its shard.
        buffer: size of the shuffle buffer, from which the next sample is drawn; at least 1.
    """

    shards: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    buffer: int


@runtime_checkable
class StreamedSampleSet(Protocol):
    """A data set that may be slow to read in any order."""

    @property
    def stream(self) -> Stream | None:
        """The positions of the samples in shards; None: any reading order is fast."""


@runtime_checkable
class EpochSampleSet(Protocol):
    """A data set whose samples differ from epoch to epoch, as with augmentation."""

    def at_epoch(self, epoch: int, /) -> SampleSet:
        """Return the samples of ``epoch`` (0-based), equal in every process and attempt.

        Their number and order are the same in all epochs.
        """
