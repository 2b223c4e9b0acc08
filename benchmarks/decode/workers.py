"""Each contestant in a process of its own, and what is measured in there: CPU time, peak memory, frames.

Linux only: memory is read from ``/proc``. ``VmHWM`` is reset before it is read, because a new process inherits the
``ru_maxrss`` of the one that started it.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from benchmarks.decode.peers import FLOOR, OURS, PEERS, Pixels

if TYPE_CHECKING:
    from benchmarks.decode.floor import Floor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_CHILD_POLL_SECONDS = 0.002


class PeerError(Exception):
    """A contestant could not do what was asked; the text says why in one line."""


class Worker:
    """A fresh process that runs one call after another, and is replaced when it dies. A context manager."""

    def __init__(self) -> None:
        self._pool = self._new_pool()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """``function(*args, **kwargs)`` in the process.

        Raises:
            PeerError: whatever went wrong there: peers raise errors of their own kinds, or crash.
        """
        future = self._pool.submit(function, *args, **kwargs)
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            self._pool = self._new_pool()
        lines = [*str(error).strip().splitlines(), type(error).__name__]
        raise PeerError(lines[0]) from error

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


# What follows runs inside a worker.


def prepare(name: str) -> None:
    """Import what the contestant needs."""
    if name != FLOOR:
        PEERS[name].import_modules()


def version_of(name: str) -> str:
    """Of a peer that can be imported."""
    prepare(name)
    return PEERS[name].version()


def frames_and_cpu_seconds(name: str, path: Path, num_frames: int, size: int) -> tuple[Pixels, float]:
    """The clip as the contestant gives it; CPU seconds of all threads, and of child processes that have ended."""
    if name == FLOOR:
        decode = _floor(path, num_frames, size).decode  # preparing the packets is not counted
    else:
        decode = partial(PEERS[name].decode, path, num_frames, size)
    before = _cpu_seconds()
    frames = decode()
    return frames, _cpu_seconds() - before


def necessary_packets(path: Path, num_frames: int, size: int) -> tuple[int, int]:
    """How many packets must be decoded for the clip, and how many there are."""
    floor = _floor(path, num_frames, size)
    return floor.num_necessary, floor.num_packets


def peak_bytes_of(name: str, path: Path, num_frames: int, size: int) -> int:
    """Peak resident bytes of one decode over what is there after the imports, with its largest child process."""
    PEERS[name].import_modules()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the imports' own peak is forgotten
    with _child_peak() as child:
        PEERS[name].decode(path, num_frames, size)
    return status_bytes("VmHWM") - before + max(child, default=0)


def peak_bytes_of_demuxing(path: Path) -> int:
    """Peak resident bytes over the import of opening ``path`` and reading its packets: ffmpeg's own index."""
    import av

    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with av.open(str(path)) as container:
        for _ in container.demux(video=0):
            pass
    return status_bytes("VmHWM") - before


def resident_bytes_after(paths: Sequence[Path], num_frames: int, size: int) -> list[int]:
    """Resident bytes of this process after each of several decodes by ``decode_clip``."""
    resident = []
    for path in paths:
        PEERS[OURS].decode(path, num_frames, size)
        resident.append(status_bytes("VmRSS"))
    return resident


def decode_in_threads(
    name: str, paths: Sequence[Path], num_frames: int, size: int, num_threads: int
) -> tuple[float, float, list[Pixels]]:
    """Wall-clock seconds and CPU seconds for a clip of each path by ``num_threads`` threads, and the clips."""
    decode = PEERS[name].decode
    with ThreadPoolExecutor(num_threads) as pool:
        started, before = time.perf_counter(), _cpu_seconds()
        clips = list(pool.map(lambda path: decode(path, num_frames, size), paths))
        return time.perf_counter() - started, _cpu_seconds() - before, clips


def status_bytes(field: str, process: str = "self") -> int:
    """A field of a process's status, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@lru_cache(maxsize=1)
def _floor(path: Path, num_frames: int, size: int) -> Floor:
    from benchmarks.decode.floor import Floor  # brings PyAV, which only the floor's own worker shall hold

    return Floor(path, num_frames, size)


def _cpu_seconds() -> float:
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + child.ru_utime + child.ru_stime


@contextmanager
def _child_peak() -> Iterator[list[int]]:
    """Collects the peaks of child processes, which have to be read while they live."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_CHILD_POLL_SECONDS):
            for task in Path("/proc/self/task").glob("*/children"):
                try:
                    seen.extend(status_bytes("VmHWM", child) for child in task.read_text().split())
                except (OSError, StopIteration):
                    continue  # it has just ended

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()
