"""Find pairs of videos that show the same footage, by their perceptual hashes.

Two videos show the same footage if one looks like a window (the whole picture or a part) of the other in more than half
of its frames. It may be mirrored. Frames at the same relative times are compared. Because a fifth may have been cut off
the start, the end or both ends of one video, the frames that are then nearest in time are compared as well.

Candidates are pairs of videos that agree closely in a middle frame at the same relative time. First and last frames are
not used for this: else thousands of videos with the same title card would all be candidates. If the hashes have looks
(tiny pictures of frames), these can reject a pair, but never add one.

Measured with 10 bits on 40 sample events and 41 real clips with 46 edited copies of each (encoders at low rates, other
sizes, crops of 5 to 15%, mirrors, text, logos, borders, brightness, frame rates, up to a quarter cut from either end):
99.7% and 94.9% of the copies are found and nothing else; without the views of cuts in time, 98.8% and 92.7%. Looks lose
two of 1,269 and five of 828 of such pairs (32 edits, 40 events and 28 clips).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.perceptual_hash import (
    MIRROR_BITS,
    WINDOWS,
    Codes,
    Hashes,
    Places,
    SameFootage,
    SamePictures,
    TimeView,
    parse_hashes,
)
from fvc_lib.services.isolated_workers import available_cores

_CLOSER_BITS = 3  # a middle frame may differ in this many bits less than the others
_CUT_FIFTHS = ((1, 0), (0, 1), (1, 1))  # fifths that may have been cut from the start and from the end
_PAIRS_AT_ONCE = 1 << 16
_QUERIES_AT_ONCE = 1 << 17
_ENTRIES_AT_ONCE = 1 << 25  # codes searched at a time; the search takes some 48 bytes for each

# (4, K): numbers of one and other video, of a window of the other, and whether the one is mirrored. A middle frame of
# the whole one looks like that window.
Candidates = npt.NDArray[np.int64]
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


def near_duplicate_links(
    hashes: Sequence[str | None], max_bits: int, confirm: SamePictures | None = None, threads: int = 0
) -> list[tuple[int, int]]:
    """Return the fewest index pairs (i < j), ascending, that connect all videos of the same footage.

    Two frames agree if their codes differ in at most ``max_bits`` of 64 bits. They agree closely if the codes differ in
    at most ``max_bits - 3`` bits. Besides the hashes and about 24 bytes per video and thread, memory is bounded. Time
    grows with the number of videos to the power of about 1.4 (``docs/measurements.md``), and linearly with the number
    of copies of one video. Videos that share only one frame take about 30 nanoseconds per pair.

    Args:
        hashes: texts of ``perceptual_hash``; ``None`` (no hash) matches nothing. Their order decides which pairs are
            chosen.
        max_bits: 0 to 64.
        confirm: decides on pairs whose hashes agree; None: every such pair is linked.
        threads: number of searching threads; 0: one per available core. The links do not depend on it.

    Raises:
        ValueError: a text is no perceptual hash.
    """
    judge = Judge(hashes, max_bits, confirm)
    clusters = Components(len(judge.known))
    # Videos that are equal to the bit are compared once.
    kinds: dict[tuple[str | None, str], int] = {}
    first = np.array(
        [
            kinds.setdefault((hashes[place], confirm.looks[place] if confirm else ""), number)
            for number, place in enumerate(judge.known.tolist())
        ],
        np.int64,
    )
    copies, distinct = np.flatnonzero(first != np.arange(len(first))), np.flatnonzero(first == np.arange(len(first)))
    plain = np.zeros_like(copies)
    links = list(_link(clusters, judge, [np.stack([first[copies], copies, plain, plain])], have_one_look=True))
    at_once = _ENTRIES_AT_ONCE // len(WINDOWS)
    with ThreadPoolExecutor(threads or available_cores()) as pool:
        for frame in _middle_frames(judge.table.shape[1]):
            for start in range(0, len(distinct), at_once):
                search = _FrameSearch(judge, frame, distinct, distinct[start : start + at_once])
                links.extend(search.links(clusters, pool))
    return sorted((int(judge.known[min(pair)]), int(judge.known[max(pair)])) for pair in links)


def near_copies(contents: Sequence[str], hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """Return the near-duplicate pairs among files, as positions; of files with equal content only the first is used.

    The list is empty if ``max_bits`` is 0. See ``near_duplicate_links``.
    """
    if not max_bits:
        return []
    places = sorted({content: place for place, content in reversed(list(enumerate(contents)))}.values())
    return [(places[one], places[other]) for one, other in near_duplicate_links([hashes[i] for i in places], max_bits)]


def nearly_alike(table: Hashes, one: Hashes, max_bits: int) -> Places:
    """Return the row numbers of the videos in ``table`` that may show the footage of ``one``.

    They include all videos that ``near_duplicate_links`` would link with it directly.

    Args:
        table: codes of N videos, (N, T, 30).
        one: codes of a video, (T, 30).
        max_bits: as of ``near_duplicate_links``.
    """
    closely, near = max(0, max_bits - _CLOSER_BITS), np.zeros(len(table), np.bool_)
    for frame, mirror in itertools.product(_middle_frames(len(one)), (np.uint64(0), MIRROR_BITS)):
        codes = table[:, frame]
        for whole, part in ((codes[:, :1], one[frame]), (one[frame, :1], codes)):
            near |= (_bits_apart(whole, part, mirror) <= closely).any(axis=1)
    return np.flatnonzero(near)


def _bits_apart(whole: Codes, part: Codes, mirror: Codes | np.uint64) -> npt.NDArray[np.uint8]:
    """Return the number of bits in which ``whole``, mirrored by the bits ``mirror``, and ``part`` differ.

    It is 255 if either code is 0 (too plain to be compared).
    """
    return np.where((whole != 0) & (part != 0), np.bitwise_count(whole ^ mirror ^ part), np.uint8(255))


def _mirrors(candidates: Candidates) -> Codes:
    return np.where(candidates[3], MIRROR_BITS, np.uint64(0))


class Judge:
    """Decides whether candidates (pairs of videos) show the same footage.

    Videos are numbered among those that have a hash. For the arguments see ``near_duplicate_links``.

    Attributes:
        known: position in ``hashes`` of each numbered video.
        table: codes of the numbered videos, (N, T, 30).
        max_bits: largest difference of agreeing frames, in bits.
        closely: largest difference of closely agreeing frames, in bits.
    """

    def __init__(self, hashes: Sequence[str | None], max_bits: int, confirm: SamePictures | None = None) -> None:
        self.known = np.array([place for place, text in enumerate(hashes) if text is not None], np.int64)
        self.table, looks = parse_hashes([text for text in hashes if text is not None])
        self._looks = SameFootage(looks) if looks.size else None
        self.max_bits, self.closely = max_bits, max(0, max_bits - _CLOSER_BITS)
        self._confirm = confirm

    def hashes_agree(self, candidates: Candidates, looks: SameFootage | None = None) -> Flags:
        """Return whether more than half of the frames agree, and a middle frame closely, for K candidates, bool (K,).

        A candidate agrees if its frames do in any of the ``_time_views``. With ``looks``, the looks must agree in the
        same view.
        """
        one, other, window, _ = candidates
        mirrors, num_frames = _mirrors(candidates), self.table.shape[1]
        whole, part = self.table[one, :, 0], self.table[other, :, window]

        @cache
        def bits(first: int, second: int) -> npt.NDArray[np.uint8]:
            return _bits_apart(whole[:, first], part[:, second], mirrors)

        closely = np.zeros(len(one), np.bool_)
        for frame in _middle_frames(num_frames):
            closely |= bits(frame, frame) <= self.closely
        same = np.zeros_like(closely)
        for view in _time_views(num_frames):
            near = [bits(*frames) <= self.max_bits for frames in view]
            enough = closely & ~same & (2 * sum(agrees.astype(np.int64) for agrees in near) > num_frames)
            if looks is not None and enough.any():
                is_near = np.stack([agrees[enough] for agrees in near], axis=1)
                enough[enough] = looks.agree(one[enough], other[enough], window[enough], mirrors[enough], view, is_near)
            same |= enough
        return same

    def agree(self, near: Candidates, *, have_one_look: bool = False) -> Flags:
        """Return whether candidates whose hashes agree also agree in their looks and by ``confirm``, bool (K,).

        This is expensive. ``have_one_look`` says that both videos of each pair have the same looks.
        """
        same = np.ones(near.shape[1], np.bool_)
        if self._looks is not None and not have_one_look:
            same = self.hashes_agree(near, self._looks)
        if self._confirm is not None and same.any():
            one, other, window, _ = near[:, same]
            same[same] = self._confirm(self.known[one], self.known[other], window, _mirrors(near[:, same]))
        return same


def _apart(clusters: Components, candidates: Candidates) -> Candidates:
    """Return the candidates that are not connected yet."""
    return candidates[:, clusters.label[candidates[0]] != clusters.label[candidates[1]]]


def _link(
    clusters: Components, judge: Judge, parts: Iterable[Candidates], *, have_one_look: bool = False
) -> Iterator[tuple[int, int]]:
    """Connect candidates that show the same footage in ``clusters``; yield the pairs that joined two components."""
    for candidates in parts:
        for start in range(0, candidates.shape[1], _PAIRS_AT_ONCE):
            near = _apart(clusters, candidates[:, start : start + _PAIRS_AT_ONCE])
            near = near[:, judge.hashes_agree(near)]
            while near.size:
                # Looks are expensive: only of the fewest pairs that would connect as much as all.
                labels, ends = np.unique(clusters.label[near[:2]], return_inverse=True)
                joined = Components(len(labels))
                is_asked = np.array([joined.join(*pair) for pair in ends.reshape(2, -1).T.tolist()])
                asked = near[:, is_asked]
                same = asked[:2, judge.agree(asked, have_one_look=have_one_look)]
                yield from (pair for pair in zip(*same.tolist(), strict=True) if clusters.join(*pair))
                near = _apart(clusters, near[:, ~is_asked])


class _FrameSearch:
    """Search by one middle frame: whole pictures, plain and mirrored, are looked up among the windows of videos.

    Args:
        judge: decides on the candidates.
        frame: index of the middle frame.
        distinct: numbers of the videos whose whole pictures are looked up.
        some: numbers of the videos whose windows are searched.
    """

    def __init__(self, judge: Judge, frame: int, distinct: Places, some: Places) -> None:
        self._judge, self._frame, self._videos = judge, frame, some
        codes, wholes = judge.table[some, frame].reshape(-1), judge.table[distinct, frame, 0]
        self._entry_of = np.flatnonzero(codes).astype(np.uint32)  # place in the flat table; zeros match nothing
        self._wholes = distinct[np.flatnonzero(wholes)]  # the video of each plain query; as many mirrored ones follow
        self._codes, wholes = codes[self._entry_of], wholes[wholes != 0]
        self._queries = np.concatenate([wholes, wholes ^ MIRROR_BITS])

    def links(self, clusters: Components, pool: Executor) -> Iterator[tuple[int, int]]:
        """Connect the videos of one footage whose frame agrees closely in ``clusters``; yield the pairs that join.

        Every task starts from the connections of earlier rounds, and the results of tasks are joined in a fixed order.
        So the links do not depend on the number of threads.
        """
        blocks = blocks_for(self._judge.closely, len(self._queries), len(self._codes))
        for number, block in enumerate(blocks):
            search = BlockSearch(self._codes, blocks, number, self._judge.closely)
            queries = sorted_by(block, self._queries)

            def linked(start: int, search: BlockSearch = search, queries: Sorted = queries) -> list[tuple[int, int]]:
                own = clusters.copy()
                pairs = search.pairs(queries.part(slice(start, start + _QUERIES_AT_ONCE)), self._chooser(own))
                return list(_link(own, self._judge, self._gathered(pairs, own)))

            starts, num_tasks = range(0, len(self._queries), _QUERIES_AT_ONCE), 1
            while starts:
                for pairs in list(pool.map(linked, starts[:num_tasks])):
                    yield from (pair for pair in pairs if clusters.join(*pair))
                # Few at first: pairs that they connect are not compared again by all others.
                starts, num_tasks = starts[num_tasks:], 2 * num_tasks

    def _candidates(self, query: Places, entry: Places) -> Candidates:
        is_mirrored = query >= len(self._wholes)
        other, window = np.divmod(self._entry_of[entry].astype(np.int64), len(WINDOWS))
        one = self._wholes[query - len(self._wholes) * is_mirrored]
        return np.stack([one, self._videos[other], window, is_mirrored])

    def _gathered(self, pairs: Iterable[tuple[Places, Places]], clusters: Components) -> Iterator[Candidates]:
        """Yield the candidates that are not connected yet, in portions of bounded size.

        A pair of whole pictures is found in both directions, and yielded once.
        """
        waiting: list[Candidates] = []
        for pair in pairs:
            found = self._candidates(*pair)
            is_pair = np.where(found[2] == 0, found[0] < found[1], found[0] != found[1])
            waiting.append(_apart(clusters, found[:, is_pair]))
            if sum(part.shape[1] for part in waiting) > _PAIRS_AT_ONCE:
                yield np.concatenate(waiting, axis=1)
                waiting = []
        if waiting:
            yield np.concatenate(waiting, axis=1)

    def _chooser(self, clusters: Components) -> Callable[..., tuple[Places, Places]]:
        """Return a function for ``BlockSearch.pairs`` that skips pairs which are connected or cannot be linked."""
        table, telling = self._judge.table, _telling_frames(self._judge.table.shape[1], self._frame)

        def choose(query: Places, entry: Places, near: Callable[[Places], Flags]) -> tuple[Places, Places]:
            rows = self._candidates(query, np.broadcast_to(entry[:1], query.shape))
            columns = self._candidates(np.broadcast_to(query[:1], entry.shape), entry)
            own, others = clusters.label[rows[0]], clusters.label[columns[1]]
            some = np.flatnonzero(others != own[0]) if (own == own[0]).all() else np.arange(len(entry))
            is_near = near(some)
            if telling and is_near.any():
                may_be = np.zeros_like(is_near)
                for first, second in telling:
                    part = table[columns[1, some], second, columns[2, some]]
                    bits = _bits_apart(table[rows[0], first, 0][:, None], part, _mirrors(rows)[:, None])
                    may_be |= bits <= self._judge.max_bits
                is_near &= may_be
            row, column = np.nonzero(is_near)
            return row, some[column]

        return choose


@cache
def _telling_frames(num_frames: int, frame: int) -> TimeView:
    """Return pairs of frame indices such that any videos of one footage agree in at least one of these pairs.

    The pair ``(frame, frame)`` is never among them, because it was compared already. Empty for a single frame.
    """
    views = _time_views(num_frames)
    uses = Counter(pair for view in views for pair in view)
    telling: dict[tuple[int, int], None] = {}
    for view in views:
        others = sorted((pair for pair in view if pair != (frame, frame)), key=lambda pair: -uses[pair])
        telling |= dict.fromkeys(others[: num_frames - num_frames // 2])
    return tuple(telling)


def _middle_frames(num_frames: int) -> range:
    return range(1, num_frames - 1) if num_frames > 2 else range(num_frames)


def _time_views(num_frames: int) -> tuple[TimeView, ...]:
    """Return the ways to pair the frames of two videos: the first pairs frames at equal relative times.

    The others pair the nearest frames if a fifth was cut off the start, the end or both ends of either video.
    """
    last = num_frames - 1
    views = [tuple((frame, frame) for frame in range(num_frames))]
    for start, end in _CUT_FIFTHS:
        # Where the copy's frames lay in the whole, rounded to the nearest that was sampled; in integers, so exact.
        nearest = [(2 * (start * last + (5 - start - end) * frame) + 5) // 10 for frame in range(num_frames)]
        views.append(tuple(enumerate(nearest)))
        views.append(tuple((whole, copy) for copy, whole in enumerate(nearest)))
    return tuple(dict.fromkeys(views))


# --- All pairs of 64-bit codes that differ in few bits, exactly, without comparing all pairs. Multi-index hashing
# (Norouzi, Punjani and Fleet 2012): codes are cut into blocks of bits. Two codes that differ in few bits differ in even
# fewer bits in at least one block. So the bits of a block (its key) are looked up with every choice of that few bits
# flipped. The entries with such a key are candidates, and their whole codes are compared. The number of codes decides
# how they are cut into blocks (``blocks_for``); a few hundred codes are all compared. The queries and entries of a key
# that thousands share are compared as a matrix. The caller may skip some of these pairs.


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

    def pairs(self, queries: Sorted, choose: Choose) -> Iterator[tuple[Places, Places]]:
        """Yield (query positions, entry positions), both (K,), of pairs that differ in at most ``max_bits``.

        Args:
            queries: codes sorted by the same block.
            choose: chooses which pairs to yield where many queries and entries share a key.
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

    def _in_matrix(self, queries: Sorted, some: slice, choose: Choose) -> Iterator[tuple[Places, Places]]:
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
                found = choose(query[rows], tile_entry, near)
                yield query[rows][found[0]], tile_entry[found[1]]
            start, num_rows = start + num_rows, min(2 * num_rows, _TILE_ROWS)


def _masks(block: Block) -> Iterator[np.uint32]:
    """Yield all numbers of ``block.size`` bits of which at most ``block.radius`` are set."""
    for flipped in range(block.radius + 1):
        for chosen in itertools.combinations(range(block.size), flipped):
            yield np.uint32(sum(1 << bit for bit in chosen))
