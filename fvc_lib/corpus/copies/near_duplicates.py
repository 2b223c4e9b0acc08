"""Find pairs of videos that show the same footage, by their perceptual hashes.

Two videos show the same footage if more than half of their sampled frames match. Two frames match if the first looks
like a window of the second. A window is the whole picture or a fixed part of it, so that a cropped copy matches its
source. A mirrored copy matches, too.

Frames at the same relative times are compared. A copy may also lack a fifth of the video at the start, the end or both
ends. So the comparison is repeated with frames paired as if such a part were missing.

Only candidates are compared: pairs of videos whose hashes are very near in a frame that is neither the first nor the
last. With first and last frames, thousands of videos with the same title card would be candidates. Hashes may contain
looks (tiny pictures of the frames). If the looks differ, a pair with near hashes is rejected.

Measured with ``max_bits`` 10 on 40 generated videos and 41 real clips, with 46 edited copies of each. The edits are low
bit rates, other sizes, crops of 5 to 15%, mirrors, text, logos, borders, brightness, frame rates, and cuts of up to a
quarter at either end. 99.7% of the copies of generated videos are found, 94.9% of the copies of real clips, and no
wrong pair. If only frames at the same relative times are compared, 98.8% and 92.7% are found. Looks wrongly reject two
of 1,269 pairs of generated videos and five of 828 pairs of real clips (32 edits of 40 videos and 28 clips).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.perceptual_hash import (
    MIRROR_BITS,
    WINDOWS,
    Codes,
    Flags,
    Hashes,
    Pixels,
    Places,
    SameFootage,
    TimeView,
    parse_hashes,
)

_CLOSER_BITS = 3  # frames that agree closely differ in at most ``max_bits`` minus this many bits
_PAIRS_AT_ONCE = 1 << 16
_LOOKS_AT_ONCE = 1 << 10

# (4, K), for K pairs of videos: the number of the first video, that of the second video, that of a window of the second
# video, and 1 if the first video is mirrored, else 0. In a middle frame, the whole first video looks like that window.
Candidates = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.int32] | npt.NDArray[np.uint32]
# Chooses pairs of R queries and C entries, which are the rows and columns of a matrix. Arguments: positions of the
# queries (R,), positions of the entries (C,), and a function. The function takes K column numbers and returns which of
# these entries are near each query, bool (R, K). Returns (rows, columns) of the N chosen pairs, both (N,).
Choose = Callable[[Places, Places, Callable[[Places], Flags]], tuple[Places, Places]]

_ALL_PAIRS = 1_250_000  # with fewer pairs, all are compared
_BLOCKS = ((13_000_000, 3), (150_000, 4), (60_000, 5), (0, 7))  # (fewest entries, number of blocks to cut codes into)
_CANDIDATES = 1 << 16  # pairs of codes that are compared at a time
_LARGE_PAIRS = 1 << 17  # keys with at least this many pairs are compared as a matrix
_TILE_PAIRS, _TILE_ROWS = 1 << 17, 64


def near_duplicate_links(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """Return the fewest pairs (i, j) that connect all videos of the same footage, sorted.

    i and j are indices into ``hashes``, i < j. N copies of a video give N - 1 pairs. Two frames agree if their codes
    (64 bits each) differ in at most ``max_bits`` bits. They agree closely if the codes differ in at most ``max_bits -
    3`` bits.

    The search takes about 1.5 KiB of memory per video, in addition to the hashes. Time grows with the number of videos
    to the power of about 1.4 (documentation, page Measurements), and linearly with the number of copies of one video.
    Videos that share only one frame take about 30 nanoseconds per pair.

    Args:
        hashes: texts of ``perceptual_hash``; ``None`` (no hash) matches nothing. Their order decides which pairs are
            chosen.
        max_bits: largest number of differing bits of frames that agree, 0 to 64.

    Raises:
        ValueError: a text is no perceptual hash.
    """
    judge = Judge(hashes, max_bits)
    clusters = Components(len(judge.known))
    # Videos that are equal to the bit are compared once.
    kinds: dict[str | None, int] = {}
    equals = [(kinds.setdefault(hashes[place], n), n) for n, place in enumerate(judge.known)]
    distinct = np.array(list(kinds.values()), np.int64)
    repeats = [(one, other, 0, 0) for one, other in equals if one != other]
    copies = np.array(repeats, np.int64).reshape(-1, 4)
    links = list(_link(clusters, judge, copies.T))
    for frame in _middle_frames(judge.table.shape[1]):
        links.extend(_FrameSearch(judge, frame, distinct).links(clusters))
    numbers = np.array(links, np.int64).reshape(-1, 2)
    pairs = judge.known[np.sort(numbers)]
    return sorted((one, other) for one, other in pairs.tolist())


def nearly_alike(table: Hashes, one: Hashes, max_bits: int) -> Places:
    """Return the row numbers, int64 (K,), of the videos in ``table`` that may show the footage of the video ``one``.

    This is a fast first selection: these videos agree closely with ``one`` in a middle frame. They include all videos
    that ``near_duplicate_links`` would link directly with ``one``.

    Args:
        table: codes of N videos with T frames and 30 windows each, uint64 (N, T, 30).
        one: codes of a video, uint64 (T, 30).
        max_bits: largest number of differing bits of frames that agree, 0 to 64.
    """
    closely = max(0, max_bits - _CLOSER_BITS)
    near = np.zeros(len(table), np.bool_)
    mirrors = (np.uint64(0), MIRROR_BITS)
    for frame, mirror in itertools.product(_middle_frames(len(one)), mirrors):
        codes = table[:, frame]
        bits_in_one = _bits_apart(codes[:, :1], one[frame], mirror)
        bits_in_other = _bits_apart(one[frame, :1], codes, mirror)
        near |= (np.minimum(bits_in_one, bits_in_other) <= closely).any(axis=1)
    return np.flatnonzero(near)


def _bits_apart(whole: Codes, part: Codes, mirror: Codes | np.uint64) -> Pixels:
    """Return the number of bits, 0 to 64, in which two codes differ, uint8; the arguments are broadcast.

    The number is 255 if either code is 0, which means that its picture is too plain to be compared.

    Args:
        whole: codes of whole pictures.
        part: codes of windows of other pictures.
        mirror: the bits to flip in ``whole`` first: ``MIRROR_BITS`` to mirror the picture, 0 to leave it as it is.
    """
    can_compare = (whole != 0) & (part != 0)
    num_bits = np.bitwise_count(whole ^ mirror ^ part)
    return np.where(can_compare, num_bits, np.uint8(255))


class Judge:
    """A judge of candidates (pairs of videos): it decides whether both videos of a pair show the same footage.

    The N videos that have a hash are numbered from 0.

    Args:
        hashes: texts of ``perceptual_hash``; ``None`` (no hash) matches nothing.
        max_bits: largest number of differing bits of frames that agree, 0 to 64.

    Attributes:
        known: position in ``hashes`` of each numbered video, int64 (N,).
        table: codes of the numbered videos with T frames and 30 windows each, uint64 (N, T, 30).
        max_bits: largest difference of agreeing frames, in bits.
        closely: largest difference of closely agreeing frames, in bits.
    """

    def __init__(self, hashes: Sequence[str | None], max_bits: int) -> None:
        self.known = np.array([place for place, text in enumerate(hashes) if text is not None], np.int64)
        self.table, looks = parse_hashes([text for text in hashes if text is not None])
        self._looks = SameFootage(looks) if looks.size else None
        self.max_bits = max_bits
        self.closely = max(0, max_bits - _CLOSER_BITS)

    def hashes_agree(self, candidates: Candidates, looks: SameFootage | None = None) -> Flags:
        """Return for each of K candidates whether the hashes of its two videos agree, bool (K,).

        They agree if more than half of the frames agree and a middle frame agrees closely. Frames are paired in several
        ways (``_time_views``), for copies that were cut; it is enough if the videos agree in one of these ways.

        Args:
            candidates: (4, K), see ``Candidates``.
            looks: compares the looks (tiny pictures) of the frames, which must then agree too; None: hashes suffice.
        """
        one, other, window, is_mirrored = candidates
        mirrors = is_mirrored.astype(np.uint64) * MIRROR_BITS
        num_frames = self.table.shape[1]
        whole = self.table[one, :, 0]
        part = self.table[other, :, window]

        @cache
        def bits(first: int, second: int) -> Pixels:
            return _bits_apart(whole[:, first], part[:, second], mirrors)

        closely = np.zeros(len(one), np.bool_)
        for frame in _middle_frames(num_frames):
            closely |= bits(frame, frame) <= self.closely
        same = np.zeros_like(closely)
        for view in _time_views(num_frames):
            near = np.stack([bits(*frames) <= self.max_bits for frames in view])
            most_agree = 2 * near.sum(axis=0) > num_frames
            enough = closely & ~same & most_agree
            if looks is not None and enough.any():
                enough[enough] = looks.agree(candidates[:, enough], view, near[:, enough].T)
            same |= enough
        return same

    def agree(self, near: Candidates) -> Flags:
        """Return for each of K candidates whether its videos show the same footage, bool (K,).

        The candidates ``near``, int64 (4, K), are pairs of videos whose hashes agree already. This method compares the
        looks (tiny pictures) of their frames, which takes far longer. If the hashes have no looks, all values are true.
        """
        same = np.ones(near.shape[1], np.bool_)
        for start in range(0, len(same) if self._looks else 0, _LOOKS_AT_ONCE):
            some = slice(start, start + _LOOKS_AT_ONCE)
            same[some] = self.hashes_agree(near[:, some], self._looks)
        return same


def _apart(clusters: Components, candidates: Candidates) -> Candidates:
    """Return the ``candidates``, int64 (4, K), without the pairs of videos that are connected in ``clusters``.

    The columns of the result are the remaining pairs.
    """
    is_apart = clusters.label[candidates[0]] != clusters.label[candidates[1]]
    return candidates[:, is_apart]


def _link(clusters: Components, judge: Judge, candidates: Candidates) -> Iterator[tuple[int, int]]:
    """Connect the candidates that show the same footage, and yield the pairs (i, j) that joined two components.

    i and j are numbers of videos. Pairs whose videos are connected already are not compared.

    Args:
        clusters: components of the numbered videos; changed in place.
        judge: decides on the candidates.
        candidates: (4, K), see ``Candidates``.
    """
    for start in range(0, candidates.shape[1], _PAIRS_AT_ONCE):
        near = _apart(clusters, candidates[:, start : start + _PAIRS_AT_ONCE])
        near = near[:, judge.hashes_agree(near)]
        while near.size:
            # Looks are expensive: compare only the fewest pairs that would connect as many videos as all pairs.
            labels, ends = np.unique(clusters.label[near[:2]], return_inverse=True)
            joined = Components(len(labels))
            pairs = ends.reshape(2, -1).T.tolist()
            is_first = np.array([joined.join(*pair) for pair in pairs])
            first = near[:, is_first]
            same = first[:2, judge.agree(first)]
            yield from (pair for pair in zip(*same.tolist(), strict=True) if clusters.join(*pair))
            near = _apart(clusters, near[:, ~is_first])


class _FrameSearch:
    """A search for videos that show the same footage, by the codes of a single frame, say the third of every video.

    The whole picture of one video is looked up among the windows of all videos. So the queries are the codes of the
    whole pictures, plain and mirrored: two per video. The entries are the codes of all windows: up to 30 per video.

    Args:
        judge: decides on the candidates.
        frame: index of the frame, neither the first nor the last if there are more than two.
        videos: numbers of the videos to search.
    """

    def __init__(self, judge: Judge, frame: int, videos: Places) -> None:
        self._judge, self._videos = judge, videos
        codes = judge.table[videos, frame].reshape(-1)
        wholes = judge.table[videos, frame, 0]
        self._entry_of = np.flatnonzero(codes).astype(np.uint32)  # index in the flat table of each code that is not 0
        self._wholes = videos[np.flatnonzero(wholes)]  # videos of the plain queries; the mirrored ones follow
        self._codes, wholes = codes[self._entry_of], wholes[wholes != 0]
        self._queries = np.concatenate([wholes, wholes ^ MIRROR_BITS])
        self._telling = _telling_frames(judge.table.shape[1], frame)

    def links(self, clusters: Components) -> Iterator[tuple[int, int]]:
        """Connect the videos that show the same footage, and yield the pairs (i, j) that joined two components.

        i and j are numbers of videos. ``clusters`` holds the components of the numbered videos and is changed in place.
        Only videos that agree closely in the frame of this search are compared.
        """
        blocks = blocks_for(self._judge.closely, len(self._queries), len(self._codes))
        for number in range(len(blocks)):
            search = BlockSearch(self._codes, blocks, number, self._judge.closely)
            waiting: list[Candidates] = []
            for query, entry in search.pairs(self._queries, self._chooser(clusters)):
                one, is_mirrored = self._whole(query)
                other, window = self._window(entry)
                # A pair of whole pictures is found twice, in both orders; one order is enough.
                is_pair = np.where(window == 0, one < other, one != other)
                found = np.stack([one, other, window, is_mirrored])
                waiting.append(_apart(clusters, found[:, is_pair]))
                num_waiting = sum(part.shape[1] for part in waiting)
                if num_waiting > _PAIRS_AT_ONCE:
                    yield from _link(clusters, self._judge, np.concatenate(waiting, axis=1))
                    waiting = []
            if waiting:
                yield from _link(clusters, self._judge, np.concatenate(waiting, axis=1))

    def _whole(self, query: Places) -> tuple[Places, Flags]:
        """Return (videos, is_mirrored) of K queries, both (K,).

        A query is the code of a whole picture, plain or mirrored. ``videos`` are the numbers of the queries' videos.
        ``is_mirrored`` is true for mirrored pictures. ``query`` (K,) are indices into all queries.
        """
        is_mirrored = query >= len(self._wholes)
        return self._wholes[query - len(self._wholes) * is_mirrored], is_mirrored

    def _window(self, entry: Places) -> tuple[Places, Places]:
        """Return (videos, windows) of K entries: the numbers of the video and of its window, both (K,).

        An entry is the code of a window of a video. ``entry`` (K,) are indices into all entries.
        """
        place, window = np.divmod(self._entry_of[entry].astype(np.int64), len(WINDOWS))
        return self._videos[place], window

    def _chooser(self, clusters: Components) -> Choose:
        """Return a function that selects pairs of queries and entries, for the method ``BlockSearch.pairs``.

        The function selects pairs of near codes. Two kinds of pairs are skipped, because comparing their videos would
        be useless. Either the two videos are connected in ``clusters`` already. Or their other frames are too different
        for the same footage (``_telling_frames``). See ``Choose`` for the arguments of the function.
        """
        table = self._judge.table

        def choose(query: Places, entry: Places, near: Callable[[Places], Flags]) -> tuple[Places, Places]:
            one, is_mirrored = self._whole(query)
            other, window = self._window(entry)
            own = clusters.label[one]
            others = clusters.label[other]
            are_connected = (own == own[0]).all()
            some = np.flatnonzero(others != own[0]) if are_connected else np.arange(len(entry))
            is_near = near(some)
            if self._telling and is_near.any():
                may_be = np.zeros_like(is_near)
                mirrors = (is_mirrored * MIRROR_BITS)[:, None]
                for first, second in self._telling:
                    part = table[other[some], second, window[some]]
                    num_bits = _bits_apart(table[one, first, :1], part, mirrors)
                    may_be |= num_bits <= self._judge.max_bits
                is_near &= may_be
            row, column = np.nonzero(is_near)
            return row, some[column]

        return choose


def _telling_frames(num_frames: int, frame: int) -> TimeView:
    """Return pairs of frame indices (first video, second video) for a quick test, before two videos are compared fully.

    If two videos agree in none of these pairs, they cannot agree in more than half of their frames. So they do not show
    the same footage. The pair ``(frame, frame)`` is left out, because it was compared already. The result is empty if
    ``num_frames`` is 1.
    """
    views = _time_views(num_frames)
    uses = Counter(itertools.chain(*views))
    telling: dict[tuple[int, int], None] = {}
    for view in views:
        others = (pair for pair in view if pair != (frame, frame))
        most_used = sorted(others, key=lambda pair: -uses[pair])
        telling |= dict.fromkeys(most_used[: num_frames - num_frames // 2])
    return tuple(telling)


def _middle_frames(num_frames: int) -> range:
    return range(1, num_frames - 1) if num_frames > 2 else range(num_frames)


@cache
def _time_views(num_frames: int) -> tuple[TimeView, ...]:
    """Return the ways to pair the frames of two videos with ``num_frames`` frames each.

    A way is a tuple of pairs of frame indices (first video, second video). The first way pairs equal indices. The
    others suppose that one video is a copy of the other without a fifth at the start, the end or both ends. They pair
    each frame of the copy with the uncut video's frame that is nearest in time.
    """
    last = num_frames - 1
    views = [tuple((frame, frame) for frame in range(num_frames))]
    for start, end in ((1, 0), (0, 1), (1, 1)):  # fifths that are cut off the start and the end
        # For each frame of the cut copy, the nearest sampled frame of the uncut video; exact integer arithmetic.
        kept = 5 - start - end  # fifths
        nearest = [(2 * (start * last + kept * frame) + 5) // 10 for frame in range(num_frames)]
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
    """A range of bits of a code: ``size`` bits from bit ``start`` on, where bit 0 is the lowest.

    A search by this block finds the pairs of codes that differ in at most ``radius`` of these bits.
    """

    start: int
    size: int
    radius: int

    def keys(self, codes: Codes) -> Codes:
        """Return the key of each code: the bits of this block, as a number below ``2**size``; shape of ``codes``."""
        lowest_bits = np.uint64((1 << self.size) - 1)
        return (codes >> np.uint64(self.start)) & lowest_bits

    def masks(self) -> Iterator[np.uint32]:
        """Yield all numbers of ``size`` bits in which at most ``radius`` bits are set."""
        for flipped in range(self.radius + 1):
            for chosen in itertools.combinations(range(self.size), flipped):
                yield np.uint32(sum(1 << bit for bit in chosen))


def blocks_for(max_bits: int, num_queries: int, num_entries: int) -> tuple[Block, ...]:
    """Divide the 64 bits of codes into blocks, to search for all pairs that differ in at most ``max_bits`` bits.

    Every such pair differs in at most ``radius`` bits of at least one block, so a search by that block finds it. With
    few codes the result is a single block of size 0, which means that all pairs are compared.

    Args:
        max_bits: largest difference of a pair, in bits.
        num_queries: number of codes that are looked up.
        num_entries: number of codes among which they are looked up.
    """
    if num_queries * num_entries < _ALL_PAIRS:
        return (Block(0, 0, 0),)
    number = next(number for least, number in _BLOCKS if num_entries >= least)
    # In every pair, at least one block differs in at most ``radius`` bits; blocks of radius -1 are not needed.
    radius, larger = divmod(max_bits - number + 1, number)
    borders = [64 * block // number for block in range(number + 1)]
    blocks = [
        Block(start, end - start, radius + (place < larger))
        for place, (start, end) in enumerate(itertools.pairwise(borders))
    ]
    return tuple(block for block in blocks if block.radius >= 0)


def _sorted_by(block: Block, codes: Codes) -> tuple[Codes, _Numbers, _Numbers]:
    """Return (codes, keys, positions), all (C,): the ``codes`` sorted by their keys in ``block``, then by position.

    A code's key consists of its bits in ``block``. ``positions`` are the indices of the codes before they were sorted.
    There may be at most 2**32 codes.
    """
    # Numbers that hold key and position are sorted ten times as fast as keys by argsort.
    order = (block.keys(codes) << np.uint64(32)) | np.arange(len(codes), dtype=np.uint64)
    order.sort()
    position = order.astype(np.uint32)  # the lower 32 bits
    return codes[position], (order >> np.uint64(32)).astype(np.uint32), position


class BlockSearch:
    """A search among codes (entries) for the codes that are near to other codes (queries), by the bits of one block.

    Two codes are near if they differ in at most ``max_bits`` bits. Pairs that an earlier block finds are left out, so
    all blocks together find each pair once. There may be at most 2**31 entries.

    Args:
        entries: codes to search, uint64 (C,).
        blocks: all blocks of the search (``blocks_for``).
        number: index of the block to search by.
        max_bits: largest difference of a pair, in bits.
    """

    def __init__(self, entries: Codes, blocks: Sequence[Block], number: int, max_bits: int) -> None:
        self._block, self._earlier = blocks[number], blocks[:number]
        self._max_bits = max_bits
        self._codes, keys, self._position = _sorted_by(self._block, entries)
        # The position of the first entry of each key; the last value is the number of entries.
        all_keys = np.arange((1 << self._block.size) + 1, dtype=np.uint32)
        self._starts = np.searchsorted(keys, all_keys).astype(np.int32)

    def pairs(self, queries: Codes, choose: Choose) -> Iterator[tuple[Places, Places]]:
        """Yield the pairs of near codes in arrays (queries, entries), both int64 (K,).

        The arrays hold indices into ``queries`` and into the entries. A key is a value of the block's bits. For most
        keys, all near pairs are yielded. If very many queries and entries share a key, the function ``choose`` selects
        the pairs to yield (see ``Choose``).
        """
        codes, own_keys, position = _sorted_by(self._block, queries)
        _, start_of, times = np.unique(own_keys, return_index=True, return_counts=True)
        most_of_a_key = int(np.diff(self._starts).max())
        has_large = most_of_a_key * int(times.max(initial=0)) >= _LARGE_PAIRS
        for mask in self._block.masks():
            keys = own_keys ^ mask
            first = self._starts.take(keys)
            counts = self._starts.take(keys + np.uint32(1)) - first
            if has_large:
                num_pairs = counts[start_of] * times
                for kind in np.flatnonzero(num_pairs >= _LARGE_PAIRS):
                    start = start_of[kind]
                    some = slice(start, start + times[kind])
                    entries = slice(first[start], first[start] + counts[start])
                    yield from self._in_matrix(codes[some], position[some].astype(np.int64), entries, choose)
                    counts[some] = 0
            for query, entry in self._one_by_one(codes, first, counts):
                yield position[query].astype(np.int64), self._position[entry].astype(np.int64)

    def _one_by_one(self, queries: Codes, first: _Numbers, counts: _Numbers) -> Iterator[tuple[Places, Places]]:
        """Yield near pairs in arrays (queries, entries), both (K,): indices into the sorted queries and entries.

        The candidates of query i are ``counts[i]`` sorted entries from index ``first[i]`` on. About ``_CANDIDATES`` of
        them are compared at a time.
        """
        active = np.flatnonzero(counts)
        round_of = np.cumsum(counts[active], dtype=np.int64) // _CANDIDATES
        for some in np.split(active, np.flatnonzero(np.diff(round_of)) + 1):
            query = np.repeat(some, counts[some])
            begin = np.cumsum(counts[some]) - counts[some]
            shift = np.repeat(first[some] - begin, counts[some])
            entry = np.arange(len(query)) + shift
            difference = queries[query] ^ self._codes[entry]
            near = np.flatnonzero(np.bitwise_count(difference) <= self._max_bits)
            near = near[self._is_new(difference[near])]
            yield query[near], entry[near]

    def _is_new(self, difference: Codes) -> Flags:
        is_new = np.ones(difference.shape, np.bool_)
        for block in self._earlier:
            is_new &= np.bitwise_count(block.keys(difference)) > block.radius
        return is_new

    def _in_matrix(
        self, queries: Codes, query: Places, entries: slice, choose: Choose
    ) -> Iterator[tuple[Places, Places]]:
        """Compare all queries and entries of one key (the bits of the block); yield the near pairs that are chosen.

        Pairs are yielded as (queries, entries), both (K,): indices before sorting. They are computed in matrices of
        queries by entries. The first matrices have few rows. Their pairs connect many videos, and ``choose`` can then
        skip pairs of connected videos in the later, larger matrices.

        Args:
            queries: codes of the queries with this key, (R,).
            query: indices of these queries before sorting, (R,).
            entries: slice of the sorted entries with this key.
            choose: see ``Choose``.
        """
        codes = self._codes[entries]
        entry = self._position[entries].astype(np.int64)
        start, num_rows = 0, 1
        while start < len(query):
            rows = slice(start, start + num_rows)
            width = _TILE_PAIRS // num_rows
            for column in range(0, len(entry), width):
                tile = codes[column : column + width]
                of_tile = entry[column : column + width]

                def near(columns: Places, rows: slice = rows, tile: Codes = tile) -> Flags:
                    difference = queries[rows, None] ^ tile[columns]
                    is_near: Flags = np.bitwise_count(difference) <= self._max_bits
                    return is_near & self._is_new(difference) if is_near.any() else is_near

                row, chosen = choose(query[rows], of_tile, near)
                yield query[rows][row], of_tile[chosen]
            start += num_rows
            num_rows = min(2 * num_rows, _TILE_ROWS)
