"""``python -m benchmarks.decode``: what ``decode_clip`` costs beside its peers and beside the floor.

Videos are generated once and kept in a folder. The report goes to stdout as Markdown, progress to stderr.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path

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
    parser.add_argument("--rounds", type=int, default=3, help="decodes by each main peer and case (default: 3)")
    parser.add_argument("--folder", type=Path, default=Path("cache/benchmark"), help="where the videos are kept")
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
    arguments = read_arguments()
    absent = comparison.absences(PEERS)
    names = chosen_peers(arguments, absent)
    versions = {PEERS[name].distribution: PEERS[name].version() for name in names if name != FLOOR}
    results = Results(absent=absent, versions=versions)
    videos = chosen_videos(arguments)
    frames = arguments.frames or ((6, 16) if arguments.quick else NUM_FRAMES)
    sizes = arguments.sizes or ((112,) if arguments.quick else SIZES)
    paths = {video: make_video(video, arguments.folder) for video in videos}
    cases = {Case(video.name, n, size): video for video in videos for n in frames for size in sizes}
    if "cpu" in arguments.only:
        measure_cpu(results, names, cases, paths, arguments.rounds)
    if "memory" in arguments.only:
        measure_memory(results, names, cases, paths)
    if "lengths" in arguments.only:
        measure_lengths(results, arguments.folder)
    if {"footprint", "throughput", "scaling"} & set(arguments.only):
        measure_corpus(results, arguments)
    print(whole_report(results))


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


def measure_corpus(results: Results, arguments: argparse.Namespace) -> None:
    """What is measured on many files."""
    kinds = CORPUS[:: len(CORPUS) // 12] if arguments.quick else CORPUS
    corpus = [(video, make_video(video, arguments.folder)) for video in kinds]
    if "footprint" in arguments.only:
        full_hd = make_video(GOP_250, arguments.folder)
        results.footprint = throughput.measure_footprint(full_hd, corpus, 200)
    if "throughput" in arguments.only:
        peers = [name for name in (OURS, TORCHCODEC) if name not in results.absent]
        plan: throughput.Plan = [(name, "threads", number) for number in (1, 2) for name in peers]
        results.throughput = throughput.measure_throughput(corpus, plan, arguments.rounds)
    if "scaling" in arguments.only:
        number = throughput.processors()
        alone: throughput.Plan = [(OURS, "threads", 1), (OURS, "threads", number), (OURS, "processes", number)]
        many = list(islice(cycle(corpus), SCALING_CLIPS // 5 if arguments.quick else SCALING_CLIPS))
        results.scaling = throughput.measure_throughput(many, alone, 1)


if __name__ == "__main__":
    main()
