"""Retrieval between videos and texts in both directions, exactly, without the matrix of all similarities.

A similarity is the real dot product of two rows as they are (given as float32): who wants cosines normalises the rows.
A rank is one more than the number of wrong candidates that are at least as similar as the right one: ties count against
the model, so embeddings that have collapsed into one come last, below chance, instead of first. Counting needs no sort:
one pass over blocks of the matrix serves both directions. Where a product is computed with rounding, whatever rounding
could change is settled exactly, so no result depends on the size of the blocks, the processor or the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.retrieval_blocks import RetrievalPlan, plan_retrieval

if TYPE_CHECKING:
    import torch

    from fvc_lib.metrics.retrieval_blocks import Positives, Rows

KS = (1, 5, 10)
MEMORY_BYTES = 64_000_000
_LARGEST_NORM = 1e15  # the product of two stays far inside float32


@dataclass(frozen=True)
class DirectionMetrics:
    """How well the queries of one direction find what belongs to them.

    Attributes:
        ks: what recall was asked at.
        recall_at_k: per ``ks``, the share of queries whose best positive has rank k or better; so 1 where k is
            not less than the number of candidates.
        median_rank: of the best positive of each query, from 1.
        mean_rank: likewise.
        mrr: mean reciprocal rank of the best positive.
        ndcg: mean normalised discounted cumulative gain of all positives over the whole ranking, with gain 1 and
            discount 1 / log2(1 + rank). Source: K. Järvelin and J. Kekäläinen, "Cumulated gain-based evaluation of IR
            techniques", ACM TOIS 20 (2002).
        mean_positive_similarity: over all pairs of a query and a positive.
        num_queries: how many asked.
        num_candidates: how many were looked through.
        query_indices: int64 (num_queries,), rows of the queries; rows to which nothing belongs ask nothing.
        ranks: int64 (num_queries,), of the best positive, from 1.
        num_positives: int64 (num_queries,).
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
    """Both directions of one retrieval.

    Attributes:
        video_to_text: every video with a text asks among all texts.
        text_to_video: every text with a video asks among all videos.
        plan: how the similarities were streamed.
    """

    video_to_text: DirectionMetrics
    text_to_video: DirectionMetrics
    plan: RetrievalPlan

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
    device: str | torch.device | None = None,
    plan: RetrievalPlan | None = None,
    progress: Callable[[int, int], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> RetrievalMetrics:
    """Recall, ranks, MRR and NDCG from videos to texts and from texts to videos.

    Equal texts must be one row of ``text_embeddings`` with many videos: each of those is right, and none counts against
    another. Two rows whose embeddings agree to the last bit remain two candidates, of which one is wrong and, as a tie,
    counts against the model. Texts without a video ask nothing; they are candidates like all others.

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
        device: where to multiply and compare; that of the video embeddings if not given.
        plan: blocks of one's own instead of those that ``memory_bytes`` allows.
        progress: told (pairs done, all pairs) now and then.
        log: told, line by line, what is streamed and how.

    Raises:
        ValueError: empty, of the wrong shape or kind, NaN or infinite (the row is named), a text that is not there, a k
            below 1, or too little memory.
    """
    import torch

    from fvc_lib.metrics.retrieval_blocks import Rows, in_whole_numbers
    from fvc_lib.metrics.retrieval_stream import Stream, one_thread

    ks = _check_ks(ks)
    videos, texts = _as_rows(video_embeddings, "video_embeddings"), _as_rows(text_embeddings, "text_embeddings")
    if videos.shape[1] != texts.shape[1]:
        raise ValueError(
            f"video_embeddings have {videos.shape[1]} numbers per row and text_embeddings {texts.shape[1]}; "
            "both must come from the same space"
        )
    video, text = _check_pairs(text_of_video, len(videos), len(texts))
    sizes = len(videos), len(texts), videos.shape[1]
    plan = plan or plan_retrieval(*sizes, memory_bytes, max(0, video.size - len(videos)))
    if (plan.num_videos, plan.num_texts, plan.dimensions) != sizes:
        raise ValueError(f"the plan is for other embeddings than {sizes[0]} videos and {sizes[1]} texts: {plan}")
    tell = log if log is not None else _tell_nobody
    for line in plan.describe().splitlines():
        tell(line)
    with one_thread():
        norms = _check_norms(videos, "video_embeddings"), _check_norms(texts, "text_embeddings")
        (video_order, video), (text_order, text) = _by_number(video, len(videos)), _by_number(text, len(texts))
        left, right = Rows(videos, *_placed(norms[0], video_order)), Rows(texts, *_placed(norms[1], text_order))
        left, right = in_whole_numbers(left, right)
        where = videos.device if device is None else torch.device(device)
        stream = Stream(left, right, _both_ways(left, right, video, text), plan, where)
        stream.run(progress)
        reached = [direction.at_least_as_similar() for direction in stream.directions]
    tell(stream.describe())
    to_text, to_video = (
        _measure(direction.positives, of_positives, ks)
        for direction, of_positives in zip(stream.directions, reached, strict=True)
    )
    return RetrievalMetrics(to_text, to_video, plan)


def _tell_nobody(line: str) -> None:
    pass


def _by_number(row: IntArray, num_rows: int) -> tuple[IntArray | None, IntArray]:
    """Which row stands at each place if those in fewer pairs come first (none: all at their own), and ``row`` by place.

    So the queries of a block have about as many positives each, and all of its comparisons are of use.
    """
    number = np.bincount(row, minlength=num_rows)
    if (number == number[0]).all():
        return None, row
    order = np.argsort(number, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(num_rows)
    return order, place[row]


def _placed(norms: FloatArray, order: IntArray | None) -> tuple[FloatArray, IntArray | None]:
    return (norms if order is None else norms[order]), order


def _both_ways(videos: Rows, texts: Rows, video: IntArray, text: IntArray) -> tuple[Positives, Positives]:
    from fvc_lib.metrics.retrieval_blocks import order_positives, pair_similarities

    similarity = pair_similarities(videos, texts, video, text)
    to_texts = order_positives(videos, texts, video, text, similarity)
    return to_texts, order_positives(texts, videos, text, video, similarity)


def _measure(positives: Positives, at_least_as_similar: IntArray, ks: tuple[int, ...]) -> DirectionMetrics:
    starts, number = positives.starts, positives.per_query
    asking = np.flatnonzero(number)
    from_best = starts[positives.query + 1] - np.arange(positives.query.size)  # 1 for the most similar
    ranks = from_best + at_least_as_similar - positives.num_as_similar
    best = ranks[starts[asking + 1] - 1]
    rows = asking if positives.queries.order is None else positives.queries.order[asking]
    back = np.argsort(rows)  # to the order in which the embeddings were given
    unit = positives.queries.unit * positives.candidates.unit
    return DirectionMetrics(
        ks=ks,
        recall_at_k=tuple(float(np.count_nonzero(best <= k)) / best.size for k in ks),
        median_rank=float(np.median(best)),
        mean_rank=float(best.sum()) / best.size,
        mrr=math.fsum(1 / best) / best.size,
        ndcg=_mean_ndcg(ranks, starts),
        mean_positive_similarity=math.fsum(positives.similarity) / positives.similarity.size * unit,
        num_queries=best.size,
        num_candidates=len(positives.candidates),
        query_indices=rows[back],
        ranks=best[back],
        num_positives=number[asking][back],
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
    import torch

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


def _check_norms(embeddings: torch.Tensor, name: str) -> FloatArray:
    from fvc_lib.metrics.retrieval_blocks import rows_at_once
    from fvc_lib.metrics.retrieval_stream import measure_norms

    norms = measure_norms(embeddings, rows_at_once(embeddings.shape[1]))
    wrong = np.flatnonzero(~(norms <= _LARGEST_NORM))
    if wrong.size:
        what = "has a norm of" if np.isfinite(norms[wrong[0]]) else "holds NaN or infinite numbers, norm"
        raise ValueError(
            f"row {wrong[0]} of {name} {what} {norms[wrong[0]]:.3g}, and so do {wrong.size - 1} more; "
            f"give finite rows of norm {_LARGEST_NORM:.0e} or less"
        )
    return norms


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
