"""Which videos show the same footage, by their perceptual hashes: all pairs, or as few as connect them.

Where more than half of the frames of two videos agree, one of every second frame does. So candidates are found by those
frames alone, in few videos by comparing all, in many by looking up near codes, and then judged by all frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.hamming_search import codes_within, num_lookups
from fvc_lib.corpus.perceptual_hash import MIRROR_BITS, WINDOWS, Hashes, parse_hashes

Places = npt.NDArray[np.int64]

_BLOCK_PAIRS = 1 << 16
_LOOKUP_COST = 5  # from this many videos per lookup on, looking up is faster than comparing (measured)

# The whole of one video against each window of the other, and the other way round, plain and mirrored.
_VIEWS = tuple(
    (one, other, mirror)
    for mirror in (np.uint64(0), MIRROR_BITS)
    for one, other in [(0, 0), *((0, w) for w in range(1, len(WINDOWS))), *((w, 0) for w in range(1, len(WINDOWS)))]
)


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """All index pairs (i < j), ascending, of videos that show the same footage.

    They do when, the right way round or mirrored, more than half of the frames of one differ in at most ``max_bits``
    of 64 bits from the frames at the same relative times in one and the same window of the other. Memory grows with
    the number of videos and of pairs found.

    Args:
        hashes: what ``perceptual_hash`` gave; ``None`` (no hash) matches nothing.
        max_bits: 0 to 64.

    Raises:
        ValueError: ``max_bits`` out of range, or a text that is no perceptual hash.
    """
    known, table = _known_hashes(hashes, max_bits)
    pairs: set[tuple[int, int]] = set()
    for left, right in _candidates(table, max_bits):
        same = _show_the_same(table[left], table[right], max_bits)
        pairs.update(zip(known[left[same]].tolist(), known[right[same]].tolist(), strict=True))
    return sorted(pairs)


def near_duplicate_links(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """Some of ``near_duplicate_pairs``, ascending: as few as connect all videos that those connect.

    Memory grows with the number of videos only, also where thousands of them show the same footage.

    Args:
        hashes: as for ``near_duplicate_pairs``; their order decides which of the pairs are chosen.
        max_bits: 0 to 64.

    Raises:
        ValueError: as ``near_duplicate_pairs``.
    """
    known, table = _known_hashes(hashes, max_bits)
    clusters = _Clusters(len(known))
    first = _first_of_kind(table)
    _link(clusters, table, first, np.arange(len(table)), max_bits)
    distinct = np.unique(first)
    for left, right in _gathered(_candidates(table[distinct], max_bits), distinct, clusters):
        _link(clusters, table, left, right, max_bits)
    return sorted((int(known[a]), int(known[b])) for a, b in clusters.links)


class _Clusters:
    """Which videos are connected so far: ``label`` (N,) is equal for those that are."""

    def __init__(self, count: int) -> None:
        self.label = np.arange(count)
        self.links: list[tuple[int, int]] = []
        self._members: dict[int, list[int]] = {}

    def join(self, left: int, right: int) -> None:
        """Connect two videos; nothing happens when they are connected already."""
        kept, lost = int(self.label[left]), int(self.label[right])
        if kept == lost:
            return
        members = [self._members.pop(label, [label]) for label in (kept, lost)]
        if len(members[0]) < len(members[1]):
            kept, members = lost, members[::-1]
        self.label[members[1]] = kept
        members[0].extend(members[1])
        self._members[kept] = members[0]
        self.links.append((left, right))


def _known_hashes(hashes: Sequence[str | None], max_bits: int) -> tuple[Places, Hashes]:
    """Positions (N,) of the videos that have a hash, and the hashes (N, T, 10)."""
    if not 0 <= max_bits <= 64:
        raise ValueError(f"max_bits: got {max_bits}, wanted 0 to 64")
    known = np.array([i for i, text in enumerate(hashes) if text is not None], np.int64)
    return known, parse_hashes([text for text in hashes if text is not None])


def _first_of_kind(table: Hashes) -> Places:
    """(N,): the first video whose hash is the same to the bit."""
    if not len(table):
        return np.empty(0, np.int64)
    _, first, kind = np.unique(table.reshape(len(table), -1), axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[kind.reshape(-1)])


def _gathered(
    candidates: Iterator[tuple[Places, Places]], distinct: Places, clusters: _Clusters
) -> Iterator[tuple[Places, Places]]:
    """Candidates that are not connected yet, each once, in portions worth the effort."""
    count = len(clusters.label)
    waiting, num_waiting = [np.empty(0, np.int64)], 0
    for left, right in candidates:
        left, right = distinct[left], distinct[right]
        apart = clusters.label[left] != clusters.label[right]
        waiting.append(left[apart] * count + right[apart])
        num_waiting += len(waiting[-1])
        if num_waiting > _BLOCK_PAIRS:
            yield np.divmod(np.unique(np.concatenate(waiting)), count)
            waiting, num_waiting = [], 0
    if num_waiting:
        yield np.divmod(np.unique(np.concatenate(waiting)), count)


def _link(clusters: _Clusters, table: Hashes, left: Places, right: Places, max_bits: int) -> None:
    """Connect those of the pairs (K,), (K,) that show the same footage."""
    for start in range(0, len(left), _BLOCK_PAIRS):
        some_left, some_right = left[start : start + _BLOCK_PAIRS], right[start : start + _BLOCK_PAIRS]
        apart = clusters.label[some_left] != clusters.label[some_right]
        some_left, some_right = some_left[apart], some_right[apart]
        same = _show_the_same(table[some_left], table[some_right], max_bits)
        for pair in zip(some_left[same].tolist(), some_right[same].tolist(), strict=True):
            clusters.join(*pair)


def _candidates(table: Hashes, max_bits: int) -> Iterator[tuple[Places, Places]]:
    """Yield pairs (K,), (K,) of positions, left < right, among them every pair that shows the same; some repeatedly."""
    screen = _with_matchless_zeros(table)[:, ::2]
    if len(table) > _LOOKUP_COST * num_lookups(max_bits):
        return _looked_up(screen, max_bits)
    return _compared(screen, max_bits)


def _looked_up(screen: Hashes, max_bits: int) -> Iterator[tuple[Places, Places]]:
    """Candidates found through ``codes_within``: the whole of each video against all windows of all."""
    for frame, mirror in itertools.product(range(screen.shape[1]), (np.uint64(0), MIRROR_BITS)):
        windows = screen[:, frame].reshape(-1)
        for one, window in codes_within(screen[:, frame, 0] ^ mirror, windows, max_bits):
            other = window // len(WINDOWS)
            different = one != other
            one, other = one[different], other[different]
            yield np.minimum(one, other), np.maximum(one, other)


def _compared(screen: Hashes, max_bits: int) -> Iterator[tuple[Places, Places]]:
    """Candidates found by comparing all pairs, block by block."""
    side = int(_BLOCK_PAIRS**0.5)
    for first in range(0, len(screen), side):
        for start in range(first, len(screen), side):
            nearest = _nearest_bits(screen[first : first + side], screen[start : start + side])
            left, right = np.nonzero(nearest <= max_bits)
            ascending = left + first < right + start
            yield left[ascending] + first, right[ascending] + start


def _with_matchless_zeros(table: Hashes) -> Hashes:
    """(N, T, 10) with numbers of no meaning for zeros, which must not come up as candidates by the million."""
    noise = np.random.default_rng(0).integers(1, 2**64, table.shape, np.uint64)
    return np.where(table == 0, noise, table)


def _nearest_bits(left: Hashes, right: Hashes) -> npt.NDArray[np.uint8]:
    """(N, M): bits in which the nearest of the frames of (N, T, 10) and (M, T, 10) differ, over windows and mirrors."""
    nearest = np.full((len(left), len(right)), 64, np.uint8)
    difference, bits = np.empty(nearest.shape, np.uint64), np.empty(nearest.shape, np.uint8)
    for frame, (one, other, mirror) in itertools.product(range(left.shape[1]), _VIEWS):
        np.bitwise_xor((left[:, frame, one] ^ mirror)[:, None], right[:, frame, other], out=difference)
        np.bitwise_count(difference, out=bits)
        np.minimum(nearest, bits, out=nearest)
    return nearest


def _show_the_same(left: Hashes, right: Hashes, max_bits: int) -> npt.NDArray[np.bool_]:
    """(K,): whether more than half of the frames of (K, T, 10) and (K, T, 10) agree in one and the same view."""
    same = np.zeros(len(left), np.bool_)
    for one, other, mirror in _VIEWS:
        a, b = left[:, :, one], right[:, :, other]
        agree = (np.bitwise_count(a ^ mirror ^ b) <= max_bits) & (a != 0) & (b != 0)
        same |= 2 * agree.sum(axis=1) > agree.shape[1]
    return same
