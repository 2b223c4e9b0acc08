"""``python -m benchmarks.decode``: what ``decode_clip`` costs beside its peers and beside the floor.

Videos are generated once and kept in a folder. The report goes to stdout as Markdown, progress to stderr. The peers
take turns for nine rounds and targets are judged by the median. ``--only``, ``--videos`` and the like measure a part,
``--results FILE`` puts parts together.

The peers come with ``pip install '.[bench]'``; those that are missing are named in the report. torchcodec needs
ffmpeg's shared libraries (4 to 8) from the system beside it. From 0.14 on its wheel on PyPI is linked with CUDA and
needs torch's CUDA build; 0.13 runs beside the CPU build too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from types import FrameType

from benchmarks.decode import comparison, throughput
from benchmarks.decode.cases import CASES, CORPUS, CORPUS_NUM_FRAMES, CORPUS_SIZE, GOP_250, LENGTHS, NUM_FRAMES, SIZES
from benchmarks.decode.comparison import progress
from benchmarks.decode.peers import DECORD, DEMUXING, FLOOR, OURS, PEERS, TORCHCODEC
from benchmarks.decode.report import whole_report
from benchmarks.decode.results import Case, Results
from benchmarks.decode.videos import Video, make_video
from benchmarks.decode.workers import PeerError

PARTS = ("cpu", "memory", "lengths", "footprint", "throughput", "scaling")
SCALING_CLIPS = 200
# Whose figures are targets. The others take their turn once.
MAIN = (OURS, TORCHCODEC, DECORD, FLOOR)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description="Measure decode_clip beside its peers. Install these with: pip install '.[bench]'",
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes: two 1080p videos, the main peers, 112 px")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--videos", nargs="+", metavar="WORDS", help="only videos with all these words in their names")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, FLOOR], help="only these beside ours and the floor")
    parser.add_argument("--frames", type=int, nargs="+", help=f"frames per clip (default: {NUM_FRAMES})")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"sides of the square in pixels (default: {SIZES})")
    parser.add_argument("--rounds", type=int, default=9, help="decodes by each main peer and case (default: 9)")
    parser.add_argument("--folder", type=Path, default=Path("cache/benchmark"), help="where the videos are kept")
    parser.add_argument("--results", type=Path, help="add to what is in this JSON file and report all of it")
    return parser.parse_args()


def chosen_videos(arguments: argparse.Namespace) -> list[Video]:
    """Those of the cases that were asked for."""
    words = arguments.videos or []
    videos = [video for video in CASES if all(word in video.name for word in words)]
    return videos[:2] if arguments.quick and not words else videos


def chosen_peers(arguments: argparse.Namespace, absent: dict[str, str]) -> list[str]:
    """Contestants in the order of the tables; ours and the floor always take part."""
    wanted = arguments.peers or (MAIN if arguments.quick else [*PEERS, FLOOR])
    return [name for name in [*PEERS, FLOOR] if name in {*wanted, OURS, FLOOR} and name not in absent]


def main() -> None:
    """Generate, measure, report."""
    signal.signal(signal.SIGTERM, _leave)  # so that the workers end too
    arguments = read_arguments()
    versions, absent = comparison.versions_and_absences(PEERS)
    names = chosen_peers(arguments, absent)
    results = Results.load(arguments.results) if arguments.results else Results({}, {})
    results.versions, results.absent = versions, absent
    videos = chosen_videos(arguments)
    frames = arguments.frames or ((6, 16) if arguments.quick else NUM_FRAMES)
    sizes = arguments.sizes or ((112,) if arguments.quick else SIZES)
    paths = {video: make_video(video, arguments.folder) for video in videos}
    cases = {Case(video.name, n, size): video for video in videos for n in frames for size in sizes}
    measures: dict[str, Callable[[], None]] = {
        "cpu": lambda: measure_cpu(results, names, cases, paths, arguments.rounds),
        "memory": lambda: measure_memory(results, names, cases, paths),
        "lengths": lambda: measure_lengths(results, arguments.folder),
        "footprint": lambda: measure_footprint(results, corpus(arguments), arguments.folder),
        "throughput": lambda: measure_throughput(results, corpus(arguments), arguments.rounds),
        "scaling": lambda: measure_scaling(results, corpus(arguments), SCALING_CLIPS // (5 if arguments.quick else 1)),
    }
    for part in [part for part in PARTS if part in arguments.only]:
        measures[part]()
        results.keep_newest()
        if arguments.results:
            results.save(arguments.results)
    print(whole_report(results))


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)


def measure_cpu(
    results: Results, names: list[str], cases: dict[Case, Video], paths: dict[Video, Path], rounds: int
) -> None:
    """CPU time of all contestants on all cases."""
    rounds_of = {name: rounds if name in MAIN else 1 for name in names}
    with comparison.worker_per_contestant(names) as pools:
        for case, video in cases.items():
            progress(f"CPU time: {video.name}, {case.num_frames} frames, {case.size} px")
            costs, floor, failed = comparison.compare_cpu(pools, video, paths[video], case, rounds_of)
            results.cpu += costs
            results.floor.append(floor)
            results.failures.update({f"{name} on {video.name}": why for name, why in failed.items()})


def measure_memory(results: Results, names: list[str], cases: dict[Case, Video], paths: dict[Video, Path]) -> None:
    """Peak memory of all contestants on all cases."""
    for case, video in cases.items():
        progress(f"peak memory: {video.name}, {case.num_frames} frames, {case.size} px")
        for name in [name for name in names if name != FLOOR and f"{name} on {video.name}" not in results.failures]:
            try:
                results.memory.append(comparison.measure_memory(name, paths[video], case))
            except PeerError as failure:
                results.failures[f"{name} on {video.name}"] = str(failure)


def measure_lengths(results: Results, folder: Path) -> None:
    """Our peak memory on the same picture at three lengths."""
    for video in LENGTHS:
        progress(f"peak memory: {video.name}")
        case = Case(video.name, CORPUS_NUM_FRAMES, CORPUS_SIZE)
        path = make_video(video, folder)
        results.memory += [comparison.measure_memory(name, path, case) for name in (OURS, DEMUXING)]


def corpus(arguments: argparse.Namespace) -> throughput.Corpus:
    """60 mixed files; in a hurry the shortest of each kind."""
    videos = CORPUS[::5] if arguments.quick else CORPUS
    return [(video, make_video(video, arguments.folder)) for video in videos]


def measure_footprint(results: Results, files: throughput.Corpus, folder: Path) -> None:
    """Whole processes: one clip, and very many."""
    results.footprint = throughput.measure_footprint(make_video(GOP_250, folder), files, 200)


def measure_throughput(results: Results, files: throughput.Corpus, rounds: int) -> None:
    """The mixed corpus by us and by torchcodec, on one thread and on two."""
    peers = [name for name in (OURS, TORCHCODEC) if name not in results.absent]
    plan: throughput.Plan = [(name, "threads", number) for number in (1, 2) for name in peers]
    results.throughput += throughput.measure_throughput(files, plan, rounds)


def measure_scaling(results: Results, files: throughput.Corpus, num_clips: int) -> None:
    """Many clips by one thread, by a thread per core and by a process per core."""
    cores = throughput.processors()
    plan: throughput.Plan = [(OURS, "threads", 1), (OURS, "threads", cores), (OURS, "processes", cores)]
    results.scaling += throughput.measure_throughput(list(islice(cycle(files), num_clips)), plan, 1)


if __name__ == "__main__":
    main()
