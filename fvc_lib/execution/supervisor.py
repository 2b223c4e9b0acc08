"""Watching a kernel from outside: its memory while it lives, and what the system killed for memory meanwhile."""

from __future__ import annotations

import signal
import threading

import psutil

from fvc_lib.execution.oom_counter import OomKills, oom_kills
from fvc_lib.services.process_memory import ProcessTree

SAMPLE_INTERVAL_SECONDS = 0.2


class KernelWatch:
    """Samples the resident memory of a process and its children in a thread until ``stop``.

    ``peak_rss_bytes`` is the largest of the sampled sum over the tree and the kernel's own high-water mark (VmHWM). A
    stage resets that mark when its phase changes, after its own sampler has read it: a peak of the last moment before
    is in the stage's memory log, and here perhaps not.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.rss_bytes = 0  # now
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._oom_kills = oom_kills()
        self._thread = threading.Thread(target=self._watch, name="fvc-kernel-watch", daemon=True)

    def start(self, pid: int) -> None:
        """Begin watching process ``pid``."""
        self.pid, self._tree = pid, ProcessTree(pid)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; harmless when never started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def signal_kernel(self, number: signal.Signals) -> None:
        """Forward a signal to the kernel alone; one that is gone is let be."""
        if self.pid is not None:
            try:
                psutil.Process(self.pid).send_signal(number)
            except psutil.NoSuchProcess:
                return

    def oom_kills(self) -> OomKills:
        """What the system has killed for memory since this watch was made."""
        return oom_kills().since(self._oom_kills)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
            held = self._tree.measure()
            self.rss_bytes = held.tree_bytes
            self.peak_rss_bytes = max(self.peak_rss_bytes, held.tree_bytes, held.high_water_bytes)
