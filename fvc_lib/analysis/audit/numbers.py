"""Every number of an audit: what a table of scores says of its detectors, with intervals over groups.

Replicates are drawn once for all detectors that answered the same videos, so intervals are paired and 20 detectors cost
little more than their rankings. A detector is judged on the videos it answered; detectors are compared, averaged and
set against each other on those that all of them answered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.analysis.read.headline import (
    DISHONEST_CONTROLS,
    HEADLINE_METRIC as MAIN_METRIC,
    LENGTH_ONLY,
    METADATA_ONLY,
)
from fvc_lib.metrics import agreement
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, roc_auc
from fvc_lib.metrics.cross_validation import (
    DECISION_METRICS,
    METRICS,
    PROBABILITY_METRICS,
    RANKING_METRICS,
    within_folds,
)
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE, SourceFloor, real_source_floor, shuffled_label_aucs
from fvc_lib.metrics.intervals import (
    Interval,
    ReplicateValues,
    intervals_of,
    one_vote_per_group,
    replicate_values,
)
from fvc_lib.metrics.operating_points import (
    BEST,
    OperatingPoint,
    crossed_thresholds,
    halves,
    operating_point,
    share_of_fakes_called,
    share_of_reals_called,
)
from fvc_lib.metrics.paired_difference import (
    holm,
    is_above_control,
    paired_difference,
)
from fvc_lib.services.errors import UsageError

AVERAGE = "average of all"
GIVEN = "threshold="  # of a threshold that comes with the scores
FALSE_ALARM_RATES = ("fpr=0.05", "fpr=0.01", "fpr=0.001")
SMALL_BELOW_GROUPS = 20
NOT_KNOWN, ALL_OTHERS = "not known", "all others"
_MOST_SLICES = 12
_SHUFFLES = 200
NEED_VIDEOS = (METADATA_ONLY, LENGTH_ONLY)  # controls without which nobody is above all controls
# Reals that a rate needs at least, by the metric that is NaN with fewer.
NEEDS_REALS = {"true_positive_rate_at_1_percent": 100, "true_positive_rate_at_0_1_percent": 1000}


@dataclass(frozen=True)
class Settings:
    """How an audit computes."""

    point: OperatingPoint = BEST  # where decisions are made, chosen on one half of the groups for the other
    # A threshold that comes with the scores, used in place of ``point``; None: there is none.
    threshold: float | None = None
    replicates: int = 1000
    seed: int = 0
    confidence: float = 0.95


def settings(decide_at: str, **others: Any) -> Settings:
    """Return settings that decide at ``best``, ``fpr=0.01``, ``cost=5:1`` or ``threshold=0.5``.

    Raises:
        UsageError: ``decide_at`` is none of these.
    """
    kind, _, number = decide_at.partition("=")
    try:
        if kind.strip().lower() == "threshold":
            return Settings(threshold=float(number), **others)
        return Settings(point=operating_point(decide_at), **others)
    except ValueError as error:
        raise UsageError(f"{error} Or threshold=NUMBER, one that comes with the scores.") from error


@dataclass(frozen=True)
class Rows:
    """Some of the table's videos."""

    places: IntArray  # int64 (n,), which rows of the table
    labels: IntArray  # int64 (n,) of 0 (real) and 1 (fake)
    groups: npt.NDArray[np.object_]  # (n,) group ids
    half: IntArray | None  # int64 (n,) of 0 and 1, for thresholds; None where a half would lack a class


@dataclass(frozen=True)
class Audit:
    """What was found; frames have a row for each detector and thing, undefined numbers being null."""

    detectors: tuple[str, ...]  # the highest main metric first, on the videos that all answered
    numbers: pl.DataFrame  # ``detector metric value low high num_videos num_groups``
    # The main metric on the videos that all answered, also of the average: ``detector value low high``.
    common: pl.DataFrame
    by_group: pl.DataFrame  # ``detector value low high``: one vote per group, on the videos that each answered
    # ``detector source value low high num_videos detector_value detector_low detector_high``: each control and each
    # detector on the same videos, of those by which the detector is compared the ones that the control has.
    controls: pl.DataFrame
    shuffled: pl.DataFrame  # ``detector value low high``, the mean and range of 200 deals of the labels to other groups
    differences: pl.DataFrame  # ``first second difference low high p holm_p is_shown``, all pairs
    # ``detector slice_by value auc low high called_share num_videos num_groups is_small``, worst first.
    slices: pl.DataFrame
    floors: Mapping[str, SourceFloor]  # by detector
    # ``detector point fpr fpr_low fpr_high tpr tpr_low tpr_high first_threshold second_threshold is_resolved``.
    thresholds: pl.DataFrame
    # ``detector num_videos answered_share num_real num_fake auc_if_wrong``; the last counts every video that was not
    # answered against the detector.
    coverage: pl.DataFrame
    # (D, D) on the common videos; ``equal_decisions`` alike; None without common videos.
    correlations: FloatArray | None
    equal_decisions: FloatArray | None
    regrouped: pl.DataFrame  # ``detector value low high`` with suspected groups; empty without any
    num_common: int
    num_common_groups: int
    num_videos: int
    num_groups: int
    settings: Settings

    def interval(self, detector: str, metric: str = MAIN_METRIC) -> tuple[float | None, float | None, float | None]:
        """``value low high`` of one detector's metric on its own videos; None where undefined."""
        row = self.numbers.filter((pl.col("detector") == detector) & (pl.col("metric") == metric))
        return row.select("value", "low", "high").row(0) if row.height else (None, None, None)

    @property
    def is_complete(self) -> bool:
        """Whether every detector answered every video."""
        return self.num_common == self.num_videos

    def compared(self, detector: str) -> tuple[float | None, float | None, float | None]:
        """``value low high`` by which detectors are ordered: on the videos that all answered, where there are such.

        On its own videos one that leaves out what is hard would look better than the others.
        """
        row = self.common.filter(pl.col("detector") == detector)
        return row.select("value", "low", "high").row(0) if row.height else self.interval(detector)

    def of_coverage(self, detector: str, column: str) -> Any:
        """One cell of ``coverage``."""
        return self.coverage.filter(pl.col("detector") == detector)[column].item()

    def above_controls(self, detector: str) -> bool | None:
        """Whether a detector's main metric is above every honest control's; None: not known, for some are missing."""
        own = self.honest_controls(detector)
        if not own["is_above"].all():
            return False
        return True if set(NEED_VIDEOS) <= set(own["source"]) else None

    def honest_controls(self, detector: str) -> pl.DataFrame:
        """Return a detector's honest ``controls`` with a value, and ``is_above``: whether it is above each.

        Controls that only show what a careless split would claim are left out.
        """
        own = self.controls.filter(~pl.col("source").is_in(list(DISHONEST_CONTROLS)), detector=detector)
        own = own.drop_nulls("value")
        ends = own.select("detector_value", "detector_low", "value", "high").iter_rows()
        return own.with_columns(is_above=pl.Series([is_above_control(*each) for each in ends], dtype=pl.Boolean))


def audit_scores(
    videos: pl.DataFrame,
    scores: pl.DataFrame,
    how: Settings | None = None,
    *,
    controls: Mapping[str, pl.DataFrame] | None = None,
    suspected: Sequence[str] | None = None,
) -> Audit:
    """Compute all of it.

    Args:
        videos: ``video_id label group_id generator real_source corpus``; a video without a group is its own.
        scores: a Float64 column per detector, null where it did not answer; rows as in ``videos``.
        how: the settings.
        controls: by name ``fold`` and ``score``, null where it has none, rows as in ``videos``.
        suspected: group ids (N,) if videos with similar ids belonged together; None: nothing is suspected.

    Raises:
        ValueError: lengths that differ, or only one label.
    """
    how = how or Settings()
    groups = group_ids(videos)
    labels = (videos["label"] == "fake").cast(pl.Int64).to_numpy()
    table = scores.to_numpy().astype(np.float64)  # (N, D), NaN where there is no score
    names = scores.columns
    by_pattern = _by_pattern(table)
    numbers: list[tuple[object, ...]] = []
    thresholds: list[tuple[object, ...]] = []
    slices: list[tuple[object, ...]] = []
    floors: dict[str, SourceFloor] = {}
    common_rows = np.flatnonzero(~np.isnan(table).any(axis=1))
    common = _rows(common_rows, labels, groups, how)
    drawn_of_common: ReplicateValues | None = None
    compared = len(names) > 1 and np.unique(common.labels).size == 2
    for answered, members in by_pattern.items():
        rows = _rows(np.flatnonzero(np.frombuffer(answered, dtype=bool)), labels, groups, how)
        if np.unique(rows.labels).size < 2:
            numbers += [(names[member], MAIN_METRIC, None, None, None, rows.labels.size, 0) for member in members]
            continue
        ensembles = rows.places.size == common.places.size and compared
        columns = {names[member]: table[rows.places, member] for member in members}
        both = _ensembles(table, common) if ensembles else {}
        found = [_measures(column, rows, how) for column in columns.values()]
        measures = [measure for each in found for measure in each.all]
        drawn = _drawn(rows, [*measures, *((roc_auc, column) for column in both.values())], how)
        ends = iter(intervals_of(drawn, how.confidence))
        for name, each in zip(columns, found, strict=True):
            for metric in each.metrics:
                numbers.append((name, metric, *next(ends).row()))
            thresholds += list(_threshold_rows(name, each, ends, rows))
        if ensembles and len(members) == len(names):
            first = np.cumsum([0, *(len(each.all) for each in found)])
            drawn_of_common = _some(drawn, [*first[:-1].tolist(), *range(int(first[-1]), len(drawn.values))])
        slices += list(_slices(videos[rows.places], columns, rows, found, how))
        floors |= _floors(videos[rows.places], columns, rows, how)
    if compared and drawn_of_common is None:
        columns = {name: table[common.places, number] for number, name in enumerate(names)}
        measured = [(roc_auc, column) for column in (columns | _ensembles(table, common)).values()]
        drawn_of_common = _drawn(common, measured, how)
    frame = pl.DataFrame(numbers, schema=_NUMBERS, orient="row")
    together = _named([*names, AVERAGE], drawn_of_common, how)
    main = frame.filter(pl.col("metric") == MAIN_METRIC) if together.is_empty() else together
    main = main.filter(pl.col("detector").is_in(names)).sort("value", descending=True, nulls_last=True)
    order = main["detector"].to_list()
    places = [names.index(name) for name in order]
    decisions = _decisions(table[common.places], common, how) if compared else None
    return Audit(
        detectors=tuple(order),
        numbers=frame,
        common=together,
        by_group=_by_group(table, names, labels, groups, how),
        controls=_controls(controls or {}, table, names, labels, groups, common if compared else None, how),
        shuffled=_shuffled(table, names, labels, groups, how),
        differences=_differences(names, drawn_of_common, how),
        slices=pl.DataFrame(slices, schema=_SLICES, orient="row").sort(
            "auc", "slice_by", "value", nulls_last=True, maintain_order=True
        ),
        floors={name: floors[name] for name in order if name in floors},
        thresholds=pl.DataFrame(thresholds, schema=_THRESHOLDS, orient="row"),
        coverage=_coverage(table, names, labels),
        correlations=agreement.rank_correlations(table[common.places][:, places]) if compared else None,
        equal_decisions=(
            None if decisions is None else agreement.shares_of_equal_decisions(decisions[:, places])
        ),
        regrouped=(
            pl.DataFrame(schema=_NAMED) if suspected is None
            else _aucs(table, names, labels, np.array(suspected, dtype=object), how)
        ),
        num_common=int(common.places.size),
        num_common_groups=len(set(common.groups.tolist())),
        num_videos=videos.height,
        num_groups=len(set(groups.tolist())),
        settings=how,
    )  # fmt: skip


def group_ids(videos: pl.DataFrame) -> npt.NDArray[np.object_]:
    """(N,), the group of each row; a video without one is its own."""
    pairs = videos.select("video_id", "group_id").iter_rows()
    # Whatever a group is called, it is none of the videos that stand alone.
    return np.array([f"alone {video}" if group is None else f"group {group}" for video, group in pairs], dtype=object)


_TEXT, _NUMBER, _COUNT = pl.String, pl.Float64, pl.Int64
_NUMBERS = {
    "detector": _TEXT, "metric": _TEXT, "value": _NUMBER, "low": _NUMBER, "high": _NUMBER, "num_videos": _COUNT,
    "num_groups": _COUNT,
}  # fmt: skip
_NAMED = {"detector": _TEXT, "value": _NUMBER, "low": _NUMBER, "high": _NUMBER}
_CONTROLS = {
    "detector": _TEXT, "source": _TEXT, "value": _NUMBER, "low": _NUMBER, "high": _NUMBER, "num_videos": _COUNT,
    "detector_value": _NUMBER, "detector_low": _NUMBER, "detector_high": _NUMBER,
}  # fmt: skip
_SLICES = {
    "detector": _TEXT, "slice_by": _TEXT, "value": _TEXT, "auc": _NUMBER, "low": _NUMBER, "high": _NUMBER,
    "called_share": _NUMBER, "num_videos": _COUNT, "num_groups": _COUNT, "is_small": pl.Boolean,
}  # fmt: skip
_THRESHOLDS = {
    "detector": _TEXT, "point": _TEXT, "fpr": _NUMBER, "fpr_low": _NUMBER, "fpr_high": _NUMBER, "tpr": _NUMBER,
    "tpr_low": _NUMBER, "tpr_high": _NUMBER, "first_threshold": _NUMBER, "second_threshold": _NUMBER,
    "is_resolved": pl.Boolean,
}  # fmt: skip
_DIFFERENCES = {
    "first": _TEXT, "second": _TEXT, "difference": _NUMBER, "low": _NUMBER, "high": _NUMBER, "p": _NUMBER,
    "holm_p": _NUMBER, "is_shown": pl.Boolean,
}  # fmt: skip


# --- Which rows, and the same draws for all that are measured on them


def _rows(places: IntArray, labels: IntArray, groups: npt.NDArray[np.object_], how: Settings) -> Rows:
    of_rows, own = labels[places], groups[places]
    half = halves(of_rows, own, seed=how.seed) if places.size else None
    enough = half is not None and all(np.unique(of_rows[half == each]).size == 2 for each in (0, 1))
    return Rows(places, of_rows, own, half if enough else None)


def _by_pattern(table: FloatArray) -> dict[bytes, list[int]]:
    """Columns by which rows have a score in them."""
    found: dict[bytes, list[int]] = {}
    for number, column in enumerate(table.T):
        found.setdefault((~np.isnan(column)).tobytes(), []).append(number)
    return found


def _drawn(
    rows: Rows, measures: Sequence[tuple[Metric, npt.ArrayLike]], how: Settings, votes: FloatArray | None = None
) -> ReplicateValues:
    return replicate_values(
        rows.labels, measures, rows.groups, row_weights=votes, replicates=how.replicates, seed=how.seed
    )


def _some(drawn: ReplicateValues, numbers: Sequence[int]) -> ReplicateValues:
    chosen = np.array(numbers, dtype=np.int64)
    return replace(
        drawn, values=drawn.values[chosen], replicates=drawn.replicates[chosen], bounds=drawn.bounds[chosen],
        is_distance=drawn.is_distance[chosen],
    )  # fmt: skip


def _named(names: Sequence[str], drawn: ReplicateValues | None, how: Settings) -> pl.DataFrame:
    found = intervals_of(drawn, how.confidence) if drawn else ()
    rows = [(name, *each.row()[:3]) for name, each in zip(names, found, strict=bool(drawn))]
    return pl.DataFrame(rows, schema=_NAMED, orient="row")


# --- The numbers of one detector


@dataclass(frozen=True)
class _Measures:
    """What is measured of one detector's scores."""

    metrics: tuple[str, ...]
    all: tuple[tuple[Metric, npt.ArrayLike], ...]  # the metrics by name first, then two shares of each operating point
    decisions: IntArray | None  # (n,) of 0 and 1; None where no threshold can be chosen
    thresholds: Mapping[str, tuple[float, float]]  # of each point, the two that the halves chose


def _measures(scores: FloatArray, rows: Rows, how: Settings) -> _Measures:
    decided = _decided(scores, rows, how)
    values: dict[str, npt.ArrayLike] = dict.fromkeys(RANKING_METRICS, scores)
    if decided is not None:
        values |= dict.fromkeys(DECISION_METRICS, decided.astype(np.float64))
    if is_probability(scores):
        values |= dict.fromkeys(PROBABILITY_METRICS, scores)
    points: dict[str, tuple[float, float]] = {}
    shares: list[tuple[Metric, npt.ArrayLike]] = []

    def note(name: str, limits: FloatArray, chosen: tuple[float, float]) -> None:
        points[name] = chosen
        called = decide(scores, limits).astype(np.float64)
        shares.extend([(share_of_reals_called, called), (share_of_fakes_called, called)])

    for point in dict.fromkeys((*map(operating_point, FALSE_ALARM_RATES), how.point)):
        if rows.half is not None:
            limits = crossed_thresholds(point, rows.labels, scores, rows.half)
            note(str(point), limits, (float(limits[rows.half == 1][0]), float(limits[rows.half == 0][0])))
    if how.threshold is not None:
        note(f"{GIVEN}{how.threshold:g}", np.array(how.threshold), (how.threshold, how.threshold))
    measured = [(METRICS[name], column) for name, column in values.items()]
    return _Measures(tuple(values), (*measured, *shares), decided, points)


def is_probability(scores: FloatArray) -> bool:
    """Whether all lie in [0, 1], so that they may be read as probabilities."""
    return bool(scores.size and scores.min() >= 0 and scores.max() <= 1)


def _decided(scores: FloatArray, rows: Rows, how: Settings) -> IntArray | None:
    if how.threshold is not None:
        return decide(scores, how.threshold)
    if rows.half is None:
        return None
    return decide(scores, crossed_thresholds(how.point, rows.labels, scores, rows.half))


def _decisions(table: FloatArray, rows: Rows, how: Settings) -> FloatArray | None:
    columns = [_decided(column, rows, how) for column in table.T]
    known = [column for column in columns if column is not None]
    return np.stack(known, axis=1).astype(np.float64) if len(known) == len(columns) else None


def _threshold_rows(
    name: str, measures: _Measures, ends: Iterator[Interval], rows: Rows
) -> Iterator[tuple[object, ...]]:
    per_half = () if rows.half is None else [((rows.half == each) & (rows.labels == 0)).sum() for each in (0, 1)]
    for point, chosen in measures.thresholds.items():
        called = (*next(ends).row()[:3], *next(ends).row()[:3])
        resolved = point.startswith(GIVEN) or operating_point(point).is_resolved_by(int(min(per_half)))
        yield (name, point, *called, *chosen, resolved)


# --- Slices and floors


def _slices(
    videos: pl.DataFrame, columns: Mapping[str, FloatArray], rows: Rows, found: Sequence[_Measures], how: Settings
) -> Iterator[tuple[object, ...]]:
    """Set each generator against all reals, each source of reals against all fakes, and cut both by corpus."""
    every = np.ones(rows.labels.size, dtype=bool)
    for by, sliced in (("generator", rows.labels == 1), ("real_source", rows.labels == 0), ("corpus", every)):
        values = slice_names(videos[by].filter(pl.Series(sliced)))
        named = _sliced(videos[by], values).to_numpy()
        for value in values if len(values) > 1 else ():
            own = sliced & (named == value)
            inside = own | ~sliced
            if np.unique(rows.labels[inside]).size < 2:
                continue
            part = Rows(rows.places[inside], rows.labels[inside], rows.groups[inside], None)
            drawn = _drawn(part, [(roc_auc, column[inside]) for column in columns.values()], how)
            ends = intervals_of(drawn, how.confidence)
            for name, measures, interval in zip(columns, found, ends, strict=True):
                yield _slice_row(name, by, value, interval, own, rows, measures)


def slice_names(column: pl.Series) -> list[str]:
    """Return the most frequent values, then ALL_OTHERS for the rest and NOT_KNOWN for nulls; empty without a value."""
    counts = column.drop_nulls().value_counts(sort=True).sort("count", column.name, descending=[True, False])
    values: list[str] = counts[column.name].to_list()
    names = values if len(values) <= _MOST_SLICES else [*values[: _MOST_SLICES - 1], ALL_OTHERS]
    return [*names, NOT_KNOWN] if names and column.null_count() else names


def _sliced(column: pl.Series, names: Sequence[str]) -> pl.Series:
    """Return the name of each row's slice."""
    return (
        column.fill_null(NOT_KNOWN)
        .to_frame()
        .select(pl.when(pl.col(column.name).is_in(list(names))).then(column.name).otherwise(pl.lit(ALL_OTHERS)))
        .to_series()
    )


def _slice_row(
    name: str, by: str, value: str, interval: Interval, inside: npt.NDArray[np.bool_], rows: Rows, measures: _Measures
) -> tuple[object, ...]:
    called = None if measures.decisions is None else float(measures.decisions[inside].mean())
    num_groups = len(set(rows.groups[inside].tolist()))
    small = num_groups < SMALL_BELOW_GROUPS
    # With one group of the slice nothing was drawn of it, and the interval would be of the other class alone.
    ends = interval.row()[:3] if num_groups > 1 else (interval.row()[0], None, None)
    return (name, by, value, *ends, called, int(inside.sum()), num_groups, small)


def _floors(
    videos: pl.DataFrame, columns: Mapping[str, FloatArray], rows: Rows, how: Settings
) -> dict[str, SourceFloor]:
    reals = np.flatnonzero(rows.labels == 0)
    sources = videos["real_source"].to_numpy()[reals]
    drawn = {
        "replicates": how.replicates, "seed": how.seed, "confidence": how.confidence,
        "fewest_groups": FEWEST_GROUPS_OF_A_SOURCE,
    }  # fmt: skip
    found = {
        name: real_source_floor(column[reals], sources, rows.groups[reals], **drawn)  # type: ignore[arg-type]
        for name, column in columns.items()
    }
    return {name: floor for name, floor in found.items() if floor is not None}


# --- Detectors together


def _ensembles(table: FloatArray, common: Rows) -> dict[str, FloatArray]:
    scores = table[common.places]
    return {AVERAGE: agreement.average_scores(scores)}


def _differences(names: Sequence[str], drawn: ReplicateValues | None, how: Settings) -> pl.DataFrame:
    """Of every pair of detectors; p-values are corrected for all pairs."""
    if drawn is None:
        return pl.DataFrame(schema=_DIFFERENCES)
    pairs = list(combinations(range(len(names)), 2))
    found = [paired_difference(drawn, one, other, confidence=how.confidence) for one, other in pairs]
    p_values = [each.p_value for each in found]
    adjusted = holm(p_values)
    rows = [
        (names[one], names[other], each.value, each.low, each.high, p, corrected, bool(corrected <= 1 - how.confidence))
        for (one, other), each, p, corrected in zip(pairs, found, p_values, adjusted.tolist(), strict=True)
    ]
    return pl.DataFrame(rows, schema=_DIFFERENCES, orient="row").fill_nan(None)


def _coverage(table: FloatArray, names: Sequence[str], labels: IntArray) -> pl.DataFrame:
    rows = []
    for name, column in zip(names, table.T, strict=True):
        answered = ~np.isnan(column)
        known = column[answered]
        worst = np.where(labels == 1, known.min() - 1, known.max() + 1)  # a fake below all, a real above all
        numbers = [int((answered & (labels == label)).sum()) for label in (0, 1)]
        value = roc_auc(labels, np.where(answered, column, worst))
        rows.append((name, int(answered.sum()), float(answered.mean()), *numbers, value))
    columns = ["detector", "num_videos", "answered_share", "num_real", "num_fake", "auc_if_wrong"]
    return pl.DataFrame(rows, schema=columns, orient="row")


# --- What has no detector, or other groups


def _controls(
    controls: Mapping[str, pl.DataFrame], table: FloatArray, names: Sequence[str], labels: IntArray,
    groups: npt.NDArray[np.object_], common: Rows | None, how: Settings,
) -> pl.DataFrame:  # fmt: skip
    """Every detector beside every control, on the same videos; ``common``: those by which all are compared."""
    if not controls:
        return pl.DataFrame(schema=_CONTROLS)
    sources = list(controls)
    folds = [each["fold"].fill_null(-1).to_numpy() for each in controls.values()]
    scores = np.stack([each["score"].to_numpy() for each in controls.values()], axis=1)
    if common is None:
        judged = [
            (np.frombuffer(each, dtype=bool).nonzero()[0], members) for each, members in _by_pattern(table).items()
        ]
    else:
        judged = [(common.places, list(range(len(names))))]
    found: list[tuple[object, ...]] = []
    for places, members in judged:
        for known, columns in _by_pattern(scores[places]).items():
            part = _rows(places[np.frombuffer(known, dtype=bool)], labels, groups, how)
            if np.unique(part.labels).size < 2:
                continue
            measured = [
                *((within_folds(roc_auc, folds[each][part.places]), scores[part.places, each]) for each in columns),
                *((roc_auc, table[part.places, member]) for member in members),
            ]
            ends = [each.row()[:3] for each in intervals_of(_drawn(part, measured, how), how.confidence)]
            own = dict(zip(members, ends[len(columns) :], strict=True))
            found += [
                (names[member], sources[each], *ends[number], part.places.size, *own[member])
                for member in members
                for number, each in enumerate(columns)
            ]
    return pl.DataFrame(found, schema=_CONTROLS, orient="row").fill_nan(None)


def _shuffled(
    table: FloatArray, names: Sequence[str], labels: IntArray, groups: npt.NDArray[np.object_], how: Settings
) -> pl.DataFrame:
    rows, tail = [], (1 - how.confidence) / 2
    for answered, members in _by_pattern(table).items():
        part = np.flatnonzero(np.frombuffer(answered, dtype=bool))
        found = shuffled_label_aucs(labels[part], table[part][:, members], groups[part], num=_SHUFFLES, seed=how.seed)
        rows += [
            (names[member], float(np.mean(aucs)), *np.quantile(aucs, [tail, 1 - tail]))
            for member, aucs in zip(members, found, strict=True)
        ]
    return pl.DataFrame(rows, schema=_NAMED, orient="row").fill_nan(None)


def _by_group(
    table: FloatArray, names: Sequence[str], labels: IntArray, groups: npt.NDArray[np.object_], how: Settings
) -> pl.DataFrame:
    """Return the main metric with one vote per group; empty if every video is its own group."""
    if len(set(groups.tolist())) == groups.size:
        return pl.DataFrame(schema=_NAMED)
    return _aucs(table, names, labels, groups, how, one_vote_each=True)


def _aucs(
    table: FloatArray, names: Sequence[str], labels: IntArray, groups: npt.NDArray[np.object_], how: Settings,
    *, one_vote_each: bool = False,
) -> pl.DataFrame:  # fmt: skip
    rows = []
    for answered, members in _by_pattern(table).items():
        part = _rows(np.flatnonzero(np.frombuffer(answered, dtype=bool)), labels, groups, how)
        if np.unique(part.labels).size < 2:
            continue
        measured = [(roc_auc, table[part.places, member]) for member in members]
        votes = one_vote_per_group(part.groups) if one_vote_each else None
        drawn = _drawn(part, measured, how, votes)
        found = intervals_of(drawn, how.confidence)
        rows += [(names[member], *each.row()[:3]) for member, each in zip(members, found, strict=True)]
    return pl.DataFrame(rows, schema=_NAMED, orient="row")
