"""How many candidates are at least as similar to a query as each of its positives, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.retrieval_exact import BoolArray
from fvc_lib.metrics.retrieval_masks import Mask
from fvc_lib.metrics.retrieval_positives import Positives
from fvc_lib.metrics.weighting import FloatArray, IntArray

Array = npt.NDArray[np.generic]

# What costs the same: comparing and counting a whole block once with a threshold per query, and taking this share of
# its scores out to look up where each stands among the thresholds of its query.
_SHARE_WORTH_TAKING = 0.004
# A query with more positives than this has its scores taken out: so many passes over whole blocks cost more.
_MOST_PASSES = 32
# Where a finer format leaves more of a block than this open, many may be ties of equal rows, which need no comparison.
_MANY_BETWEEN = 0.05


@dataclass(frozen=True)
class Block:
    """Scores of some videos (rows) and texts (columns), and how far they may be from the truth.

    Attributes:
        scores: (V, T) of the filter's format.
        scale: similarity per score.
        starts: the first video and the first text.
        margins: float64 (V,) and (T,), of ``scale * scores``.
        is_coarse: float32 would tell more.
    """

    scores: torch.Tensor
    scale: float
    starts: tuple[int, int]
    margins: tuple[FloatArray, FloatArray]
    is_coarse: bool


class Thresholds:
    """Between what scores a candidate may or may not be as similar as a positive, of consecutive queries.

    Attributes:
        first: int64 (Q,), place of each query's lowest positive in ``low`` and ``high``.
        number: int64 (Q,), its positives.
        low: (P,), what reaches less than this is less similar.
        high: (P,), what reaches this is at least as similar.
    """

    def __init__(self, positives: Positives, start: int, margins: FloatArray, scale: float, dtype: torch.dtype) -> None:
        starts = positives.starts[start : start + margins.size + 1]
        self.offset = int(starts[0])  # place of the first positive among those of all queries
        self.first, self.number = starts[:-1] - starts[0], np.diff(starts)
        similarity = positives.similarity[starts[0] : starts[-1]]
        around = np.repeat(margins + positives.margin[start : start + margins.size], self.number)
        self.low = _outward((similarity - around) / scale, -1, dtype)
        self.high = _outward((similarity + around) / scale, 1, dtype)
        self._none = _highest(dtype)

    def level(self, values: Array, level: int, queries: IntArray) -> Array:
        """(K,): of ``queries``, that of the ``level``-th lowest positive; what nothing reaches where there is none."""
        reached = np.full(queries.size, self._none, dtype=values.dtype)
        has = self.number[queries] > level
        reached[has] = values[self.first[queries[has]] + level]
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


class Direction:
    """One direction of retrieval: its queries are the rows (axis 0) or the columns (axis 1) of every block.

    Attributes:
        compared: pairs that were settled one by one.
    """

    def __init__(self, positives: Positives, axis: int) -> None:
        self.positives, self.axis, self.compared = positives, axis, 0
        self._masks: dict[tuple[str, torch.Size], Mask] = {}
        self._kept = 0  # scores of the blocks those are for
        self._reached = np.zeros(positives.query.size, dtype=np.int64)  # by scores above one threshold
        self._highest_reached = np.zeros_like(self._reached)  # by scores above this threshold and all lower ones

    def at_least_as_similar(self) -> IntArray:
        """int64 (P,): candidates at least as similar as each positive, positives of the same query among them."""
        total = np.append(0, np.cumsum(self._highest_reached))
        ends = self.positives.starts[1:][self.positives.query]
        found: IntArray = self._reached + total[ends] - total[:-1]
        return found

    def forget_masks(self) -> None:
        """Give back what comparisons of blocks take."""
        self._masks.clear()
        self._kept = 0

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
        share = mask.counts(self.axis).sum() / block.scores.numel()
        if share <= _SHARE_WORTH_TAKING * min(passes, _MOST_PASSES):
            self._take_out(block, block.scores, mask, thresholds, np.arange(thresholds.number.size))
            return
        many = np.flatnonzero(thresholds.number > _MOST_PASSES)
        if many.size:
            scores = self._of_queries(block.scores, many)
            self._take_out(block, scores, self._compare(scores, thresholds, "low", 0, many), thresholds, many)
            thresholds.number[many] = 0
        self._count_passes(block, thresholds)

    def _count_passes(self, block: Block, thresholds: Thresholds) -> None:
        """One comparison of all scores of a query per positive."""
        scores, held = block.scores, np.arange(thresholds.number.size)
        for level in range(int(thresholds.number.max(initial=0))):
            asking = thresholds.number[held] > level
            if asking.sum() < held.size / 2:
                scores = self._of_queries(scores, np.flatnonzero(asking))
                held, asking = held[asking], asking[asking]
            low = self._compare(scores, thresholds, "low", level, held)
            high = self._compare(scores, thresholds, "high", level, held)
            sure = high.counts(self.axis)
            places = thresholds.offset + thresholds.first[held] + level
            self._reached[places[asking]] += sure[asking]
            between = low.counts(self.axis) - sure
            if between.sum() > _MANY_BETWEEN * scores.numel() and not block.is_coarse:
                twins = self._twins(block, places, asking)
                if (between == twins).all():
                    self._reached[places[asking]] += twins[asking]
                    continue
            if between.any():
                low.differing(high)
                for rows, columns in low.positions():
                    query, candidate = self._sides(rows, columns, held)
                    self._settle(block, query, candidate, thresholds.offset + thresholds.first[query] + level)

    def _twins(self, block: Block, places: IntArray, asking: BoolArray) -> IntArray:
        """int64 (Q,): candidates of ``block`` whose numbers are those of each query's positive at ``places`` (Q,).

        They are ties, and lie between every pair of thresholds. Where embeddings have collapsed they are all there is.
        """
        kinds, start = self.positives.kinds, block.starts[1 - self.axis]
        here = np.bincount(kinds[start : start + block.scores.shape[1 - self.axis]], minlength=kinds.size)
        twins = np.zeros(places.size, dtype=np.int64)
        twins[asking] = here[kinds[self.positives.candidate[places[asking]]]]
        return twins

    def _compare(
        self,
        scores: torch.Tensor,
        thresholds: Thresholds,
        which: Literal["low", "high"],
        level: int,
        queries: IntArray | None = None,
    ) -> Mask:
        """Which scores of ``queries`` (none: all of the block) reach their thresholds."""
        held = np.arange(thresholds.number.size) if queries is None else queries
        mask = self._masks.get((which, scores.shape))
        if mask is None:
            mask = Mask(scores.shape[0], scores.shape[1], scores.device)
            if scores.numel() >= self._kept:  # those of whole blocks are used again
                self._kept = scores.numel()
                self._masks = {at: kept for at, kept in self._masks.items() if at[1] == scores.shape}
                self._masks[which, scores.shape] = mask
        mask.compare(scores, thresholds.level(getattr(thresholds, which), level, held), self.axis)
        return mask

    def _take_out(self, block: Block, scores: torch.Tensor, mask: Mask, thresholds: Thresholds, held: IntArray) -> None:
        """Look up every score that reaches the lowest threshold of its query among all of them."""
        for rows, columns in mask.positions():
            where = torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)
            values = scores[where].cpu().numpy()
            query, candidate = self._sides(rows, columns, held)
            sure = thresholds.passed(thresholds.high, query, values)
            maybe = thresholds.passed(thresholds.low, query, values)
            lowest = thresholds.offset + thresholds.first[query]
            reached = sure > 0
            np.add.at(self._highest_reached, (lowest + sure - 1)[reached], 1)
            while (still := np.flatnonzero(maybe > sure)).size:
                self._settle(block, query[still], candidate[still], (lowest + sure)[still])
                sure = sure + 1

    def _settle(self, block: Block, query: IntArray, candidate: IntArray, positive: IntArray) -> None:
        own = query + block.starts[self.axis]
        other = candidate + block.starts[1 - self.axis]
        holds = self.positives.holds(own, other, positive, in_single=block.is_coarse)
        np.add.at(self._reached, positive[holds], 1)
        self.compared += query.size

    def _thresholds(self, block: Block) -> Thresholds:
        start, margins = block.starts[self.axis], block.margins[self.axis]
        return Thresholds(self.positives, start, margins, block.scale, block.scores.dtype)

    def _sides(self, rows: IntArray, columns: IntArray, held: IntArray) -> tuple[IntArray, IntArray]:
        """Queries and candidates, counted from the block's first ones."""
        return (held[rows], columns) if self.axis == 0 else (held[columns], rows)

    def _of_queries(self, scores: torch.Tensor, queries: IntArray) -> torch.Tensor:
        return scores.index_select(self.axis, torch.from_numpy(queries).to(scores.device))


def _outward(values: FloatArray, towards: int, dtype: torch.dtype) -> Array:
    """The next number of the scores' format below (``towards`` -1) or above (1) each value."""
    if dtype == torch.int32:
        whole = np.floor(values) - 1 if towards < 0 else np.ceil(values) + 1
        return np.asarray(np.clip(whole, -_highest(dtype), _highest(dtype)).astype(np.int32))
    kind = np.float32 if dtype == torch.float32 else np.float64
    return np.asarray(np.nextafter(values.astype(kind), kind(towards * np.inf)))


def _highest(dtype: torch.dtype) -> float | int:
    """What no score reaches."""
    return 2**31 - 1 if dtype == torch.int32 else np.inf
