from __future__ import annotations

import math

import numpy as np
import pytest

from fvc_lib.metrics.retrieval import least_memory_bytes, plan_retrieval, retrieval_metrics


def embedded(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(50, 20)).astype(np.float32)
    return rows[:40], rows[40:], generator.integers(0, 10, 40)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes=1,000,000 is too little"):
        retrieval_metrics(*embedded(), memory_bytes=1_000_000)


def test_a_plan_stays_within_its_memory_whatever_there_is() -> None:
    for memory_bytes in (16_000_000, 64_000_000, 1_000_000_000):
        for dimensions in (8, 512, 1024):
            for num_videos in (20, 20_000):
                plan = plan_retrieval(num_videos, 5000, dimensions, memory_bytes)
                assert plan.streamed_bytes <= memory_bytes


def test_pairs_beyond_one_for_each_video_count_as_memory() -> None:
    assert plan_retrieval(2000, 2000, 64, 64_000_000, 200_000).streamed_bytes <= 64_000_000
    with pytest.raises(ValueError, match=r"1,002,000 pairs of which belong together; give at least \d{3},\d{3},\d{3} "):
        plan_retrieval(2000, 2000, 64, 64_000_000, 1_000_000)
    videos, texts, _ = embedded()
    least = least_memory_bytes(40, 10, 20, 360)
    with pytest.raises(ValueError, match=f"400 pairs of which belong together; give at least {least:,} "):
        retrieval_metrics(videos, texts, np.argwhere(np.ones((40, 10))), memory_bytes=least - 1)


def test_the_least_memory_is_what_a_plan_says_and_accepts() -> None:
    for sizes in ((400_000, 90_000, 512, 0), (20, 5, 3, 7), (1, 1, 1, 0), (2000, 2000, 64, 1_000_000)):
        least = least_memory_bytes(*sizes)
        assert plan_retrieval(*sizes[:3], least, sizes[3]).streamed_bytes <= least
        with pytest.raises(ValueError, match=f"at least {least:,} .*retrieval_memory_mb {math.ceil(least / 1e6)}"):
            plan_retrieval(*sizes[:3], least - 1, sizes[3])
