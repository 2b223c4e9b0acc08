from __future__ import annotations

import numpy as np

from fvc_lib.metrics.retrieval import least_memory_bytes, plan_retrieval


def embedded(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(50, 20)).astype(np.float32)
    return rows[:40], rows[40:], generator.integers(0, 10, 40)


def test_a_plan_stays_within_its_memory_whatever_there_is() -> None:
    for memory_bytes in (16_000_000, 64_000_000, 1_000_000_000):
        for dimensions in (8, 512, 1024):
            for num_videos in (20, 20_000):
                plan = plan_retrieval(num_videos, 5000, dimensions, memory_bytes)
                assert plan.streamed_bytes <= memory_bytes


def test_the_least_memory_is_what_a_plan_says_and_accepts() -> None:
    for sizes in ((400_000, 90_000, 512, 0), (20, 5, 3, 7), (1, 1, 1, 0), (2000, 2000, 64, 1_000_000)):
        least = least_memory_bytes(*sizes)
        assert plan_retrieval(*sizes[:3], least, sizes[3]).streamed_bytes <= least
        assert plan_retrieval(*sizes[:3], 0, sizes[3]).streamed_bytes <= least
