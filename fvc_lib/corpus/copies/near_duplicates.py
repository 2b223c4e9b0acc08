"""Find pairs of videos that show the same footage, by their perceptual hashes.

Two videos show the same footage if one looks like a window (the whole picture or a part) of the other in more than half
of its frames. It may be mirrored. Frames at the same relative times are compared. Because a fifth may have been cut off
the start, the end or both ends of one video, the frames that are then nearest in time are compared as well.

Candidates are pairs of videos that agree closely in a middle frame at the same relative time. First and last frames are
not used for this: else thousands of videos with the same title card would all be candidates. If the hashes have looks
(tiny pictures, ``likeness``), these can reject a pair, but never add one.

Measured with 10 bits on 40 sample events and 41 real clips with 46 edited copies of each (encoders at low rates, other
sizes, crops of 5 to 15%, mirrors, text, logos, borders, brightness, frame rates, up to a quarter cut from either end):
99.7% and 94.9% of the copies are found and nothing else; without the views of cuts in time, 98.8% and 92.7%. Looks lose
two of 1,269 and five of 828 of such pairs (32 edits, 40 events and 28 clips).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.hamming_search import BlockSearch, Flags, Places, Sorted, blocks_for, sorted_by
from fvc_lib.corpus.copies.likeness import SameFootage, SamePictures, TimeView
from fvc_lib.corpus.copies.perceptual_hash import MIRROR_BITS, WINDOWS, Codes, Hashes, parse_hashes
from fvc_lib.services.isolated_workers import available_cores

_CLOSER_BITS = 3  # a middle frame may differ in this many bits less than the others
_CUT_FIFTHS = ((1, 0), (0, 1), (1, 1))  # fifths that may have been cut from the start and from the end
_PAIRS_AT_ONCE = 1 << 16
_QUERIES_AT_ONCE = 1 << 17
_ENTRIES_AT_ONCE = 1 << 25  # codes searched at a time; the search takes some 48 bytes for each

# (4, K): numbers of one and other video, of a window of the other, and whether the one is mirrored. A middle frame of
# the whole one looks like that window.
Candidates = npt.NDArray[np.int64]


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
