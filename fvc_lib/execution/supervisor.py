"""Watching a kernel from outside: its memory while it lives, and what ended it when it died."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import psutil

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
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._oom_kills = oom_kill_count()
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

    def exit_code_of_death(self, return_code: int | None) -> tuple[int, str]:
        """FVC's exit code for a kernel that died, and the reason in words."""
        gigabytes = self.peak_rss_bytes / 1e9
        if oom_kill_count() > self._oom_kills:
            return (
                137,
                f"killed for memory after {gigabytes:.2f} GB (the system's out-of-memory counter rose)",
            )
        if return_code == -signal.SIGKILL:
            return 137, f"killed by SIGKILL at {gigabytes:.2f} GB: most likely for memory, or by hand"
        if return_code is not None and return_code < 0:
            return 138, f"kernel killed by {signal.Signals(-return_code).name} at {gigabytes:.2f} GB"
        return 138, f"kernel went away (exit status {'unknown' if return_code is None else return_code})"

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
            held = self._tree.measure()
            self.peak_rss_bytes = max(self.peak_rss_bytes, held.tree_bytes, held.high_water_bytes)


def oom_kill_count() -> int:
    """How often this process's control group (v2, else v1) has killed for memory; 0 where it cannot be read."""
    for path in _oom_files():
        try:
            match = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0


def _oom_files() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files.append(root / group.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / group.lstrip("/") / "memory.oom_control")
    return files
