"""Metrics of videos and texts: retrieval in both directions, and the likeness of captions to reference texts.

Retrieval: a query (a video or a text) is compared with all candidates (all texts or all videos). A similarity is the
dot product of two float32 embeddings, to the accuracy of float64; normalise the embeddings for cosines. A positive is a
candidate that belongs to the query. The rank of the best positive is 1 plus the number of wrong candidates that are at
least as similar. So ties count against the model, and if all embeddings are equal, the positives rank last.
Similarities that differ by no more than rounding errors are ties. The matrix of all similarities is computed block by
block.

Captions are compared by their words: runs of letters, digits and underscores, in lower case. Punctuation is ignored.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fvc_lib.metrics.classification import SHARE, FloatArray, IntArray, SumsMetric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import measure_of_rows

SingleArray = NDArray[np.float32]

KS = (1, 5, 10)
DIRECTIONS = ("video_to_text", "text_to_video")
_BLOCK = 1024  # videos, and texts, per block: 4 MB of similarities, 8 MB if float64; counts are below 65,536
_WORD = re.compile(r"\w+")
_LONGEST = 4  # words of an n-gram in BLEU

declare("recall@*", "Recall@", "higher", "Share of queries with a match among the first k.", is_share=True)
declare("mrr", "Mean reciprocal rank", "higher", "Mean of 1 / rank of the first match.", is_share=True)
declare("ndcg", "NDCG", "higher", "Discounted gain of all matches' ranks against the best order.", is_share=True)
declare("median_rank", "Median rank", "lower", "Half of the queries have their first match by this rank.")
declare("mean_rank", "Mean rank", "lower", "Mean rank of the first match.")
declare(
    "mean_positive_similarity", "Mean similarity of matching pairs", "higher",
    "Mean dot product of pairs that match; their mean cosine where embeddings have norm 1.",
)  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """The results of retrieval in one direction: how well queries find the candidates that belong to them.

    A query is a video or a text. Its positives are the candidates that belong to it.

    Attributes:
        metrics: values by name. ``recall@K``: the share of queries whose best positive has rank K or better.
            ``median_rank``, ``mean_rank`` and ``mrr`` (the mean of 1 / rank) are over the ranks of the best positives.
            ``ndcg`` is the mean NDCG over queries, with gain 1 and discount 1 / log2(1 + rank) for every positive
            (K. Järvelin and J. Kekäläinen, ACM TOIS 20, 2002). ``mean_positive_similarity`` is the mean dot product
            over all pairs that belong together.
        queries: int64 (Q,), the row numbers of the queries; rows without a positive are no queries.
        ranks: int64 (Q,), the rank of each query's best positive.
        num_positives: int64 (Q,), the number of positives of each query.
        num_candidates: number of candidates per query.
    """

    metrics: dict[str, float]
    queries: IntArray
    ranks: IntArray
    num_positives: IntArray
    num_candidates: int


def retrieval_metrics(
    video_embeddings: Any,
    text_embeddings: Any,
    pairs: ArrayLike,
    ks: Sequence[int] = KS,
) -> dict[str, Ranking]:
    """Evaluate retrieval in both directions; return a ``Ranking`` for ``video_to_text`` and for ``text_to_video``.

    The similarity is the dot product. For cosines, divide each row by its norm first: embeddings are not normalised
    here, and a long row would be similar to everything. A text that several videos share must be a single row of
    ``text_embeddings``; all its videos are then positives (candidates that belong to the query). The r-th best positive
    of a query has rank r plus the number of wrong candidates that are at least as similar. A text without a video is a
    candidate but not a query.

    Args:
        video_embeddings: (N, D), a numpy array or a torch tensor; rounded to float32.
        text_embeddings: (M, D), a numpy array or a torch tensor; rounded to float32.
        pairs: int (P, 2) of (video row, text row), the pairs that belong together. A video may have several texts, or
            none.
        ks: values of k, from 1, for which recall is wanted.

    Raises:
        ValueError: embeddings are empty, of a wrong shape, not finite or above 1e15, rows of videos and texts differ in
            length, or ``pairs`` names a missing row.
    """
    videos, texts = _rows(video_embeddings, "video_embeddings"), _rows(text_embeddings, "text_embeddings")
    pairs = np.unique(np.asarray(pairs, dtype=np.int64), axis=0)
    if pairs.size == 0 or pairs.min() < 0 or (pairs.max(axis=0) >= (len(videos), len(texts))).any():
        raise ValueError(f"pairs: wanted rows (P, 2) of {len(videos)} videos and {len(texts)} texts.")
    both = _Direction(videos, texts, pairs), _Direction(texts, videos, pairs[:, ::-1])
    for row in range(0, len(videos), _BLOCK):
        own = both[0].pairs[slice(*both[0].starts[[row, min(row + _BLOCK, len(videos))]])]
        for column in range(0, len(texts), _BLOCK):
            scores = videos[row : row + _BLOCK] @ texts[column : column + _BLOCK].T
            inside = own[own[:, 1] // _BLOCK * _BLOCK == column] - (row, column)
            scores[tuple(inside.T)] = -np.inf
            for axis, direction in enumerate(both):
                direction.count(scores, axis, (row, column))
    return {name: _ranking(direction, ks) for name, direction in zip(DIRECTIONS, both, strict=True)}


def _rows(embeddings: Any, name: str) -> SingleArray:
    on_cpu = embeddings.detach().float().cpu() if hasattr(embeddings, "detach") else embeddings  # a torch tensor
    rows = np.asarray(on_cpu, dtype=np.float32)
    if rows.ndim != 2 or not rows.size or not max(rows.max(), -rows.min()) <= 1e15:  # else a float32 could overflow
        raise ValueError(f"{name}: got shape {rows.shape}, wanted (rows, dimensions), not 0, of numbers up to 1e15.")
    return rows


class _Direction:
    """The positives of all queries of one direction, and the number of wrong candidates counted for each so far.

    The P positives are sorted by query and, within a query, by rising similarity.

    Attributes:
        queries: float32 (Q, D).
        candidates: float32 (C, D).
        pairs: int64 (P, 2), rows of queries and candidates that belong together.
        similarity: float64 (P,).
        starts: int64 (Q + 1,). The positives of query q have the indices from ``starts[q]`` to ``starts[q + 1]``.
        rounding: float64 (Q,). Times the ``eps`` of a data type, it is twice the largest error of a dot product.
        num_wrong: int64 (P,), wrong candidates that are at least as similar as the positive.
    """

    def __init__(self, queries: SingleArray, candidates: SingleArray, pairs: IntArray) -> None:
        self.queries, self.candidates = queries, candidates
        parts = [part.T for part in np.array_split(pairs, 1 + len(pairs) // _BLOCK)]  # not all rows at once in memory
        similarity = np.concatenate([_products(queries[one], candidates[other]) for one, other in parts])
        order = np.lexsort((similarity, pairs[:, 0]))
        self.pairs, self.similarity = pairs[order], similarity[order]
        self.starts = np.searchsorted(self.pairs[:, 0], np.arange(len(queries) + 1))
        # N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 3.1.
        norms, others = (np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64)) for x in (queries, candidates))
        self.rounding = (queries.shape[1] + 8) * norms * others.max()
        self.num_wrong = np.zeros(len(pairs), dtype=np.int64)

    def count(self, scores: NDArray[Any], axis: int, first: tuple[int, int]) -> None:
        """Count the wrong candidates in one block of similarities.

        Pairs whose order ``scores`` cannot tell because of rounding errors are computed again in float64; if they are
        more than 1 in 50, all of the block.

        Args:
            scores: float32 (videos, texts); -inf for positives.
            axis: the axis of the queries, 0 or 1.
            first: the indices of the first video and of the first text.
        """
        queries = self.queries[first[axis] : first[axis] + scores.shape[axis]]
        others = self.candidates[first[1 - axis] : first[1 - axis] + scores.shape[1 - axis]]
        starts = self.starts[first[axis] : first[axis] + len(queries) + 1]
        rounding = self.rounding[first[axis] : first[axis] + len(queries)]
        kind = np.finfo(np.float32)
        error = rounding * kind.eps + queries.shape[1] * kind.smallest_normal  # tiny products may become 0
        rows, level = np.flatnonzero(np.diff(starts)), 0  # ``level`` positives of each query were compared before
        while rows.size:
            own = starts[rows] + level
            # Twice the error, so that equal similarities are equal here, too.
            limit = self.similarity[own] - rounding[rows] * np.finfo(np.float64).eps
            block = scores if rows.size == len(queries) else scores.take(rows, axis)
            low, high = (np.expand_dims((limit + off[rows]).astype(block.dtype), 1 - axis) for off in (-error, error))
            reach, exceed = block >= low, block >= high
            # Rows are videos; so the queries are columns if axis is 1.
            query, candidate = np.divmod(np.flatnonzero(reach ^ exceed), block.shape[1])[:: 1 - 2 * axis]
            if query.size * 50 > block.size:
                exact = queries.astype(np.float64) @ others.astype(np.float64).T
                scores, error = np.where(np.isneginf(scores), scores, exact.T if axis else exact), 0 * error
                continue
            self.num_wrong[own] += np.add.reduce(exceed.view(np.uint8), axis=1 - axis, dtype=np.uint16)
            np.add.at(self.num_wrong, own[query], _products(queries[rows[query]], others[candidate]) >= limit[query])
            level += 1
            # If no candidate reaches a positive, none reaches a more similar one.
            rows = rows[reach.any(axis=1 - axis) & (np.diff(starts)[rows] > level)]


def _products(left: SingleArray, right: SingleArray) -> FloatArray:
    """Return the dot products (K,) in float64 of the rows (K, D) of both arrays."""
    return np.asarray(np.vecdot(left.astype(np.float64), right.astype(np.float64)))


def _ranking(direction: _Direction, ks: Sequence[int]) -> Ranking:
    """Return the ranks of the best positives and the retrieval metrics, after all blocks are counted.

    Args:
        direction: the counts.
        ks: values of k, from 1, for which recall is wanted.
    """
    starts, query = direction.starts, direction.pairs[:, 0]
    ranks = starts[query + 1] - np.arange(query.size) + direction.num_wrong
    asked = np.flatnonzero(np.diff(starts))
    best = ranks[starts[asked + 1] - 1]
    number = np.diff(starts)[asked]
    gains = np.add.reduceat(1 / np.log2(1 + ranks), starts[asked])
    ideal = np.cumsum(1 / np.log2(2 + np.arange(number.max())))[number - 1]
    recalls = {f"recall@{k}": float(np.count_nonzero(best <= k)) / best.size for k in ks}
    metrics = recalls | {
        "median_rank": float(np.median(best)),
        "mean_rank": float(best.sum()) / best.size,
        "mrr": math.fsum(1 / best) / best.size,
        "ndcg": math.fsum(gains / ideal) / best.size,
        "mean_positive_similarity": math.fsum(direction.similarity) / ranks.size,
    }
    return Ranking(metrics, asked, best, number, len(direction.candidates))


# --- Captions


def words(text: str) -> list[str]:
    """Return the words of ``text`` in order, in lower case and without punctuation."""
    return _WORD.findall(text.lower())


def content_words(texts: Sequence[str]) -> frozenset[str]:
    """Return the words that occur in at most half of ``texts``, and so help to distinguish them."""
    having = Counter(word for text in texts for word in set(words(text)))
    return frozenset(word for word, number in having.items() if 2 * number <= len(texts))


@declare("exact_match", "Word for word", "higher", "Share of captions that are a reference.", is_share=True)
def exact_match(caption: str, references: Sequence[str]) -> float:
    """Return 1 if the caption has exactly the words of one reference, in the same order, else 0."""
    return float(any(words(caption) == words(reference) for reference in references))


@declare("token_f1", "Token F1", "higher", "F1 of a caption's words against its best reference.", is_share=True)
def token_f1(caption: str, references: Sequence[str]) -> float:
    """Return the largest F1 of the caption's words over all ``references``; 0 without references.

    F1 is the harmonic mean of precision and recall of words; repeated words count as often as they occur.

    Source: P. Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text" (EMNLP 2016).
    """
    written, best = Counter(words(caption)), 0.0
    for reference in references:
        wanted = Counter(words(reference))
        total = written.total() + wanted.total()
        best = max(best, 2 * (written & wanted).total() / total if total else 1.0)
    return best


@declare(
    "content_word_recall", "Content words named", "higher", "Share of a reference's content words that are named.",
    is_share=True,
)  # fmt: skip
def content_word_recall(caption: str, references: Sequence[str], content: Collection[str]) -> float:
    """Return the share of a reference's content words that occur in the caption: the largest share over references.

    ``content`` are the words that count (see ``content_words``). References without such words are skipped; NaN if
    none is left.
    """
    written = set(words(caption))
    wanted = [set(words(reference)).intersection(content) for reference in references]
    return max((len(written & named) / len(named) for named in wanted if named), default=math.nan)


@declare("bleu4", "BLEU-4", "higher", "Precision of n-grams up to four words, over all captions.", is_share=True)
def bleu4_measure(captions: Sequence[str], references: Sequence[Sequence[str]]) -> SumsMetric:
    """Return a measure of BLEU with n-grams of up to four words, over all captions.

    A measure is a metric that holds the data of its rows, here of the N captions.

    An n-gram counts as matched at most as often as it occurs in one reference. The brevity penalty compares the
    caption's length with that of the reference nearest in length, of two equally near the shorter. There is no
    smoothing: the value is 0 where no n-gram of some length matches. Source: K. Papineni et al., "BLEU: a method for
    automatic evaluation of machine translation" (ACL 2002).

    Args:
        captions: N texts.
        references: N lists of texts, the references of each caption.
    """
    columns = np.array([_bleu_columns(*pair) for pair in zip(captions, references, strict=True)], dtype=np.float64)
    return measure_of_rows("bleu4", columns.reshape(len(captions), 2 * _LONGEST + 2), _bleu_of_sums, SHARE)


def _bleu_columns(caption: str, references: Sequence[str]) -> list[int]:
    """Return 10 counts of a caption; BLEU is computed from their sums over all captions.

    The first eight are two counts for each n = 1, 2, 3, 4: the caption's n-grams that occur in a reference, and all its
    n-grams. The last two are the number of words of the caption, and of the reference nearest in length.
    """
    written = words(caption)
    wanted = [words(reference) for reference in references]
    columns = []
    for length in range(1, _LONGEST + 1):
        grams = _grams(written, length)
        most = reduce(or_, (_grams(reference, length) for reference in wanted), type(grams)())
        columns += [(grams & most).total(), grams.total()]
    nearest = min((len(text) for text in wanted), key=lambda size: (abs(size - len(written)), size), default=0)
    return [*columns, len(written), nearest]


def _grams(text: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[start : start + length]) for start in range(len(text) - length + 1))


def _bleu_of_sums(sums: FloatArray) -> FloatArray:
    matches = sums[:, 0 : 2 * _LONGEST : 2]
    totals = sums[:, 1 : 2 * _LONGEST : 2]
    with np.errstate(divide="ignore"):
        mean_log = np.log(divide(matches, totals, undefined=0.0)).mean(axis=1)  # minus infinity where nothing matches
    penalty = np.minimum(0.0, 1 - divide(sums[:, -1], sums[:, -2], undefined=np.inf))
    return np.asarray(np.exp(mean_log + penalty))
