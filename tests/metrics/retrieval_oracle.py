"""Retrieval from the dense matrix of all similarities as whole numbers, and samples that make it hard."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st

from fvc_lib.metrics.retrieval import retrieval_metrics

KS = (1, 3, 1000)


def whole(rows: np.ndarray) -> np.ndarray:
    """Rows of float32 numbers as whole ones, 2^149 times as large: nothing is lost, nothing overflows."""
    return np.array([[int(Fraction(float(x)) * 2**149) for x in row] for row in rows], dtype=object)


def naive(similarities: np.ndarray, pairs: list[tuple[int, int]]) -> dict[str, object]:
    """One direction from the dense matrix of all similarities, candidate by candidate."""
    ranks, best, ideal_gains = {}, [], []
    for query in sorted({query for query, _ in pairs}):
        right = sorted({candidate for asked, candidate in pairs if asked == query})
        wrong = [x for candidate, x in enumerate(similarities[query]) if candidate not in right]
        own = sorted((similarities[query][candidate] for candidate in right), reverse=True)
        ranks[query] = [place + sum(x >= value for x in wrong) for place, value in enumerate(own, 1)]
        best.append(ranks[query][0])
        gain = sum(1 / math.log2(1 + rank) for rank in ranks[query])
        ideal_gains.append(gain / sum(1 / math.log2(1 + place) for place in range(1, len(right) + 1)))
    return {
        "queries": list(ranks),
        "ranks": best,
        "num_positives": [len(of_query) for of_query in ranks.values()],
        "recall": [sum(rank <= k for rank in best) / len(best) for k in KS],
        "median": float(np.median(best)),
        "mean": sum(best) / len(best),
        "mrr": math.fsum(1 / rank for rank in best) / len(best),
        "ndcg": sum(ideal_gains) / len(ideal_gains),
    }


def check_against_naive(videos: np.ndarray, texts: np.ndarray, text_of_video: np.ndarray, **options: object) -> None:
    pairs = (
        list(enumerate(text_of_video.tolist())) if text_of_video.ndim == 1 else [*map(tuple, text_of_video.tolist())]
    )
    dense = whole(videos).dot(whole(texts).T)
    found = retrieval_metrics(videos, texts, text_of_video, KS, **options)
    mirrored = [(text, video) for video, text in pairs]
    similarity = math.fsum(Fraction(dense[pair], 2**298) for pair in set(pairs)) / len(set(pairs))
    for ours, oracle in (
        (found.video_to_text, naive(dense, pairs)),
        (found.text_to_video, naive(dense.T, mirrored)),
    ):
        assert ours.query_indices.tolist() == oracle["queries"]
        assert ours.ranks.tolist() == oracle["ranks"]
        assert ours.num_positives.tolist() == oracle["num_positives"]
        assert list(ours.recall_at_k) == oracle["recall"]
        assert (ours.median_rank, ours.mean_rank, ours.mrr) == (oracle["median"], oracle["mean"], oracle["mrr"])
        assert ours.ndcg == pytest.approx(oracle["ndcg"], rel=1e-12)  # sums of logarithms
        assert ours.mean_positive_similarity == pytest.approx(
            similarity, rel=1e-12, abs=1e-13 * float(np.abs(videos).max())
        )


KINDS = (
    "normal", "quantised", "signs", "quarters", "collapsed", "nearly tied", "within margins", "half steps", "outliers",
    "tiny",
)  # fmt: skip


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings with few or many ties, near ties and rows of very different norms, and whose text is whose."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_videos, num_texts = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    dimensions = draw(st.sampled_from([1, 3, 16, 24]))
    kind = draw(st.sampled_from(KINDS))
    videos, texts = (rows_of_kind(kind, generator, number, dimensions) for number in (num_videos, num_texts))
    if kind == "tiny":
        texts *= np.float32(1e18)
    skew = draw(st.sampled_from([1, 5]))
    text_of_video = (num_texts * generator.random(num_videos) ** skew).astype(np.int64)
    return videos, texts, text_of_video


def rows_of_kind(kind: str, generator: np.random.Generator, number: int, dimensions: int) -> np.ndarray:
    """float32 (number, dimensions)."""
    rows = generator.normal(size=(number, dimensions)).astype(np.float32)
    if kind == "quantised":
        return np.round(rows)
    if kind == "signs":
        return np.sign(rows) * np.float32(dimensions**-0.5)
    if kind == "quarters":
        return np.round(rows * 40) / 4
    if kind == "collapsed":
        rows[:] = rows[0]
    elif kind == "nearly tied":
        rows[:] = rows[0]
        change = generator.random(rows.shape) < 0.1
        rows[change] = np.nextafter(rows, np.float32(generator.choice([-9, 9])))[change]
    elif kind == "within margins":  # of some format, whatever it is: products differ by 1e-1 to 1e-8 of the norms
        rows = rows[:1] + rows * np.float32(10.0) ** generator.uniform(-8, -1, (number, 1)).astype(np.float32)
    elif kind == "half steps":  # of the first byte, the second or the third: errors are as large as they can be
        steps = generator.integers(-126, 127, rows.shape) + 0.5 * 254.0 ** -generator.integers(0, 3, rows.shape)
        steps[:, 0] = 127
        rows = (steps / 127).astype(np.float32)
    elif kind == "outliers":
        rows *= np.float32(10.0) ** generator.integers(-6, 7, (number, 1))
        rows[:, 0] *= 1000
    elif kind == "tiny":
        rows *= np.float32(1e-30)
    return rows
