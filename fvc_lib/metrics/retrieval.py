"""Retrieval metrics between videos and texts in both directions, exact, without the matrix of all similarities.

A similarity is the exact dot product of two float32 rows; normalise the rows for cosines. A positive is a candidate
that belongs to the query. The rank of the best positive is 1 plus the number of wrong candidates that are at least as
similar, so ties count against the model. If all embeddings are equal, the positives rank last and not first.

The matrix of similarities is computed block by block, once for both directions. A block is multiplied in float32, or in
float64 where float32 leaves too many comparisons unsure. The largest rounding error of a product is known. A score that
differs from a positive's similarity by more than this error is counted at once. Other scores are compared in float64,
and those too close for float64 by sums without rounding. So the result does not depend on the size of the blocks, the
processor or the device.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.classification import FloatArray, IntArray

KS = (1, 5, 10)
MEMORY_BYTES = 64_000_000
BoolArray = npt.NDArray[np.bool_]
SingleArray = npt.NDArray[np.float32]

_LARGEST_NORM = 1e15  # products of two such norms stay far inside the range of float32
_LEAST_BLOCK, _BLOCK = 16, 1024  # least and largest number of rows per block side; 4 MB of scores fit into the cache
_FIXED_BYTES = 10_000_000  # memory for comparing single pairs, and for small arrays
_BYTES_PER_ROW = 160  # positives, norms and counts of both directions, with one pair per video
_BYTES_PER_MORE_PAIR = 165
_AT_ONCE = 1 << 17  # numbers converted, and scores searched, at once: 1 MB as float64
_MOST_OPEN = 0.03  # largest unsure share of a block's pairs; above it float64 is faster


@dataclass(frozen=True)
class DirectionMetrics:
    """How well the queries of one direction find their positives, the candidates that belong to them.

    Source of NDCG: K. Järvelin and J. Kekäläinen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20
    (2002), with gain 1 and discount 1 / log2(1 + rank).

    Attributes:
        ks: the values of k for which recall was measured.
        recall_at_k: for each k, the share of queries whose best positive has rank k or better.
        median_rank: median over queries of the rank of the best positive, from 1.
        mean_rank: mean over queries of the same rank.
        mrr: mean over queries of 1 / the same rank.
        ndcg: mean over queries of NDCG, which counts all positives in the whole ranking.
        mean_positive_similarity: mean dot product over all pairs of a query and one of its positives.
        num_queries: number of queries with at least one positive.
        num_candidates: number of candidates per query.
        query_indices: int64 (num_queries,), the row number of each query.
        ranks: int64 (num_queries,), the rank of each query's best positive.
        num_positives: int64 (num_queries,), the number of positives of each query.
    """

    ks: tuple[int, ...]
    recall_at_k: tuple[float, ...]
    median_rank: float
    mean_rank: float
    mrr: float
    ndcg: float
    mean_positive_similarity: float
    num_queries: int
    num_candidates: int
    query_indices: IntArray
    ranks: IntArray
    num_positives: IntArray

    def as_metrics(self) -> dict[str, float]:
        """Return all scalar metrics and counts by name, such as ``recall@1``."""
        recalls = {f"recall@{k}": value for k, value in zip(self.ks, self.recall_at_k, strict=True)}
        names = ("median_rank", "mean_rank", "mrr", "ndcg", "mean_positive_similarity", "num_queries", "num_candidates")
        return recalls | {name: float(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class RetrievalMetrics:
    """Both directions of one retrieval.

    Attributes:
        video_to_text: every video with a text is a query among all texts.
        text_to_video: every text with a video is a query among all videos.
    """

    video_to_text: DirectionMetrics
    text_to_video: DirectionMetrics

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics of both directions by direction and name, such as ``video_to_text/recall@1``."""
        return {
            f"{direction}/{name}": value
            for direction, found in vars(self).items()
            for name, value in found.as_metrics().items()
        }


def retrieval_metrics(
    video_embeddings: np.ndarray | torch.Tensor,
    text_embeddings: np.ndarray | torch.Tensor,
    text_of_video: Any,
    ks: Sequence[int] = KS,
    *,
    memory_bytes: int = MEMORY_BYTES,
    log: Callable[[str], None] | None = None,
) -> RetrievalMetrics:
    """Return recall, ranks, MRR and NDCG from videos to texts and from texts to videos, by dot products.

    A similarity is the dot product of two rows. Rows are not normalised here: divide each row by its norm first if
    cosines are wanted, else a long row is similar to everything.

    A text that several videos share must be one row of ``text_embeddings``; all its videos are then positives. The r-th
    best positive of a query has rank r plus the number of wrong candidates that are at least as similar. Two equal rows
    of ``text_embeddings`` are two candidates, and the wrong one counts as a tie against the model. A text without a
    video is a candidate but no query.

    Embeddings stay on their device and are converted block by block; float64 is rounded to float32.

    Args:
        video_embeddings: (N, D), a numpy array, or a torch tensor on any device.
        text_embeddings: (M, D), likewise.
        text_of_video: int (N,), the row of each video's text; or int (P, 2) of (video row, text row) where a video may
            have several texts, or none.
        ks: different values of k, from 1, for which recall is wanted.
        memory_bytes: memory that may be used beyond the embeddings.
        log: called with lines about the sizes and the blocks.

    Raises:
        ValueError: embeddings are empty, of a wrong shape or dtype, or not finite; ``text_of_video`` names a missing
            row; or ``ks`` are invalid.
    """
    places = tuple(int(k) for k in ks)
    if not places or min(places) < 1 or places != tuple(ks) or len(set(places)) < len(places):
        raise ValueError(f"ks={tuple(ks)!r}: give different whole numbers from 1 on")
    given = _as_rows(video_embeddings, "video_embeddings"), _as_rows(text_embeddings, "text_embeddings")
    (num_videos, dimensions), (num_texts, others) = given[0].shape, given[1].shape
    if dimensions != others:
        raise ValueError(f"video_embeddings have {dimensions} numbers per row and text_embeddings {others}")
    pairs = _check_pairs(text_of_video, num_videos, num_texts)
    plan = plan_retrieval(num_videos, num_texts, dimensions, memory_bytes, max(0, pairs[0].size - num_videos))
    log = log or (lambda _: None)
    for line in plan.describe():
        log(line)
    directions = count_all(Rows(given[0], "video_embeddings"), Rows(given[1], "text_embeddings"), pairs, plan)
    log(f"similarities: {sum(each.compared for each in directions):,} pairs compared one by one without rounding")
    to_text, to_video = (_measure(direction, places) for direction in directions)
    return RetrievalMetrics(to_text, to_video)


def _measure(direction: Direction, ks: tuple[int, ...]) -> DirectionMetrics:
    starts, queries = direction.starts, np.flatnonzero(direction.number)  # those with a positive
    from_best = starts[direction.query + 1] - np.arange(direction.query.size)  # 1 for the most similar
    ranks = from_best + direction.reached - direction.num_as_similar
    best, number = ranks[starts[queries + 1] - 1], direction.number[queries]
    ideal = np.cumsum(1 / np.log2(2 + np.arange(number.max())))[number - 1]
    return DirectionMetrics(
        ks=ks,
        recall_at_k=tuple(float(np.count_nonzero(best <= k)) / best.size for k in ks),
        median_rank=float(np.median(best)),
        mean_rank=float(best.sum()) / best.size,
        mrr=math.fsum(1 / best) / best.size,
        ndcg=math.fsum(np.add.reduceat(1 / np.log2(1 + ranks), starts[queries]) / ideal) / best.size,
        mean_positive_similarity=math.fsum(direction.similarity) / ranks.size,
        num_queries=best.size,
        num_candidates=len(direction.candidates),
        query_indices=queries,
        ranks=best,
        num_positives=number,
    )


def _as_rows(embeddings: np.ndarray | torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(embeddings, torch.Tensor):
        array = np.asarray(embeddings)
        with warnings.catch_warnings():  # a read-only array, say a memory map, is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            embeddings = torch.from_numpy(np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array)
    if embeddings.is_complex() or embeddings.dtype == torch.bool or embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"{name} have shape {tuple(embeddings.shape)} and are of {embeddings.dtype}; give real numbers "
            "(rows, dimensions), none of them 0"
        )
    return embeddings.detach()


def _check_pairs(text_of_video: Any, num_videos: int, num_texts: int) -> tuple[IntArray, IntArray]:
    """Return ``(video, text)``, the row numbers of all pairs, int64 (P,) each; raise ``ValueError`` if invalid."""
    given = np.asarray(text_of_video.cpu() if hasattr(text_of_video, "cpu") else text_of_video)
    if given.dtype.kind not in "iu":
        raise ValueError(f"text_of_video is of {given.dtype}; give whole numbers, rows of text_embeddings")
    if given.shape == (num_videos,):
        video, text = np.arange(num_videos), given.astype(np.int64)
    elif given.ndim == 2 and given.shape[1] == 2 and len(given):
        video, text = np.unique(given.astype(np.int64), axis=0).T.copy()
    else:
        raise ValueError(
            f"text_of_video has shape {given.shape}; give one text for each of the {num_videos} videos, "
            "or pairs of shape (P, 2)"
        )
    for rows, limit, what in ((video, num_videos, "video"), (text, num_texts, "text")):
        wrong = np.flatnonzero((rows < 0) | (rows >= limit))
        if wrong.size:
            raise ValueError(
                f"text_of_video names {what} {rows[wrong[0]]} (pair {wrong[0]}); {what}s are 0 to {limit - 1}"
            )
    return video, text


@dataclass(frozen=True)
class RetrievalPlan:
    """The sizes of a retrieval and of its blocks; the result does not depend on the blocks.

    Attributes:
        num_videos: number of videos.
        num_texts: number of texts.
        dimensions: numbers per embedding.
        block: largest number of videos, and of texts, in a block.
        more_pairs: number of pairs that belong together, minus one per video; at least 0.
    """

    num_videos: int
    num_texts: int
    dimensions: int
    block: int
    more_pairs: int = 0

    @property
    def streamed_bytes(self) -> int:
        """Return the estimated memory peak beyond the embeddings, in bytes."""
        rows = _BYTES_PER_ROW * (self.num_videos + self.num_texts) + _BYTES_PER_MORE_PAIR * self.more_pairs
        videos, texts = min(self.block, self.num_videos), min(self.block, self.num_texts)
        scores = videos * texts * 12  # float64 scores with three masks, or float32 scores
        operands = (videos + texts) * self.dimensions * (4 + 8)  # in float32 and in float64
        return _FIXED_BYTES + rows + scores + operands

    def describe(self) -> list[str]:
        """Return lines for the log: the sizes, the memory of the full matrix, and the blocks."""
        blocks = math.ceil(self.num_videos / self.block) * math.ceil(self.num_texts / self.block)
        dense_bytes = 4 * self.num_videos * self.num_texts
        return [
            f"samples accumulated: {self.num_videos:,} of {self.dimensions:,} numbers",
            f"unique texts: {self.num_texts:,}",
            f"dense similarities would take: {dense_bytes / 1e6:,.1f} MB as float32",
            f"streamed: {blocks:,} blocks of up to {self.block:,} rows in {self.streamed_bytes / 1e6:,.1f} MB",
        ]


def plan_retrieval(
    num_videos: int, num_texts: int, dimensions: int, memory_bytes: int, more_pairs: int = 0
) -> RetrievalPlan:
    """Return a plan with the largest blocks that fit into the cache and into ``memory_bytes``.

    If no block fits into ``memory_bytes``, the smallest block size is taken.
    """
    block = _BLOCK
    while block > _LEAST_BLOCK:
        plan = RetrievalPlan(num_videos, num_texts, dimensions, block, more_pairs)
        if plan.streamed_bytes <= memory_bytes:
            break
        block //= 2
    return RetrievalPlan(num_videos, num_texts, dimensions, block, more_pairs)


class Rows:
    """The embeddings of all videos or of all texts, read as float32 rows.

    Args:
        embeddings: (R, D), of any real dtype, on any device.
        name: name of the embeddings in errors.

    Raises:
        ValueError: a row is not finite, or its norm is too large for float32 products.
    """

    def __init__(self, embeddings: torch.Tensor, name: str = "embeddings") -> None:
        self._embeddings = embeddings
        self.dimensions = embeddings.shape[1]
        self.at_once = max(16, _AT_ONCE // self.dimensions)
        everywhere = np.arange(len(embeddings))
        squares = products(self, self, everywhere, everywhere)
        # float64 (R,), upper bounds of the L2 norms; not finite where a number of the row is not.
        self.norms: FloatArray = np.sqrt(squares) * (1 + (self.dimensions + 2) * 2.0**-52)
        wrong = np.flatnonzero(~(self.norms <= _LARGEST_NORM))
        if wrong.size:
            raise ValueError(
                f"row {wrong[0]} of {name} has a norm of {self.norms[wrong[0]]:.3g}, and so do {wrong.size - 1} more; "
                f"give finite rows of norm {_LARGEST_NORM:.0e} or less"
            )

    def __len__(self) -> int:
        return len(self._embeddings)

    def at(self, rows: IntArray) -> SingleArray:
        """Return the embeddings float32 (K, D) of the row numbers ``rows`` (K,)."""
        taken = self._embeddings.index_select(0, torch.from_numpy(rows).to(self._embeddings.device))
        return np.asarray(taken.to(torch.float32).cpu().numpy())

    @functools.cached_property
    def kinds(self) -> IntArray:
        """Return int64 (R,), a number per row that is equal exactly for rows with equal embeddings."""
        _, norm, number = np.unique(self.norms, return_inverse=True, return_counts=True)
        shared = np.flatnonzero(number[norm] > 1)
        digests = np.empty(shared.size, dtype="S16")
        for start in range(0, shared.size, self.at_once):
            rows = self.at(shared[start : start + self.at_once]) + np.float32(0)  # no -0
            digests[start : start + len(rows)] = [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
        kinds = np.arange(len(self))
        _, first, same = np.unique(digests, return_index=True, return_inverse=True)
        kinds[shared] = shared[first[same]]
        return kinds


def products(left: Rows, right: Rows, left_rows: IntArray, right_rows: IntArray) -> FloatArray:
    """Return the float64 dot products (K,) of the K pairs of row numbers ``left_rows`` and ``right_rows``."""
    parts = zip(_parts(left_rows, left.at_once), _parts(right_rows, left.at_once), strict=True)
    found = [np.vecdot(left.at(a).astype(np.float64), right.at(b).astype(np.float64)) for a, b in parts]
    return np.concatenate([np.empty(0), *found])


def is_at_least(query: SingleArray, candidate: SingleArray, positive: SingleArray) -> BoolArray:
    """Return whether ``query . candidate >= query . positive`` without rounding, bool (K,); all are float32 (K, D)."""
    query = query.astype(np.float64)  # products of float32 numbers are exact as doubles
    terms = np.concatenate([query * candidate, -query * positive], axis=1)
    return np.array([math.fsum(row) >= 0 for row in terms.tolist()], dtype=bool)


def exact_product(left: SingleArray, right: SingleArray) -> tuple[float, ...]:
    """Return the exact dot product of two rows as a tuple of floats whose sum it is.

    Every float is the rounded remainder after the floats before it. Tuples sort like the exact products.
    """
    terms = (left.astype(np.float64) * right).tolist()
    found: list[float] = []
    while not found or found[-1]:
        found.append(math.fsum(terms))
        terms.append(-found[-1])
    return tuple(found)


def largest_error(queries: FloatArray, candidates: FloatArray, dimensions: int, dtype: type[np.floating]) -> FloatArray:
    """Return the largest rounding error of a dot product in ``dtype``, float64 (Q,), per query over all candidates.

    Source: N. J. Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 3.1, with the Cauchy-Schwarz
    inequality.

    Args:
        queries: float64 (Q,), norms of the queries.
        candidates: float64 (C,), norms of the candidates.
        dimensions: numbers per row.
        dtype: float32 or float64.
    """
    kind, norm = np.finfo(dtype), candidates.max()
    flushed = 2 * dimensions * float(kind.tiny) * (1 + queries + norm)  # tiny numbers may become 0
    return np.asarray(1.01 * (dimensions + 8) * float(kind.eps) / 2 * queries * norm + flushed)


class Direction:
    """One direction of retrieval, with the positives of all queries and the counts for their ranks.

    The P positives of all Q queries are sorted by query, then by rising similarity. Those of query q have the indices
    ``starts[q]`` to ``starts[q + 1] - 1``.

    Args:
        axis: 0: the queries are the videos, the rows of every block; 1: the texts, the columns.
        sides: the embeddings of videos and texts.
        pairs: row numbers int64 (P,) of videos and of texts that belong together.
    """

    def __init__(self, axis: int, sides: tuple[Rows, Rows], pairs: tuple[IntArray, IntArray]) -> None:
        self.axis = axis
        self.compared = 0  # number of pairs that were compared one by one
        self.queries, self.candidates = sides[axis], sides[1 - axis]
        # (Q,), largest rounding error of ``similarity``.
        self.error = largest_error(self.queries.norms, self.candidates.norms, sides[0].dimensions, np.float64)
        similarity = products(self.queries, self.candidates, pairs[axis], pairs[1 - axis])
        order = np.lexsort((similarity, pairs[axis]))
        self.query, self.candidate, self.similarity = pairs[axis][order], pairs[1 - axis][order], similarity[order]
        self.starts = np.searchsorted(self.query, np.arange(len(self.queries) + 1))
        self.number = np.diff(self.starts)  # (Q,), number of positives
        self.order = np.argsort(self.number, kind="stable")  # (Q,): a block has queries with similar numbers
        first_equal = np.maximum.accumulate(np.where(self._sort_near_ties(), 0, np.arange(order.size)))
        # (P,): positives of the same query, and candidates of the counted blocks, at least as similar as this one.
        self.num_as_similar = self.starts[self.query + 1] - first_equal
        self.reached = np.zeros(order.size, dtype=np.int64)

    def _sort_near_ties(self) -> BoolArray:
        """Sort positives that float64 cannot tell apart by their exact similarity.

        Returns bool (P,): True where a positive is exactly as similar as the one before it.
        """
        is_tie = np.zeros(self.query.size, dtype=bool)
        is_tie[1:] = (np.diff(self.query) == 0) & (np.diff(self.similarity) <= 2 * self.error[self.query[1:]])
        unsure = np.flatnonzero(is_tie | np.append(is_tie[1:], False))
        sides = zip(self.query[unsure, None], self.candidate[unsure, None], strict=True)
        exact = [exact_product(self.queries.at(query)[0], self.candidates.at(own)[0]) for query, own in sides]
        group = np.cumsum(~is_tie)[unsure]
        order = sorted(range(unsure.size), key=lambda i: (group[i], exact[i]))
        self.candidate[unsure] = self.candidate[unsure[order]]
        for before, after, pair in zip(order, order[1:], unsure[1:], strict=False):
            is_tie[pair] &= exact[before] == exact[after]
        return is_tie

    def count(self, scores: npt.NDArray[np.floating], rows: tuple[IntArray, IntArray]) -> None:
        """Add the candidates of one block to the counts of the positives that they reach.

        Args:
            scores: float32 or float64 (V, T), similarities of the block's videos and texts.
            rows: row numbers of the block's videos (V,) and texts (T,).
        """
        candidates = rows[1 - self.axis]
        for level in range(int(self.number[rows[self.axis]].max())):
            positives, reached, between = self.level(scores, rows, level)
            self.reached[positives] += reached
            if not (reached.any() or between.any()):
                break  # no score reaches any higher positive
            for first in range(0, between.size, _AT_ONCE):
                flat = first + np.flatnonzero(between.reshape(-1)[first : first + _AT_ONCE])
                if flat.size:
                    found = np.divmod(flat, between.shape[1])
                    self._compare(positives[found[self.axis]], candidates[found[1 - self.axis]])

    def level(
        self, scores: npt.NDArray[np.floating], rows: tuple[IntArray, IntArray], level: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """Compare a block's scores with one positive per query: the one at index ``level`` by rising similarity.

        Queries without so many positives are skipped; Q queries remain.

        Returns:
            ``(positives, reached, unsure)``: the indices of the positives int64 (Q,), the number of candidates that
            surely are at least as similar int64 (Q,), and bool, True where the comparison is unsure, with the shape of
            the remaining scores.
        """
        queries, norms = rows[self.axis], self.candidates.norms[rows[1 - self.axis]]
        start = int(np.searchsorted(self.number[queries], level, side="right"))
        queries = queries[start:]
        positives = self.starts[queries] + level
        of_scores = largest_error(self.queries.norms[queries], norms, self.queries.dimensions, scores.dtype.type)
        error = (of_scores + self.error[queries]) * (1 + 1e-9)
        scores = scores[start:] if self.axis == 0 else scores[:, start:]
        above = []
        for side in (-1, 1):
            limits = (self.similarity[positives] + side * error).astype(scores.dtype)
            limits = np.nextafter(limits, scores.dtype.type(side * np.inf))
            above.append(scores >= (limits[:, None] if self.axis == 0 else limits))
        number = np.add.reduce(above[1].view(np.uint8), axis=1 - self.axis, dtype=np.uint16)  # a block is below 2^16
        return positives, number.astype(np.int64), above[0] ^ above[1]

    def _compare(self, positive: IntArray, candidate: IntArray) -> None:
        """Compare K pairs one by one and count the candidates that are at least as similar as their positive.

        ``positive`` and ``candidate`` are int64 (K,). Pairs are compared in float64, and without rounding where float64
        cannot decide.
        """
        self.compared += positive.size
        query, own, kinds = self.query[positive], self.candidate[positive], self.candidates.kinds
        reached = kinds[candidate] == kinds[own]
        rest = np.flatnonzero(~reached)
        similarity = products(self.queries, self.candidates, query[rest], candidate[rest])
        difference = similarity - self.similarity[positive[rest]]
        reached[rest] = difference >= 0
        for part in _parts(rest[np.abs(difference) <= 2 * self.error[query[rest]]], self.queries.at_once):
            sides = self.queries.at(query[part]), self.candidates.at(candidate[part]), self.candidates.at(own[part])
            reached[part] = is_at_least(*sides)
        np.add.at(self.reached, positive[reached], 1)


def _parts(rows: IntArray, size: int) -> list[IntArray]:
    return [rows[start : start + size] for start in range(0, rows.size, size)]


def count_all(videos: Rows, texts: Rows, pairs: tuple[IntArray, IntArray], plan: RetrievalPlan) -> list[Direction]:
    """Return the directions video to text and text to video, with all candidates counted."""
    directions = [Direction(axis, (videos, texts), pairs) for axis in (0, 1)]
    for rows in _parts(directions[0].order, plan.block):
        left: npt.NDArray[np.floating] = videos.at(rows)
        for number, columns in enumerate(_parts(directions[1].order, plan.block)):
            scores = left @ texts.at(columns).astype(left.dtype, copy=False).T
            if number == 0:
                unsure = sum(int(each.level(scores, (rows, columns), 0)[2].sum()) for each in directions)
                if unsure > _MOST_OPEN * scores.size:
                    left = left.astype(np.float64)  # for the other blocks of these rows as well
                    scores = left @ texts.at(columns).astype(np.float64).T
            for direction in directions:
                direction.count(scores, (rows, columns))
            del scores  # before the next block takes memory
    return directions
