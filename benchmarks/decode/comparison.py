"""CPU time and peak memory of the contestants, case by case."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.decode import workers
from benchmarks.decode.peers import DEMUXING, FLOOR, OURS, Pixels, uniform_places
from benchmarks.decode.results import Case, CpuCost, FloorCount, PeakMemory
from benchmarks.decode.videos import Video, read_numbers
from benchmarks.decode.workers import PeerError, Worker


def progress(text: str) -> None:
    """One line on stderr: the report alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def worker_per_contestant(names: Iterable[str]) -> Iterator[dict[str, Worker]]:
    """A process for each, so that none runs beside the libraries of another."""
    with ExitStack() as stack:
        pools = {name: stack.enter_context(Worker()) for name in names}
        for name, pool in pools.items():
            pool.run(workers.prepare, name)
        yield pools


def compare_cpu(
    pools: dict[str, Worker], video: Video, path: Path, case: Case, rounds: dict[str, int]
) -> tuple[list[CpuCost], FloorCount, dict[str, str]]:
    """The contestants take turns, round after round, each for as many ``rounds`` as are given for it.

    Returns:
        The costs, the packets that had to be decoded, and why some contestants could not.
    """
    arguments = (path, case.num_frames, case.size)
    frames: dict[str, Pixels] = {}
    seconds: dict[str, list[float]] = {name: [] for name in pools}
    failed: dict[str, str] = {}
    for number in range(max(rounds.values())):
        for name in [name for name in pools if number < rounds[name] and name not in failed]:
            try:
                frames[name], spent = pools[name].run(workers.frames_and_cpu_seconds, name, *arguments)
                seconds[name].append(spent)
            except PeerError as failure:
                failed[name] = str(failure)
    costs = [
        CpuCost(
            case,
            name,
            tuple(seconds[name]),
            worst_difference(frames[name], frames[OURS]),
            count_wrong_frames(frames[name], video, case.num_frames),
        )
        for name in pools
        if name not in failed
    ]
    necessary, there = pools[FLOOR].run(workers.necessary_packets, *arguments)
    return costs, FloorCount(case, necessary, there), failed


def measure_memory(name: str, path: Path, case: Case) -> PeakMemory:
    """One decode in a fresh process.

    Raises:
        PeerError: it cannot decode this.
    """
    with Worker() as worker:
        if name == DEMUXING:
            return PeakMemory(case, name, worker.run(workers.peak_bytes_of_demuxing, path))
        return PeakMemory(case, name, worker.run(workers.peak_bytes_of, name, path, case.num_frames, case.size))


def versions_and_absences(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the peers that can be imported, and why the others cannot; each in a process of its own."""
    versions, absent = {}, {}
    for name in names:
        with Worker() as worker:
            try:
                versions[name] = worker.run(workers.version_of, name)
            except PeerError as failure:
                absent[name] = str(failure)
    return versions, absent


def worst_difference(theirs: Pixels, ours: Pixels) -> float:
    """Mean absolute difference of the worst frame in grey levels; 255 when a frame or pixel row is missing."""
    if theirs.shape != ours.shape:
        return 255.0
    return float(np.abs(theirs.astype(np.int16) - ours).mean(axis=(1, 2, 3)).max())


def count_wrong_frames(frames: Pixels, video: Video, num_frames: int) -> int:
    """Frames that do not carry the number of the place they were asked for; missing ones count."""
    wanted = [place % video.encoding.num_frames for place in uniform_places(video.num_frames, num_frames)]
    if frames.shape[0] != num_frames:
        return num_frames
    return sum(there != asked for there, asked in zip(read_numbers(frames), wanted, strict=True))
