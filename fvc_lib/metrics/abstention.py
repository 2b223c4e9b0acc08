"""Abstention: answer fake or real only where the other answer can be ruled out, else undecided.

The method is cross-conformal prediction by class. A new video is compared with witnesses: videos whose label is known,
with scores from networks that were not trained on them. The p-value of "real" is the share of reals that look at least
as fake as the new video. The p-value of "fake" is the share of fakes that look at least as real. An answer is ruled out
where its p-value is at most the error rate. If exactly one answer remains, it is the verdict; otherwise the video is
undecided.

With an error rate of 5%, at most about 5% of the reals are called fake, however bad the network is. Likewise, at most
about 5% of the fakes are called real. But a network that knows nothing calls equal shares of both classes fake. So
``answers_that_tell`` checks whether fakes are called fake more often than reals are, and reals real more often than
fakes.

Videos of one group (near-duplicates, say) are not independent. So each group has one vote per class, divided equally
among its videos of that class. The network of fold k was trained on none of the witnesses of fold k. So its scores
are used to compare a new video with these witnesses.

V. Vovk, "Cross-conformal predictors", Annals of Mathematics and Artificial Intelligence 74 (2015); groups as in
Y. Lee, R. F. Barber, R. Willett, "Distribution-free inference with hierarchical data" (2023), arXiv:2306.06342.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

from fvc_lib.metrics.cases import CaseScore
from fvc_lib.metrics.classification import FloatArray, IntArray, check_labels, check_scores, divide

FAKE = "fake"
REAL = "real"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Witnesses:
    """Videos with known labels, and their scores by networks that were not trained on the video's group.

    Attributes:
        scores: float64 (N,), higher for fake, on any scale that all networks share.
        labels: int64 (N,), 0 real and 1 fake.
        folds: int64 (N,), number of the network, 0 to K - 1, that gave the score.
        weights: float64 (N,), the vote of each video; the votes of one group and label sum to 1.
    """

    scores: FloatArray
    labels: IntArray
    folds: IntArray
    weights: FloatArray

    @property
    def num_groups(self) -> tuple[int, int]:
        """Return ``(real, fake)``: the number of groups with reals, and of groups with fakes."""
        real, fake = (round(float(self.weights[self.labels == label].sum())) for label in (0, 1))
        return real, fake


def witnesses(labels: ArrayLike, scores: ArrayLike, groups: ArrayLike, folds: ArrayLike) -> Witnesses:
    """Return ``Witnesses`` of N videos with known labels, in which each group has one vote per label.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,), higher for fake, by networks that were not trained on the video's group.
        groups: (N,) of group ids of any type.
        folds: int (N,), number of the network that gave the score.

    Raises:
        ValueError: labels are not 0 and 1, scores are not finite, or lengths differ.
    """
    checked = check_labels(labels)
    values = check_scores(scores, checked.size)
    numbers = np.asarray(folds, dtype=np.int64)
    _, group_of = np.unique(np.asarray(groups), return_inverse=True)
    group_and_label = 2 * group_of + checked
    _, vote_of, sizes = np.unique(group_and_label, return_inverse=True, return_counts=True)
    return Witnesses(values, checked, numbers, 1 / sizes[vote_of])


@dataclass(frozen=True)
class PValues:
    """The p-values of the answers "real" and "fake" for M videos; a small p-value rules the answer out.

    Both arrays are float64 (M,), in (0, 1].
    """

    real: FloatArray
    fake: FloatArray

    def answers(self, rates: tuple[float, float]) -> list[str]:
        """Return ``fake``, ``real`` or ``undecided`` for each of the M videos.

        ``rates`` are the two error rates: the largest share of the reals that may be called fake, and the largest share
        of the fakes that may be called real.
        """
        of_reals, of_fakes = rates
        # Shares of counts: 1 of 20 must not fail 0.05 by rounding.
        not_real = self.real <= of_reals * (1 + 1e-12)
        not_fake = self.fake <= of_fakes * (1 + 1e-12)
        # Both may be ruled out, by a score between the classes and far from both. Then the video is undecided too.
        only_fake_left = not_real & ~not_fake
        only_real_left = not_fake & ~not_real
        answers: list[str] = np.select([only_fake_left, only_real_left], [FAKE, REAL], UNDECIDED).tolist()
        return answers

    def of_case(self, how: CaseScore) -> "PValues":
        """Return the p-values, both (1,), of a case: several videos of one event, here these M videos.

        They are valid even if the videos depend on each other. With ``mean``, all videos of the case are assumed to
        have the same label. Each p-value is then twice the mean over the videos (V. Vovk and R. Wang, "Combining
        p-values via averaging", Biometrika 107, 2020), or that of the video if M is 1. With ``max``, the case is fake
        if any of its videos is fake. The p-value of "real" is then M times the smallest one (Bonferroni), and that of
        "fake" is the largest one. Values above 1 become 1.
        """
        num = self.real.size
        real = min(num, 2) * self.real.mean()
        fake = min(num, 2) * self.fake.mean()
        if how == "max":
            real = num * self.real.min()
            fake = self.fake.max()
        return PValues(np.minimum([real], 1.0), np.minimum([fake], 1.0))


def p_values(known: Witnesses, scores: ArrayLike) -> PValues:
    """Return the p-values of the answers "real" and "fake" for M new videos, which are compared with known ones.

    Args:
        known: videos with known labels and out-of-fold scores.
        scores: float (M, K), the score of each video by the network of each fold; or (M, 1) by a single network. Then
            all known scores are treated as if that network had given them.

    Raises:
        ValueError: ``known`` has a fold for which ``scores`` has no column, or a score is not finite.
    """
    new = np.asarray(scores, dtype=np.float64)
    networks = known.folds if new.shape[1] > 1 else np.zeros_like(known.folds)
    if not np.isfinite(new).all() or max(networks, default=0) >= new.shape[1]:
        raise ValueError(f"scores: got {new.shape[1]} networks, wanted finite scores of the network of each fold.")
    both = []
    for label in (0, 1):
        votes = np.zeros(len(new))
        for network in range(new.shape[1]):
            of = (known.labels == label) & (networks == network)
            votes += _votes(label, known.scores[of], known.weights[of], new[:, network])
        both.append((1 + votes) / (1 + known.num_groups[label]))
    return PValues(*both)


def _votes(label: int, scores: FloatArray, weights: FloatArray, new: FloatArray) -> FloatArray:
    """Return, for every new video, the total weight of the known videos of a class that fit the class no better.

    With label 0, these are the reals that look at least as fake: their score is at least that of the new video. With
    label 1, these are the fakes that look at least as real: their score is at most that of the new video.

    Args:
        label: 0 (real) or 1 (fake), the class of the known videos.
        scores: float64 (N,), scores of the known videos.
        weights: float64 (N,), votes: each group has one vote per class, divided among its videos.
        new: float64 (M,), the new scores.

    Returns:
        float64 (M,), the sum of votes for each new video.
    """
    order = np.argsort(scores, kind="stable")
    ascending = scores[order]
    summed = np.append(0.0, weights[order].cumsum())
    if label == 0:
        num_lower = np.searchsorted(ascending, new, side="left")
        return np.asarray(summed[-1] - summed[num_lower])
    num_up_to = np.searchsorted(ascending, new, side="right")
    return np.asarray(summed[num_up_to])


def left_out_p_values(known: Witnesses, groups: ArrayLike) -> PValues:
    """Return p-values (N,) for the known videos, each compared with the known videos of all other groups.

    They serve to estimate how often answers for new videos will be wrong or undecided. The scores of all folds are
    pooled, although different networks gave them.

    Args:
        known: N videos with known labels.
        groups: (N,) of group ids.
    """
    _, group_of = np.unique(np.asarray(groups), return_inverse=True)
    first_of_next = np.bincount(group_of).cumsum()[:-1]
    members = np.split(np.argsort(group_of, kind="stable"), first_of_next)
    both = []
    for label in (0, 1):
        of = known.labels == label
        votes = _votes(label, known.scores[of], known.weights[of], known.scores)
        others = np.full(len(votes), known.num_groups[label])
        for group in members:
            alike = group[known.labels[group] == label]
            if alike.size:
                of_itself = _votes(label, known.scores[alike], known.weights[alike], known.scores[group])
                votes[group] -= of_itself
                others[group] -= 1
        # Subtraction leaves rounding noise, and votes are counted in shares of a group.
        rounded = np.maximum(np.round(votes, 9), 0)
        both.append((1 + rounded) / (1 + others))
    return PValues(*both)


def answers_that_tell(known: Witnesses, answers: list[str], level: float = 0.05) -> frozenset[str]:
    """Return the answers (``real``, ``fake``, both or none) that carry information, by a significance test.

    The answer ``fake`` carries information if the fakes get it more often than the reals do, and ``real`` if the reals
    get it more often than the fakes do. A small share of wrong answers is no proof of that. A network with random
    scores also calls few reals fake, but it calls equally few fakes fake. The test is Fisher's exact test, one-sided.
    It counts groups of videos, not videos: each group has one vote per class.

    Args:
        known: N videos with known labels.
        answers: N texts, ``real``, ``fake`` or ``undecided``: the answer for each of these videos when it is compared
            with the videos of all other groups (``left_out_p_values``).
        level: significance level: the largest probability that an answer is returned for a network with random scores.
    """
    given, telling = np.array(answers), set()
    for label, answer in ((0, REAL), (1, FAKE)):
        is_answer = given == answer
        votes = [float(known.weights[(known.labels == of) & is_answer].sum()) for of in (0, 1)]
        hits = math.floor(votes[label] + 1e-9)
        alarms = math.ceil(votes[1 - label] - 1e-9)
        num_right = known.num_groups[label]
        num_wrong = known.num_groups[1 - label]
        if hits and _fisher_p_value(hits, alarms, num_right, num_wrong) <= level:
            telling.add(answer)
    return frozenset(telling)


def _fisher_p_value(hits: int, alarms: int, num_right: int, num_wrong: int) -> float:
    """Return the one-sided p-value of Fisher's exact test: the probability of at least ``hits`` by chance.

    An answer, such as "fake", was given for ``hits`` + ``alarms`` groups. It is right for groups of one class, and
    wrong for groups of the other. (The module of scipy with this distribution is not used: importing it takes half a
    second.)

    Args:
        hits: number of groups of the right class that got the answer.
        alarms: number of groups of the wrong class that got the answer.
        num_right: number of groups of the right class.
        num_wrong: number of groups of the wrong class.
    """
    given, num_all = hits + alarms, num_right + num_wrong
    right = np.arange(max(hits, given - num_wrong), min(given, num_right) + 1)
    counts: list[Any] = [right, num_right - right, given - right, num_wrong - given + right, num_all]
    margins = [num_right, num_wrong, given, num_all - given]
    of_margins = sum(gammaln(np.add(margin, 1)) for margin in margins)
    of_counts = sum(gammaln(np.add(count, 1)) for count in counts)
    return float(np.exp(of_margins - of_counts).sum())


@dataclass(frozen=True)
class AbstentionRates:
    """The shares of videos with known labels that get a wrong answer, or no answer.

    Each group has one vote per class. A rate is NaN where there are no videos of its class.

    Attributes:
        called_fake: share of the reals that are called fake.
        called_real: share of the fakes that are called real.
        undecided: share of all videos that get no answer.
        num_groups: number of groups with reals, and of groups with fakes.
    """

    called_fake: float
    called_real: float
    undecided: float
    num_groups: tuple[int, int]


def abstention_rates(known: Witnesses, answers: list[str]) -> AbstentionRates:
    """Return the shares of wrong and of undecided answers for N videos with known labels.

    ``answers`` are N texts, ``real``, ``fake`` or ``undecided``, in the order of the videos in ``known``.
    """
    given = np.array(answers)

    def share(labels: list[int], answer: str) -> float:
        of = np.isin(known.labels, labels)
        answered = known.weights[of & (given == answer)]
        return float(divide(answered.sum(), known.weights[of].sum()))

    return AbstentionRates(share([0], FAKE), share([1], REAL), share([0, 1], UNDECIDED), known.num_groups)
