"""Looking again and again while a run is at work, without keeping the kernel from anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from fvc_lib.analysis.run_state import run_status
from fvc_lib.analysis.wording import clean_text
from fvc_lib.services.run_paths import RunPaths

_AT_WORK = frozenset({"running", "waiting"})


class LiveRefresh:
    """A task in the running event loop that calls ``look`` every so many seconds until it says that all is over.

    Args:
        look: looks once; whether there is anything left to wait for.
        told: is given one plain sentence when the task has ended by itself.
    """

    def __init__(self, look: Callable[[], Awaitable[bool]], told: Callable[[str], None]) -> None:
        self._look = look
        self._told = told
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it looks."""
        return self._task is not None and not self._task.done()

    def start(self, seconds: float) -> None:
        """Begin, or go on with another interval.

        Raises:
            RuntimeError: there is no running event loop, as outside a notebook.
        """
        loop = asyncio.get_running_loop()
        self.stop()
        self._task = loop.create_task(self._repeat(seconds))
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """End without a word; a look that is under way is given up."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _repeat(self, seconds: float) -> None:
        while await self._look():
            await asyncio.sleep(seconds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._told(f"Refreshing stopped: {clean_text(f'{type(error).__name__}: {error}')}")
        else:
            self._told("No chosen run is at work any more: refreshing stopped.")


def any_at_work(runs: Iterable[RunPaths]) -> bool:
    """Whether something is, or may soon be, at work on any of ``runs``."""
    return any(run_status(run).get("state") in _AT_WORK for run in runs)
