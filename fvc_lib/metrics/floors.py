"""Floors: AUCs that scores can reach without any ability to tell real from fake.

A result must be compared with two floors. The first is the AUC for labels that are assigned to the groups at random:
scores that are unrelated to the labels reach it. The second is the AUC between real videos of two sources (origins,
such as two datasets): scores that recognise where a video comes from reach it. A group holds videos that belong
together, such as near-duplicates.
"""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import FloatArray, check_labels, check_scores, divide, roc_auc
from fvc_lib.metrics.intervals import Interval, group_codes, group_interval


def _ranks(scores: ArrayLike, cells: ArrayLike) -> FloatArray:
    """Return the rank of each of N rows by score within its cell, float64 (N,); tied rows share their mean rank.

    A cell is a subset of the rows; ``cells`` (N,) holds the cell of each row.
    """
    return pl.DataFrame({"score": scores, "cell": cells}).select(pl.col("score").rank().over("cell")).to_numpy()[:, 0]


def _wins(is_positive: ArrayLike, ranks: FloatArray, cells: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return ``(wins, pairs)``, both float64 (R, C); ``wins / pairs`` is the AUC within each of C cells.

    A cell is a subset of the rows. A pair is a positive and a negative row of one cell. A win is a pair whose positive
    row has the higher score; a tie is half a win (Mann and Whitney's U).

    Args:
        is_positive: bool (N,) or (R, N), the positive rows, for R such choices.
        ranks: float64 (N,), ranks of the scores within the cells (``_ranks``).
        cells: int (N,), number of each row's cell, 0 to C - 1.
    """
    positive = np.atleast_2d(np.asarray(is_positive, dtype=np.float64))
    inside = np.eye(int(np.max(cells)) + 1)[np.asarray(cells)]
    number = positive @ inside
    wins = (positive * ranks) @ inside - number * (number + 1) / 2
    pairs = number * (inside.sum(0) - number)
    return wins, pairs


def shuffled_label_aucs(
    labels: ArrayLike, scores: ArrayLike, groups: ArrayLike, *, num: int = 200, seed: int = 0
) -> FloatArray:
    """Return the AUC of the scores for each of ``num`` random assignments of labels, float64 (num,).

    Every group has a share of fakes among its rows. An assignment permutes these shares among the groups. A row then
    becomes fake with a probability equal to the new share of its group. The AUC is NaN where an assignment has one
    class only. The assignments depend on ``seed``, ``labels`` and ``groups`` only.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,).
        groups: (N,) of group ids.
        num: number of assignments.
        seed: seed of the assignments.

    Raises:
        ValueError: labels are not 0 and 1, scores are not finite, or lengths differ.
    """
    checked = check_labels(labels)
    one_cell = np.zeros(checked.size, dtype=np.int64)
    ranks = _ranks(check_scores(scores, checked.size), one_cell)
    group_of_row, num_groups = group_codes(groups, checked.size)
    shares = np.bincount(group_of_row, weights=checked) / np.bincount(group_of_row, minlength=num_groups)
    generator = np.random.default_rng([seed, 2])
    deals = (generator.random(checked.size) < generator.permutation(shares)[group_of_row] for _ in range(num))
    return np.array([divide(*_wins(is_fake, ranks, one_cell)).item() for is_fake in deals])


FEWEST_GROUPS_OF_A_SOURCE = 10  # with fewer groups, two sources may differ by chance alone


@dataclass(frozen=True)
class SourceFloor:
    """The AUC of a detector's scores between real videos of two sources (origins, such as datasets).

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
    """Return how well the scores separate the two largest sources of real videos: max(AUC, 1 - AUC).

    A source is the origin of videos, such as a dataset. Only sources of at least ``FEWEST_GROUPS_OF_A_SOURCE`` groups
    are considered; the result is None if there are fewer than two. The two with the most videos are compared.

    A detector of fakes has no reason to tell two sources of reals apart. If its scores do, it recognises where videos
    come from. Its AUC between reals and fakes of different sources must then be compared with this value.

    Args:
        scores: float (N,), higher for fake.
        real_source: (N,), name of the source; None for fakes and for reals of unknown source, which are left out.
        groups: (N,) of group ids, all text or all numbers.
        replicates: number of half-samples of the groups, for the interval.
        seed: seed of the draws.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: scores are not finite.
    """
    columns = {"source": real_source, "group": groups, "score": scores}
    rows = pl.DataFrame({name: np.asarray(column).tolist() for name, column in columns.items()}).drop_nulls("source")
    sizes = rows.group_by("source").agg(pl.len(), pl.col("group").n_unique())
    sizes = (
        sizes.filter(pl.col("group") >= FEWEST_GROUPS_OF_A_SOURCE)
        .sort("len", "source", descending=[True, False])
        .head(2)
    )
    if sizes.height < 2:
        return None
    both = rows.join(sizes, on="source", how="semi", maintain_order="left")
    interval = group_interval(
        both["source"] == sizes["source"][1], both["score"], both["group"].to_list(), roc_auc, replicates=replicates,
        seed=seed, confidence=confidence,
    )  # fmt: skip
    if interval.value < 0.5:
        interval = replace(interval, value=1 - interval.value, low=1 - interval.high, high=1 - interval.low)
        sizes = sizes.reverse()
    (lower, num_lower, _), (higher, num_higher, _) = sizes.rows()
    return SourceFloor(higher, lower, interval, num_higher, num_lower)


def mean_lean(
    is_second: ArrayLike, scores: ArrayLike, folds: ArrayLike, targets: ArrayLike | None = None
) -> FloatArray:
    """Return how well scores separate two sources of videos: the mean over folds of |AUC - 0.5|, float64 (R,).

    The AUC is computed between the videos of the two sources. 0 means that scores do not depend on the source; 0.5 is
    the largest value. A fold's weight is its number of pairs of videos of different sources. With several targets (such
    as generators of fakes), the mean over folds is computed for each target, and then averaged over targets.

    The absolute value is taken in every fold, because folds have different networks. One network may score the first
    source higher, and another the second. A mean of the AUCs would hide that both recognise sources.

    Args:
        is_second: bool (N,), whether a video is of the second source; or (R, N) for R such assignments. R is 1 for
            shape (N,).
        scores: float (N,).
        folds: (N,), fold of each video.
        targets: (N,), the target of each video, such as the generator that is tested with it; None: one target.
    """
    values = np.asarray(scores, dtype=np.float64)
    _, fold_of_row = np.unique(np.asarray(folds), return_inverse=True)
    _, target_of_row = np.unique(np.zeros(values.size) if targets is None else targets, return_inverse=True)
    num_folds = fold_of_row.max() + 1
    cells = target_of_row * num_folds + fold_of_row
    won, pairs = _wins(is_second, _ranks(values, cells), cells)
    empty = -pairs.shape[1] % num_folds  # the last target may lack the last folds
    away = np.pad(np.abs(won - pairs / 2), ((0, 0), (0, empty)))
    pairs = np.pad(pairs, ((0, 0), (0, empty)))
    sums = (part.reshape(len(part), -1, num_folds).sum(2) for part in (away, pairs))
    mean: FloatArray = divide(*sums).mean(1)
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
    """Return how well scores separate two randomly assigned sources, for D random assignments, float64 (D,).

    An assignment permutes the sources among the groups of each fold and target. The measure of separation is
    ``mean_lean``, the mean over folds of |AUC - 0.5|. The values show what chance alone gives; this is far above 0
    where folds have few groups. A group with videos of both sources is treated as two groups. An assignment has no
    value if no fold of a target has both sources. Such assignments are left out, so D may be less than ``draws``.

    Args:
        is_second: bool (N,), whether a video is of the second source.
        scores: float (N,).
        groups: (N,) of group ids.
        folds: (N,), fold of each video.
        targets: (N,), the target of each video, such as the generator that is tested with it; None: one target.
        draws: number of random assignments.
        seed: seed of the assignments.
    """
    target_of_row = np.zeros(np.size(is_second)) if targets is None else targets
    columns = {"target": target_of_row, "fold": folds, "group": groups, "is_second": is_second}
    rows = pl.DataFrame({name: np.asarray(column).tolist() for name, column in columns.items()})
    units = rows.unique(maintain_order=True).with_row_index("unit")
    unit_of_row = rows.join(units, on=rows.columns, maintain_order="left")["unit"].to_numpy()
    generator = np.random.default_rng(seed)
    dealt = np.tile(units["is_second"], (draws, 1))
    for _, of_cell in units.group_by("target", "fold", maintain_order=True):
        inside = of_cell["unit"].to_numpy()
        dealt[:, inside] = generator.permuted(dealt[:, inside], axis=1)
    leans: FloatArray = np.concatenate([mean_lean(deal[unit_of_row], scores, folds, targets) for deal in dealt])
    return leans[np.isfinite(leans)]
