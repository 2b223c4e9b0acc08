#!/usr/bin/env python3
"""What indexing costs, as ratios that hold on any machine.

Files: CPU time per file of ``build_index`` (workers and parent) over that of opening and decoding the same frames one
file after the other with plain PyAV in the same run; how busy the cores were; how memory grows with the number of
files; what the second run costs. Rows: CPU time of each step on 100,000 rows over one plain pass, which is
``csv.reader`` over the manifest and one ``os.stat`` per file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import av
import numpy as np
from av.video.stream import VideoStream

from fvc_lib.corpus import index
from fvc_lib.corpus.copies.perceptual_hash import WINDOWS, hash_text
from fvc_lib.corpus.folds import check_folds, make_folds
from fvc_lib.corpus.listing import read_corpus
from fvc_lib.corpus.probing import VIDEO_FILES
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.tables import FOLDS, INDEX, read_table, write_table
from fvc_lib.video.decode.probe import VideoProbe

Result = TypeVar("Result")

ENCODINGS = (
    ("libx264", ".mp4", {"preset": "ultrafast"}),
    ("mpeg4", ".avi", {}),
    ("libvpx-vp9", ".webm", {"deadline": "realtime", "cpu-used": "8"}),
    ("mpeg2video", ".mpg", {}),
    ("libx264", ".mkv", {"preset": "ultrafast"}),
)
NUM_VIDEOS = 50
NUM_FRAMES = 12


def write_video(path: Path, seed: int, codec: str, options: dict[str, str]) -> None:
    """A tiny video of coloured tiles that drift."""
    tiles = np.random.default_rng(seed).integers(0, 256, (6, 8, 3))
    picture = np.kron(tiles, np.ones((16, 16, 1))).astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = cast(VideoStream, container.add_stream(codec, rate=25, options=options))
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for number in range(NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_files(corpus: Path, num_files: int) -> None:
    """Files of five codecs and containers, each with a content of its own: a counter behind its last packet."""
    corpus.mkdir(parents=True)
    contents = []
    for seed in range(NUM_VIDEOS):
        codec, suffix, options = ENCODINGS[seed % len(ENCODINGS)]
        path = corpus.parent / f"video{seed}{suffix}"
        write_video(path, seed, codec, options)
        contents.append((suffix, path.read_bytes()))
    for number in range(num_files):
        suffix, content = contents[number % NUM_VIDEOS]
        folder = corpus / ("real" if number % NUM_VIDEOS % 2 else "fake") / f"{number // 500:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"clip {number:06d}{suffix}").write_bytes(content + struct.pack(">I4sQ", 16, b"free", number))


def plain_decode_seconds(folder: Path, rounds: int = 4) -> float:
    """CPU seconds per file of opening and decoding every frame with PyAV on one thread."""
    paths = sorted(folder.glob("video*"))
    before = time.process_time()
    for path in paths * rounds:
        with av.open(str(path)) as container:
            container.streams.video[0].codec_context.thread_count = 1
            for _ in container.decode(video=0):
                pass
    return (time.process_time() - before) / (len(paths) * rounds)


def described(path_text: str) -> dict[str, Any]:
    """Instead of a probe: what a video might be, from the file's content. It runs in the worker processes."""
    content = Path(path_text).read_bytes()
    codes = np.frombuffer(hashlib.shake_256(content).digest(8 * 6 * len(WINDOWS)), np.uint64)
    return {
        "probe": asdict(VideoProbe("h264", "mov", "yuv420p", 320, 240, 25.0, 100, 4.0, 0, True, len(content), 9e4)),
        "content_sha256": hashlib.sha256(content).hexdigest(),
        "perceptual_hash": hash_text(codes.reshape(6, -1)),
    }


def write_rows(corpus: Path, num_rows: int) -> Path:
    """A manifest of small files, five to an event, and the files."""
    rows = [("path", "label", "group", "platform")]
    for number in range(num_rows):
        path = f"{number % 100:02d}/clip {number:06d}.mp4"
        (corpus / path).parent.mkdir(parents=True, exist_ok=True)
        (corpus / path).write_text(str(number))
        rows.append((path, "fake" if number // 5 % 2 else "real", f"event {number // 5}" if number % 7 else "", "web"))
    with (corpus / "list.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return corpus / "list.csv"


def plain_pass(manifest: Path) -> None:
    """The least that reading a manifest can be."""
    with manifest.open(newline="") as stream:
        for path, *_ in list(csv.reader(stream))[1:]:
            os.stat(manifest.parent / path)  # noqa: PTH116


def index_here(corpus: Path, out: Path, bits: int, probe_function: str) -> dict[str, float]:
    """Index in this process; its CPU time and its children's, the share of the cores in use, memory over imports."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the imports' own peak is forgotten
    cpu, start = time.process_time(), time.monotonic()
    index.VIDEO_FILES = replace(VIDEO_FILES, function=probe_function)
    config = RunConfig(cache_dir=str(out), near_duplicate_bits=bits, max_rejected_share=0.5)
    report = index.build_index(corpus, config, out)
    wall = time.monotonic() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "parent": time.process_time() - cpu,
        "children": children.ru_utime + children.ru_stime,
        "busy": (children.ru_utime + children.ru_stime) / (wall * available_cores()),
        "peak": status_bytes("VmHWM") - before,
        "probed": read_table(out / "index.parquet", INDEX).height - report.num_known,
    }


def status_bytes(field: str) -> int:
    """A field of this process's status in bytes. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def index_afresh(corpus: Path, out: Path, bits: int, probe_function: str) -> dict[str, float]:
    """``index_here`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.index", "--measure", str(corpus), str(out), str(bits), probe_function]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return dict(json.loads(done.stdout))


def bench_files(folder: Path, counts: list[int]) -> None:
    """Real videos: cost per file, cores, memory, second run."""
    print(f"{'files':>7}  {'CPU : plain decode':>18}  {'parent CPU':>10}  {'cores busy':>10}  {'again : first':>13}")
    peaks = []
    for count in counts:
        corpus = folder / str(count) / "corpus"
        write_files(corpus, count)
        plain = plain_decode_seconds(corpus.parent)
        first = index_afresh(corpus, corpus.parent, 10, VIDEO_FILES.function)
        again = index_afresh(corpus, corpus.parent, 10, VIDEO_FILES.function)
        spent = first["parent"] + first["children"]
        peaks.append(max(first["peak"], again["peak"]))
        if again["probed"]:
            raise SystemExit(f"the second run probed {again['probed']:.0f} unchanged files")
        print(
            f"{count:>7,}  {spent / count / plain:>18.2f}  {first['parent'] / spent:>10.0%}  {first['busy']:>10.0%}  "
            f"{again['parent'] / spent:>13.1%}",
            flush=True,
        )
    for one, other, low, high in zip(counts, counts[1:], peaks, peaks[1:], strict=False):
        growth = (high - low) / (other - one) * 1000 / 2**20
        print(f"peak memory of the parent, from {one:,} to {other:,} files: {growth:+.1f} MiB per 1,000 files")


def bench_rows(folder: Path, num_rows: int) -> None:
    """Many rows: each step over one plain pass."""
    manifest = write_rows(folder / "corpus", num_rows)
    cpu_of(lambda: plain_pass(manifest))
    unit = cpu_of(lambda: plain_pass(manifest))[0]

    def show(step: str, seconds: float) -> None:
        print(f"{step:<52} {seconds / unit:>8.1f}", flush=True)

    print(f"\n{f'{num_rows:,} rows: CPU time over one plain pass':<52} {'ratio':>8}")
    show("read_corpus", cpu_of(lambda: read_corpus(manifest))[0])
    first = index_afresh(manifest, folder, 0, "benchmarks.index:described")
    show("build_index, files opened but no video decoded", first["parent"] + first["children"])
    again = index_afresh(manifest, folder, 0, "benchmarks.index:described")
    show("build_index again, every file known", again["parent"])
    near = index_afresh(manifest, folder, 10, "benchmarks.index:described")
    show("near-duplicates among as many hashes", near["parent"] - again["parent"])
    seconds, videos = cpu_of(lambda: read_table(folder / "index.parquet", INDEX))
    show("read and check the index", seconds)
    seconds, folds = cpu_of(lambda: make_folds(videos, 5, 0))
    show("make_folds", seconds)
    show("check_folds", cpu_of(lambda: check_folds(folds))[0])
    show("check and write the folds", cpu_of(lambda: write_table(folds, FOLDS, folder / "folds.parquet"))[0])
    for name, measured in (("known", again), ("known, with near-duplicates", near)):
        print(
            f"peak memory of the parent over its imports, {name}: {measured['peak'] / num_rows / 1024:.1f} KiB per row"
        )


def cpu_of(work: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds and result of ``work``."""
    before = time.process_time()
    result = work()
    return time.process_time() - before, result


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[500, 1000, 2000], help="how many (500 1000 2000)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the manifest (default: 100000)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        corpus, out, bits, probe_function = arguments.measure
        print(json.dumps(index_here(Path(corpus), Path(out), int(bits), probe_function)))
        return
    with tempfile.TemporaryDirectory(prefix="fvc-bench-") as folder:
        bench_files(Path(folder) / "files", arguments.files)
        bench_rows(Path(folder) / "rows", arguments.rows)


if __name__ == "__main__":
    main()
