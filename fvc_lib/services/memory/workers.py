"""How many worker processes may work at once: one per core, as many as memory holds, no more than were asked for.

A pool begins with what a worker was measured to take, and goes on with what its own workers come to: where that is more
than memory holds, fewer work from then on. Who watches a stage's memory (``watch``) sets the budget and hears how
many there were; by that a later plan reckons for its own machine.
"""

from typing import Protocol

from fvc_lib.services.memory.budget import MemoryBudget, memory_budget, resident_and_peak_bytes, resident_bytes
from fvc_lib.services.memory.policy import EventDetail

# Peak resident memory of one worker process, of small and 1080p videos (Linux, x86-64). One whole long video took a
# decoder 322 MB: what is larger than these a pool finds out for itself.
WORKER_BYTES = 105_000_000  # that probes or decodes: 89 of 1080p h264, 97 to 102 of hevc and AV1, 127 of ten bits
FEATURE_BYTES = 140_000_000  # that measures forensic features
CROP_BYTES = 1 << 30  # with torch and a network that finds what to crop

EVENT = "workers"


class PoolWatcher(Protocol):
    """Who watches the memory of what this process does; ``MemorySampler`` is one."""

    budget: MemoryBudget

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Hears of a pool that ended."""


_watchers: list[PoolWatcher] = []


def watch(watcher: PoolWatcher) -> None:
    """From now on pools of this process keep to the watcher's budget and tell it how many workers they had."""
    _watchers.append(watcher)


def unwatch(watcher: PoolWatcher) -> None:
    """As it was before ``watch``; the last that is left counts."""
    _watchers.remove(watcher)


def most_workers(asked: int, cores: int, worker_bytes: int, budget_bytes: int, beside_bytes: int) -> int:
    """At least one. ``asked``: 0 for one per core; ``beside_bytes``: what the budget holds besides the workers."""
    return max(1, min(asked or cores, (budget_bytes - beside_bytes) // max(1, worker_bytes)))


class PoolBound:
    """How many workers of one pool may work now.

    ``asked``: 0 for one per ``cores``; ``worker_bytes``: what one is known to take. ``num_items``: no more than those.
    """

    def __init__(self, asked: int, cores: int, worker_bytes: int, num_items: int) -> None:
        self.most = min(asked or cores, num_items)
        self._asked, self._cores, self._worker_bytes = asked, cores, worker_bytes
        # A pool of one by nature is nobody's news.
        self._watcher = _watchers[-1] if _watchers and num_items > 1 and asked != 1 else None
        self._budget = _watchers[-1].budget if _watchers else memory_budget()
        self._told = 0
        self._tell(self.now())

    def now(self) -> int:
        """With what this process holds at the moment; at least one."""
        beside, most = resident_bytes(), max(1, self.most)
        return most_workers(most, self._cores, self._worker_bytes, self._budget.total_bytes, beside)

    def saw(self, pid: int) -> None:
        """A worker has answered; it may have come to take more than was known."""
        taken = resident_and_peak_bytes(pid)[1]
        if taken > self._worker_bytes:
            self._worker_bytes = taken
            if (now := self.now()) < self._told:
                self._tell(now)

    def halve(self, working: int) -> None:
        """One of so many that worked was killed: fewer from now on."""
        self.most = max(1, min(self.most, working // 2))
        self._tell(self.most)

    def _tell(self, workers: int) -> None:
        """Whoever watches the stage hears how many workers there are."""
        self._told = workers
        if self._watcher is None:
            return
        one = "1 worker process" if workers == 1 else f"{workers} worker processes"
        asked = f"{self._asked} asked for" if self._asked else f"{self._cores} cores"
        beside_mb = round(resident_bytes() / 1e6, 2)
        self._watcher.event(
            EVENT,
            f"{one} at once, of up to {self._worker_bytes / 1e6:.0f} MB; {asked}; {self._budget.describe()}",
            workers=workers,
            worker_mb=round(self._worker_bytes / 1e6, 2),
            beside_mb=beside_mb,
        )
