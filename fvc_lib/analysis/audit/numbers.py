"""The numbers of an audit: metrics of detectors and controls, computed from a table of the detectors' scores.

A detector answers a video by giving it a score. The metrics of a detector are computed on the videos that it answered.
Detectors that answered nearly all videos are compared with each other on the videos that all of them answered. A
control is a simple predictor that a detector must beat.

A group holds videos that belong together, such as copies and cuts of the same video. A half-sample is a random half of
the groups, and all intervals come from half-samples.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.analysis.read.headline import (
    HEADLINE_METRIC as MAIN_METRIC,
    LENGTH_ONLY,
    METADATA_ONLY,
    REAL_SOURCE_FLOOR,
    Measure,
    Score,
)
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, roc_auc
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
    intervals_of,
    is_above_control,
    paired_differences,
    replicate_values,
)
from fvc_lib.metrics.operating_points import (
    crossed_thresholds,
    halves,
    operating_point,
    share_of_fakes_called,
    share_of_reals_called,
)
from fvc_lib.services.errors import UsageError

FALSE_ALARM_RATES = ("fpr=0.05", "fpr=0.01", "fpr=0.001")
LEAST_ANSWERED = 0.9  # share of the videos that a detector must answer to be compared with others
SMALL_BELOW_GROUPS = 20
NOT_KNOWN, ALL_OTHERS = "not known", "all others"
_MOST_SLICES = 12
# Without these controls, which need the videos, no detector counts as above its controls.
MEASURE = Measure("ROC AUC", "video", strict_controls=dict.fromkeys((METADATA_ONLY, LENGTH_ONLY), "--corpus VIDEOS"))

Groups = npt.NDArray[np.object_]
Mask = npt.NDArray[np.bool_]
Ends = tuple[float | None, float | None, float | None]
Row = tuple[object, ...]


@dataclass(frozen=True)
class Settings:
    """Settings of an audit.

    Attributes:
        decides_at: a fixed threshold such as ``threshold=0.5``, or a rule that chooses a threshold. Rules are ``best``
            (highest balanced accuracy), ``fpr=0.01`` (1 % false alarms), and ``cost=5:1`` (least cost if a false alarm
            costs five times as much as a miss). The groups are split into two halves. The rule chooses the threshold
            of each half on the other half.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of every random draw.
        confidence: coverage of every interval, such as 0.95.

    Raises:
        UsageError: ``decides_at`` has another form.
    """

    decides_at: str = "best"
    replicates: int = 1000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        try:
            if self.threshold is None:
                operating_point(self.decides_at)
        except ValueError as error:
            raise UsageError(f"{error} Or threshold=NUMBER, one that comes with the scores.") from error

    @property
    def threshold(self) -> float | None:
        """The number of a fixed threshold, such as 0.5 for ``threshold=0.5``. None if ``decides_at`` is a rule."""
        name, _, number = self.decides_at.partition("=")
        return float(number) if name == "threshold" else None


_KINDS = {"": pl.Float64, "text": pl.String, "count": pl.Int64, "flag": pl.Boolean}
_COLUMNS = {
    "numbers": "detector:text metric:text value low high num_videos:count num_groups:count",
    "common": "detector:text value low high",
    "shuffled": "detector:text value low high",
    "controls": "detector:text source:text value low high num_videos:count detector_value detector_low detector_high "
    "is_above:flag",
    "slices": "detector:text slice_by:text value:text auc low high called_share num_videos:count num_groups:count "
    "is_small:flag",
    "floors": "detector:text higher:text lower:text value low high num_higher:count num_lower:count",
    "thresholds": "detector:text point:text fpr fpr_low fpr_high tpr tpr_low tpr_high lowest_threshold "
    "highest_threshold is_resolved:flag",
    "coverage": "detector:text num_videos:count answered_share num_real:count num_fake:count auc_if_wrong",
    "differences": "first:text second:text difference low high p holm_p is_shown:flag",
}


def _frame(rows: Sequence[Row], columns: str) -> pl.DataFrame:
    """Return ``rows`` as a frame in which NaN is null.

    ``columns`` holds column names separated by spaces. A name may be followed by the kind of its values, a key of
    ``_KINDS``, as in ``num_videos:count``. Columns without a kind are Float64.
    """
    parts = [column.partition(":") for column in columns.split()]
    return pl.DataFrame(rows, {name: _KINDS[kind] for name, _, kind in parts}, orient="row").fill_nan(None)


@dataclass(frozen=True)
class Audit:
    """The numbers of an audit of several detectors, as tables. ``audit_scores`` computes them.

    Undefined numbers are null. ``low`` and ``high`` are the ends of an interval. The main metric is the ROC AUC.
    Detectors that answered at least 90 % of the videos are compared with each other. If no detector answered that many,
    all are compared. The common videos are the videos that all compared detectors answered.

    Attributes:
        detectors: names of the detectors, the one with the highest main metric first, and ``apart`` last.
        apart: names of the detectors that answered too few videos to be compared, in the same order.
        numbers: all metrics of each detector on the videos that it answered.
        common: the main metric on the common videos. Empty if the detectors cannot be compared.
        controls: the main metric of each control (a simple predictor) and of each detector, on the same videos.
            ``is_above`` says whether the detector is above the control.
        shuffled: ROC AUC of each detector after labels were shuffled between groups 200 times. ``value`` is the mean
            over the shuffles; ``low`` and ``high`` are quantiles of them.
        differences: the main metric of ``second`` minus that of ``first``, for all pairs. ``holm_p`` is adjusted for
            all pairs.
        slices: the main metric on slices of the videos, lowest first. A slice has one generator, one source of reals or
            one corpus. ``called_share`` is the share of the slice that is called fake.
        floors: the ROC AUC, at least 0.5, with which each detector's scores tell the reals of two sources apart.
        thresholds: shares called fake, among reals (``fpr``) and fakes (``tpr``). They are measured on the half of the
            groups that did not choose the threshold.
        coverage: number of videos that each detector answered. ``auc_if_wrong`` is the ROC AUC if every video without
            an answer counts as a mistake.
        num_common: number of common videos.
        num_common_groups: number of groups of the common videos.
        num_videos: number of videos in the table.
        num_groups: number of groups in the table.
        settings: the settings of the audit.
    """

    detectors: tuple[str, ...]
    apart: tuple[str, ...]
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
        """Return ``(value, low, high)`` of ``metric`` on the videos that ``detector`` answered.

        Undefined numbers are None.
        """
        return ends_of(self.numbers.filter(detector=detector, metric=metric)) or (None, None, None)

    def compared(self, detector: str) -> Ends:
        """Return ``(value, low, high)``, the ROC AUC of ``detector`` with its interval, for comparing detectors.

        The ROC AUC is measured on the videos that all compared detectors answered. Otherwise a detector that skips hard
        videos would look better. A detector in ``apart`` is measured on the videos that it answered. Undefined numbers
        are None.
        """
        return ends_of(self.common.filter(detector=detector)) or self.interval(detector)

    def of_coverage(self, detector: str, column: str) -> Any:
        """Return one value of the table ``coverage``: the value of ``detector`` in ``column``.

        The table says how many videos each detector answered, for example in the column ``num_videos``.
        """
        return self.coverage.filter(detector=detector)[column].item()

    def scores(self, detector: str) -> list[Score]:
        """Return the scores that decide the verdict on ``detector``: its ROC AUC, and those of its controls and floor.

        A control is a simple predictor. The floor is the ROC AUC with which the detector's scores tell two sources of
        real videos apart.

        Detector and control are compared on the videos that have a score of the control. So the detector has one ROC
        AUC per control. The one whose interval begins lowest is returned.
        """
        controls = self.controls.filter(detector=detector)
        on_the_same = controls.sort("detector_low").select("detector_value", "detector_low", "detector_high").rows()
        model = on_the_same[0] if on_the_same else self.compared(detector)
        known = [("model", *model), *controls.select("source", "value", "low", "high").rows()]
        floors = self.floors.filter(detector=detector).select(pl.lit(REAL_SOURCE_FLOOR), "value", "low", "high")
        return [Score(*row) for row in (*known, *floors.rows())]


def ends_of(rows: pl.DataFrame) -> Ends | None:
    """Return the columns ``(value, low, high)`` of the first row. Return None if there are no rows."""
    return rows.select("value", "low", "high").row(0) if rows.height else None


@dataclass(frozen=True)
class _Rows:
    """A selection of n of the N videos in an audit, with their labels and groups.

    Attributes:
        places: int64 (n,), the row numbers of the videos in the table of all N videos.
        labels: int64 (n,), 0 is real and 1 is fake.
        groups: object (n,), group ids.
        how: the settings of the audit.
    """

    places: IntArray
    labels: IntArray
    groups: Groups
    how: Settings

    def part(self, chosen: Mask) -> "_Rows":
        """Return the selection of the videos for which ``chosen``, bool (n,), is True."""
        return _Rows(self.places[chosen], self.labels[chosen], self.groups[chosen], self.how)

    @property
    def has_both_labels(self) -> bool:
        """Whether the selection holds reals as well as fakes."""
        return np.unique(self.labels).size == 2

    @property
    def num_groups(self) -> int:
        """Number of different groups in the selection."""
        return len(set(self.groups.tolist()))

    def drawn(self, measures: Sequence[tuple[Metric, npt.ArrayLike]]) -> ReplicateValues:
        """Return the values of ``measures`` on these n videos and in each half-sample (random half of their groups).

        ``measures`` are pairs of a metric function and its input (n,), such as scores. All measures use the same
        half-samples.
        """
        how = self.how
        return replicate_values(self.labels, measures, self.groups, replicates=how.replicates, seed=how.seed)

    def ends(self, measures: Sequence[tuple[Metric, npt.ArrayLike]]) -> list[tuple[Any, ...]]:
        """Return a tuple ``(value, low, high, number of videos, number of groups)`` for each pair in ``measures``.

        A pair consists of a metric function and its input (n,). ``low`` and ``high`` are the ends of the interval.
        """
        return [interval.row() for interval in intervals_of(self.drawn(measures), self.how.confidence)]


def audit_scores(
    videos: pl.DataFrame,
    scores: pl.DataFrame,
    how: Settings | None = None,
    *,
    controls: Mapping[str, pl.DataFrame] | None = None,
) -> Audit:
    """Return all numbers of an audit of the detectors in ``scores``.

    Args:
        videos: one row per video with the columns ``video_id label group_id generator real_source corpus``. ``label``
            is "real" or "fake". A video whose ``group_id`` is null is a group of its own.
        scores: one Float64 column per detector, higher for fakes. Row i belongs to row i of ``videos``. Null means
            that the detector did not answer.
        how: the settings. None: the defaults.
        controls: maps the name of a control (a simple predictor) to its scores, a frame with the columns ``fold
            score``. Row i belongs to row i of ``videos``. A null score means that the control has no score for the
            video.

    Raises:
        ValueError: lengths differ, or there is only one label.
    """
    how, controls = how or Settings(), controls or {}
    labels = (videos["label"] == "fake").cast(pl.Int64).to_numpy()
    table = _Rows(np.arange(labels.size), labels, group_ids(videos), how)
    columns = {name: scores[name].cast(pl.Float64).to_numpy() for name in scores.columns}  # NaN: no answer
    answered = {name: table.part(~np.isnan(column)) for name, column in columns.items()}
    rows: dict[str, list[Row]] = defaultdict(list)
    for name, column in columns.items():
        for kind, of_kind in _of_detector(videos, column, answered[name]).items():
            rows[kind] += [(name, *row) for row in of_kind]
        rows["coverage"].append((name, *_coverage(labels, column)))
    least = LEAST_ANSWERED * labels.size
    compared = {name: column for name, column in columns.items() if answered[name].labels.size >= least} or columns
    common = table.part(~np.isnan(np.array(list(compared.values()))).any(axis=0))
    is_compared = len(compared) > 1 and common.has_both_labels
    if is_compared:
        drawn = common.drawn([(roc_auc, column[common.places]) for column in compared.values()])
        intervals = zip(compared, intervals_of(drawn, how.confidence), strict=True)
        rows["common"] = [(name, *interval.row()[:3]) for name, interval in intervals]
        rows["differences"] = list(_differences(list(compared), drawn, how))
    for name, column in columns.items():
        part = common if is_compared and name in compared else answered[name]
        rows["controls"] += [(name, *row) for row in _controls(controls, column, part)]
    frames = {name: _frame(rows[name], columns) for name, columns in _COLUMNS.items()}
    main = frames["numbers"].filter(metric=MAIN_METRIC).update(frames["common"], on="detector")
    main = main.with_columns(is_apart=~pl.col("detector").is_in(list(compared)))
    main = main.sort("is_apart", -pl.col("value"), nulls_last=True, maintain_order=True)
    frames["slices"] = frames["slices"].sort("auc", "slice_by", "value", nulls_last=True, maintain_order=True)
    return Audit(
        detectors=tuple(main["detector"]),
        apart=tuple(main.filter("is_apart")["detector"]),
        **frames,
        num_common=common.labels.size,
        num_common_groups=common.num_groups,
        num_videos=videos.height,
        num_groups=table.num_groups,
        settings=how,
    )


def group_ids(videos: pl.DataFrame) -> Groups:
    """Return the group id of each of the N rows, object (N,). A video without a group gets a group of its own."""
    alone, named = pl.format("alone {}", "video_id"), pl.format("group {}", "group_id")
    return videos.select(pl.coalesce(named, alone)).to_series().to_numpy().astype(object)


# --- One detector on the videos that it answered


def _of_detector(videos: pl.DataFrame, column: FloatArray, rows: _Rows) -> dict[str, list[Row]]:
    """Return the rows of one detector for each table of ``Audit``, as a dict from table name to rows.

    The rows do not contain the name of the detector, which is the first column of each table.

    Args:
        videos: as in ``audit_scores``, N rows.
        column: scores (N,) of the detector, NaN where it did not answer.
        rows: the videos that the detector answered.
    """
    scores, how = column[rows.places], rows.how
    tail = (1 - how.confidence) / 2
    aucs = shuffled_label_aucs(rows.labels, scores, rows.groups, num=200, seed=how.seed)
    shuffled = [(aucs.mean(), *np.quantile(aucs, [tail, 1 - tail]))]
    if not rows.has_both_labels:
        return {"shuffled": shuffled, "numbers": [(MAIN_METRIC, None, None, None, scores.size, 0)]}
    limits = _limits(scores, rows)
    called = {point: decide(scores, limit).astype(np.float64) for point, (limit, _) in limits.items()}
    decisions = called.get(how.decides_at)
    inputs = dict.fromkeys(RANKING_METRICS, scores)
    if decisions is not None:
        inputs |= dict.fromkeys(DECISION_METRICS, decisions)
    if scores.min() >= 0 and scores.max() <= 1:
        inputs |= dict.fromkeys(PROBABILITY_METRICS, scores)
    ends = rows.ends([(METRICS[metric], values) for metric, values in inputs.items()])
    thresholds: list[Row] = []
    for point, (limit, is_resolved) in limits.items():
        fpr, tpr = rows.ends([(share_of_reals_called, called[point]), (share_of_fakes_called, called[point])])
        thresholds.append((point, *fpr[:3], *tpr[:3], limit.min(), limit.max(), is_resolved))
    known = videos[rows.places]
    return {
        "shuffled": shuffled,
        "numbers": [(metric, *numbers) for metric, numbers in zip(inputs, ends, strict=True)],
        "thresholds": thresholds,
        "slices": list(_slices(known, scores, decisions, rows)),
        "floors": list(_floors(known["real_source"].to_numpy(), scores, rows)),
    }


def _limits(scores: FloatArray, rows: _Rows) -> dict[str, tuple[FloatArray, bool]]:
    """Return the decision thresholds of one detector: a dict from operating point to ``(thresholds, is_resolved)``.

    An operating point is a text such as ``fpr=0.01``. ``thresholds``, float64 (n,), holds the threshold of each video.
    The groups are split into two halves, and each half gets the threshold that was chosen on the other half.
    ``is_resolved`` says whether both halves have enough reals for the operating point. If a half lacks reals or fakes,
    no threshold is chosen, and only a fixed threshold (``Settings.threshold``) is returned.

    Args:
        scores: float64 (n,), the scores of ``rows``.
        rows: the n videos that the detector answered.
    """
    limits, how = {}, rows.how
    half = halves(rows.labels, rows.groups, seed=how.seed)
    counts = np.bincount(2 * rows.labels + half, minlength=4)  # the reals of both halves, then their fakes
    if counts.all():
        for text in (*FALSE_ALARM_RATES, *([how.decides_at] if how.threshold is None else [])):
            point = operating_point(text)
            is_resolved = point.is_resolved_by(counts[:2].min())
            limits[text] = crossed_thresholds(point, rows.labels, scores, half), is_resolved
    if how.threshold is not None:
        limits[how.decides_at] = np.full(scores.size, how.threshold), True
    return limits


def _slices(videos: pl.DataFrame, scores: FloatArray, called: FloatArray | None, rows: _Rows) -> Iterator[Row]:
    """Yield the ROC AUC of one detector in each slice, as rows of ``Audit.slices`` without the detector's name.

    A slice holds the videos with one generator, one source of reals or one corpus. The fakes of a generator are
    measured against all reals, and the reals of a source against all fakes. A corpus is measured with its own reals and
    fakes. The 12 most frequent values have a slice each; other values are ``ALL_OTHERS``, and null is ``NOT_KNOWN``.

    Args:
        videos: the n videos that the detector answered.
        scores: float64 (n,).
        called: float64 (n,), 1 for a video that is called fake, else 0. None: there is no threshold.
        rows: labels and groups of the n videos.
    """
    for by, label in (("generator", 1), ("real_source", 0), ("corpus", None)):
        sliced = np.ones(rows.labels.size, bool) if label is None else rows.labels == label
        name = pl.col(by)
        known = videos.filter(sliced).drop_nulls(by).group_by(by).len()
        frequent = known.sort("len", by, descending=[True, False])[by].head(_MOST_SLICES).to_list()
        other = pl.when(name.is_null()).then(pl.lit(NOT_KNOWN)).otherwise(pl.lit(ALL_OTHERS))
        names = videos.select(pl.when(name.is_in(frequent)).then(name).otherwise(other)).to_series().to_numpy()
        values = sorted(set(names[sliced].tolist()))
        for value in values if len(values) > 1 else []:
            chosen = sliced & (names == value)
            inside = chosen | ~sliced
            part, num_groups = rows.part(inside), rows.part(chosen).num_groups
            if part.has_both_labels:
                ((auc, low, high, *_),) = part.ends([(roc_auc, scores[inside])])
                share = None if called is None else called[chosen].mean()
                yield by, value, auc, low, high, share, chosen.sum(), num_groups, num_groups < SMALL_BELOW_GROUPS


def _floors(sources: Groups, scores: FloatArray, rows: _Rows) -> Iterator[Row]:
    how, reals = rows.how, rows.labels == 0
    floor = real_source_floor(
        scores[reals],
        sources[reals],
        rows.groups[reals],
        replicates=how.replicates,
        seed=how.seed,
        confidence=how.confidence,
    )
    if floor is not None:
        yield floor.higher, floor.lower, *floor.interval.row()[:3], floor.num_higher, floor.num_lower


def _coverage(labels: IntArray, scores: FloatArray) -> Row:
    answered = ~np.isnan(scores)
    known = scores[answered]
    # The worst scores: fakes rank below all answered videos, reals above them.
    worst = np.where(labels == 1, known.min() - 1, known.max() + 1)
    auc_if_wrong = roc_auc(labels, np.where(answered, scores, worst))
    num_fake = labels[answered].sum()
    return known.size, answered.mean(), known.size - num_fake, num_fake, auc_if_wrong


# --- Detectors together, and next to controls


def _differences(names: Sequence[str], drawn: ReplicateValues, how: Settings) -> Iterator[Row]:
    """Yield the difference in ROC AUC of each pair of detectors, the second minus the first.

    The results are rows of ``Audit.differences``. Holm's method adjusts the p-values for all pairs.

    Args:
        names: names of the detectors.
        drawn: ROC AUC of the detectors, in the order of ``names``, on all common videos and in each half-sample.
        how: the settings of the audit.
    """
    pairs = list(combinations(range(len(names)), 2))
    differences = paired_differences(drawn, pairs, how.confidence)
    for (first, second), (gap, p, is_shown) in zip(pairs, differences, strict=True):
        yield names[first], names[second], gap.value, gap.low, gap.high, gap.p_value, p, is_shown


def _controls(controls: Mapping[str, pl.DataFrame], column: FloatArray, rows: _Rows) -> Iterator[Row]:
    """Yield the ROC AUC of each control (a simple predictor) and of one detector on the same videos.

    The results are rows of ``Audit.controls`` without the detector's name, one for each control. The videos are those
    of ``rows`` for which the control has a score.

    Args:
        controls: maps the name of a control to a frame of N rows with the columns ``fold score``.
        column: scores (N,) of the detector.
        rows: the videos on which the detector is compared.
    """
    for source, frame in controls.items():
        part = rows.part(frame["score"].is_not_null().to_numpy()[rows.places])
        if part.has_both_labels:
            known = frame[part.places]
            within = within_folds(roc_auc, known["fold"].to_numpy()), known["score"].to_numpy()
            control, (value, low, high, *_) = part.ends([within, (roc_auc, column[part.places])])
            is_above = is_above_control(value, low, control[0], control[2])
            yield source, *control[:3], part.labels.size, value, low, high, is_above
