import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from fvc_lib.corpus.copies.near_duplicates import codes_within


def naive(queries: np.ndarray, entries: np.ndarray, max_bits: int) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, j in itertools.product(range(len(queries)), range(len(entries)))
        if (int(queries[i]) ^ int(entries[j])).bit_count() <= max_bits
    ]


def found(queries: np.ndarray, entries: np.ndarray, max_bits: int, *blocks: int) -> list[tuple[int, int]]:
    pairs = [pair for part in codes_within(queries, entries, max_bits, *blocks) for pair in zip(*part, strict=True)]
    return sorted((int(i), int(j)) for i, j in pairs)


def scattered(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Codes 0 to 15 bits away from one of the centres, so that there are pairs on either side of any limit."""
    codes = rng.choice(centres, count)
    for place in range(count):
        for bit in rng.permutation(64)[: rng.integers(0, 9)]:
            codes[place] ^= np.uint64(1) << np.uint64(bit)
    return codes


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from([3, 4]))
def test_every_pair_is_found_once(seed: int, max_bits: int, num_queries: int, num_entries: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**64, 3, dtype=np.uint64)
    queries, entries = scattered(rng, centres, num_queries), scattered(rng, centres, num_entries)
    assert found(queries, entries, max_bits, blocks) == naive(queries, entries, max_bits)


def test_ten_bits_anywhere_are_found() -> None:
    """However ten differing bits are spread over the blocks."""
    rng = np.random.default_rng(2)
    queries = rng.integers(0, 2**64, 400, dtype=np.uint64)
    entries = queries.copy()
    for place in range(len(entries)):
        for bit in rng.permutation(64)[: 10 + place % 2]:
            entries[place] ^= np.uint64(1) << np.uint64(bit)
    for blocks in (3, 4):
        assert found(queries, entries, 7, blocks) == []
        assert found(queries, entries, 10, blocks) == [(place, place) for place in range(0, 400, 2)]
