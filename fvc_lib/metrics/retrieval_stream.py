"""One pass over all similarities of videos and texts, in blocks, that counts exactly for both directions.

A similarity is the real dot product of two float32 rows. A block is multiplied in a format with a known largest error:
8-bit numbers where the processor has VNNI instructions, else float32; float64 where float32 leaves too much open.
Scores further from a positive's similarity than that error are counted at once; the others are compared in doubles, and
what doubles cannot tell apart is summed without rounding. So no count depends on format, blocks or processor.
"""

import functools
import hashlib
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.classification import FloatArray, IntArray

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]
SingleArray = npt.NDArray[np.float32]

_ALONE = threading.RLock()
_BLOCK = 1024  # rows of each side: the scores, 4 MB, stay in the cache and calls cost little
_LEAST_BLOCK = 16
_FIXED_BYTES = 10_000_000  # what comparing single pairs takes, and small arrays
_BYTES_PER_ROW = 160  # positives, norms and counts of both directions, with one pair per video
_BYTES_PER_MORE_PAIR = 165
_NUMBERS_AT_ONCE = 1 << 17  # converted or compared at once: 1 MB as doubles
_SCORES_AT_ONCE = 1 << 17  # searched for those between two thresholds
_MOST_LEVELS = 128  # positives of a query with which the scores of a block are compared one after the other
_SAMPLE = 64, 128  # videos and texts whose scores tell which format to take


@dataclass(frozen=True)
class RetrievalPlan:
    """How a retrieval is streamed; the result does not depend on it.

    ``num_videos`` and ``num_texts`` rows of ``dimensions`` numbers are compared in blocks of ``video_block`` x
    ``text_block``. The 8-bit numbers of ``kept_blocks`` blocks of texts are kept for all videos. ``more_pairs`` belong
    together beyond one per video.
    """

    num_videos: int
    num_texts: int
    dimensions: int
    video_block: int
    text_block: int
    kept_blocks: int = 0
    more_pairs: int = 0

    @property
    def streamed_bytes(self) -> int:
        """What is taken at most beyond the embeddings, estimated."""
        rows = _BYTES_PER_ROW * (self.num_videos + self.num_texts) + _BYTES_PER_MORE_PAIR * self.more_pairs
        scores = self.video_block * self.text_block * (8 + 3)  # as doubles, and three answers each
        operands = (self.video_block + self.text_block) * self.dimensions * (4 + 8)  # as float32 and as doubles
        return _FIXED_BYTES + rows + scores + operands + self.kept_blocks * self.text_block * self.dimensions

    def describe(self) -> list[str]:
        """Lines for the log: what was gathered, what the dense matrix would have taken, how it is streamed."""
        blocks = math.ceil(self.num_videos / self.video_block) * math.ceil(self.num_texts / self.text_block)
        shape, dense_bytes = f"{self.video_block:,} x {self.text_block:,}", 4 * self.num_videos * self.num_texts
        return [
            f"samples accumulated: {self.num_videos:,} of {self.dimensions:,} numbers",
            f"unique texts: {self.num_texts:,}",
            f"dense similarities would take: {dense_bytes / 1e6:,.1f} MB as float32",
            f"streamed: {blocks:,} block{'s' * (blocks > 1)} of {shape} in {self.streamed_bytes / 1e6:,.1f} MB",
        ]


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
    plan = functools.partial(RetrievalPlan, num_videos, num_texts, dimensions, more_pairs=more_pairs)
    videos, texts = min(_BLOCK, num_videos), min(_BLOCK, num_texts)
    while (found := plan(videos, texts)).streamed_bytes > memory_bytes:
        videos, texts = (math.ceil(videos / 2), texts) if videos >= texts else (videos, math.ceil(texts / 2))
    kept = (memory_bytes - found.streamed_bytes) // (texts * dimensions)
    return plan(videos, texts, min(kept, math.ceil(num_texts / texts)))


def least_memory_bytes(num_videos: int, num_texts: int, dimensions: int, more_pairs: int = 0) -> int:
    """The least that ``plan_retrieval`` accepts for such sizes, so that a run can check it before it trains."""
    videos, texts = (max(1, min(_LEAST_BLOCK, number)) for number in (num_videos, num_texts))
    return RetrievalPlan(num_videos, num_texts, dimensions, videos, texts, 0, more_pairs).streamed_bytes


class Rows:
    """The embeddings of one side, (R, D) of any real type on any device, taken as float32 rows."""

    def __init__(self, embeddings: torch.Tensor) -> None:
        self._embeddings = embeddings
        self.dimensions = embeddings.shape[1]
        self.at_once = max(16, _NUMBERS_AT_ONCE // self.dimensions)
        everywhere = np.arange(len(embeddings))
        squares = products(self, self, everywhere, everywhere)
        # float64 (R,), not less than the true ones; infinite or NaN where a number is.
        self.norms: FloatArray = np.sqrt(squares) * (1 + (self.dimensions + 2) * 2.0**-52)

    def __len__(self) -> int:
        return len(self._embeddings)

    def at(self, rows: IntArray) -> SingleArray:
        """float32 (K, D): the rows (K,)."""
        taken = self._embeddings.index_select(0, torch.from_numpy(rows).to(self._embeddings.device))
        return np.asarray(taken.to(torch.float32).cpu().numpy())

    @functools.cached_property
    def kinds(self) -> IntArray:
        """int64 (R,): equal for rows that agree in every number. Only rows of equal norms are looked at."""
        _, norm, number = np.unique(self.norms, return_inverse=True, return_counts=True)
        places = np.flatnonzero(number[norm] > 1)
        digests = np.empty(places.size, dtype="S16")
        for start in range(0, places.size, self.at_once):
            rows = self.at(places[start : start + self.at_once]) + np.float32(0)  # no -0
            digests[start : start + len(rows)] = [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
        kinds = np.arange(len(self))
        _, first, same = np.unique(digests, return_index=True, return_inverse=True)
        kinds[places] = places[first[same]]
        return kinds


def products(left: Rows, right: Rows, left_rows: IntArray, right_rows: IntArray) -> FloatArray:
    """float64 (K,): dot products in doubles of the rows (K,) of both sides."""
    found = [np.empty(0)]
    for rows, others in zip(_parts(left_rows, left.at_once), _parts(right_rows, left.at_once), strict=True):
        found.append(np.vecdot(left.at(rows).astype(np.float64), right.at(others).astype(np.float64)))
    return np.concatenate(found)


def is_at_least(query: SingleArray, candidate: SingleArray, positive: SingleArray) -> BoolArray:
    """Whether ``query . candidate >= query . positive`` in real numbers, of float32 rows (K, D): bool (K,)."""
    query = query.astype(np.float64)  # products of float32 numbers are exact as doubles
    terms = np.concatenate([query * candidate, -query * positive], axis=1)
    return np.array([math.fsum(row) >= 0 for row in terms.tolist()], dtype=bool)


def exact_product(left: SingleArray, right: SingleArray) -> tuple[float, ...]:
    """The dot product of two rows without rounding: doubles, each what those before leave, up to 0; ordered like it."""
    terms = (left.astype(np.float64) * right).tolist()
    found: list[float] = []
    while not found or found[-1]:
        found.append(math.fsum(terms))
        terms.append(-found[-1])
    return tuple(found)


@dataclass(frozen=True)
class Operand:
    """One side of a product: ``scale * values`` is within ``errors`` (R,) of rows with ``norms`` (R,), by the norm."""

    values: Array
    norms: FloatArray
    errors: FloatArray | float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Format:
    """A number format of rows, and the share of pairs that it may leave to single comparisons."""

    name: str
    numbers: type[np.generic]
    most_open: float

    def operand(self, rows: SingleArray, norms: FloatArray) -> Operand:
        """float32 ``rows`` (R, D) in this format; 8-bit numbers are clipped at four root mean squares."""
        if self.numbers is not np.int8:
            return Operand(rows.astype(self.numbers, copy=False), norms)
        spread = 4 * float(np.sqrt(np.square(norms).mean() / rows.shape[1]))
        per_step = np.float32(1 / max(min(float(np.abs(rows).max()), spread) / 127, 2.0**-100))
        scaled = rows * per_step
        values = np.clip(np.rint(scaled), -127, 127)
        scale = 1 / float(per_step)
        scaled -= values
        left = np.sqrt(np.vecdot(scaled, scaled)).astype(np.float64)  # in float32, and so a little off itself
        left = left * (1 + 1e-3 + rows.shape[1] * 2.0**-22) + rows.shape[1] ** 0.5 * 1e-6
        return Operand(values.astype(np.int8), norms, scale * left + norms * (1.01 * 2.0**-24), scale)

    def scores(self, videos: Operand, texts: Operand) -> Array:
        """(V, T), of all pairs: int32 of 8-bit numbers, else as the numbers."""
        if self.numbers is np.int8:
            found: torch.Tensor = torch._int_mm(torch.from_numpy(videos.values), torch.from_numpy(texts.values).T)
            return np.asarray(found.numpy())
        return np.asarray(videos.values @ texts.values.T)

    def margin(self, queries: Operand, candidates: Operand) -> FloatArray:
        """float64 (Q,): how far a scaled score of a query may be from the truth, by Cauchy and Schwarz.

        Source of the rounding of sums: N. J. Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 3.1.
        """
        norm, error = candidates.norms.max(), np.max(candidates.errors)
        margin = (queries.norms * error + queries.errors * (norm + error)) * (1 + 1e-9)
        if self.numbers is np.float32:
            dimensions = queries.values.shape[1]
            flushed = dimensions * 2.0**-125 * (1 + queries.norms + norm)  # tiny numbers may become 0
            margin = margin + 1.01 * (dimensions + 2) * 2.0**-24 * queries.norms * norm + flushed
        return np.asarray(margin)


BYTES, SINGLE, DOUBLE = (
    Format("int8", np.int8, 0.01),
    Format("float32", np.float32, 0.03),
    Format("float64", np.float64, 1),
)


def formats_for(dimensions: int) -> tuple[Format, ...]:
    """The formats to try, the fastest first. 8-bit ones need VNNI, and rows that are not too long for int32."""
    flags = torch.cpu.get_capabilities()
    has_vnni = flags.get("avx512_vnni") or flags.get("avx_vnni")
    return (BYTES, SINGLE, DOUBLE) if has_vnni and 16 <= dimensions < 2**31 // 127**2 else (SINGLE, DOUBLE)


@dataclass(frozen=True)
class Block:
    """Scores (V, T) of the videos and texts at ``rows``; ``scale`` times a score is within ``margins`` of the truth.

    ``copies`` say of both sides, by kind, how many of the rows are of it.
    """

    scores: Array
    scale: float
    rows: tuple[IntArray, IntArray]
    margins: tuple[FloatArray, FloatArray]
    copies: tuple[IntArray, IntArray]


class Direction:
    """One direction of retrieval: its queries are the rows (axis 0) or the columns (axis 1) of every block.

    The positives (P,) of all queries (Q,) stand in the order of the queries and of rising similarity; those of query q
    are ``[starts[q], starts[q + 1])``.
    """

    def __init__(self, axis: int, sides: tuple[Rows, Rows], pairs: tuple[IntArray, IntArray]) -> None:
        self.axis = axis
        self.compared = 0  # pairs that were compared one by one
        self.queries, self.candidates = sides[axis], sides[1 - axis]
        rounding = 1.01 * (sides[0].dimensions + 8) * 2.0**-53
        self.margin = rounding * self.queries.norms * self.candidates.norms.max()  # (Q,), of ``similarity`` at most
        similarity = products(self.queries, self.candidates, pairs[axis], pairs[1 - axis])
        order = np.lexsort((similarity, pairs[axis]))
        self.query, self.candidate, self.similarity = pairs[axis][order], pairs[1 - axis][order], similarity[order]
        self.starts = np.searchsorted(self.query, np.arange(len(self.queries) + 1))
        self.number = np.diff(self.starts)  # (Q,) of positives
        self.order = np.argsort(self.number, kind="stable")  # (Q,): those of one block then have about as many each
        first_equal = np.maximum.accumulate(np.where(self._sort_near_ties(), 0, np.arange(order.size)))
        # (P,): positives of the same query, and candidates of the counted blocks, at least as similar as this one.
        self.num_as_similar = self.starts[self.query + 1] - first_equal
        self.reached = np.zeros(order.size, dtype=np.int64)

    def _sort_near_ties(self) -> BoolArray:
        """Bring positives that doubles cannot tell apart into true order; which equal the one before: bool (P,)."""
        is_tie = np.zeros(self.query.size, dtype=bool)
        is_tie[1:] = (np.diff(self.query) == 0) & (np.diff(self.similarity) <= 2 * self.margin[self.query[1:]])
        unsure = np.flatnonzero(is_tie | np.append(is_tie[1:], False))
        kind, known = self.candidates.kinds[self.candidate], {}
        for place in unsure:
            if (key := (self.query[place], kind[place])) not in known:
                rows = self.queries.at(self.query[[place]]), self.candidates.at(self.candidate[[place]])
                known[key] = exact_product(rows[0][0], rows[1][0])
        values = [known[self.query[place], kind[place]] for place in unsure]
        group = np.cumsum(~is_tie)[unsure]
        order = sorted(range(unsure.size), key=lambda i: (group[i], values[i]))
        self.candidate[unsure] = self.candidate[unsure[order]]
        for before, after, place in zip(order, order[1:], unsure[1:], strict=False):
            is_tie[place] &= values[before] == values[after]
        return is_tie

    def open_share(self, block: Block) -> float:
        """Of the pairs of ``block``, about how many would have to be compared one by one."""
        number = self.number[block.rows[self.axis]]
        _, _, between = self._level(block, 0, number.size)
        return float(between.sum()) / block.scores.size * (1 + max(1.0, float(number.mean()))) / 2

    def count(self, block: Block) -> None:
        """Add to ``reached`` what ``block`` holds; every pair must come once."""
        queries, candidates = block.rows[self.axis], block.rows[1 - self.axis]
        number = self.number[queries]
        few = int(np.searchsorted(number, _MOST_LEVELS, side="right"))
        for level in range(number[few - 1] if few else 0):
            places, reached, between = self._level(block, level, few)
            self.reached[places] += reached
            is_settled = True
            for first in range(0, between.size, _SCORES_AT_ONCE):
                flat = first + np.flatnonzero(between.reshape(-1)[first : first + _SCORES_AT_ONCE])
                if flat.size:
                    found, is_settled = np.divmod(flat, between.shape[1]), False
                    self._compare(places[found[self.axis]], candidates[found[1 - self.axis]])
            if is_settled and not reached.any():
                break  # no score reaches any higher positive
        scores = block.scores if self.axis == 0 else block.scores.T
        for place in range(few, queries.size):
            self._count_query(queries[place], candidates, scores[place] * block.scale, block.margins[self.axis][place])

    def _level(self, block: Block, level: int, stop: int) -> tuple[IntArray, IntArray, BoolArray]:
        """The scores beside the ``level``-th lowest positive of the queries before ``stop`` that have as many.

        Returns the places of these positives, how many candidates surely reach each, and which pairs are unsure, with
        the shape of the scores. Rows that equal the positive's are unsure; a query to which nothing else is unsure has
        reached them.
        """
        queries = block.rows[self.axis]
        start = int(np.searchsorted(self.number[queries], level, side="right"))
        queries = queries[start:stop]
        places = self.starts[queries] + level
        margin = (block.margins[self.axis][start:stop] + 2 * self.margin[queries]) * (1 + 1e-9)
        scores = block.scores[start:stop] if self.axis == 0 else block.scores[:, start:stop]
        above = []
        for side in (-1, 1):
            limits = _rounded((self.similarity[places] + side * margin) / block.scale, side, scores.dtype)
            above.append(scores >= (limits[:, None] if self.axis == 0 else limits))
        maybe, sure = (_count(each, 1 - self.axis) for each in above)
        is_settled = maybe - sure == block.copies[1 - self.axis][self.candidates.kinds[self.candidate[places]]]
        between = above[0] ^ above[1]
        between &= ~is_settled[:, None] if self.axis == 0 else ~is_settled
        return places, np.where(is_settled, maybe, sure), between

    def _count_query(self, query: int, candidates: IntArray, values: FloatArray, margin: float) -> None:
        """The same for one query with many positives, among which its similarities ``values`` (C,) are searched."""
        first, stop = self.starts[query : query + 2]
        margin = (margin + 2 * self.margin[query]) * (1 + 1e-9)
        own = self.similarity[first:stop]
        sure, maybe = (np.searchsorted(own, values + off, side="right") for off in (-margin, margin))
        self.reached[first:stop] += np.bincount(sure, minlength=stop - first + 1)[::-1].cumsum()[-2::-1]
        while (still := np.flatnonzero(maybe > sure)).size:
            self._compare(first + sure[still], candidates[still])
            sure = sure + 1

    def _compare(self, place: IntArray, candidate: IntArray) -> None:
        """Count the candidates (K,) at least as similar as the positives at (K,): in doubles, or without rounding."""
        self.compared += place.size
        query, own, kinds = self.query[place], self.candidate[place], self.candidates.kinds
        reached = kinds[candidate] == kinds[own]
        rest = np.flatnonzero(~reached)
        difference = (
            products(self.queries, self.candidates, query[rest], candidate[rest]) - self.similarity[place[rest]]
        )
        reached[rest] = difference >= 0
        for part in _parts(rest[np.abs(difference) <= 2 * self.margin[query[rest]]], self.queries.at_once):
            sides = self.queries.at(query[part]), self.candidates.at(candidate[part]), self.candidates.at(own[part])
            reached[part] = is_at_least(*sides)
        np.add.at(self.reached, place[reached], 1)


def _count(answers: BoolArray, axis: int) -> IntArray:
    """int64: how many ``answers`` are true along ``axis``, at most 255 of them summed up in a byte."""
    numbers = answers.view(np.uint8) if axis == 0 else answers.view(np.uint8).T
    total = np.zeros(numbers.shape[1], dtype=np.int64)
    for start in range(0, len(numbers), 255):
        total += np.add.reduce(numbers[start : start + 255], axis=0, dtype=np.uint8)
    return total


def _rounded(values: FloatArray, side: int, kind: np.dtype[Any]) -> Array:
    """``values`` as numbers of ``kind``, a little below (side -1) or above them (1)."""
    if kind == np.int32:
        whole: FloatArray = np.floor(values) - 1 if side < 0 else np.ceil(values) + 1
        return np.clip(whole, -(2**31) + 1, 2**31 - 1).astype(np.int32)
    nearest: Array = np.nextafter(values.astype(kind), kind.type(side * np.inf))
    return nearest


def _parts(rows: IntArray, size: int) -> list[IntArray]:
    return [rows[start : start + size] for start in range(0, rows.size, size)]


class Stream:
    """Counts for both ``directions``, videos and texts as queries, what is at least as similar as each positive."""

    def __init__(self, videos: Rows, texts: Rows, pairs: tuple[IntArray, IntArray], plan: RetrievalPlan) -> None:
        self.sides, self.plan = (videos, texts), plan
        self.directions = Direction(0, self.sides, pairs), Direction(1, self.sides, pairs)
        self.formats = formats_for(plan.dimensions)
        self.blocks_by_format: dict[str, int] = {}

    def run(self) -> None:
        """Count all blocks."""
        kept: dict[int, Operand] = {}
        texts = _parts(self.directions[1].order, self.plan.text_block)
        for videos in _parts(self.directions[0].order, self.plan.video_block):
            kind = self._choose(videos)
            left = self._operand(kind, 0, videos)
            for number, columns in enumerate(texts):
                right = kept.get(number) if kind is BYTES else None
                if right is None:
                    right = self._operand(kind, 1, columns)
                    if kind is BYTES and number < self.plan.kept_blocks:
                        kept[number] = right
                block = self._block(kind, (videos, columns), left, right)
                for direction in self.directions:
                    direction.count(block)
                del block  # before the next one takes memory
                self.blocks_by_format[kind.name] = self.blocks_by_format.get(kind.name, 0) + 1

    def describe(self) -> str:
        """A line for the log: what it took."""
        blocks = ", ".join(f"{number:,} in {name}" for name, number in self.blocks_by_format.items())
        compared = sum(direction.compared for direction in self.directions)
        return f"similarities: blocks {blocks}; {compared:,} pairs compared one by one without rounding"

    def _choose(self, videos: IntArray) -> Format:
        """The fastest format that leaves few pairs open, by a sample of ``videos`` and of all texts."""
        texts = self.directions[1].order
        steps = math.ceil(videos.size / _SAMPLE[0]), math.ceil(texts.size / min(_SAMPLE[1], self.plan.text_block))
        rows = videos[:: steps[0]], texts[:: steps[1]]
        for kind in self.formats[:-1]:
            block = self._block(kind, rows, self._operand(kind, 0, rows[0]), self._operand(kind, 1, rows[1]))
            if sum(direction.open_share(block) for direction in self.directions) <= kind.most_open:
                return kind
        return self.formats[-1]

    def _operand(self, kind: Format, side: int, rows: IntArray) -> Operand:
        return kind.operand(self.sides[side].at(rows), self.sides[side].norms[rows])

    def _block(self, kind: Format, rows: tuple[IntArray, IntArray], videos: Operand, texts: Operand) -> Block:
        margins = kind.margin(videos, texts), kind.margin(texts, videos)
        of_videos, of_texts = (
            np.bincount(side.kinds[each], minlength=len(side)) for side, each in zip(self.sides, rows, strict=True)
        )
        scores, scale = kind.scores(videos, texts), videos.scale * texts.scale
        return Block(scores, scale, rows, margins, (of_videos, of_texts))


@contextmanager
def one_thread() -> Iterator[None]:
    """For steps of a millisecond or less, between which other threads would only wait and spin."""
    with _ALONE:  # two at once would each give back the other's limit for good
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with threadpool_limits(1, user_api="blas"):
                yield
        finally:
            torch.set_num_threads(before)
