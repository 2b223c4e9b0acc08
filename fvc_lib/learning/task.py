"""What a task gives to the engine: data sets, a model, a loss and accumulators. Nothing else is task-specific."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
        """Samples ``[start, stop)``, without a copy."""
        return Batch(self.sample_ids[start:stop], {name: t[start:stop] for name, t in self.tensors.items()})

    def to(self, device: torch.device) -> Batch:
        """The same samples on ``device``."""
        if device.type == "cpu":
            return self
        return Batch(self.sample_ids, {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()})

    def pin_memory(self) -> Batch:
        """The same samples in page-locked memory; the loader calls this."""
        return Batch(self.sample_ids, {name: t.pin_memory() for name, t in self.tensors.items()})


def stack_samples(samples: Sequence[Sample]) -> Batch:
    """A batch of ``samples``, which must have tensors of equal names and shapes."""
    names = samples[0].tensors
    tensors = {name: torch.stack([sample.tensors[name] for sample in samples]) for name in names}
    return Batch(tuple(sample.sample_id for sample in samples), tensors)


@dataclass(frozen=True)
class LossSum:
    """A loss not yet divided: the weighted sum over samples, and the sum of the weights.

    Kept apart because the mean of micro-batches' means is not the batch's mean when weights differ.

    Attributes:
        total: scalar, carries the gradient.
        weight: scalar, carries none.
    """

    total: Tensor
    weight: Tensor


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
        """A freshly initialised model; called under the engine's own random state."""
        ...

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Outputs by name, each with the batch as its first dimension."""
        ...

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """The weighted sum over the batch and the weights' sum."""
        ...

    def new_accumulator(self) -> Accumulator:
        """Empty; filled over one pass of the validation data."""
        ...
