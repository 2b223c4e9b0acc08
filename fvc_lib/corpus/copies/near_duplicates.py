"""Which videos show the same footage, by their perceptual hashes: all pairs, or as few as connect them.

Two videos do when one looks like a window of the other, the right way round or mirrored, in more than half of its
frames. Compared are frames at the same relative times, or where one is taken for a copy with a fifth cut off at the
start, at the end, or at both: the nearest that were sampled. One frame from the middle must agree closely at the same
relative time. By it candidates are found, in few videos by comparing all, in many by looking up near codes; first and
last frames find none, so that thousands of videos with one title or closing card do not all become candidates. Where
hashes come with looks, these have the last word (``likeness``): they take links away and add none.

Measured with 10 bits on 40 sample events and 41 real clips with 46 edited copies of each (encoders at low rates, other
sizes, crops of 5 to 15%, mirrors, text, logos, borders, brightness, frame rates, up to a quarter cut from either end):
99.7% and 94.9% of the copies are found and nothing else; without the views of cuts in time, 98.8% and 92.7%. Looks lose
two of 1,269 and five of 828 of such pairs (32 edits, 40 events and 28 clips).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.likeness import SameFootage, SamePictures, TimeView
from fvc_lib.corpus.copies.perceptual_hash import MIRROR_BITS, WINDOWS, Codes, Hashes, parse_hashes

# All pairs of 64-bit codes that differ in few bits, exactly. Multi-index hashing (Norouzi, Punjani and Fleet 2012):
# codes that differ in few bits differ in very few bits of at least one of a few blocks, so that block is looked up with
# each choice of so few bits flipped; the whole code then decides. With four blocks of 16 bits each lookup finds a
# 65,536th of the entries; among many millions three blocks of 21 cost more lookups and find a fifth as much in all.

Places = npt.NDArray[np.int64]

_BLOCKS_OF_MANY, _BLOCKS_OF_FEW = 3, 4
_MANY_ENTRIES = 1 << 23  # from here on fewer blocks: of 10 million entries a query takes 10 microseconds instead of 68
_MOST_CANDIDATES = 1 << 18  # compared at a time
_PIECE = 1 << 20


def num_lookups(max_bits: int, num_blocks: int = _BLOCKS_OF_FEW) -> int:
    """How often each code is looked up for pairs within ``max_bits``: what the search costs grows with it."""
    return sum(
        math.comb(len(bits), flipped)
        for bits, radius in zip(_blocks(num_blocks), _radii(max_bits, num_blocks), strict=True)
        for flipped in range(radius + 1)
    )


def codes_within(
    queries: Codes, entries: Codes, max_bits: int, num_blocks: int | None = None
) -> Iterator[tuple[Places, Places]]:
    """Yield the positions (K,), (K,) of all pairs of a query and an entry that differ in at most ``max_bits`` bits.

    Every pair comes once. The order depends on the codes only. Memory grows with the number of codes and with
    ``_MOST_CANDIDATES``, not with the number of pairs.

    Args:
        queries: uint64 (Q,).
        entries: uint64 (E,).
        max_bits: 0 to 64; beyond about 12 there are so many lookups that comparing all pairs is faster.
        num_blocks: that a code is cut into; None: what suits the number of entries. It changes the order alone.
    """
    if num_blocks is None:
        num_blocks = _BLOCKS_OF_MANY if len(entries) >= _MANY_ENTRIES else _BLOCKS_OF_FEW
    radii, blocks = _radii(max_bits, num_blocks), _blocks(num_blocks)
    masks = [np.uint64(sum(1 << bit for bit in bits)) for bits in blocks]
    for block, radius in enumerate(radii):
        if radius < 0:
            continue
        for query, entry in _within_in_block(queries, entries, blocks[block], radius, max_bits):
            difference = queries[query] ^ entries[entry]
            is_new = np.ones(len(query), np.bool_)
            for earlier in range(block):  # which has found the pair already
                is_new &= np.bitwise_count(difference & masks[earlier]) > radii[earlier]
            if is_new.any():
                yield query[is_new], entry[is_new]


def _blocks(number: int) -> tuple[tuple[int, ...], ...]:
    """The bits of each block: neighbours (frequencies next to each other) lie in different ones."""
    return tuple(tuple(range(start, 64, number)) for start in range(number))


def _radii(max_bits: int, num_blocks: int) -> tuple[int, ...]:
    """Bits that may differ in each block; -1: it need not be looked at. If all were exceeded, so would the sum be."""
    share, rest = divmod(max_bits - num_blocks + 1, num_blocks)
    return tuple(share + (block < rest) for block in range(num_blocks))


def _within_in_block(
    queries: Codes, entries: Codes, bits: tuple[int, ...], radius: int, max_bits: int
) -> Iterator[tuple[Places, Places]]:
    """All pairs within ``max_bits`` whose bits of this block differ in at most ``radius``."""
    entry_keys, query_keys = _gather(entries, bits), _gather(queries, bits)
    entry_order, query_order = _order(entry_keys), _order(query_keys)
    starts = np.zeros((1 << len(bits)) + 1, np.int32)
    for some in _pieces(len(entry_keys)):
        starts[1:] += np.bincount(entry_keys[some], minlength=1 << len(bits)).astype(np.int32)
    np.cumsum(starts, out=starts)
    del entry_keys
    # In the order of their keys, neighbouring queries look up neighbouring places.
    query_keys, sorted_queries, sorted_entries = query_keys[query_order], queries[query_order], entries[entry_order]
    for mask in _masks(len(bits), radius):
        keys = query_keys ^ np.uint32(mask)
        first = starts[keys]
        counts = starts[keys + 1] - first
        asked = np.flatnonzero(counts)
        for start, stop in _portions(counts[asked]):
            query, entry = _near(sorted_queries, sorted_entries, asked[start:stop], first, counts, max_bits)
            if len(query):
                yield query_order[query].astype(np.int64), entry_order[entry].astype(np.int64)


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


def _gather(codes: Codes, bits: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """The chosen bits of each code as one small number."""
    keys = np.zeros(len(codes), np.uint32)
    for some in _pieces(len(codes)):
        for place, bit in enumerate(bits):
            keys[some] |= ((codes[some] >> np.uint64(bit)) & np.uint64(1)).astype(np.uint32) << np.uint32(place)
    return keys


def _pieces(count: int) -> Iterator[slice]:
    """What is worked on at a time where numbers in between take several times the memory of what is kept."""
    return (slice(start, start + _PIECE) for start in range(0, count, _PIECE))


def _order(keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """A stable order: 16 bits at a time, for as such numpy sorts by radix, ten times as fast."""
    order = np.argsort(keys.astype(np.uint16), kind="stable").astype(np.uint32)
    high = (keys >> np.uint32(16)).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")] if high.any() else order


def _masks(num_bits: int, radius: int) -> Iterator[int]:
    """All numbers of ``num_bits`` bits with at most ``radius`` of them set."""
    for flipped in range(radius + 1):
        for chosen in itertools.combinations(range(num_bits), flipped):
            yield sum(1 << bit for bit in chosen)


_CLOSER_BITS = 3  # a middle frame must agree in so many bits more than the others
_CUT_FIFTHS = ((1, 0), (0, 1), (1, 1))  # what may have been cut from the start and from the end
_BLOCK_PAIRS = 1 << 16
_ASKED_AT_ONCE = 1 << 9
_LOOKUP_COST = 2  # from this many videos per lookup on, looking up is faster than comparing (measured)


@dataclass(frozen=True)
class _Candidates:
    """(K,) each: the whole of ``one``, turned by ``mirror``, has a middle frame like that ``window`` of ``other``."""

    one: Places
    other: Places
    window: Places
    mirror: Codes

    def __len__(self) -> int:
        return len(self.one)

    def where(self, kept: npt.NDArray[np.bool_] | slice) -> Self:
        """Some of them."""
        return type(self)(self.one[kept], self.other[kept], self.window[kept], self.mirror[kept])


def near_duplicate_links(
    hashes: Sequence[str | None], max_bits: int, confirm: SamePictures | None = None
) -> list[tuple[int, int]]:
    """Index pairs (i < j), ascending, of videos that show the same footage: as few as connect all that do.

    Frames agree when they differ in at most ``max_bits`` of 64 bits, closely when in at most ``max_bits - 3``. Memory
    grows with the number of videos only, also where thousands of them show the same footage.

    Args:
        hashes: what ``perceptual_hash`` gave; ``None`` (no hash) matches nothing. Their order decides which pairs are
            chosen.
        max_bits: 0 to 64.
        confirm: is given pairs whose hashes agree and has the last word; none: hashes decide.

    Raises:
        ValueError: ``max_bits`` out of range, or a text that is no perceptual hash.
    """
    known, table, looks = _known_hashes(hashes, max_bits)
    judge = _Judge(known, table, looks, max_bits, confirm)
    clusters = Components(len(known))
    links: set[tuple[int, int]] = set()
    first = _first_of_kind([(hashes[place], confirm.looks[place] if confirm else "") for place in known])
    copies = np.flatnonzero(first != np.arange(len(first)))
    links.update(_link(clusters, replace(judge, looks=None), _as_they_are(first[copies], copies)))  # looks are the same
    distinct = np.unique(first)
    for found in _gathered(_candidates(table, distinct, max_bits), distinct, clusters):
        links.update(_link(clusters, judge, found))
    return sorted((int(known[min(pair)]), int(known[max(pair)])) for pair in links)


def near_copies(contents: Sequence[str], hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """``near_duplicate_links``, but of files with one content the first stands for all; none for 0 bits."""
    first: dict[str, int] = {}
    for place, content in enumerate(contents if max_bits else ()):
        first.setdefault(content, place)
    places = list(first.values())
    return [(places[one], places[other]) for one, other in near_duplicate_links([hashes[i] for i in places], max_bits)]


def nearly_alike(table: Hashes, one: Hashes, max_bits: int) -> Places:
    """Which of (N, T, 30) may show the footage of ``one``, (T, 30).

    They are all that ``near_duplicate_links`` links with it directly, and few besides.
    """
    closely, near = max(0, max_bits - _CLOSER_BITS), np.zeros(len(table), np.bool_)
    for frame, mirror in itertools.product(_middle_frames(len(one)), (np.uint64(0), MIRROR_BITS)):
        codes = table[:, frame]
        for whole, part in ((codes[:, :1], one[frame]), (one[frame, :1], codes)):
            has_meaning = (whole != 0) & (part != 0)
            near |= ((np.bitwise_count(whole ^ mirror ^ part) <= closely) & has_meaning).any(axis=1)
    return np.flatnonzero(near)


@dataclass(frozen=True)
class _Judge:
    known: Places
    table: Hashes
    looks: SameFootage | None
    max_bits: int
    confirm: SamePictures | None

    def hashes_agree(self, found: _Candidates) -> npt.NDArray[np.bool_]:
        return _show_the_same(self.table, None, found, self.max_bits)

    def looks_agree(self, near: _Candidates) -> npt.NDArray[np.bool_]:
        """(K,): of candidates whose hashes agree; dear, so it is asked of as few as possible."""
        same = np.ones(len(near), np.bool_)
        if self.looks is not None:
            same = _show_the_same(self.table, self.looks, near, self.max_bits)
        if self.confirm is not None and same.any():
            asked = near.where(same)
            same[same] = self.confirm(self.known[asked.one], self.known[asked.other], asked.window, asked.mirror)
        return same


def _known_hashes(hashes: Sequence[str | None], max_bits: int) -> tuple[Places, Hashes, SameFootage | None]:
    """Positions (N,) of the videos that have a hash, the hashes (N, T, 30), and who judges their looks, if any."""
    if not 0 <= max_bits <= 64:
        raise ValueError(f"max_bits: got {max_bits}, wanted 0 to 64")
    known = np.array([i for i, text in enumerate(hashes) if text is not None], np.int64)
    table, looks = parse_hashes([text for text in hashes if text is not None])
    return known, table, SameFootage(looks) if looks.size else None


def _first_of_kind(kinds: Sequence[tuple[str | None, str]]) -> Places:
    """(N,): the first of those that are the same to the bit, so that they have the same neighbours."""
    first: dict[tuple[str | None, str], int] = {}
    return np.array([first.setdefault(kind, place) for place, kind in enumerate(kinds)], np.int64)


def _as_they_are(one: Places, other: Places) -> _Candidates:
    return _Candidates(one, other, np.zeros_like(one), np.zeros(len(one), np.uint64))


def _gathered(candidates: Iterator[_Candidates], distinct: Places, clusters: Components) -> Iterator[_Candidates]:
    """Candidates that are not connected yet, in portions worth the effort, by their places among all videos."""
    waiting: list[_Candidates] = []
    num_waiting = 0
    for some in candidates:
        found = _Candidates(distinct[some.one], distinct[some.other], some.window, some.mirror)
        waiting.append(found.where(clusters.label[found.one] != clusters.label[found.other]))
        num_waiting += len(waiting[-1])
        if num_waiting > _BLOCK_PAIRS:
            yield _concatenated(waiting)
            waiting, num_waiting = [], 0
    if num_waiting:
        yield _concatenated(waiting)


def _concatenated(parts: Sequence[_Candidates]) -> _Candidates:
    one, other, window = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("one", "other", "window")
    )
    return _Candidates(one, other, window, np.concatenate([part.mirror for part in parts]))


def _link(clusters: Components, judge: _Judge, candidates: _Candidates) -> Iterator[tuple[int, int]]:
    """Connect those of the candidates that show the same footage; yields each pair that connects anything."""
    for some in _apart(clusters, candidates, _BLOCK_PAIRS):
        for near in _apart(clusters, some.where(judge.hashes_agree(some)), _ASKED_AT_ONCE):
            same = near.where(judge.looks_agree(near))
            yield from (
                pair for pair in zip(same.one.tolist(), same.other.tolist(), strict=True) if clusters.join(*pair)
            )


def _apart(clusters: Components, candidates: _Candidates, num_at_once: int) -> Iterator[_Candidates]:
    """Portions of the candidates, without what is connected by the time that a portion is asked for."""
    for start in range(0, len(candidates), num_at_once):
        some = candidates.where(slice(start, start + num_at_once))
        yield some.where(clusters.label[some.one] != clusters.label[some.other])


def _candidates(table: Hashes, distinct: Places, max_bits: int) -> Iterator[_Candidates]:
    """Yield every view of two videos in which a middle frame agrees closely, some repeatedly, some without meaning.

    They are numbered by their places in ``distinct``, which are rows of the table.
    """
    closely = max(0, max_bits - _CLOSER_BITS)
    search = _looked_up if len(distinct) > _LOOKUP_COST * num_lookups(closely) else _compared
    for frame in _middle_frames(table.shape[1]):
        codes = _without_zeros(table[distinct, frame])
        for one, place, mirror in search(codes, closely):
            other, window = np.divmod(place, len(WINDOWS))
            # Two whole pictures are compared from both sides; one is enough.
            is_new = np.where(window == 0, one < other, one != other)
            yield _Candidates(one, other, window, mirror).where(is_new)


def _looked_up(codes: Hashes, max_bits: int) -> Iterator[tuple[Places, Places, Codes]]:
    """Wholes of (N, 30) codes, plain and mirrored, and the places in the flat codes that are near them."""
    count = len(codes)
    wholes = np.concatenate([codes[:, 0], codes[:, 0] ^ MIRROR_BITS])
    for query, place in codes_within(wholes, codes.reshape(-1), max_bits):
        is_mirrored = query >= count
        yield query - count * is_mirrored, place, np.where(is_mirrored, MIRROR_BITS, np.uint64(0))


def _compared(codes: Hashes, max_bits: int) -> Iterator[tuple[Places, Places, Codes]]:
    """The same found by comparing all, block by block."""
    flat = codes.reshape(-1)
    rows = max(1, _BLOCK_PAIRS // max(1, len(flat)))
    for start in range(0, len(codes), rows):
        for mirror in (np.uint64(0), MIRROR_BITS):
            difference = (codes[start : start + rows, 0] ^ mirror)[:, None] ^ flat
            one, place = np.nonzero(np.bitwise_count(difference) <= max_bits)
            yield one + start, place, np.full(len(one), mirror)


def _without_zeros(codes: Hashes) -> Hashes:
    """(N, 30), changed: numbers of no meaning for zeros, which must not come up as candidates by the million."""
    rng = np.random.default_rng(0)
    for some in _pieces(len(codes)):
        piece = codes[some]
        np.copyto(piece, rng.integers(1, 2**64, piece.shape, np.uint64), where=piece == 0)
    return codes


def _show_the_same(
    table: Hashes, looks: SameFootage | None, candidates: _Candidates, max_bits: int
) -> npt.NDArray[np.bool_]:
    """(K,): whether more than half of the frames of (N, T, 30) agree in some view of time, and a middle one closely."""
    whole = table[candidates.one, :, 0]
    part = table[candidates.other, :, candidates.window]
    num_frames = table.shape[1]

    @cache
    def bits(one: int, other: int) -> npt.NDArray[np.uint8]:
        has_meaning = (whole[:, one] != 0) & (part[:, other] != 0)
        return np.where(
            has_meaning, np.bitwise_count(whole[:, one] ^ candidates.mirror ^ part[:, other]), np.uint8(255)
        )

    closely = np.zeros(len(candidates), np.bool_)
    for frame in _middle_frames(num_frames):
        closely |= bits(frame, frame) <= max(0, max_bits - _CLOSER_BITS)
    same = np.zeros_like(closely)
    for view in _time_views(num_frames):
        near = [bits(*frames) <= max_bits for frames in view]
        enough = closely & ~same & (2 * sum(agrees.astype(np.int64) for agrees in near) > num_frames)
        if looks is not None and enough.any():
            asked = candidates.where(enough)
            is_near = np.stack([agrees[enough] for agrees in near], axis=1)
            enough[enough] = looks.agree(asked.one, asked.other, asked.window, asked.mirror, view, is_near)
        same |= enough
    return same


def _middle_frames(num_frames: int) -> range:
    return range(1, num_frames - 1) if num_frames > 2 else range(num_frames)


def _time_views(num_frames: int) -> tuple[TimeView, ...]:
    """Frames of equal relative times, and those nearest to each other when either of the two was cut."""
    last = num_frames - 1
    views = [tuple((frame, frame) for frame in range(num_frames))]
    for start, end in _CUT_FIFTHS:
        # Where the copy's frames lay in the whole, rounded to the nearest that was sampled; in integers, so exact.
        nearest = [(2 * (start * last + (5 - start - end) * frame) + 5) // 10 for frame in range(num_frames)]
        views.append(tuple(enumerate(nearest)))
        views.append(tuple((whole, copy) for copy, whole in enumerate(nearest)))
    return tuple(dict.fromkeys(views))
