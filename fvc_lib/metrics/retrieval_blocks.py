"""In what blocks the similarities of all videos and texts are streamed through a given amount of memory."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.classification import FloatArray, IntArray

_MOST_VIDEOS, _MOST_TEXTS = 1024, 1024  # of a block: its scores, 4 MB, stay in the cache and calls cost little
MOST_TEXTS = 8 * 255  # a row's answers are summed up in bytes, eight at a time
_LEAST = 16
_SHARE_PLANNED = 0.8  # of what is free beside what is kept: allocators leave holes
ROWS_AT_ONCE = 128  # that are converted into another format, and stay in the cache
VIDEOS_AT_ONCE = 256  # that are multiplied limb by limb
_FIXED_BYTES = 10_000_000  # what settling single pairs takes, and small arrays
_BYTES_PER_ROW = 160  # positives, norms and counts of both directions, with one pair per video
_BYTES_PER_MORE_PAIR = 165


@dataclass(frozen=True)
class RetrievalPlan:
    """How a retrieval is streamed; the result does not depend on it.

    Attributes:
        num_videos: rows of the dense matrix.
        num_texts: its columns.
        dimensions: numbers per embedding.
        video_block: videos per block.
        text_block: texts per block.
        text_panel: texts that are converted once for all videos, a whole number of blocks.
        more_pairs: pairs that belong together beyond one per video.
    """

    num_videos: int
    num_texts: int
    dimensions: int
    video_block: int
    text_block: int
    text_panel: int
    more_pairs: int = 0

    def __post_init__(self) -> None:
        if min(self.video_block, self.text_block, self.text_panel) < 1 or self.text_block > MOST_TEXTS:
            raise ValueError(
                f"blocks of {self.video_block} x {self.text_block} in panels of {self.text_panel} texts; "
                f"give sizes from 1 on, and blocks of {MOST_TEXTS} texts at most"
            )

    @property
    def streamed_bytes(self) -> int:
        """About what is taken at most: a block, its operands, the panel's limbs, and some numbers per row."""
        block = _block_bytes(self.video_block, self.text_block, self.text_panel, self.dimensions)
        return block + _kept_bytes(self.num_videos + self.num_texts, self.more_pairs)

    @property
    def dense_bytes(self) -> int:
        """What all similarities would take at once, as float32."""
        return 4 * self.num_videos * self.num_texts

    def describe(self) -> str:
        """Lines for the log: what was gathered, what the dense matrix would have taken, how it is streamed."""
        blocks = _parts(self.num_videos, self.video_block) * _parts(self.num_texts, self.text_block)
        size = _size(self.streamed_bytes)
        lines = (
            f"samples accumulated: {self.num_videos:,} of {self.dimensions:,} numbers",
            f"unique texts: {self.num_texts:,}",
            f"dense similarities would take: {_size(self.dense_bytes)} as float32",
            f"streamed: {blocks:,} block{'s' * (blocks > 1)} of {self.video_block:,} x {self.text_block:,} in {size}",
        )
        return "\n".join(lines)


def plan_retrieval(
    num_videos: int, num_texts: int, dimensions: int, memory_bytes: int, more_pairs: int = 0
) -> RetrievalPlan:
    """The largest blocks that fit into ``memory_bytes`` and the cache.

    Raises:
        ValueError: not even blocks of 16 x 16 fit.
    """
    needed = least_memory_bytes(num_videos, num_texts, dimensions, more_pairs)
    if memory_bytes < needed:
        raise ValueError(
            f"memory_bytes={memory_bytes:,} is too little for {num_videos:,} videos and {num_texts:,} texts of "
            f"{dimensions:,} numbers, {num_videos + more_pairs:,} pairs of which belong together; give at least "
            f"{needed:,} (of a run: retrieval_memory_mb {math.ceil(needed / 1e6)})"
        )
    free = memory_bytes - _kept_bytes(num_videos + num_texts, more_pairs)
    videos, texts = min(_MOST_VIDEOS, num_videos), min(_MOST_TEXTS, num_texts)
    while _block_bytes(videos, texts, texts, dimensions) > free:
        if videos >= texts:
            videos = math.ceil(videos / 2)
        else:
            texts = math.ceil(texts / 2)
    blocks = _parts(num_texts, texts)
    while blocks > 1 and _block_bytes(videos, texts, texts * blocks, dimensions) > _SHARE_PLANNED * free:
        blocks -= 1
    return RetrievalPlan(num_videos, num_texts, dimensions, videos, texts, texts * blocks, more_pairs)


def least_memory_bytes(num_videos: int, num_texts: int, dimensions: int, more_pairs: int = 0) -> int:
    """The least that ``plan_retrieval`` accepts for such sizes, so that who will measure later may ask before."""
    videos, texts = min(_LEAST, num_videos), min(_LEAST, num_texts)
    return _kept_bytes(num_videos + num_texts, more_pairs) + _block_bytes(videos, texts, texts, dimensions)


def _kept_bytes(num_rows: int, more_pairs: int) -> int:
    return _FIXED_BYTES + _BYTES_PER_ROW * num_rows + _BYTES_PER_MORE_PAIR * more_pairs


def _parts(whole: int, part: int) -> int:
    return math.ceil(whole / part)


def _block_bytes(videos: int, texts: int, panel: int, dimensions: int) -> int:
    """What the blocks of one panel take at most.

    Scores as float64, masks of whole blocks and of parts, and sums of limbs. Then either both operands as float32 and
    once more as float64, or the videos' and the panel's limbs and what is being converted.
    """
    in_doubles = (videos + texts) * dimensions * 12
    in_limbs = (videos + panel) * dimensions * 3 + (max(videos, texts) + 2 * ROWS_AT_ONCE) * dimensions * 4
    return videos * texts * (8 + 3) + VIDEOS_AT_ONCE * texts * 4 + max(in_doubles, in_limbs)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


# ----------------------------------------------------------------------------------------------------
# Similarities without rounding: which of two dot products is the larger, and whether they are equal.
#
# A matrix product rounds differently with every block shape, so ranks taken from it would depend on how it was cut.
# Here
# a similarity is the real dot product of two rows of float32 numbers. Doubles settle nearly every comparison of
# two; the
# rest, among them all ties, is summed without error.
#


BoolArray = npt.NDArray[np.bool_]
SingleArray = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 1 << 17  # of one operand: 1 MB as doubles, which stays in the cache


def rows_at_once(dimensions: int) -> int:
    """Pairs of rows that are multiplied together at once."""
    return max(16, _NUMBERS_AT_ONCE // dimensions)


def double_rounding(dimensions: int) -> float:
    """Most that a dot product in doubles is off, per product of the rows' norms, in whatever order it is summed.

    Products of float32 numbers are exact as doubles, so only the sum rounds. Source: N. J. Higham, "Accuracy and
    Stability of Numerical Algorithms" (2002), section 3.1.
    """
    return 1.01 * (dimensions + 2) * 2.0**-53


def single_rounding(dimensions: int) -> float:
    """The same of a dot product in float32, whose products round too."""
    return 1.01 * (dimensions + 2) * 2.0**-24


def flushed(dimensions: int, norms: FloatArray | float, other_norms: FloatArray | float) -> FloatArray | float:
    """Most that it is off besides, where tiny numbers are flushed to zero."""
    return dimensions * 2.0**-125 * (1 + norms + other_norms)


def double_products(left: SingleArray, right: SingleArray) -> FloatArray:
    """float64 (K,): dot products of the rows of two float32 (K, D)."""
    return np.asarray(np.vecdot(left.astype(np.float64), right.astype(np.float64)))


def at_least(query: SingleArray, candidate: SingleArray, positive: SingleArray) -> BoolArray:
    """Whether ``query . candidate >= query . positive`` in real numbers: bool (K,).

    Args:
        query: float32 (K, D).
        candidate: likewise.
        positive: likewise.
    """
    same = (candidate == positive).all(axis=1)
    if same.all():
        return np.asarray(same)
    query, candidate, positive = (rows[~same].astype(np.float64) for rows in (query, candidate, positive))
    parts = _exact_parts(np.concatenate([query * candidate, -query * positive], axis=1))
    same[~same] = [math.fsum(row) >= 0 for row in parts]
    return np.asarray(same)


def exact_values(left: SingleArray, right: SingleArray) -> FloatArray:
    """float64 (K, R): dot products of rows without rounding, which lexicographic order orders as numbers.

    The first column is the product rounded to the nearest double, the next what is left rounded likewise, and so on
    until nothing is left. Equal products have equal rows.
    """
    terms = [list(row) for row in _exact_parts(left.astype(np.float64) * right.astype(np.float64))]
    columns: list[list[float]] = []
    while not columns or any(columns[-1]):
        columns.append([math.fsum(row) for row in terms])
        for row, value in zip(terms, columns[-1], strict=True):
            row.append(-value)
    return np.array(columns).T


def _exact_parts(terms: FloatArray) -> FloatArray:
    """float64 (K, R) with the same sums as the rows of ``terms`` (K, T), without rounding; overwrites ``terms``.

    The leading bits of all terms of a row are cut off at one place, so that their sum is exact, until nothing is left.
    Source: S. M. Rump, T. Ogita and S. Oishi, "Accurate floating-point summation part I", SIAM J. Sci. Comput. 31
    (2008), algorithm 3.2.
    """
    headroom = math.ceil(math.log2(terms.shape[1] + 2))
    sums = [np.zeros(len(terms))]
    while (largest := np.abs(terms).max(axis=1, initial=0)).any():
        _, exponent = np.frexp(largest)
        cut = np.where(largest > 0, np.ldexp(1.0, exponent + headroom), 0)[:, None]
        leading = (cut + terms) - cut
        terms -= leading
        sums.append(leading.sum(axis=1))
    return np.stack(sums, axis=1)


# ----------------------------------------------------------------------------------------------------
# The embeddings of one side of a retrieval: as float32 numbers, in the order in which they are streamed.


_LARGEST_WHOLE = 2.0**22  # whole numbers up to this are float32 numbers, and so are halves of them
_UNITS = 2.0**-100, 2.0**100  # whose reciprocals are float32 numbers too
_LARGEST_PRODUCT = 2.0**53  # and sums up to this are doubles


@dataclass(frozen=True)
class Rows:
    """Rows of embeddings at their places in the stream.

    Attributes:
        embeddings: (R, D), wherever they are and of any real type.
        norms: float64 (R,), by place, not less than the true ones.
        order: int64 (R,), which row stands at each place; none: each stands at its own.
        unit: what the numbers are divided by, without rounding; similarities are in products of both sides' units.
        largest: magnitude after that, where all are whole numbers so small that products of both sides' rows are exact
            as doubles; none where they are not.
    """

    embeddings: torch.Tensor
    norms: FloatArray
    order: IntArray | None = None
    unit: float = 1.0
    largest: float | None = None

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dimensions(self) -> int:
        """Numbers per row."""
        return self.embeddings.shape[1]

    def between(self, start: int, stop: int) -> torch.Tensor:
        """float32 (stop - start, D): the rows of places ``[start, stop)``; a view where nothing has to be changed."""
        if self.order is None:
            return self._as_single(self.embeddings[start:stop])
        return self._as_single(self._taken(self.order[start:stop]))

    def at(self, places: IntArray) -> SingleArray:
        """float32 (K, D): the rows of ``places`` (K,)."""
        return self._as_single(self._taken(places if self.order is None else self.order[places])).cpu().numpy()

    def _taken(self, rows: IntArray) -> torch.Tensor:
        return self.embeddings.index_select(0, torch.from_numpy(rows).to(self.embeddings.device))

    def _as_single(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(torch.float32)
        return rows if self.unit == 1.0 else (rows / self.unit).round_()  # devices may multiply by 1 / unit


def in_whole_numbers(videos: Rows, texts: Rows) -> tuple[Rows, Rows]:
    """Both in units of which all their numbers are small multiples, so that no product is rounded; else as they are.

    Embeddings of a few values (bits, signs, counts) have ties everywhere, which doubles would otherwise leave to
    comparisons one by one.
    """
    of_videos = _unit_and_largest(videos)
    of_texts = _unit_and_largest(texts) if of_videos is not None else None
    if of_videos is None or of_texts is None or of_videos[1] * of_texts[1] * videos.dimensions > _LARGEST_PRODUCT:
        return videos, texts
    return _in_units(videos, *of_videos), _in_units(texts, *of_texts)


def _in_units(rows: Rows, unit: float, largest: float) -> Rows:
    return replace(rows, norms=rows.norms / unit, unit=unit, largest=largest)


def _unit_and_largest(rows: Rows) -> tuple[float, float] | None:
    """A unit of which all numbers are multiples by at most 2^22, and the largest multiple; mostly one look tells."""
    found = _in_units_of_the_least(rows) or _in_powers_of_two(rows)
    return found if found is not None and _UNITS[0] <= found[0] <= _UNITS[1] else None


def _in_units_of_the_least(rows: Rows) -> tuple[float, float] | None:
    unit, largest = 0.0, 0.0
    for numbers in _magnitudes(rows):
        if unit == 0 and numbers.any():
            unit = float(numbers[numbers > 0].min())
        multiples = np.rint(numbers / unit) if unit else numbers
        largest = max(largest, float(multiples.max()))
        if largest > _LARGEST_WHOLE or (multiples * unit != numbers).any():
            return None
    return unit or 1.0, largest


def _in_powers_of_two(rows: Rows) -> tuple[float, float] | None:
    grain, largest = np.inf, 0.0
    for numbers in _magnitudes(rows):
        mantissa, exponent = np.frexp(numbers[numbers > 0])
        bits = np.ldexp(mantissa, 24).astype(np.int64)
        grain = min(grain, float(np.ldexp((bits & -bits).astype(np.float64), exponent - 24).min(initial=np.inf)))
        largest = max(largest, float(numbers.max()))
        if largest > grain * _LARGEST_WHOLE:
            return None
    return (grain, largest / grain) if largest else (1.0, 0.0)


def _magnitudes(rows: Rows) -> Iterator[FloatArray]:
    step = rows_at_once(rows.dimensions)
    for start in range(0, len(rows), step):
        yield np.abs(rows.between(start, min(start + step, len(rows))).cpu().numpy().astype(np.float64))


# ----------------------------------------------------------------------------------------------------
# What belongs to each query of a direction of retrieval, ordered by similarity.


@dataclass(frozen=True)
class Positives:
    """The positives of all queries of one direction, in the order of the queries and of rising similarity.

    Attributes:
        queries: (Q, D), the embeddings that look for something, those with fewer positives first.
        candidates: (C, D), those that are looked through.
        starts: int64 (Q + 1,): the positives of query q are ``[starts[q], starts[q + 1])``; none: it asks nothing.
        query: int64 (P,), whose each positive is.
        candidate: int64 (P,), which candidate it is.
        similarity: float64 (P,), not falling within a query; off by at most ``margin`` of the query.
        margin: float64 (Q,).
        single_margin: float64 (Q,), how far off the difference of one in float32 and one with ``margin`` is at most.
        num_as_similar: int64 (P,), positives of the same query at least as similar as this one, itself among them.
    """

    queries: Rows
    candidates: Rows
    starts: IntArray
    query: IntArray
    candidate: IntArray
    similarity: FloatArray
    margin: FloatArray
    single_margin: FloatArray
    num_as_similar: IntArray

    @functools.cached_property
    def kinds(self) -> IntArray:
        """int64 (C,): candidates that agree in every number have the same; made when there is much to settle."""
        seen: dict[bytes, int] = {}
        found = np.empty(len(self.candidates), dtype=np.int64)
        step = rows_at_once(self.candidates.dimensions)
        for start in range(0, found.size, step):
            rows = self.candidates.at(np.arange(start, min(start + step, found.size))) + np.float32(0)  # no -0
            for place, row in enumerate(rows, start):
                found[place] = seen.setdefault(hashlib.blake2b(row, digest_size=16).digest(), place)
        return found

    @property
    def per_query(self) -> IntArray:
        """int64 (Q,)."""
        return np.diff(self.starts)

    def holds(self, query: IntArray, candidate: IntArray, positive: IntArray, *, in_single: bool) -> BoolArray:
        """Whether each ``candidate`` is at least as similar to its query as the ``positive``: bool (K,).

        Args:
            query: int64 (K,).
            candidate: int64 (K,).
            positive: int64 (K,), places in the arrays of positives.
            in_single: try float32 first, which settles most pairs that a coarser format left open.
        """
        found: BoolArray = candidate == self.candidate[positive]
        if "kinds" in vars(self):
            found |= self.kinds[candidate] == self.kinds[self.candidate[positive]]
        asked = np.flatnonzero(~found)
        step = rows_at_once(self.queries.dimensions)
        for start in range(0, asked.size, step):
            rows = asked[start : start + step]
            found[rows] = self._compare(query[rows], candidate[rows], positive[rows], in_single)
        return found

    def _compare(self, query: IntArray, candidate: IntArray, positive: IntArray, in_single: bool) -> BoolArray:
        left, right = self.queries.at(query), self.candidates.at(candidate)
        found, close = np.zeros(query.size, dtype=bool), np.arange(query.size)
        if in_single:
            difference = np.vecdot(left, right) - self.similarity[positive]
            found = difference > 0
            close = np.flatnonzero(np.abs(difference) <= self.single_margin[query])
        if close.size:
            difference = double_products(left[close], right[close]) - self.similarity[positive[close]]
            found[close] = difference >= 0
            unsure = np.abs(difference) <= 2 * self.margin[query[close]]
            close = close[unsure] if self.queries.largest is None else close[:0]
        if close.size:
            found[close] = at_least(left[close], right[close], self.candidates.at(self.candidate[positive[close]]))
        return found


def pair_similarities(videos: Rows, texts: Rows, video: IntArray, text: IntArray) -> FloatArray:
    """float64 (P,): dot products of rows ``video`` (P,) and ``text`` (P,), within ``double_rounding``."""
    found = np.empty(video.size)
    step = rows_at_once(videos.dimensions)
    for start in range(0, video.size, step):
        part = slice(start, start + step)
        found[part] = double_products(videos.at(video[part]), texts.at(text[part]))
    return found


def order_positives(
    queries: Rows, candidates: Rows, query: IntArray, candidate: IntArray, similarity: FloatArray
) -> Positives:
    """The positives of one direction from its pairs.

    Args:
        queries: (Q, D).
        candidates: (C, D).
        query: int64 (P,), no pair twice.
        candidate: int64 (P,).
        similarity: float64 (P,), from ``pair_similarities``.
    """
    margin, single = _margins(queries, candidates)
    order = np.lexsort((similarity, query))
    query, candidate, similarity = query[order], candidate[order], similarity[order]
    joined = (np.diff(query) == 0) & (np.diff(similarity) <= 2 * margin[query[1:]])
    equal = np.zeros(query.size, dtype=bool)  # to the one before
    if queries.largest is not None:
        equal[1:] = joined
    elif joined.any():  # neighbours that doubles cannot tell apart
        unsure = np.flatnonzero(np.append(joined, False) | np.append(False, joined))
        place = np.zeros_like(query)
        place[unsure] = _order_of_equals(queries, candidates, query[unsure], candidate[unsure])
        order = np.lexsort((place, np.cumsum(np.append(True, ~joined))))
        candidate, place = candidate[order], place[order]
        equal[1:] = joined & (np.diff(place) == 0)
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    first_equal = np.maximum.accumulate(np.where(equal, 0, np.arange(query.size)))
    as_similar = starts[query + 1] - first_equal
    return Positives(
        queries, candidates, starts, query, candidate, similarity, margin, margin + single, as_similar
    )  # fmt: skip


def _margins(queries: Rows, candidates: Rows) -> tuple[FloatArray, FloatArray]:
    """float64 (Q,) each: how far a similarity in doubles and one in float32 are from the truth at most."""
    dimensions, largest = queries.dimensions, candidates.norms.max()
    double = double_rounding(dimensions) * queries.norms * largest
    single = single_rounding(dimensions) * queries.norms * largest + flushed(dimensions, queries.norms, largest)
    return double * (queries.largest is None), np.asarray(single)  # of whole numbers, doubles are the truth


def _order_of_equals(queries: Rows, candidates: Rows, query: IntArray, candidate: IntArray) -> IntArray:
    """int64 (P,): places of the pairs by their similarity without rounding; equal ones have the same place."""
    step = rows_at_once(queries.dimensions)
    blocks = []
    for start in range(0, query.size, step):
        part = slice(start, start + step)
        blocks.append(exact_values(queries.at(query[part]), candidates.at(candidate[part])))
    width = max(block.shape[1] for block in blocks)
    values = np.concatenate([np.pad(block, ((0, 0), (0, width - block.shape[1]))) for block in blocks])
    order = np.lexsort(values.T[::-1])
    larger = (values[order][1:] != values[order][:-1]).any(axis=1)
    places = np.empty(query.size, dtype=np.int64)
    places[order] = np.concatenate([[0], np.cumsum(larger)])
    return places
