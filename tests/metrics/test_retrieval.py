from __future__ import annotations

import itertools
import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics import retrieval
from fvc_lib.metrics.retrieval import (
    RetrievalPlan,
    Rows,
    exact_product,
    is_at_least,
    largest_error,
    plan_retrieval,
    retrieval_metrics,
)
from tests.metrics.retrieval_oracle import check_against_naive, rows_of_kind, samples, whole


@settings(max_examples=10, deadline=None)
@given(sample=samples(), seed=st.integers(0, 1000))
def test_a_video_may_have_several_texts_or_none(sample, seed) -> None:
    videos, texts, _ = sample
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 30))
    pairs = np.stack([generator.integers(0, len(videos), size), generator.integers(0, len(texts), size)], axis=1)
    check_against_naive(videos, texts, pairs)


def test_larger_blocks_than_one_sum_of_bytes_are_counted_right() -> None:
    """More answers of one row, or of one column, than a byte counts."""
    generator = np.random.default_rng(1)
    videos = generator.integers(-3, 4, (300, 16)).astype(np.float32)
    texts = generator.integers(-3, 4, (2040, 16)).astype(np.float32)
    text_of_video = generator.integers(0, 40, 300)
    dense = videos @ texts.T  # whole numbers: exact
    with mock.patch.object(retrieval, "plan_retrieval", return_value=RetrievalPlan(300, 2040, 16, 2040)):
        found = retrieval_metrics(videos, texts, text_of_video)
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
    given = retrieval_metrics(videos, convert(texts), torch.from_numpy(text_of_video))
    assert given.as_metrics() == pytest.approx(expected)


def with_value(value: float) -> np.ndarray:
    rows = np.ones((3, 2))
    rows[1, 1] = value
    return rows


@pytest.mark.parametrize(
    ("videos", "texts", "text_of_video", "ks", "message"),
    [
        (with_value(np.nan), np.ones((2, 2)), [0, 1, 0], (1,), "row 1 of video_embeddings has a norm of nan"),
        (np.ones((3, 2)), with_value(-np.inf), [0, 1, 0], (1,), "row 1 of text_embeddings has a norm of inf"),
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
        (np.ones((3, 2), dtype=complex), np.ones((2, 2)), [0, 1, 1], (1,), "are of torch.complex128"),
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


def test_the_log_says_what_was_gathered_and_how_it_was_streamed() -> None:
    lines: list[str] = []
    videos, texts, text_of_video = embedded()
    retrieval_metrics(videos, texts, text_of_video, log=lines.append)
    assert lines[0] == "samples accumulated: 40 of 20 numbers"
    assert lines[1] == "unique texts: 10"
    assert lines[2] == "dense similarities would take: 0.0 MB as float32"
    assert lines[3].startswith("streamed: 1 blocks of up to 1,024 rows in ")
    assert re.fullmatch(r"similarities: \d+ pairs compared one by one without rounding", lines[-1])
    described = plan_retrieval(117_120, 23_592, 512, 64_000_000).describe()
    assert described[2] == "dense similarities would take: 11,052.4 MB as float32"
    assert described[3].startswith("streamed: 2,760 blocks of up to 1,024 rows in ")


def test_a_plan_stays_within_its_memory() -> None:
    for memory_bytes, dimensions, num_videos in itertools.product((16_000_000, 64_000_000), (8, 1024), (20, 20_000)):
        plan = plan_retrieval(num_videos, 5000, dimensions, memory_bytes)
        assert plan.streamed_bytes <= memory_bytes


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
    assert is_at_least(query, candidate, positive).tolist() == [a >= b for a, b in zip(left, right, strict=True)]
    values = [exact_product(*rows) for rows in zip([*query, *query], [*candidate, *positive], strict=True)]
    exact = [*left, *right]
    for (one, first), (other, second) in itertools.combinations(zip(values, exact, strict=True), 2):
        assert (one < other, one == other) == (first < second, first == second)


def test_equal_sums_of_other_orders_are_ties_though_doubles_differ() -> None:
    generator = np.random.default_rng(3)
    rows = (generator.normal(size=(1, 64)) * 10.0 ** generator.integers(-6, 7, 64)).astype(np.float32)
    texts = np.concatenate([rows[:, generator.permutation(64)] for _ in range(20)])
    videos = np.full((20, 64), 0.1, dtype=np.float32)
    assert len(set(np.vecdot(videos.astype(np.float64), texts.astype(np.float64)))) > 1
    found = retrieval_metrics(videos, texts, np.arange(20))
    assert set(found.video_to_text.ranks) == {20}


@settings(max_examples=70, deadline=None)
@given(
    sample=samples(),
    block=st.integers(1, 30),
    most_open=st.sampled_from([-1.0, 0.03, 1.0]),  # in doubles, by need, in float32
    at_once=st.sampled_from([1, 20]),
)
def test_every_metric_is_that_of_a_dense_oracle(sample, block, most_open, at_once) -> None:
    videos, texts, text_of_video = sample
    plan = RetrievalPlan(len(videos), len(texts), videos.shape[1], block)
    with (
        mock.patch.object(retrieval, "_MOST_OPEN", most_open),
        mock.patch.object(retrieval, "_AT_ONCE", at_once),
        mock.patch.object(retrieval, "plan_retrieval", return_value=plan),
    ):
        check_against_naive(videos, texts, text_of_video)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rows", ["normal", "half steps", "outliers", "within margins"])
def test_no_product_is_further_from_the_truth_than_is_said(dtype, scale: float, rows: str) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (rows_of_kind(rows, generator, number, 64) for number in (300, 30))
    videos *= np.float32(scale)
    norms = [np.linalg.norm(each.astype(np.float64), axis=1) * (1 + 1e-12) for each in (videos, texts)]
    exact = [each.astype(np.longdouble) for each in (videos, texts)]
    off = np.abs(videos.astype(dtype) @ texts.astype(dtype).T - np.vecdot(exact[0][:, None], exact[1]))
    assert (off <= largest_error(norms[0], norms[1], 64, dtype)[:, None]).all()
    assert (off <= largest_error(norms[1], norms[0], 64, dtype)).all()


def test_rows_are_of_a_kind_where_all_numbers_agree() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    rows[4], rows[7], rows[8] = rows[1], -rows[1], rows[1, ::-1]  # the last two have the same norm only
    assert Rows(torch.from_numpy(rows)).kinds.tolist() == [0, 1, 2, 3, 1, 5, 6, 7, 8]
    assert Rows(torch.tensor([[0.0, 1], [-0.0, 1]])).kinds.tolist() == [0, 0]
