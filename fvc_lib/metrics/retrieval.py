"""Retrieval between videos and texts in both directions, exactly, without the matrix of all similarities.

A similarity is the real dot product of two rows as float32: normalise the rows for cosines.
A rank is one more than the number of wrong candidates that are at least as similar as the right one: ties count against
the model, so embeddings that have collapsed into one come last, below chance, instead of first. Counting needs no sort:
one pass over blocks of the matrix serves both directions. Where a product is computed with rounding, whatever rounding
could change is settled exactly, so no result depends on the size of the blocks, the processor or the device.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fvc_lib.metrics.classification import IntArray
from fvc_lib.metrics.retrieval_stream import Direction, Rows, Stream, one_thread, plan_retrieval

KS = (1, 5, 10)
MEMORY_BYTES = 64_000_000
_LARGEST_NORM = 1e15  # the product of two stays far inside float32


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
    mean_positive_similarity: float  # over all pairs of a query and a positive
    num_queries: int  # with at least one positive
    num_candidates: int  # rows that were searched
    query_indices: IntArray  # int64 (num_queries,): the row of each such query,
    ranks: IntArray  # the rank of its best positive
    num_positives: IntArray  # and how many it has

    def chance(self) -> dict[str, float]:
        """What candidates in random order would be expected to score, by the names of ``as_metrics``.

        Below this lies what has collapsed: each of its ranks is the worst of all that its ties allow.
        """
        numbers, queries = np.unique(self.num_positives, return_counts=True)
        each = np.array([_chance(int(number), self.num_candidates, self.ks) for number in numbers])
        names = (*(f"recall@{k}" for k in self.ks), "mean_rank", "mrr", "ndcg")
        return {name: float(value) for name, value in zip(names, queries @ each / queries.sum(), strict=True)}

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
            for direction in ("video_to_text", "text_to_video")
            for name, value in getattr(self, direction).as_metrics().items()
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
    """Recall, ranks, MRR and NDCG from videos to texts and from texts to videos.

    Equal texts must be one row of ``text_embeddings`` with many videos: each of those is right, and none counts against
    another. Two rows whose embeddings agree to the last bit remain two candidates, of which one is wrong and, as a tie,
    counts against the model. Texts without a video are candidates only.

    The positives of one query do not count against one another: the r-th best has rank r plus the wrong candidates at
    least as similar. Embeddings stay where they are and are converted block by block; wider numbers than float32 are
    rounded to it.

    Args:
        video_embeddings: (N, D) of numpy or torch on any device.
        text_embeddings: (M, D), likewise.
        text_of_video: int (N,), the row of each video's text; or int (P, 2) of (video row, text row) where a video may
            have several texts, or none.
        ks: where recall is wanted.
        memory_bytes: what may be taken beyond the embeddings; 160 bytes of it per row and 165 per pair beyond one
            for each video, the rest for blocks.
        log: called with lines about what is streamed and how.

    Raises:
        ValueError: empty, of the wrong shape or kind, NaN or infinite (the row is named), a text that is not there, a k
            below 1, or too little memory.
    """
    ks = _check_ks(ks)
    given = _as_rows(video_embeddings, "video_embeddings"), _as_rows(text_embeddings, "text_embeddings")
    if given[0].shape[1] != given[1].shape[1]:
        raise ValueError(
            f"video_embeddings have {given[0].shape[1]} numbers per row and text_embeddings {given[1].shape[1]}; "
            "both must come from the same space"
        )
    pairs = _check_pairs(text_of_video, len(given[0]), len(given[1]))
    sizes = len(given[0]), len(given[1]), given[0].shape[1]
    plan = plan_retrieval(*sizes, memory_bytes, max(0, pairs[0].size - sizes[0]))
    log = log or (lambda _: None)
    for line in plan.describe():
        log(line)
    with one_thread():
        videos, texts = Rows(given[0]), Rows(given[1])
        _check_norms(videos, "video_embeddings")
        _check_norms(texts, "text_embeddings")
        stream = Stream(videos, texts, pairs, plan)
        stream.run()
    log(stream.describe())
    to_text, to_video = (_measure(direction, ks) for direction in stream.directions)
    return RetrievalMetrics(to_text, to_video)


def _measure(direction: Direction, ks: tuple[int, ...]) -> DirectionMetrics:
    starts, number, similarity = direction.starts, direction.number, direction.similarity
    asking = np.flatnonzero(number)
    from_best = starts[direction.query + 1] - np.arange(direction.query.size)  # 1 for the most similar
    ranks = from_best + direction.reached - direction.num_as_similar
    best = ranks[starts[asking + 1] - 1]
    return DirectionMetrics(
        ks=ks,
        recall_at_k=tuple(float(np.count_nonzero(best <= k)) / best.size for k in ks),
        median_rank=float(np.median(best)),
        mean_rank=float(best.sum()) / best.size,
        mrr=math.fsum(1 / best) / best.size,
        ndcg=_mean_ndcg(ranks, starts),
        mean_positive_similarity=math.fsum(similarity) / similarity.size,
        num_queries=best.size,
        num_candidates=len(direction.candidates),
        query_indices=asking,
        ranks=best,
        num_positives=number[asking],
    )


def _chance(num_positives: int, num_candidates: int, ks: tuple[int, ...]) -> list[float]:
    """Expected recall at each of ``ks``, rank and reciprocal rank of the best positive, and NDCG, in random order."""
    place = np.arange(1, num_candidates + 1)
    later = np.cumprod(np.maximum(0, num_candidates - num_positives - place + 1) / (num_candidates - place + 1))
    here = np.append(1, later[:-1]) - later  # the best positive stands at this place
    discounts = 1 / np.log2(1 + place)
    recalls = [1 - float(later[min(k, num_candidates) - 1]) for k in ks]
    gain = discounts.mean() * num_positives / discounts[:num_positives].sum()
    return [*recalls, (num_candidates + 1) / (num_positives + 1), float((here / place).sum()), float(gain)]


def _mean_ndcg(ranks: IntArray, starts: IntArray) -> float:
    """Over the queries with a positive; ``ranks`` (P,), those of query q in ``[starts[q], starts[q + 1])``."""
    gains = 1 / np.log2(1 + ranks)
    number = np.diff(starts)
    ideal = np.append(0, np.cumsum(1 / np.log2(2 + np.arange(number.max()))))
    asking = np.flatnonzero(number)
    values = np.add.reduceat(gains, starts[asking]) / ideal[number[asking]]
    return math.fsum(values) / asking.size


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
