"""Batches from a map-style data set: the same ones with any number of loader processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader

from fvc_lib.learning.task import Batch, Sample, SampleSet, stack_samples


def load_batches(
    data: SampleSet, batches: list[list[int]], *, num_workers: int, device: torch.device
) -> Iterator[Batch]:
    """The samples of each list in ``batches`` stacked on the CPU, in that order.

    A data set that can read many samples at once (``__getitems__``, which torch's loader asks for) gives the batch
    itself: of clips, stacking them one by one took longer than reading them.

    Raises:
        Whatever ``data`` raises for a sample it cannot give; a dead worker is torch's RuntimeError naming its signal.
    """
    loader: DataLoader[Batch] = DataLoader(
        data,  # type: ignore[arg-type]  # a map-style set need not inherit torch's class
        batch_sampler=batches,
        num_workers=min(num_workers, len(batches)),
        collate_fn=_stacked,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own, so that starting a pass draws nothing from the model's generator
    )
    return iter(loader)


def _stacked(samples: Batch | Sequence[Sample]) -> Batch:
    return samples if isinstance(samples, Batch) else stack_samples(samples)
