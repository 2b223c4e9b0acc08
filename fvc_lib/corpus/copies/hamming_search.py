"""All pairs of 64-bit codes that differ in few bits, exactly, without comparing all.

Multi-index hashing (Norouzi, Punjani and Fleet 2012): codes that differ in few bits differ in very few bits of at least
one of a few blocks, so that block is looked up with each choice of so few bits flipped; the whole code then decides.
Into which blocks codes are cut follows from how many there are (``blocks_for``); of a few hundred all are compared.

Codes that thousands share in a block are compared as a matrix, a tile at a time, and whoever knows which of these pairs
need no comparison says so (``Large``).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.perceptual_hash import Codes

Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Near = Callable[[Places, Places], Flags]  # (R, C): which of (R,) rows and (C,) columns of a matrix are a new pair
# Of the queries (Q,) and entries (E,) that are the rows and columns of a matrix: the pairs to be yielded, as rows and
# columns (K,), (K,).
Large = Callable[[Places, Places, Near], Iterator[tuple[Places, Places]]]

# Nanoseconds, measured; they decide how codes are cut, never what is found.
_LOOKUP_NS, _COMPARED_NS, _IN_MATRIX_NS, _STEP_NS, _KEY_NS = 20.0, 0.9, 0.9, 60_000.0, 2.0
_MOST_BLOCKS, _MOST_KEY_BITS = 7, 24
_CANDIDATES = 1 << 16  # compared at a time
_LARGE_PAIRS = 1 << 17  # keys with at least this many pairs are compared as a matrix
_TILE_PAIRS, _TILE_ROWS = 1 << 17, 64
_PIECE = 1 << 22  # counted at a time


@dataclass(frozen=True)
class Block:
    """Some bits of a code, of which at most ``radius`` may differ in a pair that is found by them."""

    bits: tuple[int, ...]
    radius: int

    @property
    def mask(self) -> np.uint64:
        """Bit mask of the block."""
        return np.uint64(sum(1 << bit for bit in self.bits))

    @property
    def num_lookups(self) -> int:
        """Number of keys that each query is looked up by."""
        return sum(math.comb(len(self.bits), flipped) for flipped in range(self.radius + 1))

    def keys(self, codes: Codes) -> npt.NDArray[np.uint32]:
        """Return the bits of each code as one small number."""
        keys, words = np.zeros(len(codes), np.uint32), codes.view(np.uint16).reshape(-1, 4)
        values = np.arange(1 << 16, dtype=np.uint32)
        for word in range(4):  # of a little-endian code
            part = np.zeros(1 << 16, np.uint32)
            for place, bit in enumerate(self.bits):
                if bit // 16 == word:
                    part |= ((values >> np.uint32(bit % 16)) & np.uint32(1)) << np.uint32(place)
            keys |= part[words[:, word]]
        return keys


def blocks_for(max_bits: int, num_queries: int, num_entries: int) -> tuple[Block, ...]:
    """Return the blocks by which pairs within ``max_bits`` are found in least time. One without bits: compare all."""
    best: tuple[Block, ...] = (Block((), 0),)
    least = num_queries * num_entries * _IN_MATRIX_NS + _STEP_NS
    for blocks in _ways_to_cut(max_bits):
        nanoseconds = 0.0
        for block in blocks:
            num_keys = 1 << len(block.bits)
            a_lookup = _LOOKUP_NS + _COMPARED_NS * _width(num_entries, num_keys)
            nanoseconds += num_keys * _KEY_NS + block.num_lookups * (_STEP_NS + num_queries * a_lookup)
        if nanoseconds < least:
            best, least = blocks, nanoseconds
    return best


def _ways_to_cut(max_bits: int) -> Iterator[tuple[Block, ...]]:
    """Yield sets of blocks of which at least one differs in at most its radius, for each pair within ``max_bits``."""
    for number in range(2, _MOST_BLOCKS + 1):
        share, rest = divmod(max_bits - number + 1, number)
        radii = [share + (block < rest) for block in range(number)]
        for size in range(4, _MOST_KEY_BITS + 1) if rest else (0,):  # of those with the larger radius
            left, others = 64 - size * rest, number - rest
            sizes = [size] * rest + [left // others + (place < left % others) for place in range(others)]
            if left < 0 or (share >= 0 and not 1 <= min(sizes) <= max(sizes) <= _MOST_KEY_BITS):
                continue
            blocks = zip(_dealt(sizes), radii, strict=True)
            yield tuple(Block(bits, radius) for bits, radius in blocks if radius >= 0)


def _dealt(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Deal bits in turn, so that neighbouring frequencies lie in different blocks."""
    bits: list[list[int]] = [[] for _ in sizes]
    turns = itertools.cycle(range(len(sizes)))
    for bit in range(sum(sizes)):
        bits[next(block for block in turns if len(bits[block]) < sizes[block])].append(bit)
    return [tuple(each) for each in bits]


@dataclass(frozen=True)
class Sorted:
    """Codes in the order of their keys in a block; equal keys in the order of their positions."""

    codes: Codes
    keys: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]  # among the codes that were given

    @classmethod
    def by(cls, block: Block, codes: Codes) -> Self:
        """Sort at most 2**32 codes by their keys in ``block``."""
        # As one number the two sort ten times as fast as by argsort.
        order = block.keys(codes).astype(np.uint64) << np.uint64(32)
        order |= np.arange(len(codes), dtype=np.uint64)
        order.sort()
        position = order.astype(np.uint32)  # the lower half
        order >>= np.uint64(32)
        return cls(codes[position], order.astype(np.uint32), position)

    def __len__(self) -> int:
        return len(self.codes)

    def part(self, some: slice) -> Self:
        """Return some of them."""
        return type(self)(self.codes[some], self.keys[some], self.position[some])


@dataclass(frozen=True)
class BlockSearch:
    """Entries that are looked up by one block, and the blocks before it."""

    codes: Codes  # of the entries, sorted
    position: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int32]  # where each key begins among them, and at last where all end
    block: Block
    earlier: tuple[Block, ...]
    max_bits: int

    @classmethod
    def of(cls, entries: Codes, blocks: Sequence[Block], number: int, max_bits: int) -> Self:
        """For the block of that number, at most 2**31 entries."""
        block = blocks[number]
        found = Sorted.by(block, entries)
        starts = np.zeros((1 << len(block.bits)) + 1, np.int32)
        for some in range(0, len(found), _PIECE):
            starts[1:] += np.bincount(found.keys[some : some + _PIECE], minlength=len(starts) - 1).astype(np.int32)
        np.cumsum(starts, out=starts)
        return cls(found.codes, found.position, starts, block, tuple(blocks[:number]), max_bits)

    def pairs(self, queries: Sorted, large: Large | None = None) -> Iterator[tuple[Places, Places]]:
        """Yield the positions (K,), (K,) of pairs within ``max_bits`` that no earlier block finds, each once.

        Args:
            queries: sorted by the same block.
            large: says which pairs to yield of keys that many queries and entries share; none: all that are near.
        """
        times = _run_lengths(queries.keys)
        most = int(times.max(initial=0)) * int(np.diff(self.starts).max(initial=0))
        ends = self.starts[1:]
        for mask in _masks(len(self.block.bits), self.block.radius):
            keys = queries.keys ^ np.uint32(mask)
            first = self.starts.take(keys)
            counts = ends.take(keys) - first
            if most >= _LARGE_PAIRS:
                is_large = counts * times.astype(np.int64) >= _LARGE_PAIRS
                for start in np.flatnonzero(is_large & _is_run_start(queries.keys)):
                    rows = np.arange(start, start + times[start])
                    yield from self._in_matrix(queries, rows, int(first[start]), int(counts[start]), large)
                counts[is_large] = 0
            for query, entry in self._one_by_one(queries.codes, first, counts):
                yield queries.position[query].astype(np.int64), self.position[entry].astype(np.int64)

    def _one_by_one(
        self, queries: Codes, first: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> Iterator[tuple[Places, Places]]:
        """Places among the sorted of the near pairs of each query and its ``counts`` entries from ``first``.

        Each is compared with as many entries as most have, whether they are its own or others that follow: copying
        what lies together and sorting out the few that are near is faster than counting. Those that have more are
        compared with the next, twice as many at a time.
        """
        width, asked = min(_width(len(self.codes), len(self.starts) - 1), len(self.codes)), np.flatnonzero(counts)
        first, counts = first[asked], counts[asked]
        done = 0
        while len(asked):
            # All overlapping runs of ``width`` neighbours, as items that are copied whole.
            runs = np.ndarray(
                len(self.codes) - width + 1, f"V{width * 8}", buffer=self.codes, strides=self.codes.strides
            )
            from_place = np.minimum(first + np.int32(done), np.int32(len(runs) - 1))
            at_once = max(1, _CANDIDATES // width)
            for start in range(0, len(asked), at_once):
                some = slice(start, start + at_once)
                difference = runs[from_place[some]].view(np.uint64).reshape(-1, width)
                difference ^= queries[asked[some]][:, None]
                near = np.flatnonzero(np.bitwise_count(difference) <= self.max_bits)
                if not len(near):
                    continue
                row, column = np.divmod(near, width)
                entry = from_place[some][row] + column
                is_own = (entry >= first[some][row] + done) & (entry < first[some][row] + counts[some][row])
                if self.earlier:
                    is_own &= self._is_new(difference.reshape(-1)[near])
                yield asked[some][row[is_own]], entry[is_own]
            done += width
            more = counts > done
            asked, first, counts = asked[more], first[more], counts[more]
            width = min(2 * width, len(self.codes))

    def _is_new(self, difference: Codes) -> Flags:
        is_new = np.ones(difference.shape, np.bool_)
        for block in self.earlier:
            is_new &= np.bitwise_count(difference & block.mask) > block.radius
        return is_new

    def _in_matrix(
        self, queries: Sorted, rows: Places, first: int, count: int, large: Large | None
    ) -> Iterator[tuple[Places, Places]]:
        codes, entries = queries.codes[rows], self.codes[first : first + count]
        query = queries.position[rows].astype(np.int64)
        entry = self.position[first : first + count].astype(np.int64)

        def near(some: Places, others: Places) -> Flags:
            difference = codes[some][:, None] ^ entries[others]
            is_near: Flags = np.bitwise_count(difference) <= self.max_bits
            if self.earlier and is_near.any():
                is_near &= self._is_new(difference)
            return is_near

        found = (large or _all_tiles)(query, entry, near)
        yield from ((query[some], entry[others]) for some, others in found)


def codes_within(
    queries: Codes, entries: Codes, max_bits: int, blocks: Sequence[Block] | None = None
) -> Iterator[tuple[Places, Places]]:
    """Yield the positions (K,), (K,) of all pairs of a query and an entry that differ in at most ``max_bits`` bits.

    Every pair comes once. The order depends on the codes only. Memory grows with the number of codes, not with the
    number of pairs.

    Args:
        queries: uint64 (Q,).
        entries: uint64 (E,).
        max_bits: 0 to 64.
        blocks: what ``blocks_for`` gave; None: it is asked.
    """
    blocks = blocks_for(max_bits, len(queries), len(entries)) if blocks is None else blocks
    for number, block in enumerate(blocks):
        yield from BlockSearch.of(entries, blocks, number, max_bits).pairs(Sorted.by(block, queries))


def tiles(rows: Places, columns: Places) -> Iterator[tuple[Places, Places]]:
    """Cut a matrix into pieces that a processor's cache holds."""
    at_once = min(max(1, len(rows)), _TILE_ROWS)
    for start in range(0, len(rows), at_once):
        for column in range(0, len(columns), _TILE_PAIRS // at_once):
            yield rows[start : start + at_once], columns[column : column + _TILE_PAIRS // at_once]


def _all_tiles(queries: Places, entries: Places, near: Near) -> Iterator[tuple[Places, Places]]:
    for rows, columns in tiles(np.arange(len(queries)), np.arange(len(entries))):
        row, column = np.nonzero(near(rows, columns))
        if len(row):
            yield rows[row], columns[column]


def _width(num_entries: int, num_keys: int) -> int:
    """Return a number of entries that nearly no key exceeds."""
    mean = num_entries / num_keys
    return math.ceil(1 + mean + math.sqrt(mean))


def _is_run_start(keys: npt.NDArray[np.uint32]) -> Flags:
    """Return (Q,): whether a key differs from the one before it."""
    return np.concatenate([np.ones(min(1, len(keys)), np.bool_), keys[1:] != keys[:-1]])


def _run_lengths(keys: npt.NDArray[np.uint32]) -> Places:
    """Return (Q,): the number of equal keys of each of these sorted keys."""
    starts = np.flatnonzero(_is_run_start(keys))
    lengths = np.diff(starts, append=len(keys))
    return np.repeat(lengths, lengths)


def _masks(num_bits: int, radius: int) -> Iterator[int]:
    """Yield all numbers of ``num_bits`` bits with at most ``radius`` of them set."""
    for flipped in range(radius + 1):
        for chosen in itertools.combinations(range(num_bits), flipped):
            yield sum(1 << bit for bit in chosen)
