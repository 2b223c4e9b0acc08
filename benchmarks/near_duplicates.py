#!/usr/bin/env python3
"""What comparing the perceptual hashes of many videos costs: CPU seconds, memory, and links found.

Each case is a process of its own. Hashes are drawn, not made from videos: of independent bits, as strangers have, and
of few flipped ones, as copies have. Adverse cases are clusters that a comparison of all their pairs would drown in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.index import status_bytes
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import LOOK_BYTES, WINDOWS, Hashes, hash_text

NUM_FRAMES = 6
BITS = 10


def strangers(count: int, rng: np.random.Generator) -> Hashes:
    """Videos that have nothing in common."""
    return rng.integers(1, 2**64, (count, NUM_FRAMES, len(WINDOWS)), np.uint64)


def with_copies(count: int, rng: np.random.Generator) -> Hashes:
    """Three of ten are copies of another video, cascades of up to a hundred among them."""
    table = strangers(count, rng)
    num_copies = 3 * count // 10
    sources = (rng.pareto(1.2, num_copies) * count / 400).astype(np.int64) % (count - num_copies)
    table[-num_copies:] = _flipped(table[sources], rng, 4)
    return rng.permutation(table)


def near_cluster(count: int, rng: np.random.Generator) -> Hashes:
    """A tenth are copies of one video, no two the same."""
    table = strangers(count, rng)
    table[: count // 10] = _flipped(np.broadcast_to(table[0], (count // 10, *table.shape[1:])), rng, 1)
    return table


def same_cluster(count: int, rng: np.random.Generator) -> Hashes:
    """A tenth are the same to the bit."""
    table = strangers(count, rng)
    table[: count // 10] = table[0]
    return table


def one_frame(count: int, rng: np.random.Generator) -> Hashes:
    """A tenth share one frame in the middle and nothing else: all of their pairs are candidates, none is a copy."""
    table = strangers(count, rng)
    table[: count // 10, 2] = table[0, 2]
    return table


def black(count: int, rng: np.random.Generator) -> Hashes:
    """Half are black from beginning to end."""
    table = strangers(count, rng)
    table[: count // 2] = 0
    return table


CASES: dict[str, Callable[[int, np.random.Generator], Hashes]] = {
    "strangers": strangers,
    "with copies": with_copies,
    "near cluster": near_cluster,
    "same cluster": same_cluster,
    "one frame": one_frame,
    "black": black,
}


def with_looks(table: Hashes, rng: np.random.Generator) -> list[str]:
    """The texts of hashes (N, T, 30), with looks that are those of all near ones, but for noise."""
    first = rng.integers(0, 240, (NUM_FRAMES, LOOK_BYTES), np.uint8)
    looks = (first + rng.integers(0, 8, LOOK_BYTES, np.uint8) for _ in table)
    return [hash_text(codes, look) for codes, look in zip(table, looks, strict=True)]


def measure(case: str, count: int, has_looks: bool) -> dict[str, float]:
    """One case in this process: CPU and wall seconds, bytes over what the texts take, and links."""
    rng = np.random.default_rng(0)
    table = CASES[case](count, rng)
    texts = with_looks(table, rng) if has_looks else [hash_text(codes) for codes in table]
    del table
    Path("/proc/self/clear_refs").write_text("5")  # what drawing them took is forgotten
    before = status_bytes("VmRSS")
    cpu, wall = time.process_time(), time.monotonic()
    links = near_duplicate_links(texts, BITS)
    spent = {"cpu": time.process_time() - cpu, "wall": time.monotonic() - wall}
    return {**spent, "peak": status_bytes("VmHWM") - before, "links": len(links)}


def _flipped(table: Hashes, rng: np.random.Generator, num_bits: int) -> Hashes:
    """The same with ``num_bits`` bits of each code drawn and turned."""
    flipped = table.copy()
    for _ in range(num_bits):
        flipped ^= np.uint64(1) << rng.integers(0, 64, table.shape, np.uint64)
    return flipped


def main() -> None:
    """Draw, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="some of them")
    parser.add_argument("--without-looks", action="store_true", help="2.9 KiB less of memory a video")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.videos, not arguments.without_looks)))
        return
    print(f"{f'{arguments.videos:,} videos':<16} {'CPU s':>7} {'wall s':>7} {'KiB a video':>12} {'links':>8}")
    for case in arguments.cases:
        command = [sys.executable, "-m", "benchmarks.near_duplicates", "--measure", case]
        command += ["--videos", str(arguments.videos), *(["--without-looks"] if arguments.without_looks else [])]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        found = json.loads(done.stdout)
        per_video = found["peak"] / arguments.videos / 1024
        print(
            f"{case:<16} {found['cpu']:>7.1f} {found['wall']:>7.1f} {per_video:>12.1f} {found['links']:>8,}", flush=True
        )


if __name__ == "__main__":
    main()
