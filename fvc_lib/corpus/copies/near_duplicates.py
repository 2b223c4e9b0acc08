"""Pairs of videos that show the same footage, by their perceptual hashes.

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

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.hamming_search import BlockSearch, Flags, Near, Places, Sorted, blocks_for, tiles
from fvc_lib.corpus.copies.likeness import SameFootage, SamePictures, TimeView
from fvc_lib.corpus.copies.perceptual_hash import MIRROR_BITS, WINDOWS, Codes, Hashes, parse_hashes
from fvc_lib.services.isolated_workers import available_cores

_CLOSER_BITS = 3  # a middle frame may differ in this many bits less than the others
_CUT_FIFTHS = ((1, 0), (0, 1), (1, 1))  # what may have been cut from the start and from the end
_PAIRS_AT_ONCE = 1 << 16
# Fixed, whatever the number of threads, because they decide which of several possible links are chosen.
_QUERIES_AT_ONCE = 1 << 17
_ENTRIES_AT_ONCE = 1 << 25  # codes searched at a time; the search takes some 48 bytes for each
_MOST_ROWS = 64


@dataclass(frozen=True)
class _Candidates:
    """(K,) each: the whole of ``one``, turned by ``mirror``, has a middle frame like that ``window`` of ``other``."""

    one: Places
    other: Places
    window: Places
    mirror: Codes

    def __len__(self) -> int:
        return len(self.one)

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> Self:
        """Return some of them."""
        return type(self)(self.one[chosen], self.other[chosen], self.window[chosen], self.mirror[chosen])


def near_duplicate_links(
    hashes: Sequence[str | None], max_bits: int, confirm: SamePictures | None = None, threads: int = 0
) -> list[tuple[int, int]]:
    """Return the fewest index pairs (i < j), ascending, that connect all videos of the same footage.

    Frames agree when they differ in at most ``max_bits`` of 64 bits, closely when in at most ``max_bits - 3``. Beside
    the hashes memory is bounded, but for some 24 bytes a video and thread. Time grows with the number of videos to the
    power of about 1.4 (``docs/measurements.md``); many copies of one video cost in proportion to their number, many
    videos that share a frame and nothing else to its square, some 30 nanoseconds a pair.

    Args:
        hashes: what ``perceptual_hash`` gave; ``None`` (no hash) matches nothing. Their order decides which pairs are
            chosen.
        max_bits: 0 to 64.
        confirm: is given pairs whose hashes agree and has the last word; none: hashes decide.
        threads: how many search at once; 0: one per available core. The links do not depend on it.

    Raises:
        ValueError: ``max_bits`` out of range, or a text that is no perceptual hash.
    """
    known, table, looks = _known_hashes(hashes, max_bits)
    judge = _Judge(known, table, looks, max_bits, confirm)
    clusters = Components(len(known))
    links: list[tuple[int, int]] = []
    pictures = None if confirm is None else [confirm.looks[place] for place in known]
    first = _first_of_kind([hashes[place] or "" for place in known], pictures)
    copies = np.flatnonzero(first != np.arange(len(first)))
    links.extend(_link(clusters, replace(judge, looks=None), _as_they_are(first[copies], copies)))  # looks are the same
    distinct = np.flatnonzero(first == np.arange(len(first)))
    at_once = _ENTRIES_AT_ONCE // len(WINDOWS)
    with ThreadPoolExecutor(threads or available_cores()) as pool:
        for frame in _middle_frames(table.shape[1]):
            for start in range(0, len(distinct), at_once):
                some = distinct[start : start + at_once]
                links.extend(_links_of_a_frame(judge, frame, distinct, some, clusters, pool))
    return sorted((int(known[min(pair)]), int(known[max(pair)])) for pair in links)


def near_copies(contents: Sequence[str], hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """Return ``near_duplicate_links`` of the first file of each content; none for 0 bits."""
    first: dict[str, int] = {}
    for place, content in enumerate(contents if max_bits else ()):
        first.setdefault(content, place)
    places = list(first.values())
    return [(places[one], places[other]) for one, other in near_duplicate_links([hashes[i] for i in places], max_bits)]


def nearly_alike(table: Hashes, one: Hashes, max_bits: int) -> Places:
    """Return the rows of ``table``, (N, T, 30), that may show the footage of ``one``, (T, 30).

    They include all that ``near_duplicate_links`` links with it directly.
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
        """Return (K,): whether looks agree, of candidates whose hashes do; expensive."""
        same = np.ones(len(near), np.bool_)
        if self.looks is not None:
            same = _show_the_same(self.table, self.looks, near, self.max_bits)
        if self.confirm is not None and same.any():
            asked = near.where(same)
            same[same] = self.confirm(self.known[asked.one], self.known[asked.other], asked.window, asked.mirror)
        return same


def _known_hashes(hashes: Sequence[str | None], max_bits: int) -> tuple[Places, Hashes, SameFootage | None]:
    """Return positions (N,) of the videos with a hash, the hashes (N, T, 30), and the judge of their looks, if any."""
    if not 0 <= max_bits <= 64:
        raise ValueError(f"max_bits: got {max_bits}, wanted 0 to 64")
    known = np.array([i for i, text in enumerate(hashes) if text is not None], np.int64)
    table, looks = parse_hashes([text for text in hashes if text is not None])
    return known, table, SameFootage(looks) if looks.size else None


def _first_of_kind(texts: Sequence[str], looks: Sequence[str] | None) -> Places:
    """Return (N,): the first of the videos that are equal to the bit."""
    digests = np.empty((len(texts), 2), np.uint64)
    for place, text in enumerate(texts):
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        if looks is not None:
            digest.update(b" " + looks[place].encode())
        digests[place] = np.frombuffer(digest.digest(), np.uint64)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first of each kind comes first
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(digests[order], axis=0) != 0).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[is_first][np.cumsum(is_first) - 1]
    return first


def _as_they_are(one: Places, other: Places) -> _Candidates:
    return _Candidates(one, other, np.zeros_like(one), np.zeros(len(one), np.uint64))


def _gathered(candidates: Iterator[_Candidates], clusters: Components) -> Iterator[_Candidates]:
    """Yield unconnected candidates, in portions worth the effort."""
    waiting: list[_Candidates] = []
    num_waiting = 0
    for found in candidates:
        waiting.append(found.where(clusters.label[found.one] != clusters.label[found.other]))
        num_waiting += len(waiting[-1])
        if num_waiting > _PAIRS_AT_ONCE:
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
    """Connect the candidates that show the same footage; yield each pair that connects anything."""
    for some in _apart(clusters, candidates, _PAIRS_AT_ONCE):
        near = some.where(judge.hashes_agree(some))
        while len(near):
            is_asked = _would_connect(clusters, near)
            asked = near.where(is_asked)
            same = asked.where(judge.looks_agree(asked))
            yield from (
                pair for pair in zip(same.one.tolist(), same.other.tolist(), strict=True) if clusters.join(*pair)
            )
            near = near.where(~is_asked)
            near = near.where(clusters.label[near.one] != clusters.label[near.other])


def _would_connect(clusters: Components, near: _Candidates) -> Flags:
    """Return (K,): the fewest pairs that connect as much as all of them, because looks are expensive."""
    labels, ends = np.unique(np.stack([clusters.label[near.one], clusters.label[near.other]]), return_inverse=True)
    parts = Components(len(labels))
    return np.array([parts.join(*pair) for pair in ends.reshape(2, -1).T.tolist()])


def _apart(clusters: Components, candidates: _Candidates, num_at_once: int) -> Iterator[_Candidates]:
    """Yield portions of the candidates without pairs that are connected by then."""
    for start in range(0, len(candidates), num_at_once):
        some = candidates.where(slice(start, start + num_at_once))
        yield some.where(clusters.label[some.one] != clusters.label[some.other])


def _links_of_a_frame(
    judge: _Judge, frame: int, distinct: Places, some: Places, clusters: Components, pool: Executor
) -> Iterator[tuple[int, int]]:
    """Connect videos in which this middle frame agrees closely, as a whole of ``distinct``, in a window of ``some``.

    Each task begins with what those before its round connected, and what they find is joined in their order: so the
    links do not depend on how many work at once.
    """
    codes, wholes = judge.table[some, frame].reshape(-1), judge.table[distinct, frame, 0]
    query_of, entry_of = np.flatnonzero(wholes), np.flatnonzero(codes).astype(np.uint32)  # zeros match nothing
    codes, wholes = codes[entry_of], wholes[query_of]
    queries = np.concatenate([wholes, wholes ^ MIRROR_BITS])
    closely = max(0, judge.max_bits - _CLOSER_BITS)
    blocks = blocks_for(closely, len(queries), len(codes))
    for number, block in enumerate(blocks):
        in_block, by_key = BlockSearch.of(codes, blocks, number, closely), Sorted.by(block, queries)

        def linked(start: int, in_block: BlockSearch = in_block, by_key: Sorted = by_key) -> list[tuple[int, int]]:
            search = _Search(judge, clusters.copy(), frame, distinct[query_of], some, entry_of)
            near = in_block.pairs(by_key.part(slice(start, start + _QUERIES_AT_ONCE)), search.in_matrix)
            found = _gathered((search.candidates(*pairs) for pairs in near), search.clusters)
            return [pair for each in found for pair in _link(search.clusters, judge, each)]

        starts, num_tasks = range(0, len(by_key), _QUERIES_AT_ONCE), 1
        while starts:
            for pairs in list(pool.map(linked, starts[:num_tasks])):
                yield from (pair for pair in pairs if clusters.join(*pair))
            # Few at first: what they connect is not asked about again by all others.
            starts, num_tasks = starts[num_tasks:], 2 * num_tasks


@dataclass(frozen=True)
class _Search:
    """Queries and entries of one frame: the wholes, plain and mirrored, and the windows of some videos."""

    judge: _Judge
    clusters: Components
    frame: int
    wholes: Places  # the video of each plain query; as many mirrored ones follow
    videos: Places
    entry_of: npt.NDArray[np.uint32]  # place of each entry in the flat table (videos, 30)

    def candidates(self, query: Places, entry: Places) -> _Candidates:
        """Return (K,) pairs without those of a video with itself; two wholes are paired once."""
        found = self._pairs(query, entry)
        return found.where(np.where(found.window == 0, found.one < found.other, found.one != found.other))

    def _pairs(self, query: Places, entry: Places) -> _Candidates:
        is_mirrored = query >= len(self.wholes)
        other, window = np.divmod(self.entry_of[entry].astype(np.int64), len(WINDOWS))
        mirror = np.where(is_mirrored, MIRROR_BITS, np.uint64(0))
        return _Candidates(self.wholes[query - len(self.wholes) * is_mirrored], self.videos[other], window, mirror)

    def in_matrix(self, query: Places, entry: Places, near: Near) -> Iterator[tuple[Places, Places]]:
        """Yield unconnected pairs of queries and entries, as rows and columns, that may show the same.

        Of videos that are connected one is compared with all, and by then mostly no others are left for the rest.
        """
        label = self.clusters.label
        one, other = self._pairs(query, entry[:1]), self._pairs(query[:1], entry)
        rows, columns, at_once = np.arange(len(query)), np.arange(len(entry)), 1
        while len(rows):
            label_of = label[one.one[rows]]
            of_first = np.flatnonzero(label_of == label_of[0])
            apart = columns[label[other.other] != label_of[0]]
            if not len(apart):
                rows = np.delete(rows, of_first)
                continue
            has_many = len(of_first) >= at_once
            taken = of_first[:at_once] if has_many else np.arange(min(at_once, len(rows)))
            for some, others in tiles(rows[taken], apart if has_many else columns):
                is_near = near(some, others)
                if is_near.any():
                    is_near &= self._may_be_the_same(one, some, other, others)
                row, column = np.nonzero(is_near)
                if len(row):
                    yield some[row], others[column]
            rows, at_once = np.delete(rows, taken), min(2 * at_once, _MOST_ROWS)

    def _may_be_the_same(self, one: _Candidates, rows: Places, other: _Candidates, columns: Places) -> Flags:
        """Return (R, C): whether more than half of the frames may agree in some view."""
        table, telling = self.judge.table, _telling_frames(self.judge.table.shape[1], self.frame)
        may_be = np.full((len(rows), len(columns)), not telling)
        for first, second in telling:
            whole = table[one.one[rows], first, 0]
            part = table[other.other[columns], second, other.window[columns]]
            agrees = np.bitwise_count((whole ^ one.mirror[rows])[:, None] ^ part) <= self.judge.max_bits
            may_be |= agrees & (whole != 0)[:, None] & (part != 0)
        return may_be


@cache
def _telling_frames(num_frames: int, frame: int) -> TimeView:
    """Return pairs of frames of which at least one agrees whenever more than half of a view's do.

    That of ``frame`` itself is not among them; none of a single frame.
    """
    views = _time_views(num_frames)
    uses = Counter(pair for view in views for pair in view)
    telling: dict[tuple[int, int], None] = {}
    for view in views:
        others = sorted((pair for pair in view if pair != (frame, frame)), key=lambda pair: -uses[pair])
        telling |= dict.fromkeys(others[: num_frames - num_frames // 2])
    return tuple(telling)


def _show_the_same(
    table: Hashes, looks: SameFootage | None, candidates: _Candidates, max_bits: int
) -> npt.NDArray[np.bool_]:
    """Return (K,): whether over half of the frames agree in some view of time, and a middle one closely."""
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
    """Return pairs of frames at equal relative times, and the nearest ones if either video was cut."""
    last = num_frames - 1
    views = [tuple((frame, frame) for frame in range(num_frames))]
    for start, end in _CUT_FIFTHS:
        # Where the copy's frames lay in the whole, rounded to the nearest that was sampled; in integers, so exact.
        nearest = [(2 * (start * last + (5 - start - end) * frame) + 5) // 10 for frame in range(num_frames)]
        views.append(tuple(enumerate(nearest)))
        views.append(tuple((whole, copy) for copy, whole in enumerate(nearest)))
    return tuple(dict.fromkeys(views))
