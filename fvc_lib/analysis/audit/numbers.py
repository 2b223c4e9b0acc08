"""The numbers of an audit of anyone's scores, with intervals over groups.

A detector is judged on the videos that it answered. Detectors are compared and averaged on the videos that all of them
answered, with the same random draws of groups.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fvc_lib.analysis.read.headline import (
    DISHONEST_CONTROLS,
    HEADLINE_METRIC as MAIN_METRIC,
    LENGTH_ONLY,
    METADATA_ONLY,
)
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, roc_auc
from fvc_lib.metrics.combination import average_scores, rank_correlations
from fvc_lib.metrics.cross_validation import (
    DECISION_METRICS,
    METRICS,
    PROBABILITY_METRICS,
    RANKING_METRICS,
    within_folds,
)
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE, real_source_floor, shuffled_label_aucs
from fvc_lib.metrics.intervals import (
    ReplicateValues,
    holm,
    intervals_of,
    is_above_control,
    one_vote_per_group,
    paired_difference,
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
from fvc_lib.services.errors import UsageError

AVERAGE = "average of all"
GIVEN = "threshold="  # of a threshold that comes with the scores
FALSE_ALARM_RATES = ("fpr=0.05", "fpr=0.01", "fpr=0.001")
SMALL_BELOW_GROUPS = 20
NOT_KNOWN, ALL_OTHERS = "not known", "all others"
_MOST_SLICES = 12
NEED_VIDEOS = (METADATA_ONLY, LENGTH_ONLY)  # controls without which nobody is above all controls
# Reals that a rate needs at least, by the metric that is NaN with fewer.
NEEDS_REALS = {"true_positive_rate_at_1_percent": 100, "true_positive_rate_at_0_1_percent": 1000}

Groups = npt.NDArray[np.object_]
Ends = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Settings:
    """How an audit computes.

    Attributes:
        point: the rule that chooses a threshold. Each half of the groups chooses the threshold of the other half.
        threshold: a threshold that comes with the scores and replaces ``point``; None if there is none.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of every random draw.
        confidence: coverage of every interval, such as 0.95.
    """

    point: OperatingPoint = BEST
    threshold: float | None = None
    replicates: int = 1000
    seed: int = 0
    confidence: float = 0.95


def settings(decide_at: str, **others: Any) -> Settings:
    """Return settings whose rule of decision is the text ``decide_at``.

    Examples are ``best``, ``fpr=0.01``, ``cost=5:1`` and ``threshold=0.5``. ``others`` are further fields of
    ``Settings``.

    Raises:
        UsageError: ``decide_at`` has another form.
    """
    try:
        if decide_at.startswith(GIVEN):
            return Settings(threshold=float(decide_at.removeprefix(GIVEN)), **others)
        return Settings(point=operating_point(decide_at), **others)
    except ValueError as error:
        raise UsageError(f"{error} Or threshold=NUMBER, one that comes with the scores.") from error


@dataclass(frozen=True)
class Audit:
    """The outcome of ``audit_scores``.

    Undefined numbers are null. ``low`` and ``high`` are the ends of an interval. The main metric is the ROC AUC. The
    common videos are those that all detectors answered.

    Attributes:
        detectors: names, the highest main metric on the common videos first.
        numbers: all metrics of each detector on the videos that it answered: ``detector metric value low high
            num_videos num_groups``.
        common: the main metric on the common videos, also for the average of all scores: ``detector value low high``.
        by_group: the main metric if every group has the same weight: ``detector value low high``. Computed on the
            videos that the detector answered; empty if every group is a single video.
        controls: each control (a simple predictor) next to each detector on the same videos: ``detector source value
            low high num_videos detector_value detector_low detector_high``.
        shuffled: ROC AUC after labels were dealt to other groups, mean and range over the deals: ``detector value low
            high``.
        differences: the main metric of ``second`` minus that of ``first``, for all pairs: ``first second difference
            low high p holm_p is_shown``.
        slices: the main metric on parts of the videos, worst first: ``detector slice_by value auc low high called_share
            num_videos num_groups is_small``.
        floors: how well scores tell the reals of two sources apart: ``detector higher lower value low high num_higher
            num_lower``.
        thresholds: shares called fake, among reals (``fpr``) and fakes (``tpr``): ``detector point fpr fpr_low fpr_high
            tpr tpr_low tpr_high first_threshold second_threshold is_resolved``.
        coverage: ``detector num_videos answered_share num_real num_fake auc_if_wrong``. ``auc_if_wrong`` counts every
            video without an answer as a mistake.
        regrouped: the main metric with suspected groups: ``detector value low high``; empty if none are suspected.
        correlations: float64 (D, D), Spearman's correlation of the scores on the common videos. None if the detectors
            could not be compared.
        num_common: number of common videos.
        num_common_groups: number of groups of the common videos.
        num_videos: number of videos in the table.
        num_groups: number of groups in the table.
        settings: how the numbers were computed.
    """

    detectors: tuple[str, ...]
    numbers: pl.DataFrame
    common: pl.DataFrame
    by_group: pl.DataFrame
    controls: pl.DataFrame
    shuffled: pl.DataFrame
    differences: pl.DataFrame
    slices: pl.DataFrame
    floors: pl.DataFrame
    thresholds: pl.DataFrame
    coverage: pl.DataFrame
    regrouped: pl.DataFrame
    correlations: FloatArray | None
    num_common: int
    num_common_groups: int
    num_videos: int
    num_groups: int
    settings: Settings

    def interval(self, detector: str, metric: str = MAIN_METRIC) -> Ends:
        """Return ``(value, low, high)`` of ``metric`` on the videos that ``detector`` answered; None if undefined."""
        return ends_of(self.numbers.filter(detector=detector, metric=metric)) or (None, None, None)

    @property
    def is_complete(self) -> bool:
        """Whether every detector answered every video."""
        return self.num_common == self.num_videos

    def compared(self, detector: str) -> Ends:
        """Return ``(value, low, high)`` of the main metric, on the common videos if detectors were compared there.

        Otherwise the videos are those that ``detector`` answered. There, a detector that skips hard videos would look
        better than the others.
        """
        return ends_of(self.common.filter(detector=detector)) or self.interval(detector)

    def of_coverage(self, detector: str, column: str) -> Any:
        """Return the value of ``column`` in the row of ``detector`` in ``coverage``."""
        return self.coverage.filter(detector=detector)[column].item()

    def above_controls(self, detector: str) -> bool | None:
        """Return whether a detector is above every honest control.

        None if it is above all that were computed, but ``NEED_VIDEOS`` (controls that need the videos) are missing.
        """
        own = self.honest_controls(detector)
        if not own["is_above"].all():
            return False
        return True if set(NEED_VIDEOS) <= set(own["source"]) else None

    def honest_controls(self, detector: str) -> pl.DataFrame:
        """Return the rows of ``controls`` of a detector, with a bool column ``is_above``: it beats the control.

        Controls without a value and those on a split that leaks (``DISHONEST_CONTROLS``) are left out.
        """
        own = self.controls.filter(~pl.col("source").is_in(list(DISHONEST_CONTROLS)), detector=detector)
        own = own.drop_nulls("value")
        ends = own.select("detector_value", "detector_low", "value", "high").iter_rows()
        return own.with_columns(is_above=pl.Series([is_above_control(*each) for each in ends], dtype=pl.Boolean))


def ends_of(rows: pl.DataFrame) -> Ends | None:
    """Return ``(value, low, high)`` of the first row; None without rows."""
    return rows.select("value", "low", "high").row(0) if rows.height else None


@dataclass(frozen=True)
class _Rows:
    """A selection of n videos of the table.

    Attributes:
        places: int64 (n,), row numbers in the table.
        labels: int64 (n,), 0 is real and 1 is fake.
        groups: object (n,), group ids.
        half: int64 (n,) of 0 and 1: the half of the groups that a video is in, for choosing thresholds. None if a half
            would lack a class.
        how: the settings of the audit.
    """

    places: IntArray
    labels: IntArray
    groups: Groups
    half: IntArray | None
    how: Settings

    @property
    def has_both_labels(self) -> bool:
        """Whether there are reals and fakes."""
        return np.unique(self.labels).size == 2

    def drawn(
        self, measures: Sequence[tuple[Metric, npt.ArrayLike]], votes: FloatArray | None = None
    ) -> ReplicateValues:
        """Return the values of ``measures`` on these rows and in each half-sample; all measures share the draws.

        ``votes`` (n,) are weights of the rows; None: all equal.
        """
        return replicate_values(
            self.labels, measures, self.groups, row_weights=votes, replicates=self.how.replicates, seed=self.how.seed
        )

    def ends(self, measures: Sequence[tuple[Metric, npt.ArrayLike]], votes: FloatArray | None = None) -> list[Ends]:
        """Return ``(value, low, high)`` of each measure; arguments as in ``drawn``."""
        found = intervals_of(self.drawn(measures, votes), self.how.confidence)
        return [interval.row()[:3] for interval in found]


def audit_scores(
    videos: pl.DataFrame,
    scores: pl.DataFrame,
    how: Settings | None = None,
    *,
    controls: Mapping[str, pl.DataFrame] | None = None,
    suspected: Sequence[str] | None = None,
) -> Audit:
    """Compute all numbers of an audit.

    Args:
        videos: ``video_id label group_id generator real_source corpus``. A video with a null group is a group of its
            own.
        scores: one Float64 column per detector, null where it did not answer; rows as in ``videos``.
        how: the settings; None: the defaults.
        controls: maps the name of a control to a frame with ``fold`` and ``score``. Rows are as in ``videos``, null
            where the control has no score.
        suspected: group ids (N,) from ``suspected_groups``; None: nothing is suspected.

    Raises:
        ValueError: lengths differ, or there is only one label.
    """
    how, groups = how or Settings(), group_ids(videos)
    labels = (videos["label"] == "fake").cast(pl.Int64).to_numpy()
    table = scores.to_numpy().astype(np.float64)  # (N, D), NaN where there is no score
    names = scores.columns

    def rows_of(places: npt.NDArray[np.bool_], their_groups: Groups = groups) -> _Rows:
        part, own = labels[places], their_groups[places]
        half = halves(part, own, seed=how.seed) if part.size else None
        enough = half is not None and all(np.unique(part[half == each]).size == 2 for each in (0, 1))
        return _Rows(np.flatnonzero(places), part, own, half if enough else None, how)

    found: dict[str, list[tuple[object, ...]]] = {name: [] for name in _SCHEMAS}
    alike: dict[bytes, list[int]] = {}  # detectors by the videos that they answered
    for number, column in enumerate(table.T):
        alike.setdefault(np.isnan(column).tobytes(), []).append(number)
    for members in alike.values():
        rows = rows_of(~np.isnan(table[:, members[0]]))
        columns = {names[number]: table[rows.places, number] for number in members}
        decided = {name: _decided(own, rows) for name, own in columns.items()} if rows.has_both_labels else {}
        for number, (name, own) in zip(members, columns.items(), strict=True):
            found["coverage"].append((name, *_coverage(labels, table[:, number])))
            found["shuffled"].append((name, *_shuffled(rows, own)))
            if not decided:
                found["numbers"].append((name, MAIN_METRIC, None, None, None, rows.labels.size, 0))
                continue
            found["numbers"] += [(name, *row) for row in _numbers(own, decided[name], rows)]
            found["thresholds"] += [(name, *row) for row in _thresholds(own, rows)]
            found["floors"] += [(name, *row) for row in _floor(videos[rows.places], own, rows)]
            if len(set(groups.tolist())) < groups.size:
                found["by_group"].append((name, *rows.ends([(roc_auc, own)], one_vote_per_group(rows.groups))[0]))
            if suspected is not None:
                regrouped = rows_of(~np.isnan(table[:, number]), np.array(suspected, dtype=object))
                found["regrouped"].append((name, *regrouped.ends([(roc_auc, own)])[0]))
        if decided:
            found["slices"] += list(_slices(videos[rows.places], columns, decided, rows))
    common, together = rows_of(~np.isnan(table).any(axis=1)), np.empty((0, 0))
    is_compared = len(names) > 1 and common.has_both_labels
    if is_compared:
        together = table[common.places]
        measured = [(roc_auc, column) for column in (*together.T, average_scores(together))]
        drawn = common.drawn(measured)
        ends = [interval.row()[:3] for interval in intervals_of(drawn, how.confidence)]
        found["common"] = [(name, *row) for name, row in zip([*names, AVERAGE], ends, strict=True)]
        found["differences"] = list(_differences(names, drawn, how))
    if controls:
        alone = [(rows_of(~np.isnan(column)), [name]) for name, column in zip(names, table.T, strict=True)]
        for rows, judged in [(common, names)] if is_compared else alone:
            known = scores.select(judged).to_numpy().astype(np.float64)
            found["controls"] += list(_controls(controls, known, judged, rows, rows_of))
    frames = {
        name: pl.DataFrame(found[name], schema=schema, orient="row").fill_nan(None) for name, schema in _SCHEMAS.items()
    }
    main = frames["common"] if is_compared else frames["numbers"].filter(metric=MAIN_METRIC)
    order = main.filter(pl.col("detector").is_in(names)).sort("value", descending=True, nulls_last=True)["detector"]
    by_rank = pl.col("detector").replace_strict({name: place for place, name in enumerate(order)}, default=None)
    frames["slices"] = frames["slices"].sort("auc", "slice_by", "value", nulls_last=True, maintain_order=True)
    frames["floors"] = frames["floors"].sort(by_rank)
    places = [names.index(name) for name in order]
    return Audit(
        detectors=tuple(order),
        **frames,
        correlations=rank_correlations(together[:, places]) if is_compared else None,
        num_common=int(common.places.size),
        num_common_groups=len(set(common.groups.tolist())),
        num_videos=videos.height,
        num_groups=len(set(groups.tolist())),
        settings=how,
    )


def group_ids(videos: pl.DataFrame) -> Groups:
    """Return the group id of each row, object (N,); a video without a group gets an id of its own."""
    # Whatever a group is called, it is none of the videos that stand alone.
    alone, named = pl.format("alone {}", "video_id"), pl.format("group {}", "group_id")
    return videos.select(pl.coalesce(named, alone)).to_series().to_numpy().astype(object)


_TEXT, _NUMBER, _COUNT = pl.String, pl.Float64, pl.Int64
_ENDS = {"value": _NUMBER, "low": _NUMBER, "high": _NUMBER}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "numbers": {"detector": _TEXT, "metric": _TEXT, **_ENDS, "num_videos": _COUNT, "num_groups": _COUNT},
    **{name: {"detector": _TEXT, **_ENDS} for name in ("common", "by_group", "shuffled", "regrouped")},
    "controls": {
        "detector": _TEXT, "source": _TEXT, **_ENDS, "num_videos": _COUNT, "detector_value": _NUMBER,
        "detector_low": _NUMBER, "detector_high": _NUMBER,
    },
    "slices": {
        "detector": _TEXT, "slice_by": _TEXT, "value": _TEXT, "auc": _NUMBER, "low": _NUMBER, "high": _NUMBER,
        "called_share": _NUMBER, "num_videos": _COUNT, "num_groups": _COUNT, "is_small": pl.Boolean,
    },
    "floors": {
        "detector": _TEXT, "higher": _TEXT, "lower": _TEXT, **_ENDS, "num_higher": _COUNT, "num_lower": _COUNT,
    },
    "thresholds": {
        "detector": _TEXT, "point": _TEXT, "fpr": _NUMBER, "fpr_low": _NUMBER, "fpr_high": _NUMBER, "tpr": _NUMBER,
        "tpr_low": _NUMBER, "tpr_high": _NUMBER, "first_threshold": _NUMBER, "second_threshold": _NUMBER,
        "is_resolved": pl.Boolean,
    },
    "differences": {
        "first": _TEXT, "second": _TEXT, "difference": _NUMBER, "low": _NUMBER, "high": _NUMBER, "p": _NUMBER,
        "holm_p": _NUMBER, "is_shown": pl.Boolean,
    },
    "coverage": {
        "detector": _TEXT, "num_videos": _COUNT, "answered_share": _NUMBER, "num_real": _COUNT, "num_fake": _COUNT,
        "auc_if_wrong": _NUMBER,
    },
}  # fmt: skip

# --- One detector on the videos that it answered


def _numbers(scores: FloatArray, decided: IntArray | None, rows: _Rows) -> Iterator[tuple[object, ...]]:
    values: dict[str, npt.ArrayLike] = dict.fromkeys(RANKING_METRICS, scores)
    if decided is not None:
        values |= dict.fromkeys(DECISION_METRICS, decided.astype(np.float64))
    if scores.min() >= 0 and scores.max() <= 1:
        values |= dict.fromkeys(PROBABILITY_METRICS, scores)
    drawn = rows.drawn([(METRICS[name], column) for name, column in values.items()])
    for name, interval in zip(values, intervals_of(drawn, rows.how.confidence), strict=True):
        yield name, *interval.row()


def _decided(scores: FloatArray, rows: _Rows) -> IntArray | None:
    """Return the decisions, int64 (n,), 1 is fake; None where no threshold can be chosen."""
    if rows.how.threshold is not None:
        return decide(scores, rows.how.threshold)
    if rows.half is None:
        return None
    return decide(scores, crossed_thresholds(rows.how.point, rows.labels, scores, rows.half))


def _thresholds(scores: FloatArray, rows: _Rows) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.thresholds``, without ``detector``.

    The rates of a threshold are measured on the half of the groups that did not choose it.
    """
    chosen: dict[str, tuple[FloatArray, bool]] = {}
    if rows.half is not None:
        reals = min(int(((rows.half == each) & (rows.labels == 0)).sum()) for each in (0, 1))
        for point in dict.fromkeys((*map(operating_point, FALSE_ALARM_RATES), rows.how.point)):
            limits = crossed_thresholds(point, rows.labels, scores, rows.half)
            chosen[str(point)] = limits, point.is_resolved_by(reals)
    if rows.how.threshold is not None:
        chosen[f"{GIVEN}{rows.how.threshold:g}"] = np.full(scores.size, rows.how.threshold), True
    if not chosen:
        return
    called = [decide(scores, limits).astype(np.float64) for limits, _ in chosen.values()]
    ends = rows.ends([(share, each) for each in called for share in (share_of_reals_called, share_of_fakes_called)])
    halves_of = (rows.half == 1, rows.half == 0) if rows.half is not None else (slice(None), slice(None))
    for place, (name, (limits, is_resolved)) in enumerate(chosen.items()):
        first, second = (float(limits[half][0]) for half in halves_of)
        yield name, *ends[2 * place], *ends[2 * place + 1], first, second, is_resolved


def _slices(
    videos: pl.DataFrame, columns: Mapping[str, FloatArray], decided: Mapping[str, IntArray | None], rows: _Rows
) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.slices`` for every detector in ``columns``.

    The fakes of a generator are measured against all reals, and the reals of a source against all fakes. A corpus is
    measured with its own reals and fakes.
    """
    every = np.ones(rows.labels.size, dtype=bool)
    for by, sliced in (("generator", rows.labels == 1), ("real_source", rows.labels == 0), ("corpus", every)):
        values = slice_names(videos[by].filter(pl.Series(sliced)))
        known = pl.col(by).fill_null(NOT_KNOWN)
        kept = pl.when(known.is_in(values)).then(known).otherwise(pl.lit(ALL_OTHERS))
        named = videos.select(kept).to_series().to_numpy()
        for value in values if len(values) > 1 else ():
            own = sliced & (named == value)
            inside = own | ~sliced
            part = _Rows(rows.places[inside], rows.labels[inside], rows.groups[inside], None, rows.how)
            if not part.has_both_labels:
                continue
            num_groups = len(set(rows.groups[own].tolist()))
            ends = part.ends([(roc_auc, scores[inside]) for scores in columns.values()])
            for (name, decisions), (auc, low, high) in zip(decided.items(), ends, strict=True):
                # With one group of the slice nothing was drawn of it.
                interval = (low, high) if num_groups > 1 else (None, None)
                called = None if decisions is None else float(decisions[own].mean())
                counts = (int(own.sum()), num_groups, num_groups < SMALL_BELOW_GROUPS)
                yield name, by, value, auc, *interval, called, *counts


def slice_names(column: pl.Series) -> list[str]:
    """Return the names of slices: the most frequent values, ALL_OTHERS for the rest, and NOT_KNOWN for nulls.

    NOT_KNOWN aside, there are at most 12 names. The list is empty if every value is null.
    """
    counts = column.drop_nulls().value_counts(sort=True).sort("count", column.name, descending=[True, False])
    values: list[str] = counts[column.name].to_list()
    names = values if len(values) <= _MOST_SLICES else [*values[: _MOST_SLICES - 1], ALL_OTHERS]
    return [*names, NOT_KNOWN] if names and column.null_count() else names


def _floor(videos: pl.DataFrame, scores: FloatArray, rows: _Rows) -> Iterator[tuple[object, ...]]:
    reals = np.flatnonzero(rows.labels == 0)
    floor = real_source_floor(
        scores[reals], videos["real_source"].to_numpy()[reals], rows.groups[reals], replicates=rows.how.replicates,
        seed=rows.how.seed, confidence=rows.how.confidence, fewest_groups=FEWEST_GROUPS_OF_A_SOURCE,
    )  # fmt: skip
    if floor is not None:
        yield floor.higher, floor.lower, *floor.interval.row()[:3], floor.num_higher, floor.num_lower


def _coverage(labels: IntArray, scores: FloatArray) -> tuple[object, ...]:
    answered = ~np.isnan(scores)
    known = scores[answered]
    worst = np.where(labels == 1, known.min() - 1, known.max() + 1)  # a fake below all, a real above all
    numbers = [int((answered & (labels == label)).sum()) for label in (0, 1)]
    value = roc_auc(labels, np.where(answered, scores, worst))
    return int(answered.sum()), float(answered.mean()), *numbers, value


def _shuffled(rows: _Rows, scores: FloatArray) -> tuple[object, ...]:
    aucs = shuffled_label_aucs(rows.labels, scores[:, None], rows.groups, num=200, seed=rows.how.seed)[0]
    tail = (1 - rows.how.confidence) / 2
    return float(np.mean(aucs)), *np.quantile(aucs, [tail, 1 - tail]).tolist()


# --- Detectors together, and next to controls


def _differences(names: Sequence[str], drawn: ReplicateValues, how: Settings) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.differences``, one for each pair of detectors; Holm's p is corrected for all pairs."""
    pairs = list(combinations(range(len(names)), 2))
    found = [paired_difference(drawn, one, other, confidence=how.confidence) for one, other in pairs]
    adjusted = holm([pair.p_value for pair in found]).tolist()
    for (one, other), pair, p in zip(pairs, found, adjusted, strict=True):
        ends = (pair.value, pair.low, pair.high)
        yield names[one], names[other], *ends, pair.p_value, p, bool(p <= 1 - how.confidence)


def _controls(
    controls: Mapping[str, pl.DataFrame], table: FloatArray, names: Sequence[str], rows: _Rows, rows_of: Any
) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.controls``, one for each detector and control.

    Both are measured on the videos of ``rows`` for which the control has a score.

    Args:
        controls: as in ``audit_scores``.
        table: scores (N, D) of the detectors, NaN where there is none.
        names: D names of the detectors.
        rows: the videos on which detectors are compared.
        rows_of: returns the ``_Rows`` of a bool mask (N,).
    """
    for source, control in controls.items():
        known = np.zeros(control.height, dtype=bool)
        known[rows.places] = control["score"].is_not_null().to_numpy()[rows.places]
        part = rows_of(known)
        if part.has_both_labels:
            folds, scores = (
                control["fold"].fill_null(-1).to_numpy()[part.places],
                control["score"].to_numpy()[part.places],
            )
            of_detectors = [(roc_auc, column) for column in table[part.places].T]
            ends, *own = part.ends([(within_folds(roc_auc, folds), scores), *of_detectors])
            for name, of_detector in zip(names, own, strict=True):
                yield name, source, *ends, part.places.size, *of_detector


# --- Videos whose ids suggest that they came from one another: groups that a table does not state

_VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".gif"})
# A copy's ending: a number of few digits, a compression level, or a step of editing.
_SUFFIX = re.compile(
    r"(?:[_\-. ]+(?:\d{1,3}|c\d\d|q\d\d|v\d|raw|real|fake|copy|orig|original|edited|crop|cropped|aug|face|swap|swapped|"
    r"clip\d*|part\d*|seg\d*|frame\d*|scene\d*)|\s*\(\d+\))$",
    re.IGNORECASE,
)
_MOST_ALIKE = 100  # videos; a name that more share, or a fifth of all, is a habit of naming
KINDS_OF_LIKENESS = {
    "same name": "the same file name in several folders or formats",
    "name and suffix": "one name with different endings, such as clip and clip_2",
    "shared sequence": "numbers as in FaceForensics++, where 000_003 is made of 000 and 003",
}


def similar_ids(ids: Sequence[str], labels: Sequence[str], groups: Sequence[str | None]) -> pl.DataFrame:
    """Return families: sets of videos with similar ids that belong to two or more groups.

    A family is only a suspicion. Counters look alike for no reason, and copies may have different ids.

    Args:
        ids: N video ids.
        labels: N labels.
        groups: N group ids; None: the video has none.

    Returns:
        One row per family: ``kind`` (a key of ``KINDS_OF_LIKENESS``), ``videos`` (a list of ids) and
        ``has_both_labels``.
    """
    rows = [
        (kind, key, video, label, group or f"alone {video}")
        for video, label, group in zip(ids, labels, groups, strict=True)
        for kind, key in _keys_of(video)
    ]
    names = ("kind", "key", "video", "label", "group")
    families = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row").group_by("kind", "key").agg(
        videos=pl.col("video").unique().sort(), num_groups=pl.col("group").n_unique(),
        has_both_labels=pl.col("label").n_unique() > 1,
    )  # fmt: skip
    most = max(2, min(_MOST_ALIKE, len(ids) // 5))
    joined = pl.col("videos").list.join("\n")
    families = families.filter(pl.col("videos").list.len().is_between(2, most), pl.col("num_groups") > 1)
    families = families.with_columns(joined=joined).sort("kind", "joined", descending=[True, False])
    # "same name" comes before "name and suffix", which says nothing more of the same videos.
    return families.unique("joined", keep="first", maintain_order=True).select("kind", "videos", "has_both_labels")


def _keys_of(video: str) -> list[tuple[str, str]]:
    path = PurePosixPath(video.replace("\\", "/"))
    stem = path.stem if path.suffix.lower() in _VIDEO_ENDINGS else path.name
    base = stem.lower()
    if sequences := re.fullmatch(r"(\d{3})(?:_(\d{3}))?", stem):  # FaceForensics++: target_source
        return [("same name", base), *(("shared sequence", part) for part in sequences.groups() if part)]
    while (shorter := _SUFFIX.sub("", base)) not in ("", base):
        base = shorter
    return [("same name", stem.lower()), *([("name and suffix", base)] if len(base) >= 3 else [])]


def suspected_groups(ids: Sequence[str], groups: Sequence[str | None], families: pl.DataFrame) -> list[str]:
    """Return N group ids: videos that share a stated group or a family of ``similar_ids`` get the same id."""
    places, nodes = {video: place for place, video in enumerate(ids)}, dict[object, int]()
    edges = [(place, f"group {group}") for place, group in enumerate(groups) if group is not None]
    edges += [(places[video], f"family {n}") for n, family in enumerate(families["videos"]) for video in family]
    starts = [start for start, _ in edges]
    ends = [len(ids) + nodes.setdefault(name, len(nodes)) for _, name in edges]
    size = len(ids) + len(nodes)
    graph = coo_array((np.ones(len(edges)), (starts, ends)), shape=(size, size))
    _, parts = connected_components(graph, directed=False)
    return [f"suspected {part}" for part in parts[: len(ids)]]
