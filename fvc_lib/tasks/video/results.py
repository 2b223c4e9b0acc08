"""Results of out-of-fold predictions: each metric of the model with an interval, next to those of the controls.

``cross_validation.measure_over_folds`` defines the value over all folds. Metrics called ``..._uncalibrated`` are the
model's before its temperature.

In scope ``all`` each video counts once. In ``all_by_group`` each group counts once, so that a clip copied a hundred
times does not dominate. ``fold_mean`` and ``fold_std`` are the mean and sample standard deviation over the folds; the
standard deviation is no interval, because folds share training data.

Intervals cover the choice of test groups, not of training runs or of shuffled labels. A control that gives all videos
the same score has an interval of width zero.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, divide, weighted_metric
from fvc_lib.metrics.cross_validation import METRICS, PROBABILITY_METRICS, measure_over_folds
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.metrics.intervals import group_intervals, one_vote_per_group
from fvc_lib.metrics.operating_points import confusion_at, operating_point
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    AUGMENTED,
    FEATURES,
    LABELS,
    LEFT_OUT,
    RESULTS,
    SLICES,
    check_table,
    frame_of,
    read_table,
)
from fvc_lib.tasks.video.classical.table import read_features
from fvc_lib.tasks.video.controls import all_controls, fake_labels, trainings_of
from fvc_lib.tasks.video.real_sources import (
    MARGIN,
    REAL_SOURCE_CONTROL,
    REAL_SOURCE_FLOOR,
    control_scores,
    margin_over_floor,
    possible_floor,
    real_source_floor,
)
from fvc_lib.tasks.video.selection import RecordedSelection
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.clips.store import ClipStore

MODEL = "model"
ALL_FOLDS = "all"
ALL_BY_GROUP = "all_by_group"
TARGET_SCOPE = "target:"


METRIC_NAMES = tuple(METRICS)
# Of the model alone: no control has a temperature.
MODEL_ONLY_NAMES = tuple(name + UNCALIBRATED for name in PROBABILITY_METRICS)

_SCORE_TOLERANCE = 1e-9
IntervalRow = tuple[float | None, float | None, float | None, int, int]


def kfold_results(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    *,
    left_out: Collection[str] = (),
    protocol: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return every metric of the model and of each control, per fold, per target and over all folds (RESULTS).

    With targets (corpora, generators) each has a scope ``target:NAME``, and the values over all folds are the mean over
    the targets. An undefined metric (a fold of one class) is null. The order of the tables' rows does not matter.

    Args:
        index: INDEX schema; the metadata control learns from it.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together.
        config: replicates, confidence and seed.
        left_out: ids of videos without a clip (``undecoded``).
        protocol: PROTOCOL schema; None: that of ``kfold``.

    Raises:
        LeakageError: a group is in two folds, or a video is predicted twice or in another fold.
        DataError: predictions are missing or unknown to the folds, have other labels, several thresholds in one fold or
            scores that do not follow from the logits, or there are fewer than two folds.
    """
    check_predictions(folds, predictions, left_out=left_out, labels_were_shuffled=config.shuffle_labels)
    predictions = predictions.sort("video_id")
    judged = predictions.select("video_id", "group_id", "label", "fold")  # with shuffle_labels the shuffled ones
    trainings = None if protocol is None else trainings_of(protocol, config, left_out)
    rows = _source_rows(MODEL, with_targets(predictions, protocol), METRIC_NAMES + MODEL_ONLY_NAMES, config)
    for source, scored in all_controls(index, judged, predictions, seed=config.seed, trainings=trainings).items():
        rows += _source_rows(source, with_targets(scored, protocol), METRIC_NAMES, config)
    rows += _trained_floor_rows(index, folds, predictions, config, left_out, protocol)
    rows += [] if config.shuffle_labels else _source_floor_rows(index, predictions, config, protocol)
    return check_table(frame_of(rows, RESULTS), RESULTS, "kfold results")


def _source_floor_rows(
    index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None
) -> list[tuple[object, ...]]:
    """Return the floor over targets, like the model's value; over all videos if a target lacks a source."""
    for scored in (with_targets(predictions, protocol), predictions):
        floor = real_source_floor(index, scored, config)
        if floor is not None and math.isfinite(floor.value):
            value, low, high, *sizes = floor.row()
            return [(REAL_SOURCE_FLOOR, ALL_FOLDS, "roc_auc", value, low, high, None, None, *sizes)]
    return []


def made_samples(run: RunPaths, config: RunConfig) -> pl.DataFrame:
    """Return AUGMENTED, or of a model on forensic features ``video_id group_id augmentation_index``."""
    if config.of_features != "forensic":
        return read_table(run.augmented_metadata, AUGMENTED)
    measured = read_features(run, config).videos
    rows = read_table(run.features, FEATURES).select("video_id", "group_id", augmentation_index=pl.lit(0))
    return rows.filter(pl.col("video_id").is_in(measured))


def clip_reader(config: RunConfig) -> Callable[[str, int], Pixels] | None:
    """Return the function that reads a clip of the network; None if the model sees no clips."""
    return None if config.of_features == "forensic" else ClipStore.of(config).read


def undecoded(folds: pl.DataFrame, clips: pl.DataFrame, protocol: pl.DataFrame | None = None) -> list[str]:
    """Return the sorted ids of videos of ``folds`` or ``protocol`` that have no row in ``clips`` (``made_samples``)."""
    used = folds if protocol is None else protocol.filter(pl.col("part") != LEFT_OUT)
    return sorted(set(used["video_id"]) - set(clips["video_id"]))


def _trained_floor_rows(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    left_out: Collection[str],
    protocol: pl.DataFrame | None,
) -> list[tuple[object, ...]]:
    """Return the rows of the control trained on two sources of reals; null if it is possible and missing."""
    due, _ = possible_floor(index, folds, config, left_out, protocol)
    if due.is_empty():
        return []
    scored = control_scores(due, predictions)
    if scored is None:
        missing = (None, None, None, None, None, due.height, due["group_id"].n_unique())
        return [(REAL_SOURCE_CONTROL, ALL_FOLDS, "roc_auc", *missing)]
    of_targets = with_targets(scored, protocol)
    metric, values = measured("roc_auc", of_targets)
    if math.isfinite(metric(fake_labels(of_targets), values)):  # else a target has not both sources: over all together
        scored = of_targets
    rows = [row for row in _source_rows(REAL_SOURCE_CONTROL, scored, ["roc_auc"], config) if row[1] != ALL_BY_GROUP]
    judged = with_targets(predictions, protocol)
    margin = margin_over_floor((judged, measured("roc_auc", judged)), (scored, measured("roc_auc", scored)), config)
    value, low, high, *sizes = margin.row()
    return [*rows, (REAL_SOURCE_CONTROL, ALL_FOLDS, MARGIN, value, low, high, None, None, *sizes)]


def with_targets(scored: pl.DataFrame, protocol: pl.DataFrame | None) -> pl.DataFrame:
    """Return ``scored`` with a column ``target`` if ``protocol`` (PROTOCOL) has targets."""
    if protocol is None or protocol["target"].drop_nulls().is_empty():
        return scored
    of_video = protocol.filter(pl.col("part") == "test").select("video_id", "target")
    return scored.join(of_video, on="video_id", how="left", maintain_order="left")


def check_predictions(
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    left_out: Collection[str] = (),
    labels_were_shuffled: bool = False,
) -> None:
    """Check that each video of ``folds`` except ``left_out`` is predicted once, in its own fold.

    Raises:
        LeakageError: a group is in two folds; a video is predicted twice, in another fold, or in another group.
        DataError: videos are missing or unknown; labels differ (unless shuffled on purpose); a fold has several
            thresholds or temperatures; a score does not follow from its logit and temperature.
    """
    again = "Run 04_fold_training again for these folds."
    check_folds(folds)
    twice = predictions.filter(pl.col("video_id").is_duplicated())
    _refuse(twice["video_id"].unique(), LeakageError, "videos are predicted more than once", again)
    due = folds.filter(~pl.col("video_id").is_in(sorted(left_out)))
    missing = due.join(predictions, on="video_id", how="anti")
    _refuse(missing["video_id"], DataError, "videos of the folds have no prediction", again)
    unknown = predictions.join(due, on="video_id", how="anti")
    _refuse(unknown["video_id"], DataError, "predicted videos are not in the folds (or were left out)", again)
    both = predictions.join(due, on="video_id", how="inner", suffix="_due")
    moved = both.filter((pl.col("fold") != pl.col("fold_due")) | (pl.col("group_id") != pl.col("group_id_due")))
    _refuse(moved["video_id"], LeakageError, "videos are predicted in another fold or group than their own", again)
    if not labels_were_shuffled:
        relabelled = both.filter(pl.col("label") != pl.col("label_due"))
        _refuse(relabelled["video_id"], DataError, "predictions carry another label than the folds", again)
    for chosen in ("threshold", "temperature"):
        several = predictions.group_by("fold").agg(pl.col(chosen).n_unique()).filter(pl.col(chosen) > 1)
        _refuse(several["fold"], DataError, f"folds have more than one {chosen}", again)
    given = probabilities(predictions["logit"].to_numpy(), predictions["temperature"].to_numpy())
    other = predictions.filter(pl.Series(np.abs(given - predictions["score"].to_numpy()) > _SCORE_TOLERANCE))
    _refuse(other["video_id"], DataError, "scores are not sigmoid(logit / temperature)", again)


def measured(name: str, scored: pl.DataFrame) -> tuple[Metric, FloatArray]:
    """Return the metric called ``name`` over the folds of ``scored``, and its argument (N,) for each row.

    Args:
        name: one of ``METRIC_NAMES`` or ``MODEL_ONLY_NAMES``.
        scored: columns ``fold score threshold``, for ``MODEL_ONLY_NAMES`` ``logit``, and maybe ``target``.
    """
    calibrated = name.removesuffix(UNCALIBRATED)
    scores = scored["score"].to_numpy() if name == calibrated else probabilities(scored["logit"].to_numpy(), 1.0)
    targets = scored["target"].to_numpy() if "target" in scored.columns and scored["target"].n_unique() > 1 else None
    return measure_over_folds(calibrated, scores, scored["threshold"].to_numpy(), scored["fold"].to_numpy(), targets)


def interval_rows(
    scored: pl.DataFrame, measures: Sequence[tuple[Metric, FloatArray]], config: RunConfig, scope: str = ALL_FOLDS
) -> list[IntervalRow]:
    """Return (value, low, high, videos, groups) of each of ``measures``, on the same draws of groups.

    Args:
        scored: columns ``group_id label``.
        measures: metrics with their arguments (N,); see ``measured``.
        config: replicates, confidence and seed.
        scope: ``ALL_FOLDS`` or ``ALL_BY_GROUP``.
    """
    groups = scored["group_id"].to_list()
    intervals = group_intervals(
        fake_labels(scored),
        measures,
        groups,
        row_weights=one_vote_per_group(groups) if scope == ALL_BY_GROUP else None,
        replicates=config.bootstrap_replicates,
        seed=config.seed,
        confidence=config.confidence,
    )
    return [each.row() for each in intervals]


def _source_rows(
    source: str, scored: pl.DataFrame, names: Sequence[str], config: RunConfig
) -> list[tuple[object, ...]]:
    per_fold = {
        int(key[0]): _fold_values(part, names)
        for key, part in scored.sort("fold").group_by("fold", maintain_order=True)
    }
    rows: list[tuple[object, ...]] = []
    measures = [measured(name, scored) for name in names]
    for scope in (ALL_FOLDS, ALL_BY_GROUP):
        for name, found in zip(names, interval_rows(scored, measures, config, scope), strict=True):
            of_folds = [values[name] for values in per_fold.values()] if scope == ALL_FOLDS else []
            rows.append((source, scope, name, *found[:3], *_mean_and_deviation(of_folds), *found[3:]))
    for target in scored["target"].unique().sort() if "target" in scored.columns else ():
        part = scored.filter(pl.col("target") == target)
        found_here = interval_rows(part, [measured(name, part) for name in names], config)
        rows += [
            (source, f"{TARGET_SCOPE}{target}", name, *each[:3], None, None, *each[3:])
            for name, each in zip(names, found_here, strict=True)
        ]
    for fold, values in per_fold.items():
        part = scored.filter(pl.col("fold") == fold)
        sizes = (part.height, part["group_id"].n_unique())
        rows += [
            (source, f"fold_{fold}", name, _or_none(value), None, None, None, None, *sizes)
            for name, value in values.items()
        ]
    return rows


def _fold_values(part: pl.DataFrame, names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of one fold."""
    labels, part = fake_labels(part), part.drop("target", strict=False)
    return {name: METRICS[name.removesuffix(UNCALIBRATED)](labels, measured(name, part)[1]) for name in names}


def _mean_and_deviation(values: list[float]) -> tuple[float | None, float | None]:
    defined = np.array([value for value in values if math.isfinite(value)])
    mean = float(defined.mean()) if defined.size else None
    return mean, float(defined.std(ddof=1)) if defined.size > 1 else None


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _refuse(found: pl.Series, kind: type[DataError], what: str, remedy: str) -> None:
    if found.len():
        ids = ", ".join(repr(value) for value in found.sort().head(5).to_list())
        more = f" and {found.len() - 5} more" if found.len() > 5 else ""
        raise kind(f"{found.len()} {what}: {ids}{more}. {remedy}")


# Slices: the result by platform, kind of fake, length, size and codec. Slices are many and small: some look good or bad
# by chance, and no interval is adjusted for their number. Each kind of fake is set against all reals, since a slice of
# fakes alone has no AUC; so the slices' numbers of videos do not add up to all videos.

# Fewer groups of a class make a slice small: with ten, the interval of a share near one half is about 0.6 wide.
SMALL_BELOW_GROUPS = 10
NOT_KNOWN = "not known"
ALL_OTHERS = "all others"
MOST_VALUES = 12  # per column; the other values make one slice

# Bins are half open, [from, to). Resolution counts pixels, so portrait and landscape videos fall into the same bins.
DURATION_EDGES_SECONDS = (5, 15, 60, 300)
RESOLUTION_EDGES = ((320, 240), (640, 360), (1280, 720), (1920, 1080))

MANIPULATION = "manipulation"
REAL_SOURCE = "real_source"
GENERATOR = "generator"
_CATEGORIES = ("platform", "corpus", "label_source", REAL_SOURCE, MANIPULATION, GENERATOR, "codec")


@weighted_metric
def share_called_fake(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of rows that are called fake."""
    del labels
    return divide(weights @ decisions, weights.sum(axis=1))


_OF_BOTH_CLASSES = ("roc_auc", "balanced_accuracy")
_OF_CLASS = {"fake": "true_positive_rate", "real": "false_positive_rate"}  # fakes found, reals called fake


@dataclass(frozen=True)
class _Slice:
    """The predictions of one slice; shares are measured for ``classes``."""

    slice_by: str
    value: str
    rows: pl.DataFrame
    classes: Sequence[str] = ("fake", "real")


def slice_table(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return AUC, balanced accuracy, and the shares of fakes and of reals called fake, of every slice (SLICES).

    Slices are by ``platform``, ``corpus``, ``label_source``, ``real_source``, ``manipulation``, ``generator`` (unless
    it equals the manipulation), ``duration``, ``resolution`` and ``codec``. Each source of reals is set against all
    fakes, and each manipulation or generator against all reals. A column with one value makes no slice; a missing value
    is ``not known``. A metric is null if a slice lacks a class that it needs.

    Args:
        index: columns of INDEX.
        predictions: PREDICTIONS schema, all folds together.
        config: replicates, confidence and seed of the intervals.

    Raises:
        DataError: a predicted video that the index does not hold.
    """
    known = _known_of(index, predictions)
    rows = [row for part in _slices(known) for row in _rows_of(part, config)]
    return check_table(frame_of(rows, SLICES), SLICES, "slices")


def _known_of(index: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    """Return the predictions with a text column for each kind of slice."""
    absent = predictions.join(index, on="video_id", how="anti")
    if absent.height:
        raise DataError(
            f"{absent.height} predicted videos are not in the index, e.g. {absent['video_id'].min()!r}. Both must come "
            "from one run: run 01_data_index and what follows it again."
        )
    seconds = [f"{edge} s" for edge in DURATION_EDGES_SECONDS]
    pixels, sizes = [w * h for w, h in RESOLUTION_EDGES], [f"{w}x{h}" for w, h in RESOLUTION_EDGES]
    described = index.select(
        "video_id",
        *(pl.col(name) if name in index.columns else pl.lit(None, pl.String).alias(name) for name in _CATEGORIES),
        duration=_binned(pl.col("duration_seconds"), DURATION_EDGES_SECONDS, seconds),
        resolution=_binned(pl.col("width") * pl.col("height"), pixels, sizes),
    )
    return predictions.join(described, on="video_id").sort("video_id")


def _binned(value: pl.Expr, edges: Sequence[int], names: Sequence[str]) -> pl.Expr:
    """Return the name of the half-open bin that ``value`` lies in; null if it is unknown."""
    labels = [f"under {names[0]}", *(f"{low} to {high}" for low, high in pairwise(names))]
    known = value.cast(pl.Float64).fill_nan(None)
    below = [pl.when(known < edge).then(pl.lit(label)) for edge, label in zip(edges, labels, strict=True)]
    return pl.coalesce(*below, pl.when(known >= edges[-1]).then(pl.lit(f"{names[-1]} and more")))


def _slices(known: pl.DataFrame) -> Iterator[_Slice]:
    for column in ("platform", "corpus", "label_source"):
        yield from _by_value(known, column)
    real, fake = (known.filter(pl.col("label") == label) for label in LABELS)
    makers = [MANIPULATION]
    if fake.filter(pl.col(GENERATOR) != pl.col(MANIPULATION).fill_null("")).height:
        makers.append(GENERATOR)
    for column, of, others, label in (
        (REAL_SOURCE, real, fake, "real"),
        *((each, fake, real, "fake") for each in makers),
    ):
        for kind in _by_value(of, column):
            yield _Slice(column, kind.value, pl.concat([kind.rows, others]).sort("video_id"), classes=(label,))
    for column in ("duration", "resolution", "codec"):
        yield from _by_value(known, column)


def _by_value(known: pl.DataFrame, column: str) -> Iterator[_Slice]:
    """Yield a slice for each frequent value, and one for the rest; nothing for a single value."""
    if known.get_column(column).null_count() == known.height:
        return
    filled = known.with_columns(pl.col(column).fill_null(NOT_KNOWN))
    counts = filled.group_by(column).len().sort(["len", column], descending=[True, False])
    if counts.height < 2:
        return
    values = counts.get_column(column).to_list()
    shown = values if len(values) <= MOST_VALUES else values[: MOST_VALUES - 1]
    for value in shown:
        yield _Slice(column, value, filled.filter(pl.col(column) == value))
    if len(shown) < len(values):
        yield _Slice(column, ALL_OTHERS, filled.filter(~pl.col(column).is_in(shown)))


def _rows_of(part: _Slice, config: RunConfig) -> Iterator[tuple[object, ...]]:
    rows = part.rows
    groups = {label: rows.filter(pl.col("label") == label)["group_id"].n_unique() for label in LABELS}
    numbers = [int((rows["label"] == label).sum()) for label in LABELS]
    sizes = (rows.height, *numbers, rows["group_id"].n_unique())
    is_small = min(groups.values()) < SMALL_BELOW_GROUPS
    found = interval_rows(rows, [measured(name, rows) for name in _OF_BOTH_CLASSES], config)
    for name, ends in zip(_OF_BOTH_CLASSES, found, strict=True):
        yield (part.slice_by, part.value, name, *ends[:3], *sizes, is_small)
    for label in part.classes:
        of_class = rows.filter(pl.col("label") == label)
        share: Sequence[float | int | None] = (None, None, None)
        if of_class.height:
            decisions = measured("balanced_accuracy", of_class)[1]
            share = interval_rows(of_class, [(share_called_fake, decisions)], config)[0][:3]
        yield (part.slice_by, part.value, _OF_CLASS[label], *share, *sizes, groups[label] < SMALL_BELOW_GROUPS)


@weighted_metric
def precision(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of fakes among rows that are called fake."""
    return divide(weights @ (labels * decisions), weights @ decisions)


def confusion_table(predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return the decisions of all folds at their thresholds, with intervals over groups; the last row is the precision.

    Columns: ``label called_fake called_real called_fake_share low_share high_share num_groups``. ``predictions`` are
    those of all folds (PREDICTIONS). A class with fewer than two groups has no interval. The precision depends on the
    share of fakes in the corpus.
    """
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    thresholds = predictions["threshold"].to_numpy()
    counts = confusion_at(labels, scores, thresholds)
    rows: list[tuple[object, ...]] = []
    decisions = decide(scores, thresholds).astype(float)
    for label, called_fake, called_real in (
        ("fake", counts.hits, counts.misses),
        ("real", counts.false_alarms, counts.rejections),
    ):
        of_class = (predictions["label"] == label).to_numpy()
        found: Sequence[float | int | None] = (None, None, None, 0, 0)
        if of_class.any():
            part = predictions.filter(pl.Series(of_class))
            found = interval_rows(part, [(share_called_fake, decisions[of_class])], config)[0]
        rows.append((label, called_fake, called_real, *found[:3], found[4]))
    found = interval_rows(predictions, [(precision, decisions)], config)[0]
    rows.append(("precision", counts.hits + counts.false_alarms, None, *found[:3], found[4]))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def operating_sentence(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> str:
    """Return sentences on the aim of the folds' thresholds, and on whether the reals suffice for it."""
    chosen = [each.selection for each in selections if each is not None]
    asked = {each.operating_point for each in chosen}
    if len(asked) != 1:
        return "What the thresholds were chosen for is not recorded, or differs between the folds."
    point = operating_point(asked.pop())
    sentence = f"Thresholds were chosen on inner validation videos for {point.says}."
    blind = [each.num_real for each in chosen if not point.is_resolved_by(each.num_real)]
    if blind:
        sentence += (
            f" In {len(blind)} of {len(chosen)} folds that part has too few reals to resolve it (the least {min(blind)}"
            "): the threshold there is one that calls no real fake, which promises less than was asked for."
        )
    if at_one := [each for each in chosen if each.threshold >= 1]:
        reals = sum(each.num_real_at_one for each in at_one)
        where = f"In {len(at_one)} of {len(chosen)} folds the threshold is 1"
        sentence += f" {where}: only a score of 1 itself is called fake"
        sentence += f", and {reals} reals of that part have it, so the operating point is not kept." if reals else "."
    num_real = int((predictions["label"] == "real").sum())
    if not point.is_resolved_by(num_real):
        sentence += f" Nor can the {num_real} reals that were tested show whether it was kept."
    return sentence


_SCHEMA = {
    "label": pl.String, "called_fake": pl.Int64, "called_real": pl.Int64, "called_fake_share": pl.Float64,
    "low_share": pl.Float64, "high_share": pl.Float64, "num_groups": pl.Int64,
}  # fmt: skip
