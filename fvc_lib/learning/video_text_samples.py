"""Clips and texts as samples, with what the network's options want beside them: hidden frames, other tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fvc_lib.learning.random_state import stable_seed
from fvc_lib.learning.task import Batch, Sample


class BatchedSamples(Protocol):
    """A data set that reads several samples at once, such as ``video_text_data.VideoTextDataset``."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int], /) -> Batch:
        """The samples of ``indices`` as one batch."""
        ...


@dataclass(frozen=True)
class HiddenFrames:
    """Which frames of a clip masked modelling hides; the same for any order, batch, worker and rank.

    Attributes:
        num_frames: of a clip.
        num_hidden: of them.
        seed: of the draws.
        epoch: another one hides others.
    """

    num_frames: int
    num_hidden: int
    seed: int
    epoch: int = 0

    def of(self, sample_id: str) -> Tensor:
        """Bool (T,), true where a frame of this sample is hidden."""
        generator = np.random.default_rng(stable_seed("hidden frames", self.seed, self.epoch, sample_id))
        hidden = torch.zeros(self.num_frames, dtype=torch.bool)
        hidden[generator.permutation(self.num_frames)[: self.num_hidden].tolist()] = True
        return hidden


def num_hidden_frames(num_frames: int, share: float) -> int:
    """The nearest number to ``share`` of ``num_frames`` that hides at least one and leaves at least one."""
    return min(max(round(share * num_frames), 1), num_frames - 1)


@dataclass(frozen=True)
class PreparedSamples:
    """``data`` with more tensors: ``hidden`` bool (T,) where frames are hidden, and ``beside``.

    Attributes:
        data: clips and texts.
        beside: tensors by name, each (N, ...), a row per sample.
        hidden: None: nothing is hidden.
    """

    data: BatchedSamples
    beside: Mapping[str, Tensor]
    hidden: HiddenFrames | None = None

    @property
    def classes(self) -> None:
        """There are none."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch."""
        batch = self.data.__getitems__(indices)
        tensors = batch.tensors | {name: rows[list(indices)] for name, rows in self.beside.items()}
        if self.hidden is not None:
            tensors["hidden"] = torch.stack([self.hidden.of(sample_id) for sample_id in batch.sample_ids])
        return Batch(batch.sample_ids, tensors)

    def at_epoch(self, epoch: int) -> PreparedSamples:
        """The same samples, with the frames hidden that ``epoch`` (0-based) hides."""
        return self if self.hidden is None else replace(self, hidden=replace(self.hidden, epoch=epoch))
