import itertools

import numpy as np
from hypothesis import assume, given, strategies as st

from fvc_lib.corpus.folds import balance_groups

COUNTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any), min_size=4, max_size=8)


def loads(counts: np.ndarray, parts: np.ndarray, num_parts: int) -> np.ndarray:
    return np.array([counts[parts == part].sum(axis=0) for part in range(num_parts)])


def deviation(load: np.ndarray, shares: np.ndarray) -> float:
    totals = load.sum(axis=0)
    missing = (load == 0).sum()
    return float((((load - np.outer(shares, totals)) / totals) ** 2).sum() + 1e4 * missing)


@given(COUNTS, st.sampled_from([(0.5, 0.5), (0.75, 0.25), (1 / 3, 1 / 3, 1 / 3)]), st.integers(0, 5))
def test_no_move_or_swap_betters_it_and_it_is_near_the_best_of_all(
    drawn: list[tuple[int, int]], drawn_shares: tuple[float, ...], seed: int
) -> None:
    counts, shares = np.array(drawn), np.array(drawn_shares)
    assume((np.count_nonzero(counts, axis=0) >= len(shares)).all())
    parts = balance_groups(counts, shares, np.random.default_rng(seed))
    load = loads(counts, parts, len(shares))
    assert (load > 0).all()
    reached = deviation(load, shares)
    every = np.array(list(itertools.product(range(len(shares)), repeat=len(counts))))
    costs = np.array(
        [deviation(loads(counts, one, len(shares)), shares) for one in every[:: max(1, len(every) // 500)]]
    )
    assert reached <= costs.min() + 0.15
    for a, b in itertools.combinations(range(len(counts)), 2):
        swapped = parts.copy()
        swapped[a], swapped[b] = parts[b], parts[a]
        assert reached <= deviation(loads(counts, swapped, len(shares)), shares) + 1e-8
    for place, part in itertools.product(range(len(counts)), range(len(shares))):
        moved = parts.copy()
        moved[place] = part
        assert reached <= deviation(loads(counts, moved, len(shares)), shares) + 1e-8
