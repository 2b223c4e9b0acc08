"""How many candidates are at least as similar to a query as each of its positives, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fvc_lib.metrics.retrieval_exact import BoolArray
from fvc_lib.metrics.retrieval_masks import Mask, Masks
from fvc_lib.metrics.retrieval_positives import Positives
from fvc_lib.metrics.retrieval_thresholds import Thresholds
from fvc_lib.metrics.weighting import FloatArray, IntArray

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
