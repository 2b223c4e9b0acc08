"""Order the samples of an epoch, divide them into batches, and load the batches.

The order depends only on the data, epoch and seed, so a training can resume at any position. Batches are the same with
any number of loader processes, and after the death of a loader process.
"""

import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, EpochSampleSet, Sample, SampleSet, stack_samples
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory import PREFETCHED_BATCHES, memory_advice

IntArray = npt.NDArray[np.int64]
Indices = TypeVar("Indices", list[int], range)

MAX_RESTARTS = 3  # consecutive restarts of the loader processes without a batch between them
_WORKER_DIED = re.compile(
    r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)"
    r"|^Pin memory thread exited unexpectedly"
)


def epoch_order(num_samples: int, epoch: int, seed: int, classes: Sequence[int] | None = None) -> IntArray:
    """Return the order of the samples in one epoch: (num_samples,) int64 sample indices.

    Args:
        num_samples: number of samples in the data set.
        epoch: the epoch, 0-based. Epochs differ in their order.
        seed: seed of the order.
        classes: (num_samples,) class of every sample, to balance the classes; None: the order is a permutation. All
            classes occur equally often, up to a difference of one. Samples of a rare class are repeated, all of them
            equally often up to a difference of one. Of a common class only some samples occur, without repetition.
    """
    generator = np.random.default_rng(stable_seed("epoch order", seed, epoch))
    if classes is None:
        return generator.permutation(num_samples)
    labels = np.asarray(classes)
    kinds = np.unique(labels)
    shares = np.full(kinds.size, num_samples // kinds.size)
    shares[generator.permutation(kinds.size)[: num_samples % kinds.size]] += 1
    drawn = []
    for kind, share_of_kind in zip(kinds, shares, strict=True):
        members = np.flatnonzero(labels == kind)
        rounds = [generator.permutation(members) for _ in range(-(-share_of_kind // members.size))]
        drawn.append(np.concatenate(rounds)[:share_of_kind])
    return generator.permutation(np.concatenate(drawn))


def effective_batches(order: IntArray, size: int, first: int = 0) -> list[list[int]]:
    """Return ``order``, an epoch's sample indices, divided into effective batches (the samples of one optimizer step).

    A batch has ``size`` indices; the last may have fewer. The result begins with batch number ``first`` (0-based):
    after a resume, the earlier batches are already done.
    """
    return [order[start : start + size].tolist() for start in range(first * size, order.size, size)]


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
    return indices[len(indices) * rank // num_ranks : len(indices) * (rank + 1) // num_ranks]


def batches_per_epoch(num_samples: int, size: int) -> int:
    """Return the number of effective batches in an epoch of ``num_samples`` samples: their quotient, rounded up.

    An effective batch has ``size`` samples; the last may have fewer.
    """
    return -(-num_samples // size)


class LoaderDiedError(FvcError):
    """Loader processes died more than ``MAX_RESTARTS`` times in a row at the same batch."""


class PlannedBatch(NamedTuple):
    """A batch that is to be loaded.

    ``data_set`` is the index of its data set in a list of data sets. ``samples`` are sample indices; may be empty.
    ``epoch`` (0-based) is the epoch for which samples are augmented, if the data set is an ``EpochSampleSet``. None:
    the data set itself is read.
    """

    data_set: int
    epoch: int | None
    samples: list[int]


def load_batches(
    data: SampleSet,
    batches: list[list[int]],
    *,
    num_workers: int,
    pin_memory: bool = False,
    on_restart: Callable[[str], None] = lambda reason: None,
) -> Iterator[Batch]:
    """Yield a batch of ``data`` for every list of sample indices in ``batches``, in order.

    The other arguments and the errors are those of ``load_planned``.
    """
    plan = (PlannedBatch(0, None, samples) for samples in batches)
    return load_planned([data], plan, num_workers=num_workers, pin_memory=pin_memory, on_restart=on_restart)


def load_planned(
    data_sets: Sequence[SampleSet],
    plan: Iterable[PlannedBatch],
    *,
    num_workers: int,
    pin_memory: bool = False,
    on_restart: Callable[[str], None] = lambda reason: None,
) -> Generator[Batch]:
    """Load the batches of ``plan`` in loader processes, and yield them in order, as ``Batch`` on the CPU.

    A planned batch without samples gives an empty batch. The loader processes live until the end of ``plan`` and read
    ahead across epochs, so a training waits for their start only once. When a loader process dies, all loader processes
    are started again at the batch that is due. If a data set has the method ``__getitems__``, it receives all sample
    indices of a batch, and may return a ``Batch``.

    Args:
        data_sets: the data sets to load from.
        plan: the batches to load.
        num_workers: number of loader processes; 0: load in this process.
        pin_memory: whether to copy batches to page-locked memory.
        on_restart: called with the reason when loader processes are started again.

    Raises:
        LoaderDiedError: loader processes died more than ``MAX_RESTARTS`` times at the same batch.
        Exception: the data set's error for a sample that it cannot read.
    """
    plan, data = iter(plan), _PlannedSamples(data_sets)
    # Torch requests batches ahead of the one that it returns. They are taken from ``plan`` here, before torch requests
    # them: the death of a loader process raises an error within the request, which would end the generator ``plan``.
    ahead = PREFETCHED_BATCHES * num_workers + 1
    due = deque(islice(plan, ahead))
    num_sent = 0
    deaths = 0
    num_workers = min(num_workers, len(due))

    def sent() -> Iterator[PlannedBatch]:
        nonlocal num_sent
        while num_sent < len(due):
            num_sent += 1
            yield due[num_sent - 1]

    with _deaths_noticed(num_workers) as next_batch:
        while due:
            try:
                num_sent = 0
                loader: Iterator[Batch] = iter(
                    DataLoader(
                        data,  # type: ignore[arg-type]  # a map-style set need not inherit torch's class
                        batch_sampler=sent(),  # type: ignore[arg-type]  # torch hands its items on as they are
                        num_workers=num_workers,
                        collate_fn=_unchanged,  # type: ignore[arg-type]  # ``__getitems__`` gives a batch already
                        pin_memory=pin_memory,
                        generator=torch.Generator(),  # a separate one, so that a pass draws nothing from the model's
                        prefetch_factor=PREFETCHED_BATCHES if num_workers else None,
                    )
                )
                while due:
                    batch = next_batch(loader)
                    due.popleft()
                    num_sent, deaths = num_sent - 1, 0
                    yield batch
                    due.extend(islice(plan, ahead - len(due)))
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not (num_workers and _is_death(error)):
                    raise
                reason = str(error).partition("\n")[0] or "a loader process ended while it handed over a batch"
            deaths += 1
            if deaths > MAX_RESTARTS:
                raise LoaderDiedError(
                    f"loader processes died {deaths} times at one batch, the last time: {reason} If they are killed "
                    f"for memory: {memory_advice('loaders')}"
                )
            on_restart(reason)


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


@contextmanager
def _deaths_noticed(num_workers: int) -> Iterator[Callable[[Iterator[Batch]], Batch]]:
    """Enable torch's signal handler for dead loader processes only while the training waits for a batch.

    While the handler is enabled, it may raise at any line of the program, for example within an optimizer's step.
    Without it, a dead process is noticed only after five seconds. Nothing is changed if ``num_workers`` is 0, or in a
    thread other than the main thread, because signal handlers can be set only there.

    Yields:
        A function that returns the next batch of a loader. It raises if a loader process has died since its last call.
    """
    if not num_workers or threading.current_thread() is not threading.main_thread():
        yield next
        return
    # Torch itself sets the handler only with the first loader of a process.
    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def following(loader: Iterator[Batch]) -> Batch:
        before = signal.signal(signal.SIGCHLD, handler)
        try:
            torch._C._error_if_any_worker_fails()
            return next(loader)
        finally:
            signal.signal(signal.SIGCHLD, before)

    try:
        yield following
    finally:
        # An abandoned generator may be collected in any thread, where no handler can be set.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


def _is_death(error: BaseException) -> bool:
    """Return whether ``error``, which a ``DataLoader`` raised, means that a loader process died.

    It is False for errors that the data set raised; they begin with ``Caught ... in DataLoader worker process``.
    """
    text = str(error)
    if isinstance(error, RuntimeError):
        return bool(_WORKER_DIED.match(text))
    return not text.startswith("Caught ") or "in pin memory thread" in text.partition("\n")[0]
