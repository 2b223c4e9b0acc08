import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.corpus.copies import near_duplicates
from fvc_lib.corpus.copies.near_duplicates import Block, BlockSearch, blocks_for, sorted_by


def naive(queries: np.ndarray, entries: np.ndarray, max_bits: int) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, j in itertools.product(range(len(queries)), range(len(entries)))
        if (int(queries[i]) ^ int(entries[j])).bit_count() <= max_bits
    ]


def found(queries: np.ndarray, entries: np.ndarray, max_bits: int, blocks: tuple[Block, ...]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for number, block in enumerate(blocks):
        search = BlockSearch(entries, blocks, number, max_bits)
        for part in search.pairs(sorted_by(block, queries)):
            pairs.extend(zip(*(places.tolist() for places in part), strict=True))
    return sorted(pairs)


def scattered(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Codes 0 to 15 bits away from one of the centres, so that there are pairs on either side of any limit."""
    codes = rng.choice(centres, count)
    for place in range(count):
        for bit in rng.permutation(64)[: rng.integers(0, 9)]:
            codes[place] ^= np.uint64(1) << np.uint64(bit)
    return codes


CORPUS_SIZES = (1, 300, 3_000, 100_000, 10_000_000)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from(CORPUS_SIZES)
)
def test_every_pair_is_found_once(seed: int, max_bits: int, num_queries: int, num_entries: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**64, 3, dtype=np.uint64)
    queries, entries = scattered(rng, centres, num_queries), scattered(rng, centres, num_entries)
    blocks = blocks_for(max_bits, size, size)
    assert found(queries, entries, max_bits, blocks) == naive(queries, entries, max_bits)


@pytest.mark.parametrize("size", [1, 3_000, 10_000_000])
@pytest.mark.parametrize("least", ["at once", "never"])
def test_codes_that_many_share_in_a_block_are_found_once(size: int, least: str, monkeypatch) -> None:
    monkeypatch.setattr(near_duplicates, "_LARGE_PAIRS", 2 if least == "at once" else 1 << 40)
    monkeypatch.setattr(near_duplicates, "_TILE_PAIRS", 64)
    monkeypatch.setattr(near_duplicates, "_CANDIDATES", 50)
    rng = np.random.default_rng(3)
    centre = rng.integers(0, 2**64, 1, dtype=np.uint64)
    shared = (1 << 20) - 1  # the lower bits are equal in all, so some blocks are too
    queries, entries = (np.concatenate([centre, centre, scattered(rng, centre, 60)]) for _ in range(2))
    queries, entries = ((codes & ~np.uint64(shared)) | (centre & np.uint64(shared)) for codes in (queries, entries))
    assert found(queries, entries, 6, blocks_for(6, size, size)) == naive(queries, entries, 6)
