"""One thread beside the caller that does one job at a time, started while there is room for it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

Job = Callable[[], None]
_Task = tuple[Job, "Future[None]"]


class OneWorker:
    """Does jobs in a thread of its own, each to its end before the next is taken.

    The thread starts with the first job and then waits for others. Where memory is short a thread may fail to start,
    or die at birth without ever saying so (``Thread.start`` then waits for ever); the first job is given early, so
    later ones meet a thread that is there already. Where it cannot be started the job is done by the caller. The
    interpreter's end does not wait: whoever needs a job done calls ``finish``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._started = False
        self._last: Future[None] | None = None
        # The thread holds the queue and not this object, so it ends when nobody can give it jobs any more.
        weakref.finalize(self, self._tasks.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether the last job is still being done."""
        return self._last is not None and not self._last.done()

    def give(self, job: Job) -> None:
        """Wait for the job before, then hand over ``job``; raises what the one before raised."""
        self.finish()
        self._last = Future()
        if self._has_thread():
            self._tasks.put((job, self._last))
        else:
            _do(job, self._last)

    def wait(self) -> None:
        """Wait for the last job; what it raised is kept for ``finish``."""
        if self._last is not None:
            self._last.exception()

    def finish(self) -> None:
        """Wait for the last job; raises what it raised, once."""
        if self._last is not None:
            error = self._last.exception()
            self._last = None
            if error is not None:
                raise error

    def _has_thread(self) -> bool:
        if not self._started:
            try:
                threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True).start()
            except RuntimeError:  # no room for another thread
                return False
            self._started = True
        return True


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        _do(*task)
        del task  # what it was written from is not held until the next one


def _do(job: Job, end: Future[None]) -> None:
    try:
        job()
    except BaseException as error:  # noqa: BLE001 - raised again by finish, in the thread that can act on it
        end.set_exception(error.with_traceback(None))  # which would hold what the job was made from
    else:
        end.set_result(None)
