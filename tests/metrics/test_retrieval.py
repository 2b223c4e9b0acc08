from __future__ import annotations

import itertools
import math
import threading
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from fvc_lib.metrics import retrieval_counting, retrieval_filters, retrieval_masks, retrieval_stream
from fvc_lib.metrics.retrieval import retrieval_metrics
from fvc_lib.metrics.retrieval_exact import at_least, double_products, exact_values
from fvc_lib.metrics.retrieval_filters import BYTES, DOUBLE, SINGLE
from fvc_lib.metrics.retrieval_masks import Mask
from fvc_lib.metrics.retrieval_plan import RetrievalPlan, plan_retrieval

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


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings with few or many ties, near ties and rows of very different norms, and whose text is whose."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_videos, num_texts = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    dimensions = draw(st.sampled_from([1, 3, 16, 24]))
    videos = generator.normal(size=(num_videos, dimensions)).astype(np.float32)
    texts = generator.normal(size=(num_texts, dimensions)).astype(np.float32)
    kind = draw(st.sampled_from(["normal", "quantised", "collapsed", "nearly tied", "outliers", "tiny"]))
    if kind == "quantised":
        videos, texts = np.round(videos), np.round(texts)
    elif kind == "collapsed":
        videos[:], texts[:] = videos[0], texts[0]
    elif kind == "nearly tied":
        for rows in (videos, texts):
            rows[:] = rows[0]
            change = generator.random(rows.shape) < 0.1
            rows[change] = np.nextafter(rows, np.float32(generator.choice([-9, 9])))[change]
    elif kind == "outliers":
        videos *= np.float32(10.0) ** generator.integers(-6, 7, (num_videos, 1))
        texts[:, 0] *= 1000
    elif kind == "tiny":
        videos *= np.float32(1e-30)
        texts *= np.float32(1e-12)
    skew = draw(st.sampled_from([1, 5]))
    text_of_video = (num_texts * generator.random(num_videos) ** skew).astype(np.int64)
    return videos, texts, text_of_video


FORMATS = {"bytes": (BYTES,), "single": (SINGLE,), "double": (DOUBLE,), "in turn": (BYTES, SINGLE, DOUBLE)}


@settings(max_examples=50, deadline=None)
@given(
    sample=samples(),
    blocks=st.tuples(st.integers(1, 30), st.integers(1, 15), st.integers(1, 15)),
    formats=st.sampled_from(sorted(FORMATS)),
    worth_taking=st.sampled_from([0.0, 0.1, 1.0]),
    most_passes=st.sampled_from([1, 2, 32]),
    many_between=st.sampled_from([-1.0, 0.05, 1.0]),
    by_torch=st.booleans(),
)
def test_every_metric_is_that_of_a_dense_oracle(
    sample, blocks, formats, worth_taking, most_passes, many_between, by_torch
) -> None:
    videos, texts, text_of_video = sample
    plan = RetrievalPlan(len(videos), len(texts), videos.shape[1], *blocks)
    kinds = FORMATS[formats] if videos.shape[1] >= 16 else (SINGLE, DOUBLE)
    with (
        mock.patch.object(retrieval_stream, "filters_of", return_value=kinds),
        mock.patch.object(retrieval_counting, "_SHARE_WORTH_TAKING", worth_taking),
        mock.patch.object(retrieval_counting, "_MOST_PASSES", most_passes),
        mock.patch.object(retrieval_counting, "_MANY_BETWEEN", many_between),
        mock.patch.object(retrieval_masks, "COMPARED_BY_NUMPY", set() if by_torch else {"cpu"}),
        mock.patch.object(retrieval_filters, "MULTIPLIED_BY_NUMPY", set() if by_torch else {"cpu"}),
    ):
        check_against_naive(videos, texts, text_of_video, plan=plan)


@settings(max_examples=10, deadline=None)
@given(sample=samples(), seed=st.integers(0, 1000))
def test_a_video_may_have_several_texts_or_none(sample, seed) -> None:
    videos, texts, _ = sample
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 30))
    pairs = np.stack([generator.integers(0, len(videos), size), generator.integers(0, len(texts), size)], axis=1)
    check_against_naive(videos, texts, pairs)


def test_larger_blocks_than_one_sum_of_bytes_are_counted_right() -> None:
    """Rows of more than 255 words' worth of answers, columns of more than 255 rows."""
    generator = np.random.default_rng(1)
    videos = generator.integers(-3, 4, (300, 16)).astype(np.float32)
    texts = generator.integers(-3, 4, (2040, 16)).astype(np.float32)
    text_of_video = generator.integers(0, 40, 300)
    dense = videos @ texts.T  # whole numbers: exact
    found = retrieval_metrics(videos, texts, text_of_video, plan=RetrievalPlan(300, 2040, 16, 300, 2040, 2040))
    own = dense[np.arange(300), text_of_video][:, None]
    np.testing.assert_array_equal(found.video_to_text.ranks, (dense >= own).sum(1))
    for text, rank in zip(found.text_to_video.query_indices, found.text_to_video.ranks, strict=True):
        right = text_of_video == text
        assert rank == 1 + (dense[~right, text] >= dense[right, text].max()).sum()


def test_what_has_collapsed_comes_last_and_not_first() -> None:
    found = retrieval_metrics(np.ones((12, 5)), np.ones((4, 5)), np.arange(12) % 3, (1, 3, 4))
    assert found.video_to_text.recall_at_k == (0, 0, 1)
    assert found.video_to_text.mean_rank == 4
    assert set(found.text_to_video.ranks) == {9}  # behind the eight videos of others
    assert found.text_to_video.recall_at_k == (0, 0, 0)
    assert (
        found.text_to_video.as_metrics()["recall@1"] < found.text_to_video.chance()["recall@1"] == pytest.approx(1 / 3)
    )


def test_equal_texts_in_two_rows_are_a_tie_and_as_one_row_they_are_not() -> None:
    videos = np.eye(3, 4, dtype=np.float32)
    twice = retrieval_metrics(videos, videos[[0, 1, 2, 0]], [0, 1, 2])
    assert twice.video_to_text.ranks.tolist() == [2, 1, 1]
    once = retrieval_metrics(videos[[0, 1, 2, 0]], videos, [0, 1, 2, 0])
    assert once.video_to_text.ranks.tolist() == [1, 1, 1, 1]
    assert once.text_to_video.ndcg == 1.0


def test_texts_without_a_video_are_candidates_only() -> None:
    videos, texts = np.eye(2), np.array([[1.0, 0], [0, 1], [2, 2]])
    found = retrieval_metrics(videos, texts, [0, 1])
    assert found.video_to_text.ranks.tolist() == [2, 2]
    assert found.text_to_video.query_indices.tolist() == [0, 1]
    assert found.as_metrics()["text_to_video/num_queries"] == 2
    assert found.as_metrics()["video_to_text/recall@1"] == 0
    assert found.as_metrics()["video_to_text/recall@5"] == 1  # of three candidates


@pytest.mark.parametrize("num_positives", [1, 2, 4])
def test_chance_is_the_mean_of_all_orders(num_positives: int) -> None:
    found = retrieval_metrics(np.ones((4, 2)), np.ones((1, 2)), [0] * 4, (1, 2, 9))
    direction = found.text_to_video.__class__(
        **{**vars(found.text_to_video), "num_positives": np.array([num_positives])}
    )
    chosen = list(itertools.combinations(range(1, 5), num_positives))
    ideal = sum(1 / math.log2(1 + place) for place in range(1, num_positives + 1))
    assert direction.chance() == pytest.approx(
        {
            "recall@1": np.mean([min(ranks) <= 1 for ranks in chosen]),
            "recall@2": np.mean([min(ranks) <= 2 for ranks in chosen]),
            "recall@9": 1,
            "mean_rank": np.mean([min(ranks) for ranks in chosen]),
            "mrr": np.mean([1 / min(ranks) for ranks in chosen]),
            "ndcg": np.mean([sum(1 / math.log2(1 + rank) for rank in ranks) / ideal for ranks in chosen]),
        }
    )


def embedded(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(50, 20)).astype(np.float32)
    return rows[:40], rows[40:], generator.integers(0, 10, 40)


@pytest.mark.parametrize(
    "convert",
    [
        torch.from_numpy,
        lambda rows: torch.from_numpy(rows).requires_grad_(),
        lambda rows: rows.astype(np.float64),
        lambda rows: np.asfortranarray(rows),
        lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
        lambda rows: rows[:, ::-1].copy()[:, ::-1],
    ],
)
def test_embeddings_may_come_in_any_container(convert) -> None:
    videos, texts, text_of_video = embedded()
    expected = retrieval_metrics(videos, texts, text_of_video).as_metrics()
    assert retrieval_metrics(convert(videos), convert(texts), text_of_video).as_metrics() == pytest.approx(expected)
    videos.flags.writeable = False
    given = retrieval_metrics(videos, convert(texts), torch.from_numpy(text_of_video), device="cpu")
    assert given.as_metrics() == pytest.approx(expected)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_are_what_they_are_as_float32(kind: torch.dtype) -> None:
    videos, texts, text_of_video = embedded()
    halves = [torch.from_numpy(rows).to(kind) for rows in (videos, texts)]
    wide = [rows.float() for rows in halves]
    assert (
        retrieval_metrics(*halves, text_of_video).as_metrics() == retrieval_metrics(*wide, text_of_video).as_metrics()
    )


def with_value(value: float) -> np.ndarray:
    rows = np.ones((3, 2))
    rows[1, 1] = value
    return rows


@pytest.mark.parametrize(
    ("videos", "texts", "text_of_video", "ks", "message"),
    [
        (with_value(np.nan), np.ones((2, 2)), [0, 1, 0], (1,), "row 1 of video_embeddings holds NaN"),
        (np.ones((3, 2)), with_value(-np.inf), [0, 1, 0], (1,), "row 1 of text_embeddings holds NaN or infinite"),
        (with_value(1e30), np.ones((2, 2)), [0, 1, 0], (1,), "row 1 of video_embeddings has a norm of 1e.30"),
        (np.ones((0, 2)), np.ones((2, 2)), [], (1,), r"video_embeddings have shape \(0, 2\)"),
        (np.ones((3, 2)), np.ones((0, 2)), [0, 0, 0], (1,), r"text_embeddings have shape \(0, 2\)"),
        (np.ones((3, 0)), np.ones((2, 0)), [0, 0, 0], (1,), r"video_embeddings have shape \(3, 0\)"),
        (np.ones(3), np.ones((2, 2)), [0, 0, 0], (1,), r"video_embeddings have shape \(3,\)"),
        (np.ones((3, 2)), np.ones((2, 4)), [0, 0, 0], (1,), "2 numbers per row and text_embeddings 4"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1], (1,), "one text for each of the 3 videos"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1, 2], (1,), r"names text 2 \(pair 2\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, -1, 1], (1,), r"names text -1 \(pair 1\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [[3, 0]], (1,), r"names video 3 \(pair 0\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [0.0, 1.0, 1.0], (1,), "is of float64"),
        (np.ones((3, 2), dtype=complex), np.ones((2, 2)), [0, 1, 1], (1,), "are of complex128"),
        (np.ones((3, 2)), torch.ones(2, 2, dtype=torch.bool), [0, 1, 1], (1,), "are of torch.bool"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1, 1], (0,), r"ks=\(0,\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1, 1], (), r"ks=\(\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1, 1], (1, 1), r"ks=\(1, 1\)"),
        (np.ones((3, 2)), np.ones((2, 2)), [0, 1, 1], (1.5,), r"ks=\(1.5,\)"),
    ],
)
def test_what_cannot_be_measured_is_refused(videos, texts, text_of_video, ks, message) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(videos, texts, np.array(text_of_video), ks)


def test_a_plan_for_other_embeddings_and_too_little_memory_are_refused() -> None:
    videos, texts, text_of_video = embedded()
    with pytest.raises(ValueError, match="for other embeddings than 40 videos and 10 texts"):
        retrieval_metrics(videos, texts, text_of_video, plan=RetrievalPlan(40, 10, 21, 8, 8, 8))
    with pytest.raises(ValueError, match="at most") as error:
        RetrievalPlan(40, 10_000, 21, 8, 2041, 2041)
    assert "give sizes from 1 on" in str(error.value)
    with pytest.raises(ValueError, match="memory_bytes=1,000,000 is too little"):
        retrieval_metrics(videos, texts, text_of_video, memory_bytes=1_000_000)


def test_a_plan_stays_within_its_memory_whatever_there_is() -> None:
    for memory_bytes in (16_000_000, 64_000_000, 1_000_000_000):
        for dimensions in (8, 512, 1024):
            for num_videos in (20, 20_000):
                plan = plan_retrieval(num_videos, 5000, dimensions, memory_bytes)
                assert plan.streamed_bytes <= memory_bytes
                assert plan.text_panel % plan.text_block == 0


def test_pairs_beyond_one_for_each_video_count_as_memory() -> None:
    assert plan_retrieval(2000, 2000, 64, 64_000_000, 200_000).streamed_bytes <= 64_000_000
    with pytest.raises(ValueError, match=r"1,002,000 pairs of which belong together; give at least \d{3},\d{3},\d{3} "):
        plan_retrieval(2000, 2000, 64, 64_000_000, 1_000_000)
    videos, texts, _ = embedded()
    every = np.argwhere(np.ones((40, 10)))
    assert retrieval_metrics(videos, texts, every).plan.more_pairs == 360


def test_threads_are_given_back_after_errors_and_by_calls_at_once() -> None:
    def limits() -> list[int]:
        return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]

    def stop(*_: int) -> None:
        raise KeyError

    def second() -> None:
        with retrieval_stream.one_thread():
            entered.set()

    before, entered, other = limits(), threading.Event(), threading.Thread(target=second)
    with pytest.raises(KeyError):
        retrieval_metrics(*embedded(), progress=stop)
    assert limits() == before
    with retrieval_stream.one_thread():
        other.start()
        assert not entered.wait(0.05)  # else it would take our limit for what was before, and leave it there
    other.join()
    assert limits() == before


def test_the_log_says_what_was_gathered_and_how_it_was_streamed() -> None:
    lines, told = [], []
    videos, texts, text_of_video = embedded()
    retrieval_metrics(videos, texts, text_of_video, log=lines.append, progress=lambda *done: told.append(done))
    assert lines[0] == "samples accumulated: 40 of 20 numbers"
    assert lines[1] == "unique texts: 10"
    assert lines[2] == "dense similarities would take: 1.6 kB as float32"
    assert lines[3].startswith("streamed: 1 block of 40 x 10 in ")
    assert lines[-1].startswith("similarities: blocks 1 in ")
    assert told == [(400, 400)]
    described = plan_retrieval(117_120, 23_592, 512, 64_000_000).describe().splitlines()
    assert described[2] == "dense similarities would take: 11.1 GB as float32"
    assert described[3].startswith("streamed: 2,760 blocks of 1,024 x 1,024 in ")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0, 3, 30]), dimensions=st.integers(1, 40))
def test_comparisons_without_rounding_are_those_of_fractions(seed: int, spread: int, dimensions: int) -> None:
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-spread, spread + 1, (3, 6, dimensions))
    query, candidate, positive = np.ldexp(generator.normal(size=exponents.shape), exponents).astype(np.float32)
    positive[:4] = candidate[:4]
    positive[1:4, 0] = np.nextafter(positive[1:4, 0], np.float32(9))
    query[3, 0] = np.float32(1e-38)
    left, right = ((whole(query) * whole(rows)).sum(axis=1) for rows in (candidate, positive))
    assert at_least(query, candidate, positive).tolist() == [a >= b for a, b in zip(left, right, strict=True)]
    values = [tuple(row) for row in exact_values(np.concatenate([query] * 2), np.concatenate([candidate, positive]))]
    exact = [*left, *right]
    for (one, first), (other, second) in itertools.combinations(zip(values, exact, strict=True), 2):
        assert (one < other, one == other) == (first < second, first == second)


@pytest.mark.parametrize("kind", [BYTES, SINGLE, DOUBLE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1.0, 1e6])
def test_no_format_is_further_from_the_truth_than_it_says(kind: retrieval_filters.Filter, scale: float) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (generator.normal(size=(30, 64)).astype(np.float32) for _ in range(2))
    videos *= np.float32(scale)
    videos[0] *= 100  # clipped by a step that is made for the others
    norms = [np.linalg.norm(rows.astype(np.float64), axis=1) * (1 + 1e-12) for rows in (videos, texts)]
    left, right = (
        kind.operand(torch.from_numpy(rows), of_rows) for rows, of_rows in zip((videos, texts), norms, strict=True)
    )
    scores = torch.empty(30, 30, dtype=kind.scores)
    kind.multiply(left, right, scores)
    truth = np.array([double_products(np.repeat(row[None], 30, axis=0), texts) for row in videos])
    off = np.abs(scores.numpy() * (left.scale * right.scale) - truth)
    assert (off <= kind.margin(left, right, 64)[:, None] + 1e-13 * norms[0][:, None]).all()
    assert (off <= kind.margin(right, left, 64) + 1e-13 * norms[0].max()).all()


def test_answers_are_counted_and_found_where_they_are() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (300, 37)).astype(np.int32))
    for axis, limits in ((0, np.arange(300) % 9), (1, np.arange(37) % 9)):
        mask = Mask(300, 37, scores.device)
        mask.compare(scores, limits.astype(np.int32), axis)
        expected = scores.numpy() >= np.expand_dims(limits, 1 - axis)
        np.testing.assert_array_equal(mask.counts(0), expected.sum(1))
        np.testing.assert_array_equal(mask.counts(1), expected.sum(0))
        places = [np.stack(part) for part in mask.positions()]
        np.testing.assert_array_equal(np.concatenate(places, axis=1), np.nonzero(expected))


def test_equal_sums_of_other_orders_are_ties_though_doubles_differ() -> None:
    generator = np.random.default_rng(3)
    rows = (generator.normal(size=(1, 64)) * 10.0 ** generator.integers(-6, 7, 64)).astype(np.float32)
    texts = np.concatenate([rows[:, generator.permutation(64)] for _ in range(20)])
    videos = np.full((20, 64), 0.1, dtype=np.float32)
    assert len(set(double_products(videos, texts))) > 1
    found = retrieval_metrics(videos, texts, np.arange(20))
    assert set(found.video_to_text.ranks) == {20}
