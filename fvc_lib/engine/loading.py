"""Which samples make up which batch, and the batches themselves.

The order of samples is a pure function of epoch and seed, so that a training can go on from any position in it. Batches
are the same with any number of loader processes, and when one of them dies.
"""

import itertools
import mmap
import multiprocessing
import os
import re
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, EpochSampleSet, Sample, SampleSet, Stream, stack_samples
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory.policy import PREFETCHED_BATCHES, memory_advice

IntArray = npt.NDArray[np.int64]

MAX_RESTARTS = 3  # in a row, without a batch between them
_WORKER_DIED = re.compile(
    r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)"
    r"|^Pin memory thread exited unexpectedly"
)


def epoch_order(
    num_samples: int,
    epoch: int,
    seed: int,
    classes: Sequence[int] | None = None,
    batch_size: int | None = None,
    stream: Stream | None = None,
) -> IntArray:
    """(num_samples,) int64 sample indices for one epoch.

    Without ``classes`` a permutation. With ``classes`` (num_samples,) every class gets an equal share of the places
    (they differ by at most one): a rare class's samples come several times, each as often as the others of its class
    but for one; a common class's are thinned out, without repetition. With ``batch_size`` besides, every so many
    places in a row (an effective batch, of which the last may be smaller) are shared out like that.

    With ``stream`` samples are drawn as a shuffle buffer draws them: shards come in a drawn order, their samples go one
    after the other into a buffer of that many, and each that comes in takes the place of one drawn from it.
    """
    generator = np.random.default_rng(stable_seed("epoch order", seed, epoch))
    shard_order = generator.permutation(int(stream.shards.max()) + 1) if stream is not None else None

    def shuffled(members: IntArray) -> IntArray:
        if stream is None or shard_order is None:
            return generator.permutation(members)
        read = members[np.lexsort((stream.places[members], shard_order[stream.shards[members]]))]
        return _buffered(read, stream.buffer, generator)

    if classes is None:
        return shuffled(np.arange(num_samples))
    labels = np.asarray(classes)
    kinds = np.unique(labels)
    size = batch_size or num_samples
    sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
    by_batch = np.array([_even_shares(size, kinds.size, generator) for size in sizes]).reshape(-1, kinds.size)
    shares = by_batch.sum(0)
    drawn = [
        _repeated(np.flatnonzero(labels == kind), share, shuffled) for kind, share in zip(kinds, shares, strict=True)
    ]
    ends = by_batch.cumsum(0)
    batches = [
        np.concatenate([own[end - share : end] for own, share, end in zip(drawn, row, at, strict=True)])
        for row, at in zip(by_batch, ends, strict=True)
    ]
    return np.concatenate([generator.permutation(batch) for batch in batches])


def _even_shares(num_places: int, num_kinds: int, generator: np.random.Generator) -> IntArray:
    """(num_kinds,) that differ by at most one and add up to ``num_places``; who gets one more is drawn."""
    shares = np.full(num_kinds, num_places // num_kinds)
    shares[generator.permutation(num_kinds)[: num_places % num_kinds]] += 1
    return shares


def effective_batches(order: IntArray, size: int, first: int = 0) -> list[list[int]]:
    """``order`` cut into effective batches of ``size`` (the last may be smaller), from number ``first`` on."""
    return [order[start : start + size].tolist() for start in range(first * size, order.size, size)]


def batch_size_of(num_samples: int, size: int, number: int) -> int:
    """Return the number of samples of effective batch ``number`` (0-based) of an epoch."""
    return max(0, min(size, num_samples - number * size))


def share(indices: list[int], rank: int, num_ranks: int) -> list[int]:
    """Return the part of one effective batch that ``rank`` computes: neighbours, as even as can be, maybe none.

    The ranks' shares one after the other are the batch.
    """
    return indices[len(indices) * rank // num_ranks : len(indices) * (rank + 1) // num_ranks]


def batches_per_epoch(num_samples: int, size: int) -> int:
    """Return the number of effective batches of an epoch."""
    return -(-num_samples // size)


def _repeated(members: IntArray, count: int, shuffled: Callable[[IntArray], IntArray]) -> IntArray:
    rounds = -(-count // members.size)
    return np.concatenate([shuffled(members) for _ in range(rounds)])[:count]


def _buffered(read: IntArray, buffer: int, generator: np.random.Generator) -> IntArray:
    """``read`` as it comes out of a shuffle buffer."""
    held, out = read[:buffer].copy(), np.empty_like(read)
    drawn = generator.integers(buffer, size=max(0, read.size - buffer)).tolist()
    for number, (place, coming) in enumerate(zip(drawn, read[buffer:].tolist(), strict=True)):
        out[number] = held[place]
        held[place] = coming
    out[len(drawn) :] = generator.permutation(held)
    return out


class LoaderDiedError(FvcError):
    """Loader processes keep dying."""


class PlannedBatch(NamedTuple):
    """One batch of a plan: the place of its data set among those that are loaded from, the epoch whose samples these
    are (None: the data as they are), and which.
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
    """Load the samples of each list in ``batches``, as ``load_planned``."""
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
    """Load the batches of ``plan`` in order, stacked on the CPU; without samples a batch is empty.

    The loader processes live until the plan's end and read ahead across whatever is one pass or epoch to the caller, so
    a training waits for them once: started anew for every pass they took 16 % of the demo's time.

    A data set that can read many samples at once (``__getitems__``) gives the batch itself: of clips, stacking them one
    by one took longer than reading them. When a loader process is killed the loader starts anew at the batch that is
    due, and ``on_restart`` is called with the reason.

    Raises:
        LoaderDiedError: they were killed again and again at the same batch.
        Whatever a data set raises for a sample it cannot give.
    """
    plan, data = iter(plan), _PlannedSamples(data_sets)
    # What torch may ask for before it gives the next batch is taken from the plan here, and not where torch asks: a
    # death is raised in the midst of that, and would end a generator for good.
    ahead = PREFETCHED_BATCHES * num_workers + 1
    due, num_sent, deaths = deque(islice(plan, ahead)), 0, 0
    num_workers = min(num_workers, len(due))

    def sent(slots: _Slots) -> Iterator[_Asked]:
        nonlocal num_sent
        while num_sent < len(due):
            num_sent += 1
            yield _Asked(due[num_sent - 1], slots.take())

    with _DeathsNoticed(num_workers) as noticed:
        while due:
            try:
                num_sent = 0
                with closing(_Slots(ahead + 1 if num_workers else 0)) as slots:
                    loader = iter(_loader(_Fetched(data, slots), sent(slots), num_workers, pin_memory))
                    while due:
                        batch = noticed.next(loader)
                        due.popleft()
                        num_sent, deaths = num_sent - 1, 0
                        yield batch
                        del batch  # its slot may serve again
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


def _loader(data: "_Fetched", batches: Iterator["_Asked"], num_workers: int, pin_memory: bool) -> DataLoader[Batch]:
    return DataLoader(
        data,  # type: ignore[arg-type]  # a map-style set need not inherit torch's class
        batch_sampler=batches,  # type: ignore[arg-type]  # torch hands its items on as they are
        num_workers=num_workers,
        collate_fn=_unchanged,  # type: ignore[arg-type]  # gets what ``__getitems__`` gives, which is a batch already
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own, so that starting a pass draws nothing from the model's generator
        prefetch_factor=PREFETCHED_BATCHES if num_workers else None,
    )


class _PlannedSamples:
    """What planned batches are made from, in whatever process."""

    def __init__(self, data_sets: Sequence[SampleSet]) -> None:
        self._data_sets = data_sets
        self._at_epoch: dict[int, tuple[int, SampleSet]] = {}  # by data set, the last one asked for

    def batch(self, planned: PlannedBatch) -> Batch:
        """Its samples, stacked."""
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


# How a batch comes from a loader process: large tensors in memory that both have, all else in the message itself.
# Torch would make a new shared file for every tensor, whose descriptor is asked of the loader process over a socket:
# of a batch of 38 MB that took 11 ms of the training's processor time, and 40 of the loader's.

# Of a tensor that goes into a slot. What is kept of a batch for a whole pass is smaller, and so many messages go into
# the pipe that no loader process is left behind, waiting to write, when the training is killed.
_LEAST_BYTES = 1 << 12
_ALIGNED = 64
_NUMBERS = itertools.count()


class _Asked(NamedTuple):
    """What a loader process is sent: which batch, and the slot for it; None: to be handed over by torch."""

    planned: PlannedBatch
    slot: int | None


class _Place(NamedTuple):
    """Where in a slot a tensor lies."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class _Slots:
    """Nameless files (memfd) that forked loader processes have as well; each holds the large tensors of a batch.

    A slot serves again once nothing refers to the tensors that lay in it, whoever kept them; where none is free, or the
    system has no such files or does not fork, torch hands the batch over. A file grows as it must and never shrinks.
    """

    def __init__(self, count: int) -> None:
        usable = count and hasattr(os, "memfd_create") and multiprocessing.get_start_method() == "fork"
        self._files = [os.memfd_create("fvc batch") for _ in range(count if usable else 0)]
        self._maps: dict[int, mmap.mmap] = {}  # this process's
        self._taken = [False] * len(self._files)  # sent and not come back
        self._views: list[list[weakref.ref[Any]]] = [[] for _ in self._files]
        self.number = next(_NUMBERS)
        _SLOTS[self.number] = self

    def take(self) -> int | None:
        """Reserve a free slot until its batch has arrived; return None if all are in use."""
        for slot, views in enumerate(self._views):
            if not self._taken[slot] and all(view() is None for view in views):
                self._taken[slot] = True
                return slot
        return None

    def put(self, slot: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy the large ones of ``tensors`` into ``slot``; what the message says of each."""
        end, said = 0, dict[str, Any]()
        for name, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes >= _LEAST_BYTES:
                said[name] = _Place(end, num_bytes, tensor.dtype, tensor.shape)
                end += -(-num_bytes // _ALIGNED) * _ALIGNED
            else:
                # an array is sent as its bytes; there is none of bfloat16
                said[name] = tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()
        for name, place in said.items():
            if isinstance(place, _Place):
                held, count = self._map(slot, end), tensors[name].numel()
                into = torch.frombuffer(held, dtype=place.dtype, count=count, offset=place.start)
                into.view(place.shape).copy_(tensors[name])
        return said

    def get(self, slot: int, said: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors that ``put`` stored; large ones are views of ``slot``."""
        tensors, views = {}, []
        end = max((what.start + what.num_bytes for what in said.values() if isinstance(what, _Place)), default=0)
        for name, what in said.items():
            if isinstance(what, _Place):
                bytes_ = np.frombuffer(self._map(slot, end), np.uint8, what.num_bytes, what.start)
                views.append(weakref.ref(bytes_))  # lives as long as any tensor that shares its memory
                tensors[name] = torch.from_numpy(bytes_).view(what.dtype).view(what.shape)
            else:
                tensors[name] = what if isinstance(what, Tensor) else torch.from_numpy(what)
        self._views[slot] = views
        self._taken[slot] = False
        return tensors

    def close(self) -> None:
        """Give the files back; what still lies in one lives as long as its tensors."""
        _SLOTS.pop(self.number, None)
        self._maps.clear()
        while self._files:
            os.close(self._files.pop())

    def _map(self, slot: int, num_bytes: int) -> mmap.mmap:
        held = self._maps.get(slot)
        if held is None or len(held) < num_bytes:
            if os.fstat(self._files[slot]).st_size < num_bytes:
                os.ftruncate(self._files[slot], num_bytes)
            held = self._maps[slot] = mmap.mmap(self._files[slot], num_bytes)
        return held


_SLOTS: dict[int, _Slots] = {}  # by number, for messages that come in


class _Message:
    """A batch in a slot; unpickled it is the batch."""

    def __init__(self, slots: int, slot: int, sample_ids: tuple[str, ...], said: dict[str, Any]) -> None:
        self._contents = slots, slot, sample_ids, said

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._contents


def _received(number: int, slot: int, sample_ids: tuple[str, ...], said: dict[str, Any]) -> Batch:
    slots = _SLOTS.get(number)
    if slots is None:  # the loader is given up; what its thread still takes in nobody reads
        return Batch((), {})
    return Batch(sample_ids, slots.get(slot, said))


class _Fetched:
    """What torch's loader asks for batches, in whatever process."""

    def __init__(self, data: _PlannedSamples, slots: _Slots) -> None:
        self._data, self._slots = data, slots

    def __getitems__(self, asked: _Asked) -> Batch | _Message:
        batch = self._data.batch(asked.planned)
        if asked.slot is None:
            return batch
        return _Message(self._slots.number, asked.slot, batch.sample_ids, self._slots.put(asked.slot, batch.tensors))


class _DeathsNoticed:
    """Lets torch's handler for dead children raise while a batch is waited for, and at no other time.

    By itself it raises wherever the program happens to be, in the middle of an optimizer's step for one. Without it a
    dead worker is noticed only after five seconds.
    """

    def __init__(self, num_workers: int) -> None:
        # Torch sets no handler in another thread, and without processes nothing can die.
        self._applies = num_workers > 0 and threading.current_thread() is threading.main_thread()
        self._handler: Any = None

    def next(self, loader: Iterator[Batch]) -> Batch:
        """Return the next batch; raise if a loader process died since the last one."""
        if not self._applies:
            return next(loader)
        before = signal.signal(signal.SIGCHLD, self._handler)
        try:
            torch._C._error_if_any_worker_fails()
            return next(loader)
        finally:
            signal.signal(signal.SIGCHLD, before)

    def __enter__(self) -> Self:
        if self._applies:
            # Torch sets it once in a process, with its first loader; after that nothing of torch's changes it again.
            torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
            self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A generator that is given up may be collected in any thread, where no handler can be set.
        if self._applies and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, self._handler)


def _is_death(error: BaseException) -> bool:
    """Whether a loader process died, or what it was handing over broke off.

    An error of the data's own comes as ``Caught ... in DataLoader worker process``.
    """
    text = str(error)
    if isinstance(error, RuntimeError):
        return bool(_WORKER_DIED.match(text))
    return not text.startswith("Caught ") or "in pin memory thread" in text.partition("\n")[0]
