"""What a task gives to the engine: data sets, a model, a loss and accumulators. Nothing else is task-specific."""

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
    """One training example: its id for messages, and tensors by name without a batch dimension."""

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
    """A loss not yet divided: the weighted sum over samples, and the sum of the weights.

    Kept apart because the mean of micro-batches' means is not the batch's mean when weights differ.
    """

    total: Tensor  # scalar, carries the gradient
    weight: Tensor  # scalar, carries none


def require_detached(values: Tensor, name: str) -> Tensor:
    """``values`` on the CPU.

    Raises:
        ValueError: they still require grad, so keeping them would keep a whole graph in memory.
    """
    if values.requires_grad:
        raise ValueError(
            f"{name}: got a tensor {tuple(values.shape)} that requires grad, wanted a detached one; call .detach() "
            "first, or the accumulator would hold every batch's graph."
        )
    return values.cpu()


class LossMean:
    """The weighted mean of losses over everything seen; NaN before anything was."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def update(self, loss: LossSum) -> None:
        """Add one batch.

        Raises:
            ValueError: the loss still requires grad.
        """
        self.total += float(require_detached(loss.total, "loss total"))
        self.weight += float(require_detached(loss.weight, "loss weight"))

    def add(self, other: LossMean) -> None:
        """Add everything ``other`` has seen."""
        self.total += other.total
        self.weight += other.weight

    def mean(self) -> float:
        """Sum over weight."""
        return self.total / self.weight if self.weight else math.nan


class SampleColumns:
    """What an accumulator keeps of each sample, in the order they came: its id, and rows of tensors by name."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._parts: dict[str, list[Tensor]] = {}

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The samples, in order."""
        return tuple(self._ids)

    def add(self, sample_ids: Sequence[str], columns: Mapping[str, Tensor]) -> None:
        """Add samples with their rows; ``ValueError`` where a tensor still requires grad."""
        self._ids.extend(sample_ids)
        for name, rows in columns.items():
            self._parts.setdefault(name, []).append(require_detached(rows, name))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def column(self, name: str) -> Tensor:
        """(N, ...), all rows of one tensor, of which some were added."""
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
        """(N,) what balanced sampling draws evenly from; None where that makes no sense."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class Accumulator(Protocol):
    """Gathers over batches what metrics need. Receives CPU tensors that carry no gradient."""

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch."""
        ...

    def compute(self) -> dict[str, float]:
        """Metrics by name over everything added."""
        ...

    def to_document(self) -> dict[str, Any]:
        """Everything added, for another process: tensors on the CPU, numbers, text, and lists and dicts of them.

        What is per sample stays per sample and in order, and sums stay apart by batch where their order rounds: after
        ``add_document`` in the order of the samples the metrics are those of one pass, to the bit.
        """
        ...

    def add_document(self, document: Mapping[str, Any], /) -> None:
        """Add what another accumulator of the same kind gathered; its samples come after all added so far."""
        ...


class Task(Protocol):
    """What the engine trains. Losses are sums with weights so that a batch may be split without changing the result."""

    @property
    def training_data(self) -> SampleSet:
        """What is learned from."""
        ...

    @property
    def validation_data(self) -> SampleSet:
        """What chooses the epoch; never the test data."""
        ...

    def build_model(self) -> nn.Module:
        """Return a freshly initialised model; called under the engine's own random state."""
        ...

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return outputs by name, each with the batch as its first dimension."""
        ...

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted sum over the batch and the weights' sum."""
        ...

    def new_accumulator(self) -> Accumulator:
        """Empty; filled over one pass of the validation data."""
        ...


@runtime_checkable
class JointLoss(Protocol):
    """A task that also compares the samples of an effective batch with one another, as contrastive losses do.

    Such a loss is no sum over samples, so no micro-batch has it. The engine collects the named outputs of the whole
    effective batch, over all micro-batches and ranks, asks for their loss once, and carries its gradient back into
    every micro-batch (L. Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021):
    the gradients are those of the whole batch at once, however it is split. ``forward`` must draw the same random
    numbers when it is called again from the same random state.

    The loss itself is a sum over samples of what each has to say of all the others, so it is computed some rows at a
    time, and each rank computes its own: no process holds B x B of anything.
    """

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """Names of outputs of ``forward`` that are compared; float, the batch as first dimension. Empty: none now."""
        ...

    @property
    def joint_tensors(self) -> tuple[str, ...]:
        """Names of the batch's tensors that say which samples belong together."""
        ...

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range, /) -> Tensor:
        """Return the share of samples ``[rows.start, rows.stop)`` in the sum over all samples, a scalar.

        Args:
            model: may be read: a temperature gets its gradient too.
            outputs: of all samples of the effective batch.
            tensors: of all of them.
            rows: whose share; with B samples in all, memory of the order len(rows) x B may be taken, not B x B.
        """
        ...


@runtime_checkable
class BoundedGradients(Protocol):
    """A module of a model that changes its gradients once they are those of a whole effective batch of all ranks.

    What it does in its own backward pass it does to parts: of a micro-batch, or of a rank's share.
    """

    def bound_gradients(self) -> None:
        """Change ``p.grad`` of its own parameters, which may be None; on every rank alike."""
        ...


@runtime_checkable
class FollowsEpochs(Protocol):
    """A task whose trainable parameters change from epoch to epoch."""

    def begin_epoch(self, model: nn.Module, epoch: int, /) -> None:
        """Set ``requires_grad`` of the parameters for ``epoch`` (0-based), whatever it was before.

        Called at the beginning of each epoch and when a training goes on within one. A parameter that is to be trained
        at any time must ask for a gradient in the model as it was built.
        """
        ...


@runtime_checkable
class ScalesRates(Protocol):
    """A task whose parameters learn at different rates."""

    def rate_shares(self, model: nn.Module, /) -> Mapping[nn.Parameter, float]:
        """Return factors of the learning rate by parameter; 1 for parameters that are not named."""
        ...


@dataclass(frozen=True)
class Stream:
    """How samples lie in shards that are read one after the other.

    ``shards`` and ``places`` int64 (N,): in which one each sample lies, and where in it. ``buffer``: among how many
    samples, at least 1, the next one is drawn.
    """

    shards: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    buffer: int


@runtime_checkable
class StreamedSampleSet(Protocol):
    """A data set that may be slow to read in any order."""

    @property
    def stream(self) -> Stream | None:
        """In which order it is read fast; None: in any."""
        ...


@runtime_checkable
class EpochSampleSet(Protocol):
    """A data set whose samples differ from epoch to epoch, as with augmentation."""

    def at_epoch(self, epoch: int, /) -> SampleSet:
        """Return the samples of ``epoch`` (0-based): as many, in the same order, the same in any process or attempt."""
        ...
