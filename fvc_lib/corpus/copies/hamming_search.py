"""Find all pairs of 64-bit codes that differ in few bits, exactly, without comparing all pairs.

Multi-index hashing (Norouzi, Punjani and Fleet 2012): codes are cut into blocks of bits. Two codes that differ in few
bits differ in even fewer bits in at least one block. So the bits of a block (its key) are looked up with every choice
of that few bits flipped. The entries with such a key are candidates, and their whole codes are compared. The number of
codes decides how they are cut into blocks (``blocks_for``); a few hundred codes are all compared.

The queries and entries of a key that thousands share are compared as a matrix. The caller may skip some of these pairs.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.perceptual_hash import Codes

Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
# Chooses pairs of a matrix. Arguments: positions of the queries (R,) and entries (C,), and a function that returns
# (R, K), which pairs with K of the columns are near. Returns the rows and columns (N,), (N,) of the pairs.
Choose = Callable[[Places, Places, Callable[[Places], Flags]], tuple[Places, Places]]

# Nanoseconds, measured; they decide how codes are cut, never which pairs are found.
_LOOKUP_NS, _COMPARED_NS, _STEP_NS, _KEY_NS = 20.0, 0.9, 60_000.0, 2.0
_MOST_BLOCKS, _MOST_KEY_BITS = 7, 24
_CANDIDATES = 1 << 16  # compared at a time
_LARGE_PAIRS = 1 << 17  # keys with at least this many pairs are compared as a matrix
_TILE_PAIRS, _TILE_ROWS = 1 << 17, 64


@dataclass(frozen=True)
class Block:
    """``size`` bits of a code from bit ``start`` on. Pairs found by it differ in at most ``radius`` of them."""

    start: int
    size: int
    radius: int

    def keys(self, codes: Codes) -> Codes:
        """Return the bits of this block in each code, as a number below ``2**size``; same shape as ``codes``."""
        return (codes >> np.uint64(self.start)) & np.uint64((1 << self.size) - 1)


def blocks_for(max_bits: int, num_queries: int, num_entries: int) -> tuple[Block, ...]:
    """Return the blocks by which pairs that differ in at most ``max_bits`` are found in the least estimated time.

    A single block of size 0 means that all pairs are compared.
    """
    ways: dict[tuple[Block, ...], float] = {(Block(0, 0, 0),): num_queries * num_entries * _COMPARED_NS + _STEP_NS}
    for number in range(2, _MOST_BLOCKS + 1):
        # Of each pair at least one block differs in at most its radius; blocks of radius -1 are not needed.
        radius, larger = divmod(max_bits - number + 1, number)
        borders = [64 * block // number for block in range(number + 1)]
        cut = zip(borders, borders[1:], itertools.count(), strict=False)
        blocks = tuple(Block(start, end - start, radius + (place < larger)) for start, end, place in cut)
        blocks = tuple(block for block in blocks if block.radius >= 0)
        nanoseconds = 0.0
        for block in blocks:
            num_keys = 1 << block.size
            num_lookups = sum(math.comb(block.size, flipped) for flipped in range(block.radius + 1))
            a_lookup = _LOOKUP_NS + _COMPARED_NS * _width(num_entries, num_keys)
            nanoseconds += num_keys * _KEY_NS + num_lookups * (_STEP_NS + num_queries * a_lookup)
        if blocks[0].size <= _MOST_KEY_BITS:
            ways[blocks] = nanoseconds
    return min(ways, key=lambda blocks: ways[blocks])


def _width(num_entries: int, num_keys: int) -> int:
    """Return a number of entries that hardly any key has more of, if entries are spread evenly over the keys."""
    mean = num_entries / num_keys
    return math.ceil(1 + mean + math.sqrt(mean))


@dataclass(frozen=True)
class Sorted:
    """Codes sorted by their keys in a block, and by their positions where keys are equal."""

    codes: Codes
    keys: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]  # position of each code before sorting

    def part(self, some: slice) -> "Sorted":
        """Return the codes in the slice ``some``."""
        return Sorted(self.codes[some], self.keys[some], self.position[some])


def sorted_by(block: Block, codes: Codes) -> Sorted:
    """Return ``codes``, at most 2**32, sorted by their keys in ``block``."""
    # As one number key and position sort ten times as fast as by argsort.
    order = (block.keys(codes) << np.uint64(32)) | np.arange(len(codes), dtype=np.uint64)
    order.sort()
    position = order.astype(np.uint32)  # the lower half
    return Sorted(codes[position], (order >> np.uint64(32)).astype(np.uint32), position)


class BlockSearch:
    """Search of queries among at most 2**31 entries, by block ``number`` of ``blocks``.

    Pairs that an earlier block finds are left out, so all blocks together find each pair once.
    """

    def __init__(self, entries: Codes, blocks: Sequence[Block], number: int, max_bits: int) -> None:
        self._block, self._earlier, self._max_bits = blocks[number], blocks[:number], max_bits
        ordered = sorted_by(self._block, entries)
        self._codes, self._position = ordered.codes, ordered.position
        # Where the entries of each key begin, and at last where all end.
        keys = np.arange((1 << self._block.size) + 1, dtype=np.uint32)
        self._starts = np.searchsorted(ordered.keys, keys).astype(np.int32)
        self._most_of_a_key = int(np.diff(self._starts).max())

    def pairs(self, queries: Sorted, choose: Choose | None = None) -> Iterator[tuple[Places, Places]]:
        """Yield (query positions, entry positions), both (K,), of pairs that differ in at most ``max_bits``.

        Args:
            queries: codes sorted by the same block.
            choose: chooses which pairs to yield where many queries and entries share a key; None: all near pairs.
        """
        _, start_of, times = np.unique(queries.keys, return_index=True, return_counts=True)
        has_large = self._most_of_a_key * int(times.max(initial=0)) >= _LARGE_PAIRS
        for mask in _masks(self._block):
            keys = queries.keys ^ mask
            first = self._starts.take(keys)
            counts = self._starts.take(keys + np.uint32(1)) - first
            if has_large:
                for kind in np.flatnonzero(counts[start_of] * times >= _LARGE_PAIRS):
                    start = start_of[kind]
                    some, begin = slice(start, start + times[kind]), first[start]
                    yield from self._in_matrix(queries.part(some), slice(begin, begin + counts[start]), choose)
                    counts[some] = 0
            for query, entry in self._one_by_one(queries.codes, first, counts):
                yield queries.position[query].astype(np.int64), self._position[entry].astype(np.int64)

    def _one_by_one(
        self, queries: Codes, first: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> Iterator[tuple[Places, Places]]:
        """Yield (query indices, entry indices), both (K,), of the near pairs, as indices into the sorted codes.

        Query i is compared with its candidates: ``counts[i]`` entries from ``first[i]`` on. For speed, all queries are
        compared with the same number of entries at once, and pairs with entries beyond the candidates are dropped.
        Queries with more candidates are compared with the next entries, twice as many in every round.
        """
        width, asked = min(_width(len(self._codes), len(self._starts) - 1), len(self._codes)), np.flatnonzero(counts)
        first, counts = first[asked], counts[asked]
        done = 0
        while len(asked):
            # All overlapping runs of ``width`` neighbours, as items that are copied whole.
            runs = np.ndarray(
                len(self._codes) - width + 1, f"V{width * 8}", buffer=self._codes, strides=self._codes.strides
            )
            from_place = np.minimum(first + np.int32(done), np.int32(len(runs) - 1))
            at_once = max(1, _CANDIDATES // width)
            for start in range(0, len(asked), at_once):
                some = slice(start, start + at_once)
                difference = runs[from_place[some]].view(np.uint64).reshape(-1, width)
                difference ^= queries[asked[some]][:, None]
                near = np.flatnonzero(np.bitwise_count(difference) <= self._max_bits)
                if not len(near):
                    continue
                row, column = np.divmod(near, width)
                entry = from_place[some][row] + column
                is_own = (entry >= first[some][row] + done) & (entry < first[some][row] + counts[some][row])
                is_own &= self._is_new(difference.reshape(-1)[near])
                yield asked[some][row[is_own]], entry[is_own]
            done += width
            more = counts > done
            asked, first, counts = asked[more], first[more], counts[more]
            width = min(2 * width, len(self._codes))

    def _is_new(self, difference: Codes) -> Flags:
        is_new = np.ones(difference.shape, np.bool_)
        for block in self._earlier:
            is_new &= np.bitwise_count(block.keys(difference)) > block.radius
        return is_new

    def _in_matrix(self, queries: Sorted, some: slice, choose: Choose | None) -> Iterator[tuple[Places, Places]]:
        """Yield (query positions, entry positions), both (K,), of the near pairs of all queries and ``some`` entries.

        The first matrices have few rows, so that ``choose`` can skip pairs that these have already connected.
        """
        codes, entry = self._codes[some], self._position[some].astype(np.int64)
        query = queries.position.astype(np.int64)
        start, num_rows = 0, 1
        while start < len(query):
            rows, width = slice(start, start + num_rows), _TILE_PAIRS // num_rows
            for column in range(0, len(entry), width):
                tile = codes[column : column + width]

                def near(columns: Places, rows: slice = rows, tile: Codes = tile) -> Flags:
                    difference = queries.codes[rows, None] ^ tile[columns]
                    is_near: Flags = np.bitwise_count(difference) <= self._max_bits
                    return is_near & self._is_new(difference) if is_near.any() else is_near

                tile_entry = entry[column : column + width]
                found = (choose or _all_near)(query[rows], tile_entry, near)
                yield query[rows][found[0]], tile_entry[found[1]]
            start, num_rows = start + num_rows, min(2 * num_rows, _TILE_ROWS)


def _all_near(query: Places, entry: Places, near: Callable[[Places], Flags]) -> tuple[Places, Places]:
    row, column = np.nonzero(near(np.arange(len(entry))))
    return row, column


def _masks(block: Block) -> Iterator[np.uint32]:
    """Yield all numbers of ``block.size`` bits of which at most ``block.radius`` are set."""
    for flipped in range(block.radius + 1):
        for chosen in itertools.combinations(range(block.size), flipped):
            yield np.uint32(sum(1 << bit for bit in chosen))
