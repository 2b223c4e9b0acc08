"""What belongs to each query of a direction of retrieval, ordered by similarity."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from fvc_lib.metrics.retrieval_exact import (
    BoolArray,
    at_least,
    double_products,
    double_rounding,
    flushed,
    order_of_equals,
    rows_at,
    rows_at_once,
    single_rounding,
)
from fvc_lib.metrics.weighting import FloatArray, IntArray


@dataclass(frozen=True)
class Positives:
    """The positives of all queries of one direction, in the order of the queries and of rising similarity.

    Attributes:
        queries: (Q, D), the embeddings that look for something.
        candidates: (C, D), those that are looked through.
        starts: int64 (Q + 1,): the positives of query q are ``[starts[q], starts[q + 1])``; none: it asks nothing.
        query: int64 (P,), whose each positive is.
        candidate: int64 (P,), which candidate it is.
        similarity: float64 (P,), not falling within a query; off by at most ``margin`` of the query.
        margin: float64 (Q,).
        single_margin: float64 (Q,), how far off the difference of one in float32 and one with ``margin`` is at most.
        num_as_similar: int64 (P,), positives of the same query at least as similar as this one, itself among them.
    """

    queries: torch.Tensor
    candidates: torch.Tensor
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
        step = rows_at_once(self.candidates.shape[1])
        for start in range(0, found.size, step):
            rows = rows_at(self.candidates, np.arange(start, min(start + step, found.size))) + np.float32(0)  # no -0
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
        step = rows_at_once(self.queries.shape[1])
        for start in range(0, asked.size, step):
            rows = asked[start : start + step]
            found[rows] = self._compare(query[rows], candidate[rows], positive[rows], in_single)
        return found

    def _compare(self, query: IntArray, candidate: IntArray, positive: IntArray, in_single: bool) -> BoolArray:
        left, right = rows_at(self.queries, query), rows_at(self.candidates, candidate)
        found, close = np.zeros(query.size, dtype=bool), np.arange(query.size)
        if in_single:
            difference = np.vecdot(left, right) - self.similarity[positive]
            found = difference > 0
            close = np.flatnonzero(np.abs(difference) <= self.single_margin[query])
        if close.size:
            difference = double_products(left[close], right[close]) - self.similarity[positive[close]]
            found[close] = difference > 0
            close = close[np.abs(difference) <= 2 * self.margin[query[close]]]
        if close.size:
            found[close] = at_least(
                left[close], right[close], rows_at(self.candidates, self.candidate[positive[close]])
            )
        return found


def order_positives(
    queries: torch.Tensor,
    candidates: torch.Tensor,
    norms: tuple[FloatArray, FloatArray],
    query: IntArray,
    candidate: IntArray,
    similarity: FloatArray,
) -> Positives:
    """The positives of one direction from its pairs.

    Args:
        queries: (Q, D).
        candidates: (C, D).
        norms: of the queries, float64 (Q,), and of the candidates, float64 (C,); not less than the true ones.
        query: int64 (P,), no pair twice.
        candidate: int64 (P,).
        similarity: float64 (P,), from ``pair_similarities``.
    """
    dimensions, largest = queries.shape[1], norms[1].max()
    margin = double_rounding(dimensions) * norms[0] * largest
    single = single_rounding(dimensions) * norms[0] * largest + flushed(dimensions, norms[0], largest)
    order = np.lexsort((similarity, query))
    query, candidate, similarity = query[order], candidate[order], similarity[order]
    joined = (np.diff(query) == 0) & (np.diff(similarity) <= 2 * margin[query[1:]])
    equal = np.zeros(query.size, dtype=bool)  # to the one before
    if joined.any():  # neighbours that doubles cannot tell apart
        unsure = np.flatnonzero(np.append(joined, False) | np.append(False, joined))
        place = np.zeros_like(query)
        place[unsure] = order_of_equals(queries, candidates, query[unsure], candidate[unsure])
        order = np.lexsort((place, np.cumsum(np.append(True, ~joined))))
        candidate, place = candidate[order], place[order]
        equal[1:] = joined & (np.diff(place) == 0)
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    first_equal = np.maximum.accumulate(np.where(equal, 0, np.arange(query.size)))
    as_similar = starts[query + 1] - first_equal
    return Positives(
        queries, candidates, starts, query, candidate, similarity, margin, margin + single, as_similar
    )  # fmt: skip
