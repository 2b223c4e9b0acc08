"""Batches from a map-style data set: the same ones with any number of loader processes, and when one of them dies."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from fvc_lib.engine.task import Batch, Sample, SampleSet, stack_samples
from fvc_lib.services.errors import FvcError

MAX_RESTARTS = 3  # in a row, without a batch between them
_WORKER_DIED = re.compile(
    r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)"
    r"|^Pin memory thread exited unexpectedly"
)


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
    loader starts anew at the batch that is due, and ``on_restart`` is told why.

    Raises:
        LoaderDiedError: they were killed again and again at the same batch.
        Whatever ``data`` raises for a sample it cannot give.
    """
    asked, batches = batches, [batch for batch in batches if batch]
    if len(batches) < len(asked):
        loaded = load_batches(data, batches, num_workers=num_workers, pin_memory=pin_memory, on_restart=on_restart)
        yield from (next(loaded) if batch else Batch((), {}) for batch in asked)
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
                    "for memory, lower num_workers (0 loads in the training's own process), or give the job more."
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

    def __enter__(self) -> _DeathsNoticed:
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
