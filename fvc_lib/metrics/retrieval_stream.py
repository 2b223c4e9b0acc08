"""One pass over all similarities for both directions of retrieval."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.retrieval_blocks import (
    ROWS_AT_ONCE,
    VIDEOS_AT_ONCE,
    BoolArray,
    Positives,
    RetrievalPlan,
    Rows,
    double_rounding,
    flushed,
    single_rounding,
)

# ----------------------------------------------------------------------------------------------------
# Comparing a block of scores with thresholds and counting what passes, eight answers at a time.


COMPARED_BY_NUMPY = frozenset({"cpu"})  # which does it in half of torch's time
_ROWS_PER_SUM = 128  # and a byte of a column's sum one answer of each row
_ANSWERS_AT_ONCE = 1 << 15


class Mask:
    """Answers (R, C), each a byte of 0 or 1; rows and columns are filled up with 0 to whole sums and words.

    ``memory`` is bool, at least of the product of ``padded_shape``. There are at most ``retrieval_plan.MOST_TEXTS``
    columns: a byte of a row's sum holds one answer of every word.
    """

    def __init__(self, rows: int, columns: int, memory: torch.Tensor) -> None:
        self.shape = rows, columns
        padded = padded_shape(rows, columns)
        self._bytes = memory[: padded[0] * padded[1]].view(padded)
        self._bytes[rows:] = False
        self._bytes[:, columns:] = False
        self._answers = self._bytes[:rows, :columns]
        self._words = self._bytes.view(torch.int64)

    @property
    def size(self) -> int:
        """How many answers."""
        return self.shape[0] * self.shape[1]

    def compare(self, scores: torch.Tensor, thresholds: npt.NDArray[np.generic], axis: int) -> None:
        """Answer where ``scores`` (R, C) reach ``thresholds``, one per row (axis 0) or column (axis 1)."""
        shape = (-1, 1) if axis == 0 else (1, -1)
        if scores.device.type in COMPARED_BY_NUMPY:
            np.greater_equal(scores.numpy(), thresholds.reshape(shape), out=self._answers.numpy())
        else:
            reached = torch.from_numpy(thresholds.reshape(shape)).to(scores.device)
            torch.ge(scores, reached, out=self._answers)

    def counts(self, axis: int) -> IntArray:
        """int64: how many answers of each row (axis 0) or column (axis 1) are 1."""
        rows, columns = self.shape
        if axis == 0:
            sums = self._words.sum(1).view(torch.uint8).view(-1, 8).sum(1)[:rows]
        else:
            by_part = self._words.view(-1, _ROWS_PER_SUM, self._words.shape[1]).sum(1)
            sums = by_part.view(torch.uint8).sum(0)[:columns]
        return sums.cpu().numpy().astype(np.int64)

    def positions(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Rows and columns of the answers that are 1, some at a time, in order."""
        counts = self.counts(0)
        rows = np.flatnonzero(counts)
        turns = np.cumsum(counts[rows]) // _ANSWERS_AT_ONCE
        for some in np.split(rows, np.flatnonzero(np.diff(turns)) + 1):
            if some.size:
                words = self._words[torch.from_numpy(some).to(self._bytes.device)].cpu().numpy().reshape(-1)
                held = np.flatnonzero(words)  # mostly few; to look at every answer takes six times as long
                word, byte = np.nonzero(words[held].view(np.uint8).reshape(-1, 8))
                within, columns = np.divmod(held[word] * 8 + byte, self._bytes.shape[1])
                yield some[within], columns


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Of the bytes of a mask of ``rows`` x ``columns`` answers."""
    return -(-rows // _ROWS_PER_SUM) * _ROWS_PER_SUM, -(-columns // 8) * 8


class Masks:
    """Masks by name, of any shape up to ``rows`` x ``columns``, each in the memory of the one before."""

    def __init__(self, rows: int, columns: int) -> None:
        self._size = math.prod(padded_shape(rows, columns))
        self._memory: dict[str, torch.Tensor] = {}
        self._last: dict[str, Mask] = {}

    def get(self, name: str, scores: torch.Tensor) -> Mask:
        """A mask for ``scores`` (R, C); what it answered before under that name is lost."""
        rows, columns = scores.shape
        mask = self._last.get(name)
        if mask is None or mask.shape != (rows, columns):
            if name not in self._memory:
                self._memory[name] = torch.empty(self._size, dtype=torch.bool, device=scores.device)
            mask = self._last[name] = Mask(rows, columns, self._memory[name])
        return mask

    def forget(self) -> None:
        """Give back what they take."""
        self._memory.clear()
        self._last.clear()


# ----------------------------------------------------------------------------------------------------
# Between what scores a candidate is, may be or is not at least as similar as each positive of a query.


Array = npt.NDArray[np.generic]
_FLOATS: dict[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


class Thresholds:
    """Between what scores a candidate may or may not be as similar as a positive, of consecutive queries.

    Queries with fewer positives come first.

    Attributes:
        first: int64 (Q,), place of each query's lowest positive in ``low`` and ``high``.
        number: int64 (Q,), its positives.
        low: (P,), what reaches less than this is less similar.
        high: (P,), what reaches this is at least as similar.
    """

    def __init__(
        self,
        positives: Positives,
        start: int,
        margins: FloatArray,
        scale: float,
        dtype: torch.dtype,
        *,
        is_exact: bool,
    ) -> None:
        starts = positives.starts[start : start + margins.size + 1]
        self.offset = int(starts[0])  # place of the first positive among those of all queries
        self.first, self.number = starts[:-1] - starts[0], np.diff(starts)
        similarity = positives.similarity[starts[0] : starts[-1]]
        self._none = _highest(dtype)
        if is_exact:
            self.low = self.high = similarity.astype(np.int32 if dtype == torch.int32 else _FLOATS[dtype])
            return
        around = np.repeat(margins + positives.margin[start : start + margins.size], self.number)
        self.low = _outward((similarity - around) / scale, -1, dtype)
        self.high = _outward((similarity + around) / scale, 1, dtype)

    def level(self, values: Array, level: int, start: int, stop: int) -> Array:
        """(stop - start,): of the queries ``[start, stop)``, that of the ``level``-th lowest positive.

        What nothing reaches where there is none.
        """
        number, first = self.number[start:stop], self.first[start:stop]
        asking = int(np.searchsorted(number, level, side="right"))
        reached = np.empty(stop - start, dtype=values.dtype)
        reached[:asking] = self._none
        reached[asking:] = values[first[asking:] + level]
        return reached

    def passed(self, values: Array, query: IntArray, scores: Array) -> IntArray:
        """int64 (K,): how many thresholds of its query each score reaches, by bisection."""
        left, right = np.zeros_like(query), self.number[query].copy()
        for _ in range(int(right.max(initial=0)).bit_length()):
            middle = (left + right) // 2
            searching = left < right
            place = np.minimum(self.first[query] + middle, values.size - 1)
            reached = searching & (values[place] <= scores)
            left, right = np.where(reached, middle + 1, left), np.where(searching & ~reached, middle, right)
        return left


def _outward(values: FloatArray, towards: int, dtype: torch.dtype) -> Array:
    """The next number of the scores' format below (``towards`` -1) or above (1) each value."""
    if dtype == torch.int32:
        whole = np.floor(values) - 1 if towards < 0 else np.ceil(values) + 1
        return np.asarray(np.clip(whole, -_highest(dtype), _highest(dtype)).astype(np.int32))
    kind = _FLOATS[dtype]
    return np.asarray(np.nextafter(values.astype(kind), kind(towards * np.inf)))


def _highest(dtype: torch.dtype) -> float | int:
    """What no score reaches."""
    return 2**31 - 1 if dtype == torch.int32 else np.inf


# ----------------------------------------------------------------------------------------------------
# How many candidates are at least as similar to a query as each of its positives, block by block.


# What costs the same: comparing and counting a whole block once with a threshold per query, and taking this share of
# its scores out to look up where each stands among the thresholds of its query.
_SHARE_WORTH_TAKING = 0.004
# A query with more positives than this has its scores taken out: so many passes over whole blocks cost more.
_MOST_PASSES = 32
# Where a finer format leaves more of a block than this open, many may be ties of equal rows, which need no comparison.
_MANY_BETWEEN = 0.05
# Where more of the queries that are compared have no further positive, the others are compared alone.
_SHARE_WORTH_NARROWING = 0.1
_SETTLED_AT_ONCE = 4096  # pairs: few calls, small arrays
_QUERIES_AT_ONCE = 64  # whose scores are copied out of a block


@dataclass(frozen=True)
class Block:
    """Scores of some videos (rows) and texts (columns), and how far they may be from the truth.

    Attributes:
        scores: (V, T) of the filter's format.
        scale: similarity per score.
        starts: the first video and the first text.
        margins: float64 (V,) and (T,), of ``scale * scores``.
        is_coarse: float32 would tell more.
        is_exact: scores are similarities, and whole numbers; ``scale`` is 1 and there are no margins.
    """

    scores: torch.Tensor
    scale: float
    starts: tuple[int, int]
    margins: tuple[FloatArray, FloatArray]
    is_coarse: bool
    is_exact: bool


class Direction:
    """One direction of retrieval: its queries are the rows (axis 0) or the columns (axis 1) of every block.

    Attributes:
        compared: pairs that were settled one by one.
    """

    def __init__(self, positives: Positives, axis: Literal[0, 1], masks: Masks) -> None:
        self.positives, self.axis, self.compared = positives, axis, 0
        self._masks = masks
        self._open: dict[bool, list[tuple[IntArray, IntArray, IntArray]]] = {True: [], False: []}  # by is_coarse
        self._number_open = 0
        self._reached = np.zeros(positives.query.size, dtype=np.int64)  # by scores above one threshold
        self._highest_reached = np.zeros_like(self._reached)  # by scores above this threshold and all lower ones

    def at_least_as_similar(self) -> IntArray:
        """int64 (P,): candidates at least as similar as each positive, positives of the same query among them."""
        self._settle_open()
        total = np.append(0, np.cumsum(self._highest_reached))
        ends = self.positives.starts[1:][self.positives.query]
        found: IntArray = self._reached + total[ends] - total[:-1]
        return found

    def open_share(self, block: Block) -> float:
        """Of the pairs of ``block``, about how many would have to be settled one by one."""
        thresholds = self._thresholds(block)
        low = self._compare(block.scores, thresholds, "low", 0).counts(self.axis).sum()
        high = self._compare(block.scores, thresholds, "high", 0).counts(self.axis).sum()
        # Only the lowest positives were looked at; fewer scores come near the others.
        return float(low - high) / block.scores.numel() * (1 + max(1.0, float(thresholds.number.mean()))) / 2

    def count(self, block: Block) -> None:
        """Add what ``block`` holds; every pair must come once."""
        thresholds = self._thresholds(block)
        passes = int(thresholds.number.max(initial=0))
        if not passes:
            return
        mask = self._compare(block.scores, thresholds, "low", 0)
        counts = mask.counts(self.axis)
        if counts.sum() <= _SHARE_WORTH_TAKING * min(passes, _MOST_PASSES) * block.scores.numel():
            self._take_out(block, mask, thresholds, 0)
            return
        few = int(np.searchsorted(thresholds.number, _MOST_PASSES, side="right"))
        self._count_passes(block, thresholds, few, counts)
        if few < thresholds.number.size:
            self._take_out(block, self._compare(block.scores, thresholds, "low", 0, few), thresholds, few)

    def _count_passes(self, block: Block, thresholds: Thresholds, stop: int, counts: IntArray) -> None:
        """One comparison of all scores of a query per positive, of the block's queries ``[0, stop)``.

        Those with fewer positives come first. ``counts`` are of all queries and their lowest positives.
        """
        start = 0
        for level in range(int(thresholds.number[:stop].max(initial=0))):
            asking = int(np.searchsorted(thresholds.number[:stop], level, side="right"))
            if asking - start > _SHARE_WORTH_NARROWING * (stop - start):
                start = asking
            if level or stop - start < thresholds.number.size:
                counts = self._compare(block.scores, thresholds, "low", level, start, stop).counts(self.axis)
            self._count_level(block, thresholds, level, (start, asking, stop), counts)

    def _count_level(
        self, block: Block, thresholds: Thresholds, level: int, queries: tuple[int, int, int], counts: IntArray
    ) -> None:
        """Scores above the ``level``-th lowest positives of ``queries``: those compared, and from which on they ask."""
        start, asking, stop = queries
        places = thresholds.offset + thresholds.first[asking:stop] + level
        if block.is_exact:
            self._reached[places] += counts[asking - start :]
            return
        high = self._compare(block.scores, thresholds, "high", level, start, stop)
        sure = high.counts(self.axis)
        self._reached[places] += sure[asking - start :]
        unsure = (counts - sure)[asking - start :]
        if unsure.sum() > _MANY_BETWEEN * high.size and not block.is_coarse:
            twins = self._twins(block, places)
            if (unsure == twins).all():
                self._reached[places] += twins
                return
        # A positive always lies between its own thresholds; where it alone does, nothing is open.
        own = self._in_block(block, self.positives.candidate[places])
        alone = unsure == own
        self._reached[places] += own & alone
        still = np.flatnonzero(~alone)
        for first in range(0, still.size, _QUERIES_AT_ONCE):
            part = still[first : first + _QUERIES_AT_ONCE]
            self._look_between(block, thresholds, level, asking + part)

    def _look_between(self, block: Block, thresholds: Thresholds, level: int, queries: IntArray) -> None:
        """Settle what lies between the two thresholds of the ``level``-th lowest positives of ``queries`` (K,)."""
        scores = block.scores.index_select(self.axis, torch.from_numpy(queries).to(block.scores.device)).cpu().numpy()
        place = thresholds.first[queries] + level
        shape = (-1, 1) if self.axis == 0 else (1, -1)
        between = scores >= thresholds.low[place].reshape(shape)
        between &= scores < thresholds.high[place].reshape(shape)
        rows, columns = np.divmod(np.flatnonzero(between), between.shape[1])
        which, candidate = (rows, columns) if self.axis == 0 else (columns, rows)
        self._settle(block, queries[which], candidate, thresholds.offset + place[which])

    def _in_block(self, block: Block, candidates: IntArray) -> BoolArray:
        """Which ``candidates`` (K,) are in ``block``: bool (K,)."""
        start = block.starts[1 - self.axis]
        return np.asarray((candidates >= start) & (candidates < start + block.scores.shape[1 - self.axis]))

    def _twins(self, block: Block, places: IntArray) -> IntArray:
        """int64 (K,): candidates of ``block`` whose numbers are those of the positives at ``places`` (K,).

        They are ties, and lie between every pair of thresholds. Where embeddings have collapsed they are all there is.
        """
        kinds, start = self.positives.kinds, block.starts[1 - self.axis]
        here = np.bincount(kinds[start : start + block.scores.shape[1 - self.axis]], minlength=kinds.size)
        return np.asarray(here[kinds[self.positives.candidate[places]]])

    def _compare(
        self,
        scores: torch.Tensor,
        thresholds: Thresholds,
        which: Literal["low", "high"],
        level: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Mask:
        """Which ``scores`` of the queries ``[start, stop)`` reach the thresholds of their ``level``-th positives."""
        stop = thresholds.number.size if stop is None else stop
        part = self._of_queries(scores, start, stop)
        mask = self._masks.get(which, part)
        mask.compare(part, thresholds.level(getattr(thresholds, which), level, start, stop), self.axis)
        return mask

    def _take_out(self, block: Block, mask: Mask, thresholds: Thresholds, start: int) -> None:
        """Look up every score that reaches the lowest threshold of its query, from ``start`` on, among all of them."""
        for rows, columns in mask.positions():
            query, candidate = self._sides(rows, columns, start)
            row, column = (query, candidate) if self.axis == 0 else (candidate, query)
            where = (torch.from_numpy(places).to(block.scores.device) for places in (row, column))
            values = block.scores[tuple(where)].cpu().numpy()
            sure = thresholds.passed(thresholds.high, query, values)
            maybe = thresholds.passed(thresholds.low, query, values)
            lowest = thresholds.offset + thresholds.first[query]
            reached = sure > 0
            np.add.at(self._highest_reached, (lowest + sure - 1)[reached], 1)
            while (still := np.flatnonzero(maybe > sure)).size:
                self._settle(block, query[still], candidate[still], (lowest + sure)[still])
                sure = sure + 1

    def _settle(self, block: Block, query: IntArray, candidate: IntArray, positive: IntArray) -> None:
        """Note pairs to be compared without rounding, when they are many."""
        waiting = self._open[block.is_coarse]
        waiting.append((query + block.starts[self.axis], candidate + block.starts[1 - self.axis], positive))
        self._number_open += query.size
        if self._number_open >= _SETTLED_AT_ONCE:
            self._settle_open()

    def _settle_open(self) -> None:
        for is_coarse, waiting in self._open.items():
            if waiting:
                query, candidate, positive = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
                waiting.clear()
                holds = self.positives.holds(query, candidate, positive, in_single=is_coarse)
                np.add.at(self._reached, positive[holds], 1)
                self.compared += query.size
        self._number_open = 0

    def _thresholds(self, block: Block) -> Thresholds:
        start, margins = block.starts[self.axis], block.margins[self.axis]
        dtype = block.scores.dtype
        return Thresholds(self.positives, start, margins, block.scale, dtype, is_exact=block.is_exact)

    def _sides(self, rows: IntArray, columns: IntArray, start: int) -> tuple[IntArray, IntArray]:
        """Queries and candidates, counted from the block's first ones; ``start`` is the first query looked at."""
        return (rows + start, columns) if self.axis == 0 else (columns + start, rows)

    def _of_queries(self, scores: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return scores.narrow(self.axis, start, stop - start)


# ----------------------------------------------------------------------------------------------------
# Fast approximate similarities of a block of queries and candidates, each with how far it may be from the truth.
#
# What lies further from a threshold than that is settled by a comparison. Where the processor multiplies bytes several
# times as fast as float32 numbers (AVX-512 VNNI does eight times), a product of rounded rows settles nearly all
# pairs of
# a trained model. Where it leaves too many open, numbers of three bytes follow, by six products of bytes: finer than
# float32 products, whose sums round, and faster still. Then float32 where bytes are of no use, then float64.
#


# Whose BLAS is often the faster, and knows no lesser precision than it is asked for.
MULTIPLIED_BY_NUMPY = frozenset({"cpu"})
_CLIP = 4.0  # root mean squares: what lies outside is rounded to it; beyond five the steps get too coarse
_LIMB_BASE = 254  # what half a step leaves, times this, is a byte again


@dataclass(frozen=True)
class Operand:
    """One side of a product: ``scale * values`` is within ``errors`` (R,) of rows with ``norms`` (R,), by the norm.

    Attributes:
        values: (R, D) of the filter's format; of n limbs (R, n * D), from the first to the last for videos, from the
            last to the first for texts, so that one product of consecutive columns sums all of one weight.
        scale: of the last limb where there are several.
        norms: float64 (R,), not less than the true ones.
        errors: float64 (R,).
        parts: float64 (n, R), not less than the norm of what each of several limbs stands for.
    """

    values: torch.Tensor
    scale: float
    norms: FloatArray
    errors: FloatArray
    parts: FloatArray


@dataclass(frozen=True)
class Filter:
    """A number format in which similarities are computed first.

    Attributes:
        name: for the log.
        dtype: of the rows.
        scores: of the products.
        open_share: of the pairs that it may leave open until the next format costs less than settling them one by one.
        limbs: bytes per number; 0 of floats.
    """

    name: str
    dtype: torch.dtype
    scores: torch.dtype
    open_share: float
    limbs: int = 0

    def operand(
        self,
        rows: torch.Tensor,
        norms: FloatArray,
        *,
        reverse: bool = False,
        whole: bool = False,
        memory: torch.Tensor | None = None,
    ) -> Operand:
        """``rows`` in this format.

        Args:
            rows: float32 (R, D).
            norms: float64 (R,), not less than the true ones.
            reverse: the last limb first.
            whole: numbers that this format ``is_exact`` for.
            memory: int8, flat, where bytes are kept; none: in memory of their own.
        """
        none = np.zeros((0, len(rows)))
        if self.limbs == 0:
            return Operand(rows.to(self.dtype), 1.0, norms, np.zeros(len(rows)), none)
        size = self.limbs * rows.numel()
        memory = torch.empty(size, dtype=torch.int8, device=rows.device) if memory is None else memory[:size]
        if whole:
            return Operand(memory.view(rows.shape).copy_(rows), 1.0, norms, np.zeros(len(rows)), none)
        return self._in_limbs(rows, norms, reverse, memory.view(len(rows), self.limbs, -1))

    def _in_limbs(self, rows: torch.Tensor, norms: FloatArray, reverse: bool, values: torch.Tensor) -> Operand:
        dimensions = rows.shape[1]
        per_step = float(np.float32(1 / _step(rows, clip=self.limbs == 1)))
        lengths = torch.empty(self.limbs + 1, len(rows), device=rows.device)  # of all limbs and of what is left
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            left = rows[part] * per_step
            for limb in range(self.limbs):
                whole = left.round().clamp_(-127, 127)
                values[part, self.limbs - 1 - limb if reverse else limb] = whole
                torch.linalg.vector_norm(whole, dim=1, out=lengths[limb, part])
                left.sub_(whole)
                if limb + 1 < self.limbs:
                    left.mul_(_LIMB_BASE)
            torch.linalg.vector_norm(left, dim=1, out=lengths[self.limbs, part])
        scale = 1 / per_step / _LIMB_BASE ** (self.limbs - 1)
        # Lengths are float32 sums of squares. The first factor rounds, and may flush what is no number of any limb;
        # each later one rounds by 2^-24 of half a step, which may be 0.002 of the last limb's unit.
        known = lengths.cpu().numpy().astype(np.float64) * (1 + 1e-3 + dimensions * 2.0**-22)
        unknown = dimensions**0.5 * (4e-3 if self.limbs > 1 else 1e-6)
        errors = scale * (known[-1] + unknown) + norms * (1.01 * 2.0**-24)
        weights = scale * float(_LIMB_BASE) ** np.arange(self.limbs - 1, -1, -1)
        return Operand(values.flatten(1), scale, norms, errors, weights[:, None] * (known[:-1] + 1e-9))

    def multiply(self, videos: Operand, texts: Operand, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """``out`` (V, T) becomes the scores of all pairs; ``scratch`` is int32 (``VIDEOS_AT_ONCE`` * T,)."""
        left, right = videos.values, texts.values.T
        if self.limbs > 1:
            self._multiply_limbs(left, right, out, scratch)
        elif self.limbs == 1:
            torch._int_mm(left, right, out=out)
        elif out.device.type in MULTIPLIED_BY_NUMPY:
            np.matmul(left.numpy(), right.numpy(), out=out.numpy())
        else:
            torch.mm(left, right, out=out)

    def _multiply_limbs(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """The sum of all products of limbs whose weights are not less than that of the last limb."""
        dimensions = left.shape[1] // self.limbs
        for start in range(0, len(left), VIDEOS_AT_ONCE):
            rows, sums = left[start : start + VIDEOS_AT_ONCE], out[start : start + VIDEOS_AT_ONCE]
            product = scratch[: sums.numel()].view(sums.shape)
            for last in reversed(range(self.limbs)):  # limbs whose numbers, from 0, add up to this
                columns, skipped = (last + 1) * dimensions, (self.limbs - 1 - last) * dimensions
                torch._int_mm(rows[:, :columns], right[skipped:], out=product)
                if last == self.limbs - 1:
                    sums.copy_(product)
                else:
                    sums.add_(product, alpha=float(_LIMB_BASE ** (self.limbs - 1 - last)))

    def scale(self, videos: Operand, texts: Operand) -> float:
        """Similarity per score."""
        return videos.scale * texts.scale * float(_LIMB_BASE) ** max(0, self.limbs - 1)

    def margin(self, queries: Operand, candidates: Operand, dimensions: int) -> FloatArray:
        """float64 (Q,): how far ``scale * score`` of a query and any of the candidates may be from the truth.

        By Cauchy and Schwarz: the error of one side times the other, for both; products of limbs that are left out; and
        the rounding of the product.
        """
        norm, error = candidates.norms.max(), candidates.errors.max()
        margin = (queries.norms * error + queries.errors * (norm + error)) * (1 + 1e-9)
        if self.limbs > 1:
            margin += self._limb_margin(queries, candidates)
        elif self.limbs == 0:
            margin += self._rounding(dimensions, queries.values.device) * queries.norms * norm
        if self.dtype == torch.float32:
            margin += flushed(dimensions, queries.norms, norm)
        return np.asarray(margin)

    def _limb_margin(self, queries: Operand, candidates: Operand) -> FloatArray:
        rounding = 2 * self.limbs * 2.0**-24  # each product becomes a float32 number, is scaled and added
        margin = np.zeros(len(queries.norms))
        for place, most in enumerate(candidates.parts.max(axis=1)):
            for other, lengths in enumerate(queries.parts):
                margin += lengths * (most * (1.0 if place + other >= self.limbs else rounding))
        return margin

    def _rounding(self, dimensions: int, device: torch.device) -> float:
        if self.dtype == torch.float64:
            return double_rounding(dimensions)
        return single_rounding(dimensions) + (0.0 if device.type == "cpu" else _lesser_precision())

    def is_exact(self, largest: tuple[float | None, float | None], dimensions: int, device: torch.device) -> bool:
        """Whether products of rows of whole numbers up to ``largest`` (none: of others) are not rounded at all."""
        if largest[0] is None or largest[1] is None:
            return False
        if self.limbs:
            return self.limbs == 1 and max(largest[0], largest[1]) <= 127
        if self.dtype == torch.float32:
            full = device.type == "cpu" or _lesser_precision() == 0
            return full and dimensions * largest[0] * largest[1] <= 2**24
        return True


BYTES = Filter("int8", torch.int8, torch.int32, 0.015, limbs=1)
LIMBS = Filter("three of int8", torch.int8, torch.float32, 0.03, limbs=3)
SINGLE = Filter("float32", torch.float32, torch.float32, 0.03)
DOUBLE = Filter("float64", torch.float64, torch.float64, 1.0)


def filters_of(device: torch.device, dimensions: int) -> tuple[Filter, ...]:
    """The formats worth trying on ``device``, the fastest first; the last always settles all but ties."""
    bytes_only = _worth_trying(dimensions) if device.type == "cpu" and hasattr(torch, "_int_mm") else ()
    return *bytes_only, SINGLE, DOUBLE


@functools.cache
def _worth_trying(dimensions: int) -> tuple[Filter, ...]:
    """Of the formats of bytes; measured, as a processor without instructions for them is slower than with float32.

    Three bytes are worth a little more time than float32 takes, as they leave less open.
    """
    if dimensions not in dimensions_of(BYTES):
        return ()
    rows = torch.ones(VIDEOS_AT_ONCE, dimensions), torch.ones(4 * VIDEOS_AT_ONCE, dimensions)
    of_single = _seconds(SINGLE, *rows)
    return tuple(
        kind
        for kind, share in ((BYTES, 0.7), (LIMBS, 1.4))
        if dimensions in dimensions_of(kind) and _seconds(kind, *rows) < share * of_single
    )


def dimensions_of(kind: Filter) -> range:
    """With what numbers per row a format of bytes may be used.

    With one torch's product of bytes is wrong (2.13), with few there is nothing to gain; with more than these a product
    could leave int32.
    """
    return range(16, 2**31 // (127**2 * kind.limbs) - 1)


def _seconds(kind: Filter, videos: torch.Tensor, texts: torch.Tensor) -> float:
    """Processor seconds of a product."""
    left, right = (kind.operand(rows, np.ones(len(rows))) for rows in (videos, texts))
    out = torch.empty(len(videos), len(texts), dtype=kind.scores)
    scratch = torch.empty(out.numel(), dtype=torch.int32)
    taken = []
    for _ in range(5):
        start = time.thread_time()
        kind.multiply(left, right, out, scratch)
        taken.append(time.thread_time() - start)
    return min(taken)


def _step(rows: torch.Tensor, *, clip: bool) -> float:
    """The number that one unit of the first byte stands for."""
    largest = float(rows.abs().max())
    spread = _CLIP * float(torch.linalg.vector_norm(rows)) / rows.numel() ** 0.5
    return max((min(largest, spread) if clip else largest) / 127, 2.0**-100)


def _lesser_precision() -> float:
    """What a GPU's float32 product may lose besides where torch may round its operands to ten bits (TF32) or seven."""
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-6)


_ALONE = threading.RLock()
_SAMPLED_VIDEOS, _SAMPLED_TEXTS = 64, 128  # of a row of blocks, to see how many pairs a format leaves open


class Stream:
    """Counts for both directions what is at least as similar as each positive.

    Attributes:
        videos: (N, D).
        texts: (M, D).
        directions: with the videos and with the texts as queries.
        plan: the blocks.
        device: where they are multiplied and compared.
        filters: formats to try, the fastest first.
        blocks_by_filter: how many blocks each format counted.
    """

    def __init__(
        self,
        videos: Rows,
        texts: Rows,
        positives: tuple[Positives, Positives],
        plan: RetrievalPlan,
        device: torch.device,
    ) -> None:
        self.videos, self.texts, self.plan, self.device = videos, texts, plan, device
        self._masks = Masks(plan.video_block, plan.text_block)
        self.directions = Direction(positives[0], 0, self._masks), Direction(positives[1], 1, self._masks)
        self.filters = filters_of(device, plan.dimensions)
        self.blocks_by_filter: dict[str, int] = {}
        self._converted: dict[int, Operand] = {}  # texts of the panel, by the first of each block
        self._converted_by: Filter | None = None
        self._sampled: dict[Filter, Operand] = {}  # some texts of the panel

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Count all blocks; ``progress(done, total)`` is told the pairs after each row of blocks."""
        self._scores = self._room_for_scores(torch.float32)
        scratch = VIDEOS_AT_ONCE * self.plan.text_block if any(kind.limbs > 1 for kind in self.filters) else 0
        self._scratch = torch.empty(scratch, dtype=torch.int32, device=self.device)
        kept = max(kind.limbs for kind in self.filters) * self.plan.text_panel * self.plan.dimensions
        self._panel = torch.empty(kept, dtype=torch.int8, device=self.device)  # once: pieces would leave holes
        done, total = 0, self.plan.num_videos * self.plan.num_texts
        for panel in _parts(0, self.plan.num_texts, self.plan.text_panel):
            self._converted.clear()
            self._sampled.clear()
            for start, stop in _parts(0, self.plan.num_videos, self.plan.video_block):
                self._count_row(start, stop, panel)
                done += (stop - start) * (panel[1] - panel[0])
                if progress is not None:
                    progress(done, total)
        del self._scores, self._scratch, self._panel
        self._converted.clear()
        self._sampled.clear()
        self._masks.forget()

    def describe(self) -> str:
        """A line for the log: what it took."""
        blocks = ", ".join(f"{number:,} in {name}" for name, number in self.blocks_by_filter.items())
        compared = sum(direction.compared for direction in self.directions)
        return f"similarities: blocks {blocks}; {compared:,} pairs settled one by one without rounding"

    def _count_row(self, start: int, stop: int, panel: tuple[int, int]) -> None:
        """The blocks of videos ``[start, stop)`` and the texts of ``panel``, whose conversions are kept."""
        kind = self._choose(start, stop, panel)
        videos = self._operand(kind, self.videos, start, stop)
        for first, last in _parts(*panel, self.plan.text_block):
            block = self._block(kind, (start, first), videos, self._texts(kind, first, last))
            for direction in self.directions:
                direction.count(block)
            self.blocks_by_filter[kind.name] = self.blocks_by_filter.get(kind.name, 0) + 1

    def _choose(self, start: int, stop: int, panel: tuple[int, int]) -> Filter:
        """The fastest format that leaves few pairs open, by a sample from the middle of the row and of the panel."""
        start = (start + stop - min(stop - start, _SAMPLED_VIDEOS)) // 2
        stop = min(stop, start + _SAMPLED_VIDEOS)
        size = min(panel[1] - panel[0], self.plan.text_block, _SAMPLED_TEXTS)
        first = (panel[0] + panel[1] - size) // 2
        for kind in self.filters[:-1]:
            videos = self._operand(kind, self.videos, start, stop)
            if kind not in self._sampled:
                self._sampled[kind] = self._operand(kind, self.texts, first, first + size)
            block = self._block(kind, (start, first), videos, self._sampled[kind])
            if sum(direction.open_share(block) for direction in self.directions) <= kind.open_share:
                return kind
        return self.filters[-1]

    def _texts(self, kind: Filter, first: int, last: int) -> Operand:
        """Texts ``[first, last)``; those of bytes are kept for the next videos, others take too much."""
        if kind is not self._converted_by:
            self._converted.clear()
            self._converted_by = kind
        texts = self._converted.get(first)
        if texts is None:
            place = first % self.plan.text_panel * kind.limbs * self.plan.dimensions
            texts = self._operand(kind, self.texts, first, last, self._panel[place:])
            if kind.limbs:
                self._converted[first] = texts
        return texts

    def _operand(self, kind: Filter, rows: Rows, start: int, stop: int, memory: torch.Tensor | None = None) -> Operand:
        numbers = rows.between(start, stop).to(self.device).contiguous()
        whole = self._is_exact(kind)
        norms, reverse = rows.norms[start:stop], rows is self.texts
        return kind.operand(numbers, norms, reverse=reverse, whole=whole, memory=memory)

    def _block(self, kind: Filter, starts: tuple[int, int], videos: Operand, texts: Operand) -> Block:
        shape = len(videos.values), len(texts.values)
        if kind.scores.itemsize > self._scores.itemsize:  # doubles: seldom, and twice as much
            self._scores = self._room_for_scores(kind.scores)
        scores = self._scores.view(kind.scores)[: shape[0] * shape[1]].view(shape)
        kind.multiply(videos, texts, scores, self._scratch)
        dimensions, is_exact = self.plan.dimensions, self._is_exact(kind)
        if is_exact:
            margins = np.zeros(shape[0]), np.zeros(shape[1])
        else:
            margins = kind.margin(videos, texts, dimensions), kind.margin(texts, videos, dimensions)
        return Block(scores, kind.scale(videos, texts), starts, margins, kind.limbs == 1, is_exact)

    def _room_for_scores(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.plan.video_block * self.plan.text_block, dtype=dtype, device=self.device)

    def _is_exact(self, kind: Filter) -> bool:
        return kind.is_exact((self.videos.largest, self.texts.largest), self.plan.dimensions, self.device)


@contextmanager
def one_thread() -> Iterator[None]:
    """For work of small steps, a millisecond or less each, between which other threads would only wait and spin.

    Who calls it from several threads waits: two at once would each give back the other's limit for good.
    """
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with threadpool_limits(1, user_api="blas"):
                yield
        finally:
            torch.set_num_threads(before)


def _parts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


def measure_norms(embeddings: torch.Tensor, rows_at_once: int) -> FloatArray:
    """float64 (R,): the norm of each row, or a trace more; infinite or NaN where a number is."""
    found = np.empty(len(embeddings))
    for start, stop in _parts(0, len(embeddings), rows_at_once):
        rows = embeddings[start:stop].to(torch.float32)
        found[start:stop] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu().numpy()
    return found * (1 + embeddings.shape[1] * 2.0**-52)
