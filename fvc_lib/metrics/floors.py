"""Floors of a result: AUCs that scores reach without telling real from fake.

The first floor is the AUC for labels that are dealt to the groups at random. Scores that have nothing to do with the
labels reach it. The second floor is the AUC between two sources of real videos. Scores that recognise where a video
comes from reach it. A group holds videos that belong together, such as near-duplicates.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import FloatArray, check_labels, check_scores, divide, roc_auc
from fvc_lib.metrics.intervals import Interval, group_codes, group_interval


def shuffled_label_aucs(
    labels: ArrayLike, scores: ArrayLike, groups: ArrayLike, *, num: int = 200, seed: int = 0
) -> FloatArray:
    """Return the AUC of the scores for each of ``num`` random deals of labels, float64 (num,).

    Every group has a share of fakes among its rows. A deal permutes these shares among the groups. A row then becomes
    fake with a probability equal to the share that its group was dealt. The AUC is NaN where a deal has one class only.
    The deals depend on ``seed``, ``labels`` and ``groups`` only.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,).
        groups: (N,) of group ids.
        num: number of deals.
        seed: seed of the deals.

    Raises:
        ValueError: labels are not 0 and 1, scores are not finite, or lengths differ.
    """
    from scipy.stats import rankdata  # half a second to load

    checked = check_labels(labels)
    ranks = rankdata(check_scores(scores, checked.size))
    group_of_row, num_groups = group_codes(groups, checked.size)
    shares = np.bincount(group_of_row, weights=checked) / np.bincount(group_of_row, minlength=num_groups)
    generator = np.random.default_rng([seed, 2])
    won, pairs = np.empty(num), np.empty(num)
    for deal in range(num):
        is_fake = generator.random(checked.size) < generator.permutation(shares)[group_of_row]
        fakes = float(is_fake.sum())
        won[deal] = is_fake.astype(np.float64) @ ranks - fakes * (fakes + 1) / 2  # Mann and Whitney's U
        pairs[deal] = fakes * (checked.size - fakes)
    return divide(won, pairs)


FEWEST_GROUPS_OF_A_SOURCE = 10  # with fewer groups, two sources may differ by chance alone
_MOST_CELLS = 4_000_000  # largest number of draws times videos in memory at once


@dataclass(frozen=True)
class SourceFloor:
    """The AUC of a detector's scores between two sources of real videos.

    A score that does not depend on the source has an AUC of 0.5. The source with the higher scores is the positive
    class, so the value of ``interval`` is at least 0.5. If its lower end is below 0.5, the other source might have the
    higher scores in another sample.
    """

    higher: str  # source with the higher scores, whose videos the detector rather takes for fakes
    lower: str  # source with the lower scores
    interval: Interval  # the AUC with its interval
    num_higher: int  # number of videos of ``higher``
    num_lower: int  # number of videos of ``lower``


def real_source_floor(
    scores: ArrayLike,
    real_source: ArrayLike,
    groups: ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> SourceFloor | None:
    """Return max(AUC, 1 - AUC) between the two sources of reals with the most videos.

    Returns None with fewer than two sources of at least ``FEWEST_GROUPS_OF_A_SOURCE`` groups.

    A detector of fakes has no reason to tell two sources of reals apart. If its scores do, it recognises where videos
    come from. Its AUC between reals and fakes of different sources must then be compared with this floor.

    Args:
        scores: float (N,), higher for fake.
        real_source: (N,), name of the source; None for fakes and for reals of unknown source, which are left out.
        groups: (N,) of group ids, all text or all numbers.
        replicates: number of half-samples of the groups, for the interval.
        seed: seed of the draws.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: lengths differ, or scores are not finite.
    """
    values, ids = np.asarray(scores, dtype=np.float64), np.asarray(groups, dtype=object)
    sources = np.asarray(real_source, dtype=object)
    pairs = zip(sources.tolist(), ids.tolist(), strict=True)
    named = [(source, group) for source, group in pairs if source is not None]
    groups_of = Counter(source for source, _ in set(named))
    counts = Counter(source for source, _ in named if groups_of[source] >= FEWEST_GROUPS_OF_A_SOURCE)
    if len(counts) < 2:
        return None
    first, second = sorted(counts, key=lambda source: (-counts[source], source))[:2]
    rows = np.flatnonzero((sources == first) | (sources == second))
    is_second = (sources[rows] == second).astype(np.int64)
    interval = group_interval(
        is_second, values[rows], ids[rows], roc_auc, replicates=replicates, seed=seed, confidence=confidence
    )
    if interval.value >= 0.5:
        return SourceFloor(second, first, interval, counts[second], counts[first])
    leaning = replace(interval, value=1 - interval.value, low=1 - interval.high, high=1 - interval.low)
    return SourceFloor(first, second, leaning, counts[first], counts[second])


def mean_lean(
    is_second: ArrayLike, scores: ArrayLike, folds: ArrayLike, targets: ArrayLike | None = None
) -> FloatArray:
    """Return how well scores separate two sources of videos: the mean over folds of |AUC - 0.5|, float64 (R,).

    The AUC is that between the two sources. 0 means that scores do not depend on the source; 0.5 is the largest value.
    A fold's weight is its number of pairs of videos of the two sources. All targets count equally, as in
    ``cross_validation``.

    The absolute value is taken in every fold, because folds have different networks. One network may score the first
    source higher, and another the second. A mean of the AUCs would hide that both recognise sources.

    Args:
        is_second: bool (N,), whether a video is of the second source; or (R, N) for R such assignments. R is 1 for
            shape (N,).
        scores: float (N,).
        folds: (N,), fold of each video.
        targets: (N,), the target (such as a generator) that each video tests; None: one target.
    """
    from scipy.stats import rankdata  # half a second to load

    of_second, values = np.atleast_2d(np.asarray(is_second, dtype=np.float64)), np.asarray(scores, dtype=np.float64)
    fold_of_row = np.asarray(folds)
    target_of_row = np.zeros(values.size) if targets is None else np.asarray(targets)
    of_targets = []
    for target in np.unique(target_of_row):
        total, all_pairs = np.zeros(len(of_second)), np.zeros(len(of_second))
        for fold in np.unique(fold_of_row[target_of_row == target]):
            rows = np.flatnonzero((target_of_row == target) & (fold_of_row == fold))
            second = of_second[:, rows].sum(1)
            pairs = second * (rows.size - second)
            above = of_second[:, rows] @ rankdata(values[rows]) - second * (second + 1) / 2
            total += np.abs(above - pairs / 2)
            all_pairs += pairs
        of_targets.append(divide(total, all_pairs))
    mean: FloatArray = np.mean(of_targets, axis=0)
    return mean


def leans_by_chance(
    is_second: ArrayLike,
    scores: ArrayLike,
    groups: ArrayLike,
    folds: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    draws: int = 400,
    seed: int = 0,
) -> FloatArray:
    """Return ``mean_lean`` for random deals of the sources to the groups of each fold, float64 (D,).

    These values show what chance alone gives, which is far above 0 where folds have few groups. A group with videos of
    both sources is treated as two groups. Deals in which no fold of a target has both sources have no value. They are
    left out, so D may be less than ``draws``.

    Args:
        is_second: bool (N,), whether a video is of the second source.
        scores: float (N,).
        groups: (N,) of group ids.
        folds: (N,), fold of each video.
        targets: (N,), the target (such as a generator) that each video tests; None: one target.
        draws: number of random deals.
        seed: seed of the deals.
    """
    second, fold_of_row = np.asarray(is_second, dtype=bool), np.asarray(folds)
    target_of_row = np.zeros(second.size) if targets is None else np.asarray(targets)
    columns = (target_of_row, fold_of_row, np.asarray(groups), second)
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    unit_of_row = np.array([number_of[key] for key in keys], dtype=np.int64)
    dealt_within: dict[tuple[object, object], list[int]] = {}
    for (target, fold, _, _), number in number_of.items():
        dealt_within.setdefault((target, fold), []).append(number)
    is_second_of = np.array([key[3] for key in number_of])
    generator, blocks = np.random.default_rng(seed), []
    at_once = max(1, _MOST_CELLS // second.size)
    for first in range(0, draws, at_once):
        dealt = np.tile(is_second_of, (min(at_once, draws - first), 1))
        for units in dealt_within.values():
            dealt[:, units] = generator.permuted(dealt[:, units], axis=1)
        blocks.append(mean_lean(dealt[:, unit_of_row], scores, fold_of_row, target_of_row))
    leans = np.concatenate(blocks)
    return leans[np.isfinite(leans)]
