"""Which samples make up which batch, and the batches themselves.

The order of samples is a pure function of epoch and seed, so that a training can go on from any position in it. Batches
are the same with any number of loader processes, and when one of them dies.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, Sample, SampleSet, stack_samples
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory.policy import memory_advice

IntArray = npt.NDArray[np.int64]

MAX_RESTARTS = 3  # in a row, without a batch between them
_WORKER_DIED = re.compile(
    r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)"
    r"|^Pin memory thread exited unexpectedly"
)


def epoch_order(
    num_samples: int, epoch: int, seed: int, classes: Sequence[int] | None = None, batch_size: int | None = None
) -> IntArray:
    """(num_samples,) int64 sample indices for one epoch.

    Without ``classes`` a permutation. With ``classes`` (num_samples,) every class gets an equal share of the places
    (they differ by at most one): a rare class's samples come several times, each as often as the others of its class
    but for one; a common class's are thinned out, without repetition. With ``batch_size`` besides, every so many
    places in a row (an effective batch, of which the last may be smaller) are shared out like that.
    """
    generator = np.random.default_rng(stable_seed("epoch order", seed, epoch))
    if classes is None:
        return generator.permutation(num_samples)
    labels = np.asarray(classes)
    kinds = np.unique(labels)
    size = batch_size or num_samples
    sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
    by_batch = np.array([_even_shares(size, kinds.size, generator) for size in sizes]).reshape(-1, kinds.size)
    shares = by_batch.sum(0)
    drawn = [
        _repeated(np.flatnonzero(labels == kind), share, generator) for kind, share in zip(kinds, shares, strict=True)
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
    """How many samples effective batch ``number`` (0-based) of an epoch has."""
    return max(0, min(size, num_samples - number * size))


def share(indices: list[int], rank: int, num_ranks: int) -> list[int]:
    """The part of one effective batch that ``rank`` computes: neighbours, as evenly as can be; empty for some of many.

    The ranks' shares one after the other are the batch.
    """
    return indices[len(indices) * rank // num_ranks : len(indices) * (rank + 1) // num_ranks]


def batches_per_epoch(num_samples: int, size: int) -> int:
    """How many effective batches an epoch has."""
    return -(-num_samples // size)


def _repeated(members: IntArray, count: int, generator: np.random.Generator) -> IntArray:
    rounds = -(-count // members.size)
    return np.concatenate([generator.permutation(members) for _ in range(rounds)])[:count]


class LoaderDiedError(FvcError):
    """Loader processes keep dying."""


def load_batches(
    data: SampleSet,
    batches: list[list[int]],
    *,
    num_workers: int,
    pin_memory: bool = False,
    on_restart: Callable[[str], None] = lambda reason: None,
) -> Iterator[Batch]:
    """The samples of each list in ``batches`` stacked on the CPU, in that order; an empty list is an empty batch.

    A data set that can read many samples at once (``__getitems__``, which torch's loader asks for) gives the batch
    itself: of clips, stacking them one by one took longer than reading them. When a loader process is killed the
    loader starts anew at the batch that is due, and ``on_restart`` is called with the reason.

    Raises:
        LoaderDiedError: they were killed again and again at the same batch.
        Whatever ``data`` raises for a sample it cannot give.
    """
    all_batches, batches = batches, [batch for batch in batches if batch]
    if len(batches) < len(all_batches):
        loaded = load_batches(data, batches, num_workers=num_workers, pin_memory=pin_memory, on_restart=on_restart)
        yield from (next(loaded) if batch else Batch((), {}) for batch in all_batches)
        return
    position, deaths = 0, 0
    with _DeathsNoticed(num_workers) as noticed:
        while position < len(batches):
            try:
                loader = iter(_loader(data, batches[position:], num_workers, pin_memory))
                while position < len(batches):
                    batch = noticed.next(loader)
                    position, deaths = position + 1, 0
                    yield batch
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


def _loader(data: SampleSet, batches: list[list[int]], num_workers: int, pin_memory: bool) -> DataLoader[Batch]:
    return DataLoader(
        data,  # type: ignore[arg-type]  # a map-style set need not inherit torch's class
        batch_sampler=batches,
        num_workers=min(num_workers, len(batches)),
        collate_fn=_stacked,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own, so that starting a pass draws nothing from the model's generator
    )


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
        """The next batch; a death since the last one raises."""
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


def _stacked(samples: Batch | Sequence[Sample]) -> Batch:
    return samples if isinstance(samples, Batch) else stack_samples(samples)
