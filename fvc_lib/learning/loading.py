"""Batches from a map-style data set: the same ones with any number of loader processes, and when one of them dies."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader

from fvc_lib.learning.task import Batch, Sample, SampleSet, stack_samples
from fvc_lib.services.errors import FvcError

MAX_RESTARTS = 3  # in a row, without a batch between them
_WORKER_DIED = re.compile(r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)")


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
    """The samples of each list in ``batches`` stacked on the CPU, in that order.

    A data set that can read many samples at once (``__getitems__``, which torch's loader asks for) gives the batch
    itself: of clips, stacking them one by one took longer than reading them. When a loader process is killed the
    loader starts anew at the batch that is due, and ``on_restart`` is told why.

    Raises:
        LoaderDiedError: they were killed again and again at the same batch.
        Whatever ``data`` raises for a sample it cannot give.
    """
    position, deaths = 0, 0
    while position < len(batches):
        try:
            with _silent_child_signals():
                for batch in _loader(data, batches[position:], num_workers, pin_memory):
                    position, deaths = position + 1, 0
                    yield batch
            return
        except RuntimeError as error:
            if not _WORKER_DIED.match(str(error)):
                raise
            reason = str(error).partition("\n")[0]
        deaths += 1
        if deaths > MAX_RESTARTS:
            raise LoaderDiedError(
                f"loader processes died {deaths} times at one batch, the last time: {reason} If they are killed for "
                "memory, lower num_workers (0 loads in the training's own process), or give the job more memory."
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


@contextmanager
def _silent_child_signals() -> Iterator[None]:
    """Without torch's handler for dead children, which raises wherever the program happens to be, in the middle of an
    optimizer's step for one. Waiting for the next batch finds a dead worker too, within five seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Set by torch when its first loader starts, once for the process; set before, ours is not overwritten later.
    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _stacked(samples: Batch | Sequence[Sample]) -> Batch:
    return samples if isinstance(samples, Batch) else stack_samples(samples)
