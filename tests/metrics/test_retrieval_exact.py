from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics.retrieval import exact_product, is_at_least, retrieval_metrics
from tests.metrics.retrieval_oracle import whole


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
