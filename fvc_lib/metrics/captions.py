"""Similarity of a written text to the reference texts of the same video.

Texts are compared by their words: runs of letters, digits and underscores, in lower case; punctuation does not count.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import ANY_NUMBER, SHARE, FloatArray, Metric, divide
from fvc_lib.metrics.declaration import declare, is_share
from fvc_lib.metrics.intervals import measure_of_rows

_WORD = re.compile(r"\w+")
_LONGEST = 4  # words of an n-gram in BLEU


def words(text: str) -> list[str]:
    """Return the words of ``text``, in order."""
    return _WORD.findall(text.lower())


def content_words(texts: Sequence[str]) -> frozenset[str]:
    """Return the words that occur in at most half of ``texts``; such words distinguish one text from another."""
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
    return max((_f1(Counter(words(caption)), Counter(words(reference))) for reference in references), default=0.0)


@declare(
    "content_word_recall", "Content words named", "higher", "Share of a reference's content words that are named.",
    is_share=True,
)  # fmt: skip
def content_word_recall(caption: str, references: Sequence[str], content: Collection[str]) -> float:
    """Return the share of a reference's ``content`` words that the caption has, the largest over ``references``.

    References without content words are skipped; NaN if all are.
    """
    said = set(words(caption))
    wanted = [{word for word in words(reference) if word in content} for reference in references]
    return max((len(said & each) / len(each) for each in wanted if each), default=math.nan)


def mean_measure(name: str, values: npt.ArrayLike) -> Metric:
    """Return a measure (see ``intervals_over_groups``): the mean of ``values`` (N,); rows that are NaN do not count.

    ``name`` is the metric's name.
    """
    array = np.asarray(values, dtype=np.float64)
    known = np.isfinite(array)
    columns = np.stack([np.where(known, array, 0.0), known.astype(np.float64)], axis=1)
    bounds = SHARE if is_share(name) else ANY_NUMBER
    return measure_of_rows(name, columns, lambda sums: divide(sums[:, 0], sums[:, 1]), bounds)


@declare("bleu4", "BLEU-4", "higher", "Precision of n-grams up to four words, over all captions.", is_share=True)
def bleu4_measure(captions: Sequence[str], references: Sequence[Sequence[str]]) -> Metric:
    """Return BLEU with n-grams of up to four words over all captions together, without smoothing.

    An n-gram counts as matched at most as often as it occurs in one reference. The brevity penalty compares the
    caption's length with that of the reference nearest in length, of two equally near the shorter. The result is 0
    where no n-gram of some length matches. Source: K. Papineni et al., "BLEU: a method for automatic evaluation of
    machine translation" (ACL 2002).

    Args:
        captions: N texts.
        references: N lists of texts, the references of each caption.
    """
    columns = np.array([_bleu_columns(*pair) for pair in zip(captions, references, strict=True)], dtype=np.float64)
    return measure_of_rows("bleu4", columns.reshape(len(captions), 2 * _LONGEST + 2), _bleu_of_sums, SHARE)


def _f1(said: Counter[str], wanted: Counter[str]) -> float:
    common, total = (said & wanted).total(), said.total() + wanted.total()
    return 2 * common / total if total else 1.0


def _bleu_columns(caption: str, references: Sequence[str]) -> list[int]:
    """Return 10 counts: for n = 1 to 4 the matched and all n-grams of the caption, then two lengths in words.

    The lengths are those of the caption and of the reference nearest in length.
    """
    said, wanted = words(caption), [words(reference) for reference in references]
    columns = []
    for length in range(1, _LONGEST + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for each in wanted:
            most |= _grams(each, length)
        found = _grams(said, length)
        columns += [(found & most).total(), found.total()]
    nearest = min((len(each) for each in wanted), key=lambda size: (abs(size - len(said)), size), default=0)
    return [*columns, len(said), nearest]


def _grams(text: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[start : start + length]) for start in range(len(text) - length + 1))


def _bleu_of_sums(sums: FloatArray) -> FloatArray:
    matches, totals = sums[:, 0 : 2 * _LONGEST : 2], sums[:, 1 : 2 * _LONGEST : 2]
    precisions = divide(matches, totals, undefined=0.0)
    with np.errstate(divide="ignore"):
        mean_log = np.log(precisions).mean(axis=1)  # minus infinity where nothing matches
    said, wanted = sums[:, -2], sums[:, -1]
    penalty = np.minimum(0.0, 1 - divide(wanted, said, undefined=np.inf))
    scores: FloatArray = np.exp(mean_log + penalty)
    return scores
