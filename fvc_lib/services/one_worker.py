"""One thread beside the caller that does one job at a time, started while there is room for it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class OneWorker:
    """Does jobs in a thread of its own, each to its end before the next is taken.

    The thread starts with the first job and then waits for others. Where memory is short a thread may fail to start,
    or die at birth without ever saying so (``Thread.start`` then waits for ever); the first job is given early, so
    later ones meet a thread that is there already. Where it cannot be started the job is done by the caller. The
    interpreter's end does not wait: whoever needs a job done calls ``finish``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._started = False
        self._busy = False
        # The thread holds the queues and not this object, so it ends when nobody can give it jobs any more.
        weakref.finalize(self, self._jobs.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether the last job is still being done."""
        return self._busy and self._ends.empty()

    def give(self, job: Job) -> None:
        """Wait for the job before, then hand over ``job``; raises what the one before raised."""
        self.finish()
        if not self._started:
            try:
                threading.Thread(target=_work, args=(self._jobs, self._ends), name=self._name, daemon=True).start()
            except RuntimeError:  # no room for another thread
                job()
                return
            self._started = True
        self._busy = True
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait for the last job; what it raised is kept for ``finish``."""
        if self._busy:
            end = self._ends.get()
            self._ends.put(end)

    def finish(self) -> None:
        """Wait for the last job; raises what it raised, once."""
        if not self._busy:
            return
        end, self._busy = self._ends.get(), False
        if end is not None:
            raise end


def _work(jobs: queue.SimpleQueue[Job | None], ends: queue.SimpleQueue[BaseException | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised again by finish, in the thread that can act on it
            ends.put(error)
        else:
            ends.put(None)
        del job  # what it was written from is not held until the next one
