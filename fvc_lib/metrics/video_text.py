"""Metrics of videos and texts: retrieval in both directions, and the likeness of captions to reference texts.

Retrieval: a query (a video or a text) is compared with all candidates (all texts or all videos). A similarity is the
dot product of two float32 embeddings, computed in float64; normalise the embeddings for cosines. A positive is a
candidate that belongs to the query. The rank of the best positive is 1 plus the number of wrong candidates that are at
least as similar. So ties count against the model, and if all embeddings are equal, the positives rank last.
Similarities that differ by no more than rounding errors are ties. The matrix of all similarities is computed block by
block, once for both directions.

Captions are compared by their words: runs of letters, digits and underscores, in lower case. Punctuation is ignored.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fvc_lib.metrics.classification import SHARE, FloatArray, IntArray, SumsMetric, divide
from fvc_lib.metrics.declaration import declare
from fvc_lib.metrics.intervals import measure_of_rows

SingleArray = NDArray[np.float32]

KS = (1, 5, 10)
DIRECTIONS = ("video_to_text", "text_to_video")
_BLOCK = 1024  # videos, and texts, per block: 8 MB of similarities
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
    """How well queries find their positives (the candidates that belong to them), in one direction of retrieval.

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

    Embeddings are not normalised here: divide each row by its norm first if cosines are wanted, else a long row is
    similar to everything. A text that several videos share must be a single row of ``text_embeddings``; all its videos
    are then positives. The r-th best positive of a query has rank r plus the number of wrong candidates that are at
    least as similar. A text without a video is a candidate but no query.

    Args:
        video_embeddings: (N, D), a numpy array or a torch tensor; rounded to float32.
        text_embeddings: (M, D), a numpy array or a torch tensor; rounded to float32.
        pairs: int (P, 2) of (video row, text row), the pairs that belong together. A video may have several texts, or
            none.
        ks: values of k, from 1, for which recall is wanted.

    Raises:
        ValueError: embeddings are empty, of a wrong shape or not finite, or ``pairs`` names a missing row.
    """
    videos, texts = _rows(video_embeddings, "video_embeddings"), _rows(text_embeddings, "text_embeddings")
    if videos.shape[1] != texts.shape[1]:
        raise ValueError(f"video_embeddings have {videos.shape[1]} numbers per row, text_embeddings {texts.shape[1]}.")
    given = np.asarray(pairs, dtype=np.int64)
    if given.size == 0 or given.min() < 0 or (given.max(axis=0) >= (len(videos), len(texts))).any():
        raise ValueError(f"pairs: wanted rows (P, 2) of {len(videos)} videos and {len(texts)} texts.")
    video, text = np.unique(given, axis=0).T
    to_text, to_video = _Direction(videos, texts, video, text), _Direction(texts, videos, text, video)
    for top in range(0, len(videos), _BLOCK):
        left = videos[top : top + _BLOCK].astype(np.float64)
        places = slice(to_text.starts[top], to_text.starts[top + len(left)])
        for first in range(0, len(texts), _BLOCK):
            scores = left @ texts[first : first + _BLOCK].astype(np.float64).T
            column = to_text.candidate[places] - first
            inside = (column >= 0) & (column < scores.shape[1])
            scores[to_text.query[places][inside] - top, column[inside]] = -np.inf  # positives are not wrong
            to_text.count(scores, top)
            to_video.count(scores.T, first)
    return {name: ranked.ranking(ks) for name, ranked in zip(DIRECTIONS, (to_text, to_video), strict=True)}


def _rows(embeddings: Any, name: str) -> SingleArray:
    if hasattr(embeddings, "detach"):  # a torch tensor
        embeddings = embeddings.detach().float().cpu()
    rows = np.asarray(embeddings, dtype=np.float32)
    if rows.ndim != 2 or not rows.size or not np.isfinite((rows.min(), rows.max())).all():
        raise ValueError(f"{name}: got shape {rows.shape}, wanted finite numbers (rows, dimensions), none of them 0.")
    return rows


def _products(left: SingleArray, right: SingleArray, left_rows: IntArray, right_rows: IntArray) -> FloatArray:
    """Return the dot products of K pairs of rows, float64 (K,).

    Product k is that of row ``left_rows[k]`` of ``left`` (N, D) and row ``right_rows[k]`` of ``right`` (M, D).
    """
    products = np.empty(left_rows.size)
    for start in range(0, products.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        some = left[left_rows[part]].astype(np.float64), right[right_rows[part]].astype(np.float64)
        products[part] = np.vecdot(*some)
    return products


class _Direction:
    """Counts for the rankings in one direction of retrieval, such as from videos to texts.

    A positive is a pair of a query and a candidate that belong together. For each of the P positives, the wrong
    candidates that are at least as similar are counted. Positives are sorted by query, then by rising similarity. The
    positives of query q have the indices ``starts[q]`` to ``starts[q + 1] - 1``.

    Args:
        queries: float32 (Q, D).
        candidates: float32 (C, D).
        query: int64 (P,), row numbers of the queries in the pairs that belong together.
        candidate: int64 (P,), row numbers of their candidates.
    """

    def __init__(self, queries: SingleArray, candidates: SingleArray, query: IntArray, candidate: IntArray) -> None:
        similarity = _products(queries, candidates, query, candidate)
        order = np.lexsort((similarity, query))
        self.query, self.candidate, self.similarity = query[order], candidate[order], similarity[order]
        self.starts = np.searchsorted(self.query, np.arange(len(queries) + 1))
        self.num_candidates = len(candidates)
        # Twice the largest rounding error of a dot product in float64 (N. J. Higham, "Accuracy and Stability of
        # Numerical Algorithms", 2002, 3.1): products of float32 numbers are exact, their sum is not.
        norms, others = (
            np.sqrt(_products(rows, rows, np.arange(len(rows)), np.arange(len(rows)))) for rows in (queries, candidates)
        )
        error = (queries.shape[1] + 8) * np.finfo(np.float64).eps * norms * others.max()
        self.limit = self.similarity - error[self.query]
        self.num_wrong = np.zeros(query.size, dtype=np.int64)

    def count(self, scores: FloatArray, first: int) -> None:
        """Count the wrong candidates of a block that are at least as similar as a positive; add them to ``num_wrong``.

        Args:
            scores: float64 (R, C), similarities of R queries and C candidates; minus infinity for positives.
            first: row number of the block's first query.
        """
        starts = self.starts[first : first + len(scores) + 1]
        number = np.diff(starts)
        for level in range(int(number.max())):
            rows = np.flatnonzero(number > level)
            positives = starts[rows] + level
            self.num_wrong[positives] += (scores[rows] >= self.limit[positives, None]).sum(axis=1)

    def ranking(self, ks: Sequence[int]) -> Ranking:
        """Return the ``Ranking`` of this direction, after ``count`` was called with all blocks.

        ``ks`` are the values of k for which recall is wanted.
        """
        number = np.diff(self.starts)
        queries = np.flatnonzero(number)
        ranks = self.starts[self.query + 1] - np.arange(self.query.size) + self.num_wrong  # 1 for the most similar
        best, number = ranks[self.starts[queries + 1] - 1], number[queries]
        gains = np.add.reduceat(1 / np.log2(1 + ranks), self.starts[queries])
        ideal = np.cumsum(1 / np.log2(2 + np.arange(number.max())))[number - 1]
        metrics = {f"recall@{k}": float(np.count_nonzero(best <= k)) / best.size for k in ks}
        metrics["median_rank"] = float(np.median(best))
        metrics["mean_rank"] = float(best.sum()) / best.size
        metrics["mrr"] = math.fsum(1 / best) / best.size
        metrics["ndcg"] = math.fsum(gains / ideal) / best.size
        metrics["mean_positive_similarity"] = math.fsum(self.similarity) / ranks.size
        return Ranking(metrics, queries, best, number, self.num_candidates)


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
    """Return a measure (a metric that holds its rows): BLEU with n-grams of up to four words, over all captions.

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
    """Return what a caption adds to the 10 counts over all captions that give BLEU.

    The first eight are two per n = 1, 2, 3, 4: the caption's n-grams that occur in a reference, and all its n-grams.
    The last two are the number of words of the caption, and of the reference nearest in length.
    """
    written, wanted = words(caption), [words(reference) for reference in references]
    columns = []
    for length in range(1, _LONGEST + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for reference in wanted:
            most |= _grams(reference, length)
        grams = _grams(written, length)
        columns += [(grams & most).total(), grams.total()]
    nearest = min((len(text) for text in wanted), key=lambda size: (abs(size - len(written)), size), default=0)
    return [*columns, len(written), nearest]


def _grams(text: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[start : start + length]) for start in range(len(text) - length + 1))


def _bleu_of_sums(sums: FloatArray) -> FloatArray:
    matches, totals = sums[:, 0 : 2 * _LONGEST : 2], sums[:, 1 : 2 * _LONGEST : 2]
    with np.errstate(divide="ignore"):
        mean_log = np.log(divide(matches, totals, undefined=0.0)).mean(axis=1)  # minus infinity where nothing matches
    penalty = np.minimum(0.0, 1 - divide(sums[:, -1], sums[:, -2], undefined=np.inf))
    return np.asarray(np.exp(mean_log + penalty))
