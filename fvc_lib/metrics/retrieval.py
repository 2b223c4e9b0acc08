"""Retrieval between videos and texts in both directions, exactly, without the matrix of all similarities.

A similarity is the real dot product of two rows as float32: normalise them for cosines. A rank is one more than the
number of wrong candidates at least as similar as the right one: ties count against the model, so that what has
collapsed into one embedding comes last, below chance, instead of first.

One pass over blocks of the matrix counts for both directions. A block is multiplied in float32, or in float64 where
float32 leaves too much open; the largest error of both is known. Scores further from a positive's similarity than that
are counted at once; the others are compared in doubles, and what doubles cannot tell apart is summed without rounding.
So no result depends on the size of the blocks, the processor or the device.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.classification import FloatArray, IntArray

KS = (1, 5, 10)
MEMORY_BYTES = 64_000_000
BoolArray = npt.NDArray[np.bool_]
SingleArray = npt.NDArray[np.float32]

_ALONE = threading.RLock()  # two at once would each give back the other's limit of threads for good
_LARGEST_NORM = 1e15  # the product of two stays far inside float32
_LEAST_BLOCK, _BLOCK = 16, 1024  # rows of each side: scores of 4 MB stay in the cache, and calls cost little
_FIXED_BYTES = 10_000_000  # what comparing single pairs takes, and small arrays
_BYTES_PER_ROW = 160  # positives, norms and counts of both directions, with one pair per video
_BYTES_PER_MORE_PAIR = 165
_AT_ONCE = 1 << 17  # numbers that are converted, and scores that are searched, at once: 1 MB as doubles
_MOST_LEVELS = 128  # positives of a query with which the scores of a block are compared one after the other
_MOST_OPEN = 0.03  # of a block's pairs: with more to compare one by one, a product in doubles is faster


@dataclass(frozen=True)
class DirectionMetrics:
    """How well the queries of one direction find what belongs to them.

    Source of NDCG: K. Järvelin and J. Kekäläinen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20
    (2002), with gain 1 and discount 1 / log2(1 + rank).
    """

    ks: tuple[int, ...]  # where recall was measured
    recall_at_k: tuple[float, ...]  # share of queries whose best positive has rank k or better
    median_rank: float  # of each query's best positive, from 1, as are the next two
    mean_rank: float
    mrr: float
    ndcg: float  # mean, of all positives over the whole ranking
    mean_positive_similarity: float  # dot product, over all pairs of a query and a positive
    num_queries: int  # with at least one positive
    num_candidates: int  # rows that were searched
    query_indices: IntArray  # int64 (num_queries,): the row of each such query,
    ranks: IntArray  # the rank of its best positive
    num_positives: IntArray  # and how many it has

    def as_metrics(self) -> dict[str, float]:
        """Every number by its name."""
        recalls = {f"recall@{k}": value for k, value in zip(self.ks, self.recall_at_k, strict=True)}
        names = ("median_rank", "mean_rank", "mrr", "ndcg", "mean_positive_similarity", "num_queries", "num_candidates")
        return recalls | {name: float(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class RetrievalMetrics:
    """Both directions of one retrieval."""

    video_to_text: DirectionMetrics  # every video with a text is a query among all texts
    text_to_video: DirectionMetrics  # every text with a video is a query among all videos

    def as_metrics(self) -> dict[str, float]:
        """Every number by its direction and name, such as ``video_to_text/recall@1``."""
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

    A similarity is the dot product of two rows as they are. Nothing is normalised: divide each row by its norm first
    where cosines are meant, else a long row is near to everything.

    Equal texts must be one row of ``text_embeddings`` with many videos, which are all right: the r-th best of a query's
    positives has rank r plus the wrong candidates at least as similar. Two equal rows are two candidates, and as a tie
    the wrong one counts against the model. Texts without a video are candidates only. Embeddings stay where they are
    and are converted block by block; wider numbers than float32 are rounded to it.

    Args:
        video_embeddings: (N, D) of numpy or torch on any device.
        text_embeddings: (M, D), likewise.
        text_of_video: int (N,), the row of each video's text; or int (P, 2) of (video row, text row) where a video may
            have several texts, or none.
        ks: where recall is wanted.
        memory_bytes: what may be taken beyond the embeddings.
        log: called with lines about what is streamed and how.

    Raises:
        ValueError: empty, of the wrong shape or kind, NaN or infinite, a text that is not there, a k below 1, or too
            little memory.
    """
    ks = _check_ks(ks)
    given = _as_rows(video_embeddings, "video_embeddings"), _as_rows(text_embeddings, "text_embeddings")
    (num_videos, dimensions), (num_texts, others) = given[0].shape, given[1].shape
    if dimensions != others:
        raise ValueError(
            f"video_embeddings have {dimensions} numbers per row and text_embeddings {others}; both must come from the "
            "same space"
        )
    pairs = _check_pairs(text_of_video, num_videos, num_texts)
    plan = plan_retrieval(num_videos, num_texts, dimensions, memory_bytes, max(0, pairs[0].size - num_videos))
    log = log or (lambda _: None)
    for line in plan.describe():
        log(line)
    with one_thread():
        videos, texts = Rows(given[0]), Rows(given[1])
        _check_norms(videos, "video_embeddings")
        _check_norms(texts, "text_embeddings")
        directions = count_all(videos, texts, pairs, plan)
    log(f"similarities: {sum(each.compared for each in directions):,} pairs compared one by one without rounding")
    to_text, to_video = (_measure(direction, ks) for direction in directions)
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


def _check_ks(ks: Sequence[int]) -> tuple[int, ...]:
    found = tuple(ks)
    wrong = [k for k in found if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1]
    if wrong or not found or len(set(found)) < len(found):
        raise ValueError(f"ks={found!r}: give different whole numbers from 1 on")
    return tuple(int(k) for k in found)


def _as_rows(embeddings: np.ndarray | torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(embeddings, torch.Tensor):
        array = np.asarray(embeddings)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{name} are of {array.dtype}; give real numbers")
        with warnings.catch_warnings():  # a read-only array, say a memory map, is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            embeddings = torch.from_numpy(np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array)
    if embeddings.is_complex() or embeddings.dtype == torch.bool:
        raise ValueError(f"{name} are of {embeddings.dtype}; give real numbers")
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(f"{name} have shape {tuple(embeddings.shape)}; give (rows, dimensions), none of them 0")
    return embeddings.detach()


def _check_norms(rows: Rows, name: str) -> None:
    wrong = np.flatnonzero(~(rows.norms <= _LARGEST_NORM))
    if wrong.size:
        norm = rows.norms[wrong[0]]
        what = "has a norm of" if np.isfinite(norm) else "holds NaN or infinite numbers, norm"
        raise ValueError(
            f"row {wrong[0]} of {name} {what} {norm:.3g}, and so do {wrong.size - 1} more; "
            f"give finite rows of norm {_LARGEST_NORM:.0e} or less"
        )


def _check_pairs(text_of_video: Any, num_videos: int, num_texts: int) -> tuple[IntArray, IntArray]:
    """Video and text of each pair, int64 (P,) each."""
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
                f"text_of_video names {what} {rows[wrong[0]]} (pair {wrong[0]}), and {wrong.size - 1} more are out of "
                f"range; {what}s are 0 to {limit - 1}"
            )
    return video, text


@dataclass(frozen=True)
class RetrievalPlan:
    """How a retrieval is streamed; the result does not depend on it."""

    num_videos: int
    num_texts: int
    dimensions: int  # numbers per row
    video_block: int  # rows that are compared at once
    text_block: int
    more_pairs: int = 0  # that belong together, beyond one per video

    @property
    def streamed_bytes(self) -> int:
        """What is taken at most beyond the embeddings, estimated."""
        rows = _BYTES_PER_ROW * (self.num_videos + self.num_texts) + _BYTES_PER_MORE_PAIR * self.more_pairs
        scores = self.video_block * self.text_block * 12  # as doubles, and three answers each or those of float32
        operands = (self.video_block + self.text_block) * self.dimensions * (4 + 8)  # as float32 and as doubles
        return _FIXED_BYTES + rows + scores + operands

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
    """Return the largest blocks that fit into the cache and ``memory_bytes``, or the smallest blocks there are."""
    memory_bytes = max(memory_bytes, least_memory_bytes(num_videos, num_texts, dimensions, more_pairs))
    sizes, videos, texts = (num_videos, num_texts, dimensions), min(_BLOCK, num_videos), min(_BLOCK, num_texts)
    while (plan := RetrievalPlan(*sizes, videos, texts, more_pairs)).streamed_bytes > memory_bytes:
        videos, texts = (math.ceil(videos / 2), texts) if videos >= texts else (videos, math.ceil(texts / 2))
    return plan


def least_memory_bytes(num_videos: int, num_texts: int, dimensions: int, more_pairs: int = 0) -> int:
    """Return the least memory for such sizes, so that a run can check it before it trains."""
    videos, texts = (max(1, min(_LEAST_BLOCK, number)) for number in (num_videos, num_texts))
    return RetrievalPlan(num_videos, num_texts, dimensions, videos, texts, more_pairs).streamed_bytes


class Rows:
    """The embeddings of one side, (R, D) of any real type on any device, taken as float32 rows."""

    def __init__(self, embeddings: torch.Tensor) -> None:
        self._embeddings = embeddings
        self.dimensions = embeddings.shape[1]
        self.at_once = max(16, _AT_ONCE // self.dimensions)
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
    """float64 (K,): dot products in doubles of the rows (K,) of both sides."""
    parts = zip(_parts(left_rows, left.at_once), _parts(right_rows, left.at_once), strict=True)
    found = [np.vecdot(left.at(a).astype(np.float64), right.at(b).astype(np.float64)) for a, b in parts]
    return np.concatenate([np.empty(0), *found])


def is_at_least(query: SingleArray, candidate: SingleArray, positive: SingleArray) -> BoolArray:
    """Whether ``query . candidate >= query . positive`` in real numbers, of float32 rows (K, D): bool (K,)."""
    query = query.astype(np.float64)  # products of float32 numbers are exact as doubles
    terms = np.concatenate([query * candidate, -query * positive], axis=1)
    return np.array([math.fsum(row) >= 0 for row in terms.tolist()], dtype=bool)


def exact_product(left: SingleArray, right: SingleArray) -> tuple[float, ...]:
    """Return the exact dot product of two rows as doubles, each the rest of those before; they sort like it."""
    terms = (left.astype(np.float64) * right).tolist()
    found: list[float] = []
    while not found or found[-1]:
        found.append(math.fsum(terms))
        terms.append(-found[-1])
    return tuple(found)


def largest_error(queries: FloatArray, candidates: FloatArray, dimensions: int, dtype: type[np.floating]) -> FloatArray:
    """float64 (Q,): how far a product in ``dtype`` may be from the truth, of rows with norms (Q,) and (C,).

    Source: N. J. Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 3.1, with Cauchy and Schwarz.
    """
    kind, norm = np.finfo(dtype), candidates.max()
    flushed = 2 * dimensions * float(kind.tiny) * (1 + queries + norm)  # tiny numbers may become 0
    return np.asarray(1.01 * (dimensions + 8) * float(kind.eps) / 2 * queries * norm + flushed)


@dataclass(frozen=True)
class Block:
    """Scores (V, T) of the videos and texts at ``rows``, and how far those of either side may be from the truth."""

    scores: npt.NDArray[np.floating]  # float32 or float64
    rows: tuple[IntArray, IntArray]
    errors: tuple[FloatArray, FloatArray]


class Direction:
    """One direction of retrieval: its queries are the rows (axis 0) or the columns (axis 1) of every block.

    The positives (P,) of all queries (Q,) stand in the order of the queries and of rising similarity; those of query q
    are ``[starts[q], starts[q + 1])``.
    """

    def __init__(self, axis: int, sides: tuple[Rows, Rows], pairs: tuple[IntArray, IntArray]) -> None:
        self.axis = axis
        self.compared = 0  # pairs that were compared one by one
        self.queries, self.candidates = sides[axis], sides[1 - axis]
        # (Q,), of ``similarity``.
        self.error = largest_error(self.queries.norms, self.candidates.norms, sides[0].dimensions, np.float64)
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

    def count(self, block: Block) -> None:
        """Add to ``reached`` what ``block`` holds; every pair must come once."""
        queries, candidates = block.rows[self.axis], block.rows[1 - self.axis]
        number = self.number[queries]
        few = int(np.searchsorted(number, _MOST_LEVELS, side="right"))
        for level in range(number[few - 1] if few else 0):
            positives, reached, between = self.level(block, level, few)
            self.reached[positives] += reached
            if not (reached.any() or between.any()):
                break  # no score reaches any higher positive
            for first in range(0, between.size, _AT_ONCE):
                flat = first + np.flatnonzero(between.reshape(-1)[first : first + _AT_ONCE])
                if flat.size:
                    found = np.divmod(flat, between.shape[1])
                    self._compare(positives[found[self.axis]], candidates[found[1 - self.axis]])
        scores = block.scores if self.axis == 0 else block.scores.T
        for row in range(few, queries.size):
            self._count_query(queries[row], candidates, scores[row].astype(np.float64), block.errors[self.axis][row])

    def level(self, block: Block, level: int, stop: int | None = None) -> tuple[IntArray, IntArray, BoolArray]:
        """Return the scores next to the ``level``-th lowest positive of the queries before ``stop`` that have as many.

        Returns these positives, how many candidates surely reach each, and which pairs are unsure, with the shape of
        the scores.
        """
        queries = block.rows[self.axis]
        start = int(np.searchsorted(self.number[queries], level, side="right"))
        queries = queries[start:stop]
        positives = self.starts[queries] + level
        error = (block.errors[self.axis][start:stop] + self.error[queries]) * (1 + 1e-9)
        scores = block.scores[start:stop] if self.axis == 0 else block.scores[:, start:stop]
        above = []
        for side in (-1, 1):
            limits = (self.similarity[positives] + side * error).astype(scores.dtype)
            limits = np.nextafter(limits, scores.dtype.type(side * np.inf))
            above.append(scores >= (limits[:, None] if self.axis == 0 else limits))
        number = np.add.reduce(above[1].view(np.uint8), axis=1 - self.axis, dtype=np.uint16)  # a block is below 2^16
        return positives, number.astype(np.int64), above[0] ^ above[1]

    def _count_query(self, query: int, candidates: IntArray, values: FloatArray, error: float) -> None:
        """Do the same for one query with many positives, among which its similarities ``values`` (C,) are searched."""
        first, stop = self.starts[query : query + 2]
        error = (error + self.error[query]) * (1 + 1e-9)
        own = self.similarity[first:stop]
        sure, maybe = (np.searchsorted(own, values + off, side="right") for off in (-error, error))
        self.reached[first:stop] += np.bincount(sure, minlength=stop - first + 1)[::-1].cumsum()[-2::-1]
        while (still := np.flatnonzero(maybe > sure)).size:
            self._compare(first + sure[still], candidates[still])
            sure = sure + 1

    def _compare(self, positive: IntArray, candidate: IntArray) -> None:
        """Count the candidates (K,) at least as similar as the positives (K,): in doubles, or without rounding."""
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
    """Both directions, videos and texts as queries, with what is at least as similar as each positive counted."""
    directions = [Direction(axis, (videos, texts), pairs) for axis in (0, 1)]
    for rows in _parts(directions[0].order, plan.video_block):
        dtype: type[np.floating] = np.float32
        for number, columns in enumerate(_parts(directions[1].order, plan.text_block)):
            block = _block(videos, texts, rows, columns, dtype)
            shares = [each.level(block, 0)[2].sum() / block.scores.size for each in directions] if number == 0 else []
            if sum(shares) > _MOST_OPEN:
                dtype = np.float64  # for the other blocks of these rows as well
                block = _block(videos, texts, rows, columns, dtype)
            for direction in directions:
                direction.count(block)
            del block  # before the next one takes memory
    return directions


def _block(videos: Rows, texts: Rows, rows: IntArray, columns: IntArray, dtype: type[np.floating]) -> Block:
    scores = videos.at(rows).astype(dtype, copy=False) @ texts.at(columns).astype(dtype, copy=False).T
    norms = videos.norms[rows], texts.norms[columns]
    errors = [largest_error(norms[side], norms[1 - side], videos.dimensions, dtype) for side in (0, 1)]
    return Block(scores, (rows, columns), (errors[0], errors[1]))


@contextmanager
def one_thread() -> Iterator[None]:
    """For steps of a millisecond or less, between which other threads would only wait and spin."""
    with _ALONE, threadpool_limits(1, user_api="blas"):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
