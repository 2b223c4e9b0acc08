"""What forensic features cost beside decoding the frames that they are measured on.

Decoding is the project's own, of the same frames, which are thrown away. Beside it: cutting tiles, each family alone,
and all together, decoding included, which shall take at most twice the processor time of decoding. One thread, in
turns; of each side the least of all rounds, by file.
Memory is the peak of what Python and numpy hold while a side works, of the file where it is largest.

    python -m benchmarks.features [FILES OR FOLDERS] [--rounds 3] [--every 1] [--json FILE]

Without files: the sample corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.parameters import resolve_config
from fvc_lib.video.decode.decoding import decode as decode_wanted
from fvc_lib.video.decode.frame_table import read_frame_table
from fvc_lib.video.decode.source import VideoError, open_video
from fvc_lib.video.features.family import FeatureFamily, families_named, run_places, sample_video
from fvc_lib.video.features.worker import measured

WANTED = 2.0
DECODE, TILES = "decoding", "cutting tiles"


class Discarding:
    """Takes wanted frames and keeps nothing of them."""

    def __init__(self, num_frames: int) -> None:
        self.wanted = set(np.concatenate(run_places(num_frames)).tolist())

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        self.wanted.discard(-1 if place is None else place)


def decode(path: Path) -> bool:
    """Decode the frames that are sampled; false where a video has to be decoded as a stream."""
    with open_video(path) as opened:
        done = decode_wanted(opened, read_frame_table(opened), lambda _, count, __: Discarding(count))
    return done.is_sparse


def cpu_seconds(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = call(*arguments)
    return time.process_time() - start, result


def peak_bytes(call: Callable[..., Any], *arguments: Any) -> int:
    tracemalloc.start()
    call(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def measure(path: Path, families: tuple[FeatureFamily, ...], rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """CPU seconds and peak bytes of each side for one file; nothing of a file that is not decoded sparsely."""
    try:
        if not decode(path):
            return {}, {}
        sample = sample_video(path)
    except VideoError:
        return {}, {}
    sides: dict[str, Callable[[], Any]] = {DECODE: lambda: decode(path), TILES: lambda: sample_video(path)}
    sides |= {family.name: lambda family=family: measured(sample, family) for family in families}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(cpu_seconds(sides[name])[0])
    least = {name: min(values) for name, values in seconds.items()}
    least[TILES] = max(0.0, least[TILES] - least[DECODE])
    return least, {name: peak_bytes(side) for name, side in sides.items()}


def default_files() -> list[Path]:
    sample = Path(resolve_config().data_dir) / "sample_corpus"
    return [path for path in sorted(sample.rglob("*")) if path.suffix in {".mp4", ".mkv", ".webm", ".avi", ".mov"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="take every so many-th file")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    files = [each for path in asked.files for each in (sorted(path.iterdir()) if path.is_dir() else [path])]
    families = families_named("all")
    readings: dict[str, dict[str, float]] = {}
    peaks: dict[str, int] = {}
    for path in (files or default_files())[:: asked.every]:
        found, memory = measure(path, families, asked.rounds)
        if not found:
            print(f"{path.name:<56} not decoded sparsely, left out", flush=True)
            continue
        readings[str(path)] = found
        peaks = {name: max(memory[name], peaks.get(name, 0)) for name in memory}
        ours = sum(seconds for name, seconds in found.items())
        print(f"{path.name[:56]:<56} {1e3 * found[DECODE]:8.1f} ms  {ours / found[DECODE]:6.2f}", flush=True)
    report(readings, peaks)
    if asked.json:
        asked.json.write_text(json.dumps({"cpu_seconds": readings, "peak_bytes": peaks}, indent=1) + "\n")


def report(readings: dict[str, dict[str, float]], peaks: dict[str, int]) -> None:
    total = {name: sum(found[name] for found in readings.values()) for name in next(iter(readings.values()))}
    ratios = [sum(value for name, value in found.items()) / found[DECODE] for found in readings.values()]
    print(f"\n{len(readings)} files, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<32} {'ms a file':>10} {'of decoding':>12} {'peak MB':>9}")
    for name, seconds in total.items():
        of_decoding, megabytes = seconds / total[DECODE], peaks.get(name, 0) / 1e6
        print(f"{name:<32} {1e3 * seconds / len(readings):>10.2f} {of_decoding:>12.3f} {megabytes:>9.1f}")
    ours = sum(seconds for name, seconds in total.items())
    low, middle, high = np.quantile(ratios, [0, 0.5, 1])
    print(
        f"all, decoding included: {ours / total[DECODE]:.2f} of decoding all files; by file {middle:.2f} "
        f"({low:.2f} to {high:.2f}); wanted at most {WANTED}"
    )


if __name__ == "__main__":
    main()
