import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.corpus.copies import near_duplicates
from fvc_lib.corpus.copies.near_duplicates import Block, BlockSearch, blocks_for


def naive(queries: np.ndarray, entries: np.ndarray, max_bits: int) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, j in itertools.product(range(len(queries)), range(len(entries)))
        if (int(queries[i]) ^ int(entries[j])).bit_count() <= max_bits
    ]


def found(queries: np.ndarray, entries: np.ndarray, max_bits: int, blocks: tuple[Block, ...]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for number in range(len(blocks)):
        search = BlockSearch(entries, blocks, number, max_bits)
        for part in search.pairs(queries, lambda q, e, near: np.nonzero(near(np.arange(len(e))))):
            pairs.extend(zip(*(places.tolist() for places in part), strict=True))
    return sorted(pairs)


def scattered(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Codes 0 to 15 bits away from one of the centres, so that there are pairs on either side of any limit."""
    codes = rng.choice(centres, count)
    for place in range(count):
        for bit in rng.permutation(64)[: rng.integers(0, 9)]:
            codes[place] ^= np.uint64(1) << np.uint64(bit)
    return codes


@pytest.fixture(autouse=True, scope="module")
def _small_portions():
    """Few pairs of a key are compared as a matrix already, and in small pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_CANDIDATES": 8, "_LARGE_PAIRS": 6, "_TILE_PAIRS": 64}.items():
            patch.setattr(near_duplicates, name, value)
        yield


CORPUS_SIZES = (1, 300, 3_000, 100_000, 10_000_000)


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from(CORPUS_SIZES)
)
def test_every_pair_is_found_once(seed: int, max_bits: int, num_queries: int, num_entries: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**64, 3, dtype=np.uint64)
    queries, entries = scattered(rng, centres, num_queries), scattered(rng, centres, num_entries)
    blocks = blocks_for(max_bits, size, size)
    assert found(queries, entries, max_bits, blocks) == naive(queries, entries, max_bits)
