"""Clips per second over a corpus, by threads and by processes; and what a process weighs that decodes for long."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

from benchmarks.decode import workers
from benchmarks.decode.cases import CORPUS_NUM_FRAMES, CORPUS_SIZE
from benchmarks.decode.comparison import count_wrong_frames, progress
from benchmarks.decode.peers import Pixels
from benchmarks.decode.results import Footprint, Throughput
from benchmarks.decode.videos import Video
from benchmarks.decode.workers import Worker

How = Literal["threads", "processes"]
Plan = Sequence[tuple[str, How, int]]
Corpus = Sequence[tuple[Video, Path]]

_WORKER_PROGRAM = """
import sys
from pathlib import Path
from fvc_lib.video.decode.clip import decode_clip
decode_clip(Path(sys.argv[1]), 16, 224)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1], "torch" in sys.modules)
"""


@dataclass(frozen=True)
class Round:
    """One pass over a corpus; times in seconds."""

    wall: float
    cpu: float
    busy_elsewhere: float
    clips: list[Pixels]


def measure_throughput(corpus: Corpus, plan: Plan, rounds: int) -> list[Throughput]:
    """Each (contestant, how, number of workers) of the plan in turn, round after round."""
    passed: dict[tuple[str, How, int], list[Round]] = {entry: [] for entry in plan}
    for _ in range(rounds):
        for name, how, number in plan:
            progress(f"throughput: {len(corpus)} clips by {name}, {number} {how}")
            passed[name, how, number].append(one_pass(name, corpus, how, number))
    return [
        Throughput(
            name,
            how,
            number,
            len(corpus),
            tuple(each.wall for each in passes),
            tuple(each.cpu for each in passes),
            statistics.fmean(each.busy_elsewhere for each in passes),
            sum(
                count_wrong_frames(clip, video, CORPUS_NUM_FRAMES) > 0
                for clip, (video, _) in zip(passes[0].clips, corpus, strict=True)
            ),
        )
        for (name, how, number), passes in passed.items()
    ]


def one_pass(name: str, corpus: Corpus, how: How, number: int) -> Round:
    """All clips of the corpus by new workers that have everything imported and have decoded once."""
    paths = [path for _, path in corpus]
    return (_by_threads if how == "threads" else _by_processes)(name, paths, number)


def _by_threads(name: str, paths: list[Path], number: int) -> Round:
    with Worker() as worker:
        worker.run(workers.decode_in_threads, name, paths[:number], CORPUS_NUM_FRAMES, CORPUS_SIZE, number)
        busy, started = _busy_seconds(), time.perf_counter()
        wall, cpu, clips = worker.run(workers.decode_in_threads, name, paths, CORPUS_NUM_FRAMES, CORPUS_SIZE, number)
        elsewhere = (_busy_seconds() - busy - cpu) / (time.perf_counter() - started)
    return Round(wall, cpu, max(0.0, elsewhere), clips)


def _by_processes(name: str, paths: list[Path], number: int) -> Round:
    with ProcessPoolExecutor(number, multiprocessing.get_context("spawn")) as pool:
        arguments = (CORPUS_NUM_FRAMES, CORPUS_SIZE)
        # Each of these takes longer than starting the next process, so that all are there and warm.
        for warm in [pool.submit(workers.frames_and_cpu_seconds, name, paths[0], *arguments) for _ in range(number)]:
            warm.result()
        busy, started = _busy_seconds(), time.perf_counter()
        futures = [pool.submit(workers.frames_and_cpu_seconds, name, path, *arguments) for path in paths]
        clips, cpu = zip(*(future.result() for future in futures), strict=True)
        wall = time.perf_counter() - started
        elsewhere = (_busy_seconds() - busy - sum(cpu)) / wall
    return Round(wall, sum(cpu), max(0.0, elsewhere), list(clips))


def measure_footprint(full_hd: Path, corpus: Corpus, num_decodes: int) -> Footprint:
    """A whole process for one 1080p clip, and one process over ``num_decodes`` clips, the corpus again and again."""
    progress("footprint: a process that only decodes")
    command = [sys.executable, "-c", _WORKER_PROGRAM, str(full_hd)]
    peak, has_torch = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    progress(f"footprint: {num_decodes} decodes in one process")
    paths = [path for _, path in islice(cycle(corpus), num_decodes)]
    with Worker() as worker:
        resident = worker.run(workers.resident_bytes_after, paths, CORPUS_NUM_FRAMES, CORPUS_SIZE)
    return Footprint(int(peak) * 1024, has_torch == "True", tuple(resident))


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _busy_seconds() -> float:
    """CPU seconds that all programs of this machine have used since it started."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")
