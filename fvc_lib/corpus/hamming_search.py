"""All pairs of 64-bit codes that differ in few bits, exactly, without comparing every code with every other.

Multi-index hashing (Norouzi, Punjani and Fleet 2012, "Fast Search in Hamming Space with Multi-Index Hashing"): the bits
are divided into four blocks. Codes that differ in ``r`` bits differ in few bits of at least one block, so looking up
that block with each choice of so few bits flipped finds every pair; the whole code then decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.perceptual_hash import Codes

Places = npt.NDArray[np.int64]

# Every third bit: the neighbours of a bit (frequencies next to each other) are spread over the blocks.
_BLOCKS = tuple(tuple(range(start, 64, 4)) for start in range(4))
_MOST_CANDIDATES = 1 << 18  # compared at a time


def num_lookups(max_bits: int) -> int:
    """How often each code is looked up for pairs within ``max_bits``: what the search costs grows with it."""
    return sum(
        math.comb(len(bits), flipped)
        for bits, radius in zip(_BLOCKS, _radii(max_bits), strict=True)
        for flipped in range(radius + 1)
    )


def codes_within(queries: Codes, entries: Codes, max_bits: int) -> Iterator[tuple[Places, Places]]:
    """Yield the positions (K,), (K,) of all pairs of a query and an entry that differ in at most ``max_bits`` bits.

    Every pair comes once. The order depends on the codes only. Memory grows with the number of codes and with
    ``_MOST_CANDIDATES``, not with the number of pairs.

    Args:
        queries: uint64 (Q,).
        entries: uint64 (E,).
        max_bits: 0 to 64; beyond about 12 there are so many lookups that comparing all pairs is faster.
    """
    radii = _radii(max_bits)
    for block, radius in enumerate(radii):
        if radius < 0:
            continue
        for query, entry in _within_in_block(queries, entries, block, radius, max_bits):
            difference = queries[query] ^ entries[entry]
            is_new = np.ones(len(query), np.bool_)
            for earlier in range(block):  # which has found the pair already
                is_new &= np.bitwise_count(difference & _block_mask(earlier)) > radii[earlier]
            if is_new.any():
                yield query[is_new], entry[is_new]


def _radii(max_bits: int) -> tuple[int, ...]:
    """Bits that may differ in each block; -1: it need not be looked at. If all were exceeded, so would the sum be."""
    share, rest = divmod(max_bits - len(_BLOCKS) + 1, len(_BLOCKS))
    return tuple(share + (block < rest) for block in range(len(_BLOCKS)))


def _within_in_block(
    queries: Codes, entries: Codes, block: int, radius: int, max_bits: int
) -> Iterator[tuple[Places, Places]]:
    """All pairs within ``max_bits`` whose bits of this block differ in at most ``radius``."""
    bits = _BLOCKS[block]
    entry_keys, query_keys = _gather(entries, bits), _gather(queries, bits)
    entry_order, query_order = _order(entry_keys), _order(query_keys)
    starts = np.zeros((1 << len(bits)) + 1, np.int32)
    np.cumsum(np.bincount(entry_keys, minlength=1 << len(bits)), out=starts[1:])
    # In the order of their keys, neighbouring queries look up neighbouring places.
    query_keys, sorted_queries, sorted_entries = query_keys[query_order], queries[query_order], entries[entry_order]
    for mask in _masks(len(bits), radius):
        keys = query_keys ^ mask
        first = starts[keys]
        counts = starts[keys + 1] - first
        asked = np.flatnonzero(counts)
        for start, stop in _portions(counts[asked]):
            query, entry = _near(sorted_queries, sorted_entries, asked[start:stop], first, counts, max_bits)
            if len(query):
                yield query_order[query], entry_order[entry]


def _portions(counts: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Cut into runs [start, stop) of at most ``_MOST_CANDIDATES`` in all, or of one count that is larger."""
    ends = np.cumsum(counts, dtype=np.int64)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _MOST_CANDIDATES, "right")))
        yield start, stop
        start = stop


def _near(
    queries: Codes,
    entries: Codes,
    asked: Places,
    first: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    max_bits: int,
) -> tuple[Places, Places]:
    """Positions of the pairs within ``max_bits`` of each query ``asked`` and its ``counts`` entries from ``first``."""
    repeats = counts[asked]
    ends = np.cumsum(repeats, dtype=np.int64)
    # Place within a run of entries: the running number less where the run began.
    entry = np.arange(int(ends[-1])) + np.repeat(first[asked] - (ends - repeats), repeats)
    difference = np.repeat(queries[asked], repeats) ^ entries[entry]
    near = np.flatnonzero(np.bitwise_count(difference) <= max_bits)
    return asked[np.searchsorted(ends, near, "right")], entry[near]


def _gather(codes: Codes, bits: tuple[int, ...]) -> Places:
    """The chosen bits of each code as one small number."""
    keys = np.zeros(len(codes), np.int64)
    for place, bit in enumerate(bits):
        keys |= ((codes >> np.uint64(bit)) & np.uint64(1)).astype(np.int64) << place
    return keys


def _order(keys: Places) -> Places:
    """A stable order of keys of 16 bits; as such numpy sorts them by radix, ten times as fast."""
    return np.argsort(keys.astype(np.uint16), kind="stable")


def _masks(num_bits: int, radius: int) -> Iterator[int]:
    """All numbers of ``num_bits`` bits with at most ``radius`` of them set."""
    for flipped in range(radius + 1):
        for chosen in itertools.combinations(range(num_bits), flipped):
            yield sum(1 << bit for bit in chosen)


def _block_mask(block: int) -> np.uint64:
    return np.uint64(sum(1 << bit for bit in _BLOCKS[block]))
