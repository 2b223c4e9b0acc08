from __future__ import annotations

import itertools
import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics import retrieval
from fvc_lib.metrics.retrieval import RetrievalPlan, plan_retrieval, retrieval_metrics
from tests.metrics.retrieval_oracle import check_against_naive, samples


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
