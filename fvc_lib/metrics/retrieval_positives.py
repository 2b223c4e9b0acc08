"""What belongs to each query of a direction of retrieval, ordered by similarity."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from fvc_lib.metrics.retrieval_exact import (
    BoolArray,
    at_least,
    double_products,
    double_rounding,
    exact_values,
    flushed,
    rows_at_once,
    single_rounding,
)
from fvc_lib.metrics.retrieval_rows import Rows
from fvc_lib.metrics.weighting import FloatArray, IntArray


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
