"""Intervals by cluster bootstrap: whole groups are drawn, because the videos of a group are near-duplicates.

Drawing single videos would treat fifteen copies of one clip as fifteen observations and give intervals far
too narrow; the standard deviation over five folds is no interval at all, for the folds share most of their
training data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.shared_rows import SharedRows
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric, check_labels, check_weights

# Weights held at once: 1 MB stays in the cache, and memory does not grow with replicates times rows.
_WEIGHTS_PER_BLOCK = 1 << 17


@dataclass(frozen=True)
class Interval:
    """A metric's value with its percentile interval.

    Attributes:
        value: on the rows as they are; NaN where the metric is undefined.
        low: lower end; NaN where ``value`` is, or where too few groups carry a class.
        high: upper end, likewise.
        confidence: nominal coverage, say 0.95.
        replicates: bootstrap replicates with a defined value, which the ends are quantiles of.
        num_groups: groups that were drawn from.
        num_rows: rows.
    """

    value: float
    low: float
    high: float
    confidence: float
    replicates: int
    num_groups: int
    num_rows: int


def cluster_bootstrap(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: npt.ArrayLike,
    metric: Metric,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Percentile interval of ``metric`` from groups drawn with replacement, within strata of label
    composition.

    Strata are the groups with reals only, with fakes only, and with both, so a replicate has as many groups
    of each kind as the sample and never lacks a class. A group drawn twice counts twice: a replicate is a set
    of row weights, and blocks of replicates are evaluated at once. Source: A. C. Davison and D. V. Hinkley,
    "Bootstrap Methods and their Application" (1997), sections 2.4 and 3.8; C. A. Field and A. H. Welsh,
    "Bootstrapping clustered data", JRSS B 69 (2007).

    Percentile intervals are somewhat narrow with few groups, and have no width where every replicate agrees, as
    with a perfect ranking: read them beside ``num_groups``. Of simulated samples nominal 95% intervals of the AUC
    held the truth in 93% to 96% with 20 to 380 groups of one size, in 88% (20 groups), 91% (40) and 93% (380) with
    log-normal sizes (sigma 1.1), and in 46% to 74% when rows were drawn instead of groups. Where fewer than two
    groups carry a class that class would never vary, so the value stands without an interval. The draws
    depend on ``seed``, ``groups`` and ``labels`` only, so intervals of different metrics or models on the same
    rows are paired.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,), what ``metric`` takes.
        groups: (N,) of group ids, all text or all numbers.
        metric: any weighted metric of this room, ``within_folds(...)`` included.
        row_weights: float (N,), what each row counts by itself (a drawn group multiplies it); all one if not given.
            ``one_vote_per_group(groups)`` makes every group count alike.
        replicates: how often the groups are drawn.
        seed: of the draws.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: bad labels or scores, groups or weights of another length, no replicate, or a confidence outside
            (0, 1).
    """
    return cluster_bootstrap_many(
        labels, [(metric, scores)], groups,
        row_weights=row_weights, replicates=replicates, seed=seed, confidence=confidence,
    )[0]  # fmt: skip


def cluster_bootstrap_many(
    labels: npt.ArrayLike,
    measures: Sequence[tuple[Metric, npt.ArrayLike]],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Interval, ...]:
    """The intervals of several metrics at once, each exactly as ``cluster_bootstrap`` gives it, for less time.

    Groups are drawn once, and ranking metrics of the same scores are read from one curve.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        measures: each a metric and the float (N,) it takes: scores or decisions.
        groups: (N,) of group ids, all text or all numbers.
        row_weights: float (N,), see ``cluster_bootstrap``.
        replicates: how often the groups are drawn.
        seed: of the draws.
        confidence: coverage in (0, 1).

    Returns:
        An interval per measure, in their order.

    Raises:
        ValueError: as ``cluster_bootstrap``.
    """
    check_confidence(confidence)
    drawn = replicate_values(labels, measures, groups, row_weights=row_weights, replicates=replicates, seed=seed)
    return percentile_intervals(drawn, confidence)


def percentile_intervals(drawn: ReplicateValues, confidence: float = 0.95) -> tuple[Interval, ...]:
    """The interval of each measure of ``drawn``, in their order.

    Raises:
        ValueError: a confidence outside (0, 1).
    """
    check_confidence(confidence)
    intervals = []
    for value, values in zip(drawn.values.tolist(), drawn.replicates, strict=True):
        defined = values[np.isfinite(values)] if np.isfinite(value) else np.empty(0)
        low, high = percentiles(defined, confidence)
        intervals.append(Interval(value, low, high, confidence, defined.size, drawn.num_groups, drawn.num_rows))
    return tuple(intervals)


@dataclass(frozen=True)
class ReplicateValues:
    """M measures on the rows as they are and in B bootstrap replicates, the same draws for all.

    Attributes:
        values: float64 (M,), NaN where undefined.
        replicates: float64 (M, B), NaN where undefined; B is 0 where too few groups carry a class.
        num_groups: groups that were drawn from.
        num_rows: rows.
    """

    values: FloatArray
    replicates: FloatArray
    num_groups: int
    num_rows: int


def replicate_values(
    labels: npt.ArrayLike,
    measures: Sequence[tuple[Metric, npt.ArrayLike]],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> ReplicateValues:
    """What intervals and paired differences are made of: every measure in every replicate.

    Arguments and errors are those of ``cluster_bootstrap_many``.
    """
    if replicates < 1:
        raise ValueError(f"replicates: got {replicates}, wanted at least 1.")
    checked = check_labels(labels)
    base = None if row_weights is None else check_weights(row_weights, checked.size)
    if base is not None and base.ndim != 1:
        raise ValueError(f"row_weights: got shape {base.shape}, wanted ({checked.size},), one weight per row.")
    group_of_row, num_groups = group_codes(groups, checked.size)
    shared = SharedRows(checked, measures, group_of_row, num_groups, base)
    values = shared.values()
    if _groups_per_class(checked, group_of_row, num_groups).min() < 2 or not np.isfinite(values).any():
        return ReplicateValues(values, np.empty((len(measures), 0)), num_groups, checked.size)
    blocks = draw_group_counts(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
    drawn = np.concatenate([shared.replicates(counts) for counts in blocks], axis=1)
    return ReplicateValues(values, drawn, num_groups, checked.size)


def one_vote_per_group(groups: npt.ArrayLike) -> FloatArray:
    """Row weights (N,) of one over the size of the row's group: so a group counts as one, however many copies it has.

    Raises:
        ValueError: ``groups`` is not (N,).
    """
    codes, num_groups = group_codes(groups, np.size(np.asarray(groups, dtype=object)))
    return 1 / np.bincount(codes, minlength=num_groups)[codes]


def group_codes(groups: npt.ArrayLike, num_rows: int) -> tuple[IntArray, int]:
    """Number the groups in sorted order: codes int64 (N,) and how many there are.

    Raises:
        ValueError: not one group per row.
    """
    ids = np.asarray(groups, dtype=object)
    if ids.shape != (num_rows,):
        raise ValueError(f"groups: got shape {ids.shape}, wanted ({num_rows},), one group per label.")
    # Not numpy's text type: it drops trailing NULs, and ids may hold any character.
    code_of = {group: code for code, group in enumerate(sorted(set(ids.tolist())))}
    return np.array([code_of[group] for group in ids.tolist()], dtype=np.int64), len(code_of)


def draw_group_counts(
    labels: IntArray, group_of_row: IntArray, num_groups: int, *, replicates: int, seed: int
) -> Iterator[FloatArray]:
    """Blocks (B, G) of how often each group was drawn; the blocks hold ``replicates`` rows together.

    ``counts[:, group_of_row]`` are the row weights (B, N) of a block.

    Args:
        labels: int64 (N,).
        group_of_row: int64 (N,), codes 0 .. G - 1.
        num_groups: G.
        replicates: rows to draw.
        seed: of the draws; each stratum has a generator of its own.
    """
    strata = _strata(labels, group_of_row, num_groups)
    generators = [np.random.default_rng([seed, number]) for number in range(len(strata))]
    block = max(1, _WEIGHTS_PER_BLOCK // max(labels.size, num_groups))
    for start in range(0, replicates, block):
        size = min(block, replicates - start)
        counts = np.zeros((size, num_groups))
        for members, generator in zip(strata, generators, strict=True):
            chosen = generator.integers(0, members.size, size=(size, members.size))
            cells = chosen + np.arange(size)[:, None] * members.size
            tallies = np.bincount(cells.ravel(), minlength=size * members.size)
            counts[:, members] = tallies.reshape(size, members.size)
        yield counts


def _strata(labels: IntArray, group_of_row: IntArray, num_groups: int) -> list[IntArray]:
    """Group codes by composition; a stratum of one group would never vary, so it joins one it shares a class with."""
    has_fake = np.bincount(group_of_row, weights=labels, minlength=num_groups) > 0
    has_real = np.bincount(group_of_row, weights=1 - labels, minlength=num_groups) > 0
    kind = np.where(has_real & has_fake, 1, np.where(has_fake, 2, 0))
    for pure in (0, 2):
        if (kind == pure).sum() == 1 and (kind == 1).any():
            kind[kind == pure] = 1
    if (kind == 1).sum() == 1:
        sizes = {pure: int((kind == pure).sum()) for pure in (0, 2)}
        others = [pure for pure in (0, 2) if sizes[pure]]
        if others:
            kind[kind == 1] = min(others, key=lambda pure: sizes[pure])
    return [np.flatnonzero(kind == number) for number in (0, 1, 2) if (kind == number).any()]


def _groups_per_class(labels: IntArray, group_of_row: IntArray, num_groups: int) -> IntArray:
    """How many groups hold a real and how many a fake, (2,); a class nobody has does not count."""
    present = [label for label in (0, 1) if (labels == label).any()]
    return np.array([np.unique(group_of_row[labels == label]).size for label in present], dtype=np.int64)


def check_confidence(confidence: float) -> None:
    """Raise ``ValueError`` for a confidence outside (0, 1), such as 95."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, wanted a number inside (0, 1).")


def percentiles(drawn: FloatArray, confidence: float) -> tuple[float, float]:
    """Both ends of the middle ``confidence`` of ``drawn`` (B,); NaN without any."""
    if not drawn.size:
        return np.nan, np.nan
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)
