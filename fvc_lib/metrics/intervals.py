"""Intervals over groups, from random half-samples of the groups.

A group holds videos that belong together, such as near-duplicates, so whole groups are drawn. Drawing single videos
would treat fifteen copies of one clip as fifteen observations and give intervals that are far too narrow. The standard
deviation over five folds gives no valid interval, since the folds share most of their training data.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from fvc_lib.metrics import classification
from fvc_lib.metrics.classification import (
    ANY_NUMBER,
    Bounds,
    CurveReading,
    FloatArray,
    IntArray,
    Metric,
    RankedRows,
    SumsReading,
)


class SharedRows:
    """M measures of N rows, prepared so that many half-samples are computed fast.

    The way depends on the attribute ``reading`` of a metric. With a ``CurveReading``, metrics share the confusion
    curves of the same scores and folds. With a ``SumsReading``, only sums per group are needed. Any other metric is
    called with row weights.

    Args:
        labels: int64 (N,), checked.
        measures: M pairs of a metric and the values, float (N,), that it takes.
        group_of_row: int64 (N,), group numbers 0 .. G - 1.
        num_groups: G.
        row_weights: float64 (N,); None: all 1.

    Raises:
        ValueError: values are of another length or not finite, or a metric refuses its values.
    """

    def __init__(
        self,
        labels: IntArray,
        measures: Sequence[tuple[Metric, npt.ArrayLike]],
        group_of_row: IntArray,
        num_groups: int,
        row_weights: FloatArray | None = None,
    ) -> None:
        self._labels = labels
        self._group_of_row = group_of_row
        self._row_weights = row_weights
        self._measures = [(metric, classification.check_scores(values, labels.size)) for metric, values in measures]
        # By scores and folds: the sorted rows of all folds, and the readings of their metrics by index in ``measures``.
        self._rankings: dict[tuple[bytes, bytes], tuple[list[RankedRows], dict[int, CurveReading]]] = {}
        self._sums: dict[int, tuple[SumsReading, FloatArray]] = {}
        for number, (metric, values) in enumerate(self._measures):
            reading = getattr(metric, "reading", None)
            if isinstance(reading, CurveReading):
                self._add_ranking(number, reading, values)
            elif isinstance(reading, SumsReading):
                columns = reading.columns(labels, values)
                weighted = columns if row_weights is None else columns * row_weights[:, None]
                sums = [np.bincount(group_of_row, weights=column, minlength=num_groups) for column in weighted.T]
                self._sums[number] = reading, np.stack(sums, axis=1)

    def _add_ranking(self, number: int, reading: CurveReading, scores: FloatArray) -> None:
        folds = np.zeros(scores.size, dtype=np.int64) if reading.fold_of_row is None else reading.fold_of_row
        if folds.size != scores.size:
            raise ValueError(f"labels: got {scores.size} rows, wanted {folds.size}, one per entry of folds.")
        key = scores.tobytes(), folds.tobytes()
        if key not in self._rankings:
            parts = [np.flatnonzero(folds == fold) for fold in range(int(folds.max(initial=0)) + 1)]
            self._rankings[key] = [classification.rank_rows(self._labels, scores, rows) for rows in parts], {}
        self._rankings[key][1][number] = reading

    def values(self) -> FloatArray:
        """Return the measures (M,) of all rows, by calling every metric."""
        weights = np.ones(self._labels.size) if self._row_weights is None else self._row_weights
        return np.array([float(metric(self._labels, values, weights)) for metric, values in self._measures])

    def replicates(self, counts: FloatArray) -> FloatArray:
        """Return the measures (M, R) in R half-samples; ``counts`` (R, G) are the weights of the groups."""
        found = {number: reading.of_sums(counts @ of_groups) for number, (reading, of_groups) in self._sums.items()}
        for parts, readings in self._rankings.values():
            curves = [part.curve(self._weights(counts, part.rows)) for part in parts]
            found |= {number: reading.of_curves(curves) for number, reading in readings.items()}
        for number, (metric, values) in enumerate(self._measures):
            if number not in found:
                weights = self._weights(counts, np.arange(self._labels.size))
                found[number] = metric(self._labels, values, weights)
        return np.stack([found[number] for number in range(len(self._measures))])

    def _weights(self, counts: FloatArray, rows: IntArray) -> FloatArray:
        """Return the weights (R, n) of the row numbers ``rows`` (n,) in R replicates."""
        drawn = counts[:, self._group_of_row[rows]]
        return drawn if self._row_weights is None else drawn * self._row_weights[rows]


# Number of weights in memory at once: 1 MB stays in the cache, and memory does not grow with replicates times rows.
_WEIGHTS_PER_BLOCK = 1 << 17
_OF_ROOT = 1 + math.sqrt(2)  # a bias that falls with the root of n, over what it grows by in half of them
_AT_THE_END = 1e-12  # as a share of a metric's range: nearer to its best or worst value is rounding


@dataclass(frozen=True)
class GroupCounts:
    """Numbers of the groups that an interval is computed from."""

    per_class: tuple[int, ...]  # number of groups with a real, and with a fake; one number where there is one class
    total: int  # number of all groups; less than the sum where a group has both classes

    @property
    def degrees_of_freedom(self) -> float:
        """Return Welch's degrees of freedom for two classes of equal variance, between 1 and ``total`` - 1."""
        weights = [1 / number for number in self.per_class]
        spread = sum(weight**2 / max(number - 1, 1) for weight, number in zip(weights, self.per_class, strict=True))
        return max(1.0, min(self.total - 1, sum(weights) ** 2 / spread))

    @property
    def comparisons(self) -> int:
        """Return the number of disjoint pairs of a group with a real and another group with a fake, at least 1.

        With one class it is the number of groups.
        """
        return max(1, min(*self.per_class, self.total // len(self.per_class)))


@dataclass(frozen=True)
class Interval:
    """A metric's value with its interval, which always contains it."""

    value: float  # on all rows; NaN where the metric is undefined
    low: float  # lower end; NaN where ``value`` is NaN, or where a class has fewer than two groups
    high: float  # upper end; NaN in the same cases
    confidence: float  # nominal coverage, such as 0.95
    replicates: int  # number of half-samples with a defined value
    num_groups: int  # number of groups
    num_rows: int  # number of rows

    def row(self) -> tuple[float | None, float | None, float | None, int, int]:
        """Return ``value low high num_rows num_groups``, columns of the result tables; None for an undefined number."""
        value, low, high = (float(end) if np.isfinite(end) else None for end in (self.value, self.low, self.high))
        return value, low, high, self.num_rows, self.num_groups


def group_interval(
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
    """Return ``metric`` with an interval over groups, from random half-samples of the groups.

    A half-sample holds half of the groups of each stratum. The strata are groups with reals only, with fakes only, and
    with both. The squared difference of a half-sample's value from the value of all groups estimates the variance plus
    the squared bias. This is the delete-half jackknife: J. Shao and C. F. J. Wu, "A general theory for jackknife
    variance estimation", Annals of Statistics 17 (1989). It also holds for metrics that are not smooth, such as a rate
    at a threshold. A bootstrap draws some groups twice, and so compares a real with the fake made from it more often
    than the sample does. Its intervals can then miss the value itself.

    The ends lie Student's t times the root mean square of these differences from the value, on the logit scale for a
    metric between two bounds.
    For an AUC the variance is that of N. A. Obuchowski, "Nonparametric analysis of clustered ROC curve data",
    Biometrics 53 (1997), up to terms that vanish with the number of groups. Those terms matter with few groups of
    uneven sizes, where Obuchowski's intervals are too narrow (docs/measurements.md has the simulated coverage).

    A perfect value shows no variance, so it gets a one-sided bound: the least value for which all n comparisons of
    disjoint groups (``GroupCounts.comparisons``) would still succeed with probability 1 - ``confidence``, which is
    (1 - confidence) ** (1 / n).

    Where a class has fewer than two groups it would never vary, so low and high are NaN. The draws depend on ``seed``,
    ``groups`` and ``labels`` only, so intervals of different metrics or models on the same rows are paired.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,), the scores or decisions that ``metric`` takes.
        groups: (N,) of group ids, all text or all numbers.
        metric: any weighted metric of this folder, also one made by ``within_folds``.
        row_weights: float (N,), weights of the rows; None: all 1. ``one_vote_per_group(groups)`` gives every group the
            same total weight.
        replicates: number of half-samples to draw.
        seed: seed of the draws.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: bad labels or scores, groups or weights of another length, no replicate, or a confidence outside
            (0, 1).
    """
    return group_intervals(
        labels, [(metric, scores)], groups,
        row_weights=row_weights, replicates=replicates, seed=seed, confidence=confidence,
    )[0]  # fmt: skip


def group_intervals(
    labels: npt.ArrayLike,
    measures: Sequence[tuple[Metric, npt.ArrayLike]],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Interval, ...]:
    """Return the intervals of M metrics, equal to those of ``group_interval``, in less time.

    Half-samples are drawn once, and ranking metrics of the same scores share one curve. ``measures`` are M pairs of a
    metric and the scores or decisions, float (N,), that it takes. Other arguments and errors are those of
    ``group_interval``.
    """
    check_confidence(confidence)
    drawn = replicate_values(labels, measures, groups, row_weights=row_weights, replicates=replicates, seed=seed)
    return intervals_of(drawn, confidence)


@dataclass(frozen=True)
class ReplicateValues:
    """The values of M measures on all rows and in B half-samples of the groups; all measures use the same draws."""

    values: FloatArray  # float64 (M,), NaN where undefined
    replicates: FloatArray  # float64 (M, B), NaN where undefined; B is 0 where a class has fewer than two groups
    bounds: FloatArray  # float64 (M, 2), the least and the largest possible value of each measure
    is_distance: npt.NDArray[np.bool_]  # (M,), whether it is a mean distance (``interval_ends``)
    groups: GroupCounts
    num_rows: int

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return self.groups.total


def intervals_of(drawn: ReplicateValues, confidence: float = 0.95) -> tuple[Interval, ...]:
    """Return the intervals of the M measures of ``drawn``, in the same order.

    Raises:
        ValueError: ``confidence`` is outside (0, 1).
    """
    ends = interval_ends(drawn.values, drawn.replicates, drawn.bounds, drawn.groups, confidence, drawn.is_distance)
    defined = (np.isfinite(drawn.replicates) & np.isfinite(drawn.values)[:, None]).sum(axis=1)
    columns = (drawn.values.tolist(), *(end.tolist() for end in ends), defined.tolist())
    return tuple(
        Interval(value, low, high, confidence, number, drawn.num_groups, drawn.num_rows)
        for value, low, high, number in zip(*columns, strict=True)
    )


def interval_ends(
    values: FloatArray,
    replicates: FloatArray,
    bounds: npt.ArrayLike,
    groups: GroupCounts,
    confidence: float,
    is_distance: npt.ArrayLike = False,
) -> tuple[FloatArray, FloatArray]:
    """Return ``(low, high)``, float64 (M,) each: the ends of the intervals that ``group_interval`` describes.

    Args:
        values: float64 (M,), the values on all groups.
        replicates: float64 (M, B), the values in half-samples; NaN where undefined, which does not count.
        bounds: (M, 2) or (2,), the least and the largest possible value; infinite where there is none.
        groups: numbers of the groups that the half-samples were drawn from.
        confidence: coverage in (0, 1).
        is_distance: bool (M,), whether a value is a mean of absolute values. Noise makes such a value larger, by a bias
            that falls only with the root of the number of groups. The lower end allows for this bias.

    Raises:
        ValueError: a confidence outside (0, 1).
    """
    check_confidence(confidence)
    least, most = np.broadcast_to(np.asarray(bounds, dtype=np.float64), (values.size, 2)).T
    bias, spread = deviations(values, replicates)
    reach = stdtrit(groups.degrees_of_freedom, (1 + confidence) / 2) * spread
    low, high = np.fmax(values - reach, least), np.fmin(values + reach, most)
    below, above = values - least, most - values
    known = np.isfinite(reach) & np.isfinite(below)  # else there is no scale but that of the values
    width = np.where(known & np.isfinite(above), most - least, 0.0)
    unseen = width * (1 - (1 - confidence) ** (1 / groups.comparisons))
    best, worst = (known & (distance <= width * _AT_THE_END) for distance in (above, below))
    low[best], high[worst] = np.minimum(low, most - unseen)[best], np.maximum(high, least + unseen)[worst]
    inside = known & ~best & ~worst
    below, above, start = below[inside], above[inside], least[inside]
    with np.errstate(divide="ignore"):  # infinite where the spread is many times the value
        shrunk = np.exp(-reach[inside] * (1 / below + 1 / above))  # the odds, by Student's t on their logarithm
        odds = below / above  # 0 where there is no upper bound: then it is the logarithm of the value
        low[inside] = start + below * shrunk * (1 + odds) / (1 + odds * shrunk)
        high[inside] = start + below * (1 + odds) / (shrunk + odds)
    low, high = np.minimum(low, values), np.maximum(high, values)  # rounding
    further = values - reach - _OF_ROOT * np.maximum(bias, 0.0)
    low = np.where(is_distance, np.clip(further, least, low), low)
    return np.where(np.isfinite(reach), low, np.nan), np.where(np.isfinite(reach), high, np.nan)


def deviations(values: FloatArray, replicates: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and root mean square over B, (M,) each, of ``replicates`` (M, B) minus ``values`` (M,).

    NaN replicates do not count; the result is NaN where all are.
    """
    defined = np.isfinite(replicates)
    distances = np.where(defined, replicates - values[:, None], 0.0)
    number = defined.sum(axis=1).astype(np.float64)
    mean, square = (classification.divide((distances**power).sum(axis=1), number) for power in (1, 2))
    return mean, np.sqrt(square)


def replicate_values(
    labels: npt.ArrayLike,
    measures: Sequence[tuple[Metric, npt.ArrayLike]],
    groups: npt.ArrayLike,
    *,
    row_weights: npt.ArrayLike | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> ReplicateValues:
    """Return the values of all measures on all rows and in every half-sample.

    Intervals and paired differences are computed from them. Arguments and errors are those of ``group_intervals``.
    """
    if replicates < 1:
        raise ValueError(f"replicates: got {replicates}, wanted at least 1.")
    checked = classification.check_labels(labels)
    base = None if row_weights is None else classification.check_weights(row_weights, checked.size)
    if base is not None and base.ndim != 1:
        raise ValueError(f"row_weights: got shape {base.shape}, wanted ({checked.size},), one weight per row.")
    group_of_row, num_groups = group_codes(groups, checked.size)
    shared = SharedRows(checked, measures, group_of_row, num_groups, base)
    values, drawn = shared.values(), np.empty((len(measures), 0))
    counts = count_groups(checked, group_of_row)
    if min(counts.per_class) >= 2 and np.isfinite(values).any():
        blocks = draw_half_samples(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
        drawn = np.concatenate([shared.replicates(halves) for halves in blocks], axis=1)
    readings = [getattr(metric, "reading", None) for metric, _ in measures]
    bounds = np.array([reading.bounds if reading else ANY_NUMBER for reading in readings])
    is_distance = np.array([isinstance(reading, SumsReading) and reading.is_distance for reading in readings])
    return ReplicateValues(values, drawn, bounds, is_distance, counts, checked.size)


def one_vote_per_group(groups: npt.ArrayLike) -> FloatArray:
    """Return row weights float64 (N,) of 1 / size of the row's group, so that the weights of a group sum to 1.

    Raises:
        ValueError: ``groups`` is not (N,).
    """
    codes, num_groups = group_codes(groups, np.size(np.asarray(groups, dtype=object)))
    return 1 / np.bincount(codes, minlength=num_groups)[codes]


def group_codes(groups: npt.ArrayLike, num_rows: int) -> tuple[IntArray, int]:
    """Return ``(codes, num_groups)``: int64 (N,), the number of each row's group in sorted order, and their count.

    Raises:
        ValueError: ``groups`` is not (``num_rows``,).
    """
    ids = np.asarray(groups, dtype=object)
    if ids.shape != (num_rows,):
        raise ValueError(f"groups: got shape {ids.shape}, wanted ({num_rows},), one group per label.")
    # Not numpy's text type: it drops trailing NULs, and ids may hold any character.
    code_of = {group: code for code, group in enumerate(sorted(set(ids.tolist())))}
    return np.array([code_of[group] for group in ids.tolist()], dtype=np.int64), len(code_of)


def draw_half_samples(
    labels: IntArray, group_of_row: IntArray, num_groups: int, *, replicates: int, seed: int
) -> Iterator[FloatArray]:
    """Yield blocks ``halves``, float64 (B, G), of B half-samples: 1 for the groups in it, else 0.

    The blocks have ``replicates`` rows in total. ``halves[:, group_of_row]`` are the row weights (B, N) of a block. Of
    an odd number n of groups, (n - 1) / 2 are drawn with probability (n - 1) / 2n, else one more. This makes the
    variance of a mean right.

    Args:
        labels: int64 (N,).
        group_of_row: int64 (N,), codes 0 .. G - 1.
        num_groups: G.
        replicates: number of half-samples to draw.
        seed: seed of the draws; every stratum has a separate generator.
    """
    strata = strata_of_groups(labels, group_of_row, num_groups)
    generators = [np.random.default_rng([seed, number]) for number in range(len(strata))]
    block = max(1, _WEIGHTS_PER_BLOCK // max(labels.size, num_groups))
    for start in range(0, replicates, block):
        size = min(block, replicates - start)
        halves = np.zeros((size, num_groups))
        for members, generator in zip(strata, generators, strict=True):
            smaller = members.size // 2
            taken = np.where(generator.random(size) * members.size < smaller, smaller, members.size - smaller)
            halves[:, members] = generator.permuted(np.arange(members.size) < taken[:, None], axis=1)
        yield halves


def strata_of_groups(labels: IntArray, group_of_row: IntArray, num_groups: int) -> list[IntArray]:
    """Return the group numbers of each stratum, one int64 array per stratum.

    The strata are groups with reals only, with both classes, and with fakes only. A stratum of one group would never
    vary, so it joins one that shares a class.
    """
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


def count_groups(labels: IntArray, group_of_row: IntArray) -> GroupCounts:
    """Return the number of groups of each class in ``labels`` (N,) and of all; a class without rows is left out."""
    per_class = [int(np.unique(group_of_row[labels == label]).size) for label in np.unique(labels)]
    return GroupCounts(tuple(per_class), int(np.unique(group_of_row).size))


def check_confidence(confidence: float) -> None:
    """Raise ``ValueError`` for a confidence outside (0, 1), such as 95."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, wanted a number inside (0, 1).")


# Metrics whose rows hold classes or numbers. Such a measure stores its rows and is computed from weighted sums of
# columns. Half-samples of whole groups are drawn as for every other metric.

OfSums = Callable[[FloatArray], FloatArray]


def measure_of_rows(name: str, columns: FloatArray, of_sums: OfSums, bounds: Bounds = ANY_NUMBER) -> Metric:
    """Return a metric of N fixed rows; the labels and scores that it is called with are ignored.

    Args:
        name: ``__name__`` of the metric.
        columns: float64 (N, C), C numbers per row.
        of_sums: function from the columns' weighted sums (R, C), for R sets of weights, to the metric (R,).
        bounds: least and largest possible value.

    Raises:
        ValueError: (from the returned function) called with another number of rows.
    """

    def own_columns(labels: IntArray, _scores: FloatArray) -> FloatArray:
        if labels.size != len(columns):
            raise ValueError(f"{name}: got {labels.size} rows, wanted the {len(columns)} rows it was made of.")
        return columns

    def own_sums(sums: FloatArray) -> FloatArray:
        return of_sums(sums)

    own_sums.__name__ = name
    return classification.sums_metric(own_columns, bounds)(own_sums)


def value_of_rows(columns: FloatArray, of_sums: OfSums) -> float:
    """Return ``of_sums`` of the sums of ``columns`` (N, C): the metric of ``measure_of_rows`` with all weights 1."""
    return float(of_sums(columns.sum(axis=0, keepdims=True))[0])


def intervals_over_groups(
    measures: Sequence[Metric],
    groups: npt.ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Interval, ...]:
    """Return the intervals over groups of several measures of the same N rows; see ``group_interval``.

    Groups are drawn without strata, so a half-sample may lack a class. A metric over the classes that occur is then
    over those of the half-sample. With fewer than two groups low and high are NaN.

    ``measures`` are made by ``top_k_measure``, ``regression_measures`` and the like. The draws depend on ``seed`` and
    ``groups`` only, so intervals of several models are paired. Errors are those of ``group_interval``.
    """
    nothing = np.zeros(np.asarray(groups, dtype=object).shape[0])
    measured = [(measure, nothing) for measure in measures]
    return intervals_of(replicate_values(nothing, measured, groups, replicates=replicates, seed=seed), confidence)
