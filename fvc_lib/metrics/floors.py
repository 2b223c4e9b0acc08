"""Floors of a result: AUCs of labels dealt to other groups, and AUCs between two sources of real videos.

Scores that have nothing to do with the labels reach the first. Scores that know where a video comes from reach the
second.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.classification import FloatArray, check_labels, check_scores, divide, roc_auc
from fvc_lib.metrics.intervals import Interval, group_codes, group_interval


def shuffled_label_aucs(
    labels: npt.ArrayLike, scores: npt.ArrayLike, groups: npt.ArrayLike, *, num: int = 200, seed: int = 0
) -> FloatArray:
    """Return AUCs of D scores in ``num`` deals of the labels, the same for all: (D, num), NaN where a class is empty.

    The groups' shares of fakes are permuted among the groups. In a group with both labels each row is then drawn
    with the share it was dealt, so that groups of one label stay so.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N, D).
        groups: (N,) of group ids.
        num: deals.
        seed: of the deals.

    Raises:
        ValueError: labels, scores or groups that cannot be meant.
    """
    from scipy.stats import rankdata  # half a second to load

    checked = check_labels(labels)
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"scores: got shape {table.shape}, wanted (N, D).")
    ranks = np.stack([rankdata(check_scores(column, checked.size)) for column in table.T], axis=1)
    group_of_row, num_groups = group_codes(groups, checked.size)
    shares = np.bincount(group_of_row, weights=checked) / np.bincount(group_of_row, minlength=num_groups)
    generator = np.random.default_rng([seed, 2])
    found = np.empty((table.shape[1], num))
    for deal in range(num):
        is_fake = generator.random(checked.size) < generator.permutation(shares)[group_of_row]
        fakes = float(is_fake.sum())
        won = is_fake.astype(np.float64) @ ranks - fakes * (fakes + 1) / 2  # Mann and Whitney's U
        found[:, deal] = divide(won, np.array(fakes * (checked.size - fakes)))
    return found


FEWEST_GROUPS_OF_A_SOURCE = 10  # below that chance alone parts two sources
_MOST_CELLS = 4_000_000  # of draws and videos that are in memory at once


@dataclass(frozen=True)
class SourceFloor:
    """A floor: 0.5 is a score that does not know where a real video comes from.

    ``interval`` is of the AUC in the direction in which the score leans on these videos, so its value is at least 0.5;
    a lower end below 0.5 says that another sample might lean the other way.
    """

    higher: str  # the source with the higher scores, which a detector takes for fakes rather
    lower: str
    interval: Interval
    num_higher: int  # videos
    num_lower: int


def real_source_floor(
    scores: npt.ArrayLike,
    real_source: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
    fewest_groups: int = 1,
) -> SourceFloor | None:
    """Return max(AUC, 1 - AUC) between the two largest sources of reals; None with fewer than two.

    A detector of fakes has no reason to tell two sources of reals apart. As far as its scores do, it recognises where
    videos come from, and its AUC between reals and fakes of different sources is to be read against this floor.

    Args:
        scores: float (N,), higher for fake.
        real_source: (N,) of text, None for fakes and for reals of unknown source, which are left out.
        groups: (N,) of group ids, all text or all numbers.
        replicates: half-samples of the groups; ``seed`` and ``confidence`` are its own too.
        seed: of the draws.
        confidence: coverage in (0, 1).
        fewest_groups: that a source must have; of a few, chance alone parts two.

    Raises:
        ValueError: lengths that differ, or scores that are not finite.
    """
    values, ids = np.asarray(scores, dtype=np.float64), np.asarray(groups, dtype=object)
    sources = np.asarray(real_source, dtype=object)
    if not values.shape == sources.shape == ids.shape or values.ndim != 1:
        raise ValueError(f"scores {values.shape}, real_source {sources.shape}, groups {ids.shape}: wanted (N,) each.")
    pairs = {(source, group) for source, group in zip(sources.tolist(), ids.tolist(), strict=True)}
    groups_of = Counter(source for source, _ in pairs)
    counts = Counter(source for source in sources.tolist() if source is not None and groups_of[source] >= fewest_groups)
    if len(counts) < 2:
        return None
    first, second = sorted(counts, key=lambda source: (-counts[source], source))[:2]
    rows = np.flatnonzero([source in (first, second) for source in sources.tolist()])
    is_second = np.array([source == second for source in sources[rows].tolist()], dtype=np.int64)
    found = group_interval(
        is_second, values[rows], ids[rows], roc_auc, replicates=replicates, seed=seed, confidence=confidence
    )
    if found.value >= 0.5:
        return SourceFloor(second, first, found, counts[second], counts[first])
    leaning = replace(found, value=1 - found.value, low=1 - found.high, high=1 - found.low)
    return SourceFloor(first, second, leaning, counts[first], counts[second])


def mean_lean(
    is_second: npt.ArrayLike, scores: npt.ArrayLike, folds: npt.ArrayLike, targets: npt.ArrayLike | None = None
) -> FloatArray:
    """Return the distance of the AUC between two sources from 0.5, the mean over the folds, (R,).

    A fold counts as its pairs of the two sources, and targets count alike, as in ``cross_validation``. Each fold has a
    network of its own, so one may score the first source higher and another the second, which cancels in the mean of
    their AUCs and is recognition all the same.

    Args:
        is_second: bool (N,) or (R, N): which videos are of the second source, in each of R dealings.
        scores: float (N,).
        folds: (N,).
        targets: (N,), what each video is a test of; None: all of one.
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
    found: FloatArray = np.mean(of_targets, axis=0)
    return found


def leans_by_chance(
    is_second: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: npt.ArrayLike,
    folds: npt.ArrayLike,
    targets: npt.ArrayLike | None = None,
    *,
    draws: int = 400,
    seed: int = 0,
) -> FloatArray:
    """Return ``mean_lean`` with the sources dealt at random to the groups of each fold: chance alone, (draws,).

    That is far above 0 where folds have few groups. A group with videos of both sources is dealt as two. Draws without
    a value, where a target has no fold with both sources, are left out. Arguments as of ``mean_lean``.
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
    own = np.array([key[3] for key in number_of])
    generator, found = np.random.default_rng(seed), []
    at_once = max(1, _MOST_CELLS // second.size)
    for first in range(0, draws, at_once):
        dealt = np.tile(own, (min(at_once, draws - first), 1))
        for units in dealt_within.values():
            dealt[:, units] = generator.permuted(dealt[:, units], axis=1)
        found.append(mean_lean(dealt[:, unit_of_row], scores, fold_of_row, target_of_row))
    leans = np.concatenate(found)
    return leans[np.isfinite(leans)]
