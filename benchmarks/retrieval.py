#!/usr/bin/env python3
"""What exact retrieval metrics of both directions cost, beside a matrix product of the same size and peers.

117,120 videos and 23,592 unique texts of 512 numbers, as a trained and as an untrained model would embed them; the rate
of the machine's float32 matrix product (the better of numpy's and torch's) is measured in turn with it, in this
process. Then 20,000 x 8,000 in turn with the dense matrix and counting, 2,048 x 4,096 chunks with argsort as people
write it, and faiss's exact ten best; torchmetrics, which keeps every pair, at 1,000 x 400. They find less than ours:
ranks of the best positive (recall at ten by faiss), no NDCG. Everyone has one thread; peak memory beyond the embeddings
is measured in a process of its own for each. Where recall differs by more than rounding does, the benchmark stops.
Peers: pip install '.[bench]'; without them they are left out.

    python -m benchmarks.retrieval [--quick] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.video_text import retrieval_metrics

OURS, SGEMM = "ours", "sgemm"
K = 10
CHUNK_VIDEOS, CHUNK_TEXTS = 2048, 4096
LEAST_SHARE = 0.5  # of the rate of the float32 product
MEMORY_BYTES = 64_000_000  # beyond the embeddings
Recalls = tuple[float, float]


@dataclass(frozen=True)
class Sample:
    """Embeddings of unit norm: a video's is its text's times ``signal`` and noise."""

    num_videos: int
    num_texts: int
    signal: float
    dimensions: int = 512

    @functools.cached_property
    def embeddings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Videos (N, D), texts (M, D), text of each video (N,)."""
        generator = np.random.default_rng(0)
        texts = _unit(generator.standard_normal((self.num_texts, self.dimensions), dtype=np.float32))
        others = generator.integers(0, self.num_texts, self.num_videos - self.num_texts)
        text_of_video = generator.permutation(np.concatenate([np.arange(self.num_texts), others]))
        videos = _unit(generator.standard_normal((self.num_videos, self.dimensions), dtype=np.float32))
        for start in range(0, self.num_videos, 4096):
            videos[start : start + 4096] += self.signal * texts[text_of_video[start : start + 4096]]
        return _unit(videos), texts, text_of_video

    @property
    def num_pairs(self) -> int:
        return self.num_videos * self.num_texts

    def __str__(self) -> str:
        return f"{self.num_videos:,} x {self.num_texts:,}, signal {self.signal}"


def _unit(rows: np.ndarray) -> np.ndarray:
    for start in range(0, len(rows), 4096):
        rows[start : start + 4096] /= np.linalg.norm(rows[start : start + 4096], axis=1, keepdims=True)
    return rows


def ours(sample: Sample) -> Recalls:
    videos, texts, text_of_video = sample.embeddings
    found = retrieval_metrics(videos, texts, np.stack([np.arange(len(videos)), text_of_video], axis=1), (1, K))
    name = f"recall@{K}"
    return found["video_to_text"].metrics[name], found["text_to_video"].metrics[name]


def dense_and_counting(sample: Sample) -> Recalls:
    """Ranks of the best positive from all similarities at once, without a sort."""
    videos, texts, text_of_video = sample.embeddings
    similarities = videos @ texts.T
    rows = np.arange(len(videos))
    own = similarities[rows, text_of_video]
    to_texts = (similarities >= own[:, None]).sum(axis=1)
    best = np.full(len(texts), -np.inf, dtype=np.float32)
    np.maximum.at(best, text_of_video, own)
    similarities[rows, text_of_video] = -np.inf  # one's own other videos do not count
    to_videos = 1 + (similarities >= best).sum(axis=0)
    return float((to_texts <= K).mean()), float((to_videos <= K).mean())


def chunks_and_argsort(sample: Sample) -> Recalls:
    """One direction after the other: a row of chunks, put together and sorted."""
    videos, texts, text_of_video = (torch.from_numpy(array) for array in sample.embeddings)
    places = [torch.arange(len(texts))[:, None], text_of_video]
    hits = []
    for queries, candidates, is_right in (
        (videos, texts, lambda rows, order: order == text_of_video[rows, None]),
        (texts, videos, lambda rows, order: text_of_video[order] == places[0][rows]),
    ):
        found = 0
        for rows in torch.arange(len(queries)).split(CHUNK_VIDEOS):
            parts = [queries[rows] @ part.T for part in candidates.split(CHUNK_TEXTS)]
            order = torch.cat(parts, dim=1).argsort(dim=1, descending=True)
            rank = is_right(rows, order).to(torch.uint8).argmax(dim=1)
            found += int((rank < K).sum())
        hits.append(found / len(queries))
    return hits[0], hits[1]


def faiss_best_ten(sample: Sample) -> Recalls:
    import faiss

    faiss.omp_set_num_threads(1)
    videos, texts, text_of_video = sample.embeddings
    hits = []
    for queries, candidates in ((videos, texts), (texts, videos)):
        index = faiss.IndexFlatIP(sample.dimensions)
        index.add(candidates)
        hits.append(index.search(queries, K)[1])
    to_texts = (hits[0] == text_of_video[:, None]).any(axis=1)
    to_videos = (text_of_video[hits[1]] == np.arange(len(texts))[:, None]).any(axis=1)
    return float(to_texts.mean()), float(to_videos.mean())


def torchmetrics_hit_rate(sample: Sample) -> Recalls:
    from torchmetrics.retrieval import RetrievalHitRate

    videos, texts, text_of_video = (torch.from_numpy(array) for array in sample.embeddings)
    right = text_of_video[:, None] == torch.arange(len(texts))
    similarities = videos @ texts.T
    found = []
    for scores, target in ((similarities, right), (similarities.T, right.T)):
        metric = RetrievalHitRate(top_k=K)
        asked = torch.arange(len(scores))[:, None].expand(scores.shape)
        metric.update(scores.reshape(-1), target.reshape(-1), indexes=asked.reshape(-1))
        found.append(float(metric.compute()))
    return found[0], found[1]


CONTESTANTS: dict[str, Callable[[Sample], Recalls]] = {
    OURS: ours,
    "dense matrix and counting": dense_and_counting,
    f"{CHUNK_VIDEOS} x {CHUNK_TEXTS} chunks and argsort": chunks_and_argsort,
    "faiss, the ten best": faiss_best_ten,
    "torchmetrics, hit rate": torchmetrics_hit_rate,
}
NEEDS = {"faiss, the ten best": "faiss", "torchmetrics, hit rate": "torchmetrics"}
KEEPS_EVERY_PAIR = {"torchmetrics, hit rate"}


@dataclass(frozen=True)
class Reading:
    """What one contestant took for one sample.

    Attributes:
        name: the contestant.
        sample: what it worked on.
        cpu_seconds: of each round.
        recalls: at ten, of both directions.
        peak_bytes: beyond the embeddings, in a process of its own.
    """

    name: str
    sample: Sample
    cpu_seconds: list[float]
    recalls: Recalls
    peak_bytes: int

    @property
    def nanoseconds_per_pair(self) -> float:
        return min(self.cpu_seconds) / self.sample.num_pairs * 1e9


def sgemm_seconds(size: int = 4096, dimensions: int = 512) -> float:
    """Processor seconds per multiply-add of a float32 product, of numpy or torch, whichever is faster."""
    rows = np.random.default_rng(0).standard_normal((size, dimensions), dtype=np.float32)
    out = np.empty((size, size), dtype=np.float32)
    tensor, into = torch.from_numpy(rows), torch.from_numpy(out)
    kinds = (lambda: np.matmul(rows, rows.T, out=out), lambda: torch.mm(tensor, tensor.T, out=into))
    return min(_timed(kind)[0] for kind in kinds for _ in range(3)) / (size * size * dimensions)


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    before = time.process_time()
    found = work()
    return time.process_time() - before, found


def take_turns(names: list[str], sample: Sample, small: Sample, rounds: int) -> tuple[list[Reading], list[float]]:
    """Readings of ``names`` and of the float32 product, in turn; who keeps every pair works on ``small``.

    Raises:
        SystemExit: one finds another recall than ours.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    products, recalls = [], {}
    for _ in range(rounds):
        products.append(sgemm_seconds())
        for name in names:
            given = small if name in KEEPS_EVERY_PAIR else sample
            given.embeddings  # noqa: B018 - made before time is taken
            taken, recalls[name] = _timed(functools.partial(CONTESTANTS[name], given))
            seconds[name].append(taken)
    for name in names:
        expected = recalls[OURS] if name not in KEEPS_EVERY_PAIR else ours(small)
        if not np.allclose(recalls[name], expected, atol=1e-3):
            raise SystemExit(f"{name} finds recall@{K} of {recalls[name]}, ours {expected}")
    return [
        Reading(name, given, seconds[name], recalls[name], peak_bytes(name, given))
        for name in names
        for given in [small if name in KEEPS_EVERY_PAIR else sample]
    ], products


def peak_bytes(name: str, sample: Sample) -> int:
    """Peak memory of ``name`` beyond imports and embeddings, in a process of its own. Linux only."""
    sizes = [str(sample.num_videos), str(sample.num_texts), str(sample.signal), str(sample.dimensions)]
    command = [sys.executable, "-m", "benchmarks.retrieval", "--measure", name, *sizes]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return int(done.stdout)


def measure_here(name: str, sample: Sample) -> int:
    CONTESTANTS[name](Sample(400, 200, 0.3, sample.dimensions))  # what is loaded late is no one's own
    sample.embeddings  # noqa: B018 - made before memory is looked at
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    CONTESTANTS[name](sample)
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def report(readings: list[Reading], products: list[float]) -> list[str]:
    """A line per contestant; ratios are of processor time per pair of it to ours."""
    lines = [f"{'':<34}{'CPU s':>8}{'ns/pair':>9}{'this : ours':>16}{'of sgemm':>10}{'peak MB':>9}  recall@{K}"]
    own = readings[0]
    for reading in readings:
        pairs = reading.sample.num_pairs
        ratios = [
            theirs / pairs / (mine / own.sample.num_pairs)
            for mine, theirs in zip(own.cpu_seconds, reading.cpu_seconds, strict=True)
        ]
        ratio = f"{reading.nanoseconds_per_pair / own.nanoseconds_per_pair:.1f} ({statistics.median(ratios):.1f})"
        share = min(products) * reading.sample.dimensions * pairs / min(reading.cpu_seconds)
        found = " ".join(f"{recall:.3f}" for recall in reading.recalls)
        name = reading.name if reading.sample == own.sample else f"{reading.name}*"
        lines.append(
            f"{name:<34}{min(reading.cpu_seconds):>8.2f}{reading.nanoseconds_per_pair:>9.2f}{ratio:>16}{share:>10.2f}"
            f"{reading.peak_bytes / 1e6:>9.1f}  {found}"
        )
    return lines


def verdict(reading: Reading, products: list[float], peak_of_half: int) -> str:
    """Whether the targets are met."""
    needed = min(products) * reading.sample.dimensions * reading.sample.num_pairs
    share, within = needed / min(reading.cpu_seconds), reading.peak_bytes <= MEMORY_BYTES
    return (
        f"{share:.2f} of the rate of the float32 product ({_mark(share >= LEAST_SHARE)}: {LEAST_SHARE}); "
        f"{reading.peak_bytes / 1e6:.1f} MB beyond the embeddings, {peak_of_half / 1e6:.1f} MB with half the videos "
        f"({_mark(within)}: {MEMORY_BYTES / 1e6:.0f} MB)"
    )


def _mark(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, a tenth of the videos and texts")
    parser.add_argument("--json", type=Path, help="write every reading to this file")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    before = torch.get_num_threads()
    try:
        with threadpool_limits(1):
            torch.set_num_threads(1)  # for everyone: threads that wait would spin, and count as work
            run(options)
    finally:
        torch.set_num_threads(before)


def run(options: argparse.Namespace) -> None:
    if options.measure:
        name, videos, texts, signal, dimensions = options.measure
        print(measure_here(name, Sample(int(videos), int(texts), float(signal), int(dimensions))))
        return
    rounds, part = (1, 10) if options.quick else (options.rounds, 1)
    present = [name for name in CONTESTANTS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    kept = []
    for title, signal in (("trained", 0.25), ("untrained", 0.0)):
        whole = Sample(117_120 // part, 23_592 // part, signal)
        readings, products = take_turns([OURS], whole, whole, rounds)
        half = peak_bytes(OURS, replace(whole, num_videos=whole.num_videos // 2))
        print(f"{title}, {whole}: {verdict(readings[0], products, half)}")
        peers, peer_products = take_turns(
            present, Sample(20_000 // part, 8000 // part, signal), Sample(1000, 400, signal), rounds
        )
        print("\n".join(report(peers, peer_products)) + "\n", flush=True)
        kept += [asdict(reading) for reading in readings + peers]
    print("* at 1,000 x 400, per pair; of two ratios the first is of least readings, the second the rounds' median")
    for name in CONTESTANTS.keys() - set(present):
        print(f"{name}: not installed")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
