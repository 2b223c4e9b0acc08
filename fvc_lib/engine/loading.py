"""Order the samples of an epoch, divide them into batches, and load the batches.

The order depends only on the data, epoch and seed, so a training can resume at any position. Batches are the same with
any number of loader processes.
"""

import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from fvc_lib.engine.oom_detection import first_line
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, EpochSampleSet, Sample, SampleSet, stack_samples
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory import PREFETCHED_BATCHES, memory_advice

IntArray = npt.NDArray[np.int64]
Indices = TypeVar("Indices", list[int], range)


def epoch_order(num_samples: int, epoch: int, seed: int) -> IntArray:
    """Return the order of the samples in one epoch, a permutation: (num_samples,) int64 sample indices.

    Args:
        num_samples: number of samples in the data set.
        epoch: the epoch, 0-based. Epochs differ in their order.
        seed: seed of the order.
    """
    return np.random.default_rng(stable_seed("epoch order", seed, epoch)).permutation(num_samples)


def effective_batches(order: IntArray, size: int, first: int = 0) -> list[list[int]]:
    """Return ``order``, an epoch's sample indices, divided into effective batches (the samples of one optimizer step).

    A batch is a list of ``size`` indices; the last may have fewer. The result begins with batch number ``first``
    (0-based), because the earlier batches of a resumed epoch are already done.
    """
    starts = range(first * size, order.size, size)
    return [order[start : start + size].tolist() for start in starts]


def batch_size_of(num_samples: int, size: int, number: int) -> int:
    """Return the number of samples in effective batch ``number`` (0-based) of an epoch with ``num_samples`` samples.

    It is ``size``; the last batch may have fewer samples. For a number after the last batch it is 0.
    """
    return max(0, min(size, num_samples - number * size))


def share(indices: Indices, rank: int, num_ranks: int) -> Indices:
    """Return the contiguous part of ``indices`` that belongs to the process ``rank`` (0-based) of ``num_ranks``.

    ``indices`` are, for example, the samples of an effective batch. The sizes of the parts differ by at most one, so a
    part may be empty. The parts in the order of the ranks make up ``indices``.
    """
    start = len(indices) * rank // num_ranks
    stop = len(indices) * (rank + 1) // num_ranks
    return indices[start:stop]


def batches_per_epoch(num_samples: int, size: int) -> int:
    """Return the number of effective batches in an epoch: ``num_samples`` divided by ``size``, rounded up.

    An effective batch (the samples of one optimizer step) has ``size`` samples; the last batch may have fewer.
    """
    return -(-num_samples // size)


class LoaderDiedError(FvcError):
    """The error for a data loader process that died, for example because the system killed it for lack of memory."""


class PlannedBatch(NamedTuple):
    """A batch that is to be loaded, as indices.

    ``data_set`` is the index of the data set in a list of data sets. ``samples`` are the indices of the batch's samples
    in this data set; may be empty. ``epoch`` (0-based) is the epoch for which samples are augmented, if the data set is
    an ``EpochSampleSet``. If ``epoch`` is None, samples are not augmented for an epoch.
    """

    data_set: int
    epoch: int | None
    samples: list[int]


def load_batches(
    data: SampleSet, batches: list[list[int]], *, num_workers: int, pin_memory: bool = False
) -> Iterator[Batch]:
    """Yield a batch of ``data`` for every list of sample indices in ``batches``, in order.

    ``num_workers`` is the number of loader processes; 0: load in this process. ``pin_memory`` says whether batches are
    copied to page-locked memory. The errors are those of ``load_planned``.
    """
    plan = (PlannedBatch(0, None, samples) for samples in batches)
    return load_planned([data], plan, num_workers=num_workers, pin_memory=pin_memory)


def load_planned(
    data_sets: Sequence[SampleSet], plan: Iterable[PlannedBatch], *, num_workers: int, pin_memory: bool = False
) -> Generator[Batch]:
    """Load the batches of ``plan`` in loader processes, and yield them in order, as ``Batch`` on the CPU.

    A planned batch without samples gives an empty batch. The loader processes live until the end of ``plan`` and read
    ahead across epochs, so a training waits for their start only once. If a data set has the method ``__getitems__``,
    it receives all sample indices of a batch, and may return a ``Batch``.

    Args:
        data_sets: the data sets to load from.
        plan: the batches to load.
        num_workers: number of loader processes; 0: load in this process.
        pin_memory: whether to copy batches to page-locked memory.

    Raises:
        LoaderDiedError: a loader process died.
        Exception: the data set's error for a sample that it cannot read.
    """
    loader: DataLoader[Batch] = DataLoader(
        _PlannedSamples(data_sets),  # type: ignore[arg-type]  # a map-style set need not inherit torch's class
        batch_sampler=plan,  # type: ignore[arg-type]  # torch hands its items on as they are
        num_workers=num_workers,
        collate_fn=_unchanged,  # type: ignore[arg-type]  # ``__getitems__`` gives a batch already
        pin_memory=pin_memory,
        generator=torch.Generator(),  # a separate one, so that a pass draws nothing from the model's
        prefetch_factor=PREFETCHED_BATCHES if num_workers else None,
    )
    handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    try:
        batches: Iterator[Batch] = iter(loader)
        # Torch's handler would raise at any line of the program when a loader process dies, even within an optimizer's
        # step. Without it the death is noticed some seconds later, in the wait for a batch.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        yield from batches
    except (RuntimeError, ConnectionError, EOFError) as error:
        if not num_workers or str(error).startswith("Caught "):  # the data set's own error
            raise
        raise LoaderDiedError(
            f"a loader process died, or could not hand over a batch ({first_line(error)}). The last checkpoint stands: "
            f"resume. If it was killed for memory: {memory_advice('loaders')}"
        ) from error


class _PlannedSamples:
    """A data set for torch's ``DataLoader``: its index is a ``PlannedBatch``, and its item is the loaded batch."""

    def __init__(self, data_sets: Sequence[SampleSet]) -> None:
        self._data_sets = data_sets
        self._at_epoch: dict[int, tuple[int, SampleSet]] = {}  # last epoch and its samples, by index of the data set

    def __getitems__(self, planned: PlannedBatch) -> Batch:
        if not planned.samples:
            return Batch((), {})
        data = self._data_sets[planned.data_set]
        if planned.epoch is not None and isinstance(data, EpochSampleSet):
            epoch, its_data = self._at_epoch.get(planned.data_set, (None, data))
            if epoch != planned.epoch:
                its_data = data.at_epoch(planned.epoch)
                self._at_epoch[planned.data_set] = planned.epoch, its_data
            data = its_data
        if (many := getattr(data, "__getitems__", None)) is not None:
            samples: Batch | Sequence[Sample] = many(planned.samples)
            return samples if isinstance(samples, Batch) else stack_samples(samples)
        return stack_samples([data[sample] for sample in planned.samples])


def _unchanged(batch: Batch) -> Batch:
    return batch
