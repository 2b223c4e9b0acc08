"""The numbers of an audit of anyone's scores, with intervals over groups.

A detector is judged on the videos that it answered. Detectors are compared and averaged on the videos that all of them
answered, with the same random draws of groups.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import PurePosixPath
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
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, roc_auc
from fvc_lib.metrics.combination import average_scores
from fvc_lib.metrics.cross_validation import (
    DECISION_METRICS,
    METRICS,
    PROBABILITY_METRICS,
    RANKING_METRICS,
    within_folds,
)
from fvc_lib.metrics.floors import real_source_floor, shuffled_label_aucs
from fvc_lib.metrics.intervals import (
    ReplicateValues,
    holm,
    intervals_of,
    is_above_control,
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
FALSE_ALARM_RATES = ("fpr=0.05", "fpr=0.01", "fpr=0.001")
SMALL_BELOW_GROUPS = 20
NOT_KNOWN, ALL_OTHERS = "not known", "all others"
_GIVEN = "threshold="  # of a threshold that comes with the scores
_MOST_SLICES = 12
_NEED_VIDEOS = (METADATA_ONLY, LENGTH_ONLY)  # controls without which no detector is above all controls

Groups = npt.NDArray[np.object_]
Mask = npt.NDArray[np.bool_]
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

    @property
    def decides_at(self) -> str:
        """The rule of decision as text, such as ``best`` or ``threshold=0.5``."""
        return str(self.point) if self.threshold is None else f"{_GIVEN}{self.threshold:g}"


def settings(decide_at: str, **others: Any) -> Settings:
    """Return settings whose rule of decision is the text ``decide_at``.

    Examples are ``best``, ``fpr=0.01``, ``cost=5:1`` and ``threshold=0.5``. ``others`` are further fields of
    ``Settings``.

    Raises:
        UsageError: ``decide_at`` has another form.
    """
    try:
        if decide_at.startswith(_GIVEN):
            return Settings(threshold=float(decide_at.removeprefix(_GIVEN)), **others)
        return Settings(point=operating_point(decide_at), **others)
    except ValueError as error:
        raise UsageError(f"{error} Or threshold=NUMBER, one that comes with the scores.") from error


_TEXT, _NUMBER, _COUNT = pl.String, pl.Float64, pl.Int64
_ENDS: dict[str, Any] = {"value": _NUMBER, "low": _NUMBER, "high": _NUMBER}
_RATES = {f"{rate}{end}": _NUMBER for rate in ("fpr", "tpr") for end in ("", "_low", "_high")}
_SCHEMAS: dict[str, dict[str, Any]] = {
    name: {"detector": _TEXT, **columns}
    for name, columns in {
        "numbers": {"metric": _TEXT, **_ENDS, "num_videos": _COUNT, "num_groups": _COUNT},
        "common": _ENDS,
        "shuffled": _ENDS,
        "controls": {
            "source": _TEXT, **_ENDS, "num_videos": _COUNT, "detector_value": _NUMBER, "detector_low": _NUMBER,
            "detector_high": _NUMBER, "is_above": pl.Boolean,
        },
        "slices": {
            "slice_by": _TEXT, "value": _TEXT, "auc": _NUMBER, "low": _NUMBER, "high": _NUMBER,
            "called_share": _NUMBER, "num_videos": _COUNT, "num_groups": _COUNT, "is_small": pl.Boolean,
        },
        "floors": {"higher": _TEXT, "lower": _TEXT, **_ENDS, "num_higher": _COUNT, "num_lower": _COUNT},
        "thresholds": {
            "point": _TEXT, **_RATES, "lowest_threshold": _NUMBER, "highest_threshold": _NUMBER,
            "is_resolved": pl.Boolean,
        },
        "coverage": {
            "num_videos": _COUNT, "answered_share": _NUMBER, "num_real": _COUNT, "num_fake": _COUNT,
            "auc_if_wrong": _NUMBER,
        },
    }.items()
}  # fmt: skip
_SCHEMAS["differences"] = {
    "first": _TEXT, "second": _TEXT, "difference": _NUMBER, "low": _NUMBER, "high": _NUMBER, "p": _NUMBER,
    "holm_p": _NUMBER, "is_shown": pl.Boolean,
}  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """The outcome of ``audit_scores``.

    Undefined numbers are null. ``low`` and ``high`` are the ends of an interval. The main metric is the ROC AUC. The
    common videos are those that all detectors answered.

    Attributes:
        detectors: names, the highest main metric on the common videos first.
        numbers: all metrics of each detector on the videos that it answered.
        common: the main metric on the common videos, also for the average of all scores (``AVERAGE``). Empty if the
            detectors cannot be compared.
        controls: each control (a simple predictor) next to each detector on the same videos. ``is_above`` says whether
            the detector is above the control.
        shuffled: ROC AUC after labels were dealt to other groups: mean over the deals, and their range.
        differences: the main metric of ``second`` minus that of ``first``, for all pairs. ``holm_p`` is adjusted for
            all pairs.
        slices: the main metric on parts of the videos, worst first. ``called_share`` is the share called fake.
        floors: how well scores tell the reals of two sources apart.
        thresholds: shares called fake, among reals (``fpr``) and fakes (``tpr``). They are measured on the half of the
            groups that did not choose the threshold.
        coverage: number of answered videos. ``auc_if_wrong`` counts every video without an answer as a mistake.
        num_common: number of common videos.
        num_common_groups: number of groups of the common videos.
        num_videos: number of videos in the table.
        num_groups: number of groups in the table.
        settings: how the numbers were computed.
    """

    detectors: tuple[str, ...]
    numbers: pl.DataFrame
    common: pl.DataFrame
    controls: pl.DataFrame
    shuffled: pl.DataFrame
    differences: pl.DataFrame
    slices: pl.DataFrame
    floors: pl.DataFrame
    thresholds: pl.DataFrame
    coverage: pl.DataFrame
    num_common: int
    num_common_groups: int
    num_videos: int
    num_groups: int
    settings: Settings

    def interval(self, detector: str, metric: str = MAIN_METRIC) -> Ends:
        """Return ``(value, low, high)`` of ``metric`` on the videos that ``detector`` answered; None if undefined."""
        return ends_of(self.numbers.filter(detector=detector, metric=metric)) or (None, None, None)

    def compared(self, detector: str) -> Ends:
        """Return ``(value, low, high)`` of the main metric, on the common videos if detectors were compared there.

        Otherwise the videos are those that ``detector`` answered. There, a detector that skips hard videos would look
        better than the others.
        """
        return ends_of(self.common.filter(detector=detector)) or self.interval(detector)

    def of_coverage(self, detector: str, column: str) -> Any:
        """Return the value of ``column`` in the row of ``detector`` in ``coverage``."""
        return self.coverage.filter(detector=detector)[column].item()

    def honest_controls(self, detector: str) -> pl.DataFrame:
        """Return the rows of ``controls`` of a detector that have a value and no leaking split."""
        is_honest = ~pl.col("source").is_in(list(DISHONEST_CONTROLS))
        return self.controls.filter(is_honest, detector=detector).drop_nulls("value")

    def above_controls(self, detector: str) -> bool | None:
        """Return whether a detector is above every honest control.

        None if it is above all that were computed, but controls that need the videos are missing.
        """
        honest = self.honest_controls(detector)
        if not honest["is_above"].all():
            return False
        return True if set(_NEED_VIDEOS) <= set(honest["source"]) else None


def ends_of(rows: pl.DataFrame) -> Ends | None:
    """Return ``(value, low, high)`` of the first row; None without rows."""
    return rows.select("value", "low", "high").row(0) if rows.height else None


@dataclass(frozen=True)
class _Rows:
    """A selection of n videos of the table.

    Attributes:
        mask: bool (N,), whether a row of the table is selected.
        labels: int64 (n,), 0 is real and 1 is fake.
        groups: object (n,), group ids.
        how: the settings of the audit.
    """

    mask: Mask
    labels: IntArray
    groups: Groups
    how: Settings

    @property
    def has_both_labels(self) -> bool:
        """Whether there are reals and fakes."""
        return np.unique(self.labels).size == 2

    def drawn(self, measures: Sequence[tuple[Metric, npt.ArrayLike]]) -> ReplicateValues:
        """Return the values of ``measures`` on these rows and in each half-sample; all measures share the draws."""
        return replicate_values(
            self.labels, measures, self.groups, replicates=self.how.replicates, seed=self.how.seed
        )  # fmt: skip

    def ends(self, measures: Sequence[tuple[Metric, npt.ArrayLike]]) -> list[tuple[Any, ...]]:
        """Return ``(value, low, high, n, number of groups)`` of each measure."""
        return [interval.row() for interval in intervals_of(self.drawn(measures), self.how.confidence)]


def audit_scores(
    videos: pl.DataFrame,
    scores: pl.DataFrame,
    how: Settings | None = None,
    *,
    controls: Mapping[str, pl.DataFrame] | None = None,
) -> Audit:
    """Compute all numbers of an audit.

    Args:
        videos: ``video_id label group_id generator real_source corpus``. A video with a null group is a group of its
            own.
        scores: one Float64 column per detector, null where it did not answer; rows as in ``videos``.
        how: the settings; None: the defaults.
        controls: maps the name of a control to a frame with ``fold`` and ``score``. Rows are as in ``videos``, null
            where the control has no score.

    Raises:
        ValueError: lengths differ, or there is only one label.
    """
    how, groups = how or Settings(), group_ids(videos)
    labels = (videos["label"] == "fake").cast(pl.Int64).to_numpy()
    columns = {name: scores[name].cast(pl.Float64).to_numpy() for name in scores.columns}  # NaN: no answer

    def rows_of(mask: Mask) -> _Rows:
        return _Rows(mask, labels[mask], groups[mask], how)

    found: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    found["coverage"] = [(name, *_coverage(labels, column)) for name, column in columns.items()]
    answered = {name: ~np.isnan(column) for name, column in columns.items()}
    for mask, members in _by_mask(answered):
        rows, own = rows_of(mask), {name: columns[name][mask] for name in members}
        found["shuffled"] += _shuffled(rows, own)
        if not rows.has_both_labels:
            found["numbers"] += [(name, MAIN_METRIC, None, None, None, rows.labels.size, 0) for name in members]
            continue
        limits = {name: _limits(column, rows) for name, column in own.items()}
        ends = rows.ends(list((measures := _measures(own, limits, how)).values()))
        known = dict(zip(measures, ends, strict=True))
        found["numbers"] += [(*key, *row) for key, row in known.items() if len(key) == 2]
        found["thresholds"] += _thresholds(limits, known, rows)
        found["slices"] += _slices(videos.filter(mask), own, limits, rows)
        found["floors"] += _floors(videos.filter(mask), own, rows)
    common = rows_of(np.logical_and.reduce(list(answered.values())))
    is_compared = len(columns) > 1 and common.has_both_labels
    if is_compared:
        together = np.column_stack([column[common.mask] for column in columns.values()])
        drawn = common.drawn([(roc_auc, column) for column in (*together.T, average_scores(together))])
        intervals = intervals_of(drawn, how.confidence)
        found["common"] = [(name, *of.row()[:3]) for name, of in zip([*columns, AVERAGE], intervals, strict=True)]
        found["differences"] = list(_differences(list(columns), drawn, how))
    for rows, members in [(common, list(columns))] if is_compared else [(rows_of(answered[x]), [x]) for x in columns]:
        found["controls"] += _controls(controls or {}, {name: columns[name] for name in members}, rows, rows_of)
    frames = {
        name: pl.DataFrame(found[name], schema=schema, orient="row").fill_nan(None) for name, schema in _SCHEMAS.items()
    }
    main = frames["common"] if is_compared else frames["numbers"].filter(metric=MAIN_METRIC)
    order = main.filter(pl.col("detector") != AVERAGE).sort("value", descending=True, nulls_last=True)["detector"]
    frames["slices"] = frames["slices"].sort("auc", "slice_by", "value", nulls_last=True, maintain_order=True)
    return Audit(
        detectors=tuple(order),
        **frames,
        num_common=common.labels.size,
        num_common_groups=len(set(common.groups.tolist())),
        num_videos=videos.height,
        num_groups=len(set(groups.tolist())),
        settings=how,
    )


def group_ids(videos: pl.DataFrame) -> Groups:
    """Return the group id of each row, object (N,); a video without a group gets an id of its own."""
    alone, named = pl.format("alone {}", "video_id"), pl.format("group {}", "group_id")
    return videos.select(pl.coalesce(named, alone)).to_series().to_numpy().astype(object)


def _by_mask(masks: Mapping[str, Mask]) -> list[tuple[Mask, list[str]]]:
    """Return pairs of a mask and the names that share it, so that they can share their draws."""
    alike: dict[bytes, tuple[Mask, list[str]]] = {}
    for name, mask in masks.items():
        alike.setdefault(mask.tobytes(), (mask, []))[1].append(name)
    return list(alike.values())


# --- Detectors on the videos that they answered


def _limits(scores: FloatArray, rows: _Rows) -> dict[str, FloatArray]:
    """Return the thresholds of the rows, float64 (n,), by operating point; empty where none can be chosen."""
    half, limits = _halves(rows), {}
    if half is not None:
        for point in dict.fromkeys((*map(operating_point, FALSE_ALARM_RATES), rows.how.point)):
            limits[str(point)] = crossed_thresholds(point, rows.labels, scores, half)
    if rows.how.threshold is not None:
        limits[rows.how.decides_at] = np.full(scores.size, rows.how.threshold)
    return limits


def _measures(
    columns: Mapping[str, FloatArray], limits: Mapping[str, Mapping[str, FloatArray]], how: Settings
) -> dict[tuple[str, ...], tuple[Metric, FloatArray]]:
    """Return all measures of detectors with scores ``columns`` and thresholds ``limits``.

    Keys are (detector, metric), and (detector, operating point, ``fpr`` or ``tpr``).
    """
    measures: dict[tuple[str, ...], tuple[Metric, FloatArray]] = {}
    for name, scores in columns.items():
        called = {point: decide(scores, limit).astype(np.float64) for point, limit in limits[name].items()}
        measures |= {(name, metric): (METRICS[metric], scores) for metric in RANKING_METRICS}
        if how.decides_at in called:
            measures |= {(name, metric): (METRICS[metric], called[how.decides_at]) for metric in DECISION_METRICS}
        if scores.min() >= 0 and scores.max() <= 1:
            measures |= {(name, metric): (METRICS[metric], scores) for metric in PROBABILITY_METRICS}
        measures |= {(name, point, "fpr"): (share_of_reals_called, column) for point, column in called.items()}
        measures |= {(name, point, "tpr"): (share_of_fakes_called, column) for point, column in called.items()}
    return measures


def _thresholds(
    limits: Mapping[str, Mapping[str, FloatArray]], known: Mapping[tuple[str, ...], tuple[Any, ...]], rows: _Rows
) -> Iterator[tuple[object, ...]]:
    half = _halves(rows)
    reals = 0 if half is None else min(((half == each) & (rows.labels == 0)).sum() for each in (0, 1))
    for name, of_points in limits.items():
        for point, limit in of_points.items():
            is_resolved = point.startswith(_GIVEN) or operating_point(point).is_resolved_by(reals)
            rates = (*known[name, point, "fpr"][:3], *known[name, point, "tpr"][:3])
            yield name, point, *rates, limit.min(), limit.max(), is_resolved


def _halves(rows: _Rows) -> IntArray | None:
    """Return the half of the groups, 0 or 1, of each row, int64 (n,); None if a half would lack a class."""
    half = halves(rows.labels, rows.groups, seed=rows.how.seed)
    return half if all(np.unique(rows.labels[half == each]).size == 2 for each in (0, 1)) else None


def _slices(
    videos: pl.DataFrame,
    columns: Mapping[str, FloatArray],
    limits: Mapping[str, Mapping[str, FloatArray]],
    rows: _Rows,
) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.slices``, for every detector in ``columns``.

    The fakes of a generator are measured against all reals, and the reals of a source against all fakes. A corpus is
    measured with its own reals and fakes.
    """
    for by, label in (("generator", 1), ("real_source", 0), ("corpus", None)):
        sliced = np.full(rows.labels.size, fill_value=True) if label is None else rows.labels == label
        named = _slice_names(videos[by], sliced)
        values = sorted(set(named[sliced].tolist()))
        for value in values if len(values) > 1 else ():
            own = sliced & (named == value)
            inside = own | ~sliced
            part = _Rows(inside, rows.labels[inside], rows.groups[inside], rows.how)
            if not part.has_both_labels:
                continue
            num_groups = len(set(rows.groups[own].tolist()))
            ends = part.ends([(roc_auc, scores[inside]) for scores in columns.values()])
            for (name, scores), (auc, *interval, _, _) in zip(columns.items(), ends, strict=True):
                limit = limits[name].get(rows.how.decides_at)
                called = None if limit is None else decide(scores, limit)[own].mean()
                # One group says nothing of how groups vary.
                bounds = interval if num_groups > 1 else (None, None)
                counts = (int(own.sum()), num_groups, num_groups < SMALL_BELOW_GROUPS)
                yield name, by, value, auc, *bounds, called, *counts


def _slice_names(column: pl.Series, sliced: Mask) -> Groups:
    """Return the name of the slice of each row, object (n,).

    Of more than 12 values in the ``sliced`` rows the rarest become ALL_OTHERS. A null is NOT_KNOWN.
    """
    counts = column.filter(pl.Series(sliced)).drop_nulls().rename("value").value_counts()
    values = counts.sort(["count", "value"], descending=[True, False])["value"]
    frequent = values.head(_MOST_SLICES if len(values) <= _MOST_SLICES else _MOST_SLICES - 1)
    value = pl.col(column.name)
    name = pl.when(value.is_in(frequent.implode()) | value.is_null()).then(value).otherwise(pl.lit(ALL_OTHERS))
    return column.to_frame().select(name.fill_null(NOT_KNOWN)).to_series().to_numpy().astype(object)


def _floors(videos: pl.DataFrame, columns: Mapping[str, FloatArray], rows: _Rows) -> Iterator[tuple[object, ...]]:
    reals = rows.labels == 0
    sources = videos["real_source"].to_numpy()[reals]
    for name, scores in columns.items():
        floor = real_source_floor(
            scores[reals], sources, rows.groups[reals], replicates=rows.how.replicates, seed=rows.how.seed,
            confidence=rows.how.confidence,
        )  # fmt: skip
        if floor is not None:
            yield name, floor.higher, floor.lower, *floor.interval.row()[:3], floor.num_higher, floor.num_lower


def _coverage(labels: IntArray, scores: FloatArray) -> tuple[object, ...]:
    answered = ~np.isnan(scores)
    known = scores[answered]
    worst = np.where(labels == 1, known.min() - 1, known.max() + 1)  # a fake below all, a real above all
    numbers = [int((answered & (labels == label)).sum()) for label in (0, 1)]
    return int(answered.sum()), answered.mean(), *numbers, roc_auc(labels, np.where(answered, scores, worst))


def _shuffled(rows: _Rows, columns: Mapping[str, FloatArray]) -> Iterator[tuple[object, ...]]:
    table, tail = np.column_stack(list(columns.values())), (1 - rows.how.confidence) / 2
    aucs = shuffled_label_aucs(rows.labels, table, rows.groups, num=200, seed=rows.how.seed)
    for name, of_detector in zip(columns, aucs, strict=True):
        yield name, of_detector.mean(), *np.quantile(of_detector, [tail, 1 - tail])


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
    controls: Mapping[str, pl.DataFrame], columns: Mapping[str, FloatArray], rows: _Rows, rows_of: Any
) -> Iterator[tuple[object, ...]]:
    """Yield rows of ``Audit.controls``, one for each detector and control.

    Both are measured on the videos of ``rows`` for which the control has a score.

    Args:
        controls: as in ``audit_scores``.
        columns: scores (N,) of the detectors.
        rows: the videos on which detectors are compared.
        rows_of: returns the ``_Rows`` of a bool mask (N,).
    """
    scored = {source: rows.mask & control["score"].is_not_null().to_numpy() for source, control in controls.items()}
    for mask, sources in _by_mask(scored):
        part = rows_of(mask)
        if not part.has_both_labels:
            continue
        known = [controls[source].filter(mask).fill_null(-1) for source in sources]
        of_controls = [(within_folds(roc_auc, frame["fold"].to_numpy()), frame["score"].to_numpy()) for frame in known]
        ends = part.ends([*of_controls, *((roc_auc, column[mask]) for column in columns.values())])
        for name, (value, low, high, *_) in zip(columns, ends[len(sources) :], strict=True):
            for source, control in zip(sources, ends[: len(sources)], strict=True):
                is_above = is_above_control(value, low, control[0], control[2])
                yield name, source, *control[:3], part.labels.size, value, low, high, is_above


# --- Videos whose ids suggest that they came from one another: groups that a table does not state

_VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".gif"})
# A copy's ending: a number of few digits, a compression level, or a step of editing.
_SUFFIX = re.compile(
    r"(?:(?:[_\-. ]+(?:\d{1,3}|c\d\d|q\d\d|v\d|raw|real|fake|copy|orig|original|edited|crop|cropped|aug|face|swap|"
    r"swapped|clip\d*|part\d*|seg\d*|frame\d*|scene\d*)|\s*\(\d+\)))+$",
    re.IGNORECASE,
)
_MOST_ALIKE = 100  # videos; a name that more share, or a fifth of all, is a habit of naming


def similar_ids(ids: Sequence[str], groups: Sequence[str | None]) -> pl.DataFrame:
    """Return families: sets of videos with similar ids that belong to two or more groups.

    Ids are similar if they have the same name without folder, format and endings such as ``_2`` or ``_crop``. In
    FaceForensics++, ``000_003`` is also similar to ``000`` and ``003``. A family is only a suspicion.

    Args:
        ids: N video ids.
        groups: N group ids; None: the video has none.

    Returns:
        One row per family: ``name`` and ``videos`` (a list of ids).
    """
    rows = [
        (name, video, group or f"alone {video}")
        for video, group in zip(ids, groups, strict=True)
        for name in _names_of(video)
    ]
    table = pl.DataFrame(rows, schema=dict.fromkeys(("name", "videos", "group"), pl.String), orient="row")
    families = table.group_by("name").agg(pl.col("videos").unique().sort(), num_groups=pl.col("group").n_unique())
    most = max(2, min(_MOST_ALIKE, len(ids) // 5))
    is_family = pl.col("videos").list.len().is_between(2, most) & (pl.col("num_groups") > 1)
    return families.filter(is_family).select("name", "videos").sort("name")


def _names_of(video: str) -> list[str]:
    """Return the names by which a video may share a family."""
    path = PurePosixPath(video.replace("\\", "/"))
    stem = (path.stem if path.suffix.lower() in _VIDEO_ENDINGS else path.name).lower()
    if re.fullmatch(r"\d{3}(_\d{3})?", stem):  # FaceForensics++: target_source
        return [stem, *stem.split("_")] if "_" in stem else [stem]
    base = _SUFFIX.sub("", stem)
    return [base if len(base) >= 3 else stem]
