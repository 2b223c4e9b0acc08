"""Results of out-of-fold predictions: each metric of the model with an interval, next to those of the controls.

A control is a predictor that sees no pixel or learned other labels; the model must be better. The value over all folds
is defined by ``cross_validation.measure_over_folds``. Metrics called ``..._uncalibrated`` are those of the model at a
temperature of 1.

In scope ``all`` each video counts once. In ``all_by_group`` each group counts once, so that a clip copied a hundred
times does not dominate. ``fold_mean`` and ``fold_std`` are the mean and sample standard deviation over the folds; the
standard deviation is no interval, because folds share training data.

Intervals account for the random choice of test groups, but not for that of seeds or of shuffled labels. A control that
gives all videos the same score has an interval of width zero.

Slices are the results for subsets of the videos, by platform, kind of fake, length, size and codec. They are many and
small, so some look good or bad by chance, and no interval is adjusted for their number. Each kind of fake is compared
with all reals, since fakes alone have no AUC. So the slices' numbers of videos add up to more than all videos.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, decide, divide
from fvc_lib.metrics.cross_validation import METRICS, PROBABILITY_METRICS, measure_over_folds
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.metrics.intervals import group_intervals, one_vote_per_group, paired_difference, replicate_values
from fvc_lib.metrics.operating_points import operating_point
from fvc_lib.services.atomic_files import read_json_object
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, command_text
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
from fvc_lib.tasks.video.controls import (
    MARGIN,
    REAL_SOURCE_CONTROL,
    REAL_SOURCE_FLOOR,
    all_controls,
    control_scores,
    fake_labels,
    margin_over_floor,
    metadata_only,
    possible_floor,
    real_source_floor,
    targets_of,
    tested,
    trainings_of,
)
from fvc_lib.tasks.video.selection import SELECTION, EarlierOpenings, RecordedSelection, read_selection
from fvc_lib.video.clips.store import ClipStore, Pixels
from fvc_lib.video.features.family import families_named

MODEL = "model"
ALL_FOLDS = "all"
ALL_BY_GROUP = "all_by_group"
METRIC_NAMES = tuple(METRICS)
# Of the model alone: no control has a temperature.
MODEL_ONLY_NAMES = tuple(name + UNCALIBRATED for name in PROBABILITY_METRICS)

_SCORE_TOLERANCE = 1e-9
IntervalRow = tuple[float | None, float | None, float | None, int, int]
Row = tuple[object, ...]


# What a run made


def families_of(config: RunConfig) -> dict[str, str]:
    """Return the family name by feature column, for the families that ``config`` names."""
    return {column: family.name for family in families_named(config.feature_families) for column in family.columns()}


def forensic_features(run: RunPaths, config: RunConfig) -> pl.DataFrame:
    """Return the forensic features of the run's videos that have at least one.

    Columns are ``video_id group_id`` and the float64 features, null where missing; rows are sorted by ``video_id``.

    Raises:
        DataError: there is no table, it lacks a family that ``config`` names, or no video has a feature.
    """
    table, family_of = read_table(run.features, FEATURES).sort("video_id"), families_of(config)
    names = [name for name in table.columns if name in family_of]
    values = [pl.col(name).cast(pl.Float64) for name in names]
    finite = [pl.when(value.is_finite()).then(value).alias(name) for value, name in zip(values, names, strict=True)]
    measured = table.select("video_id", "group_id", *finite).filter(pl.any_horizontal(pl.col(names).is_not_null()))
    lacking = sorted(set(family_of.values()) - {family_of[name] for name in names})
    if lacking or measured.is_empty():
        remedy = f"Measure them again: {command_text('--from', '03b', '--resume', run.root)}"
        raise DataError(f"{str(run.features)!r} has no features of the families {', '.join(lacking)}. {remedy}")
    return measured


def made_samples(run: RunPaths, config: RunConfig) -> pl.DataFrame:
    """Return the table of the run's samples: AUGMENTED, or for a model on forensic features its videos.

    The latter has columns ``video_id group_id augmentation_index``, the last 0.
    """
    if config.of_features != "forensic":
        return read_table(run.augmented_metadata, AUGMENTED)
    return forensic_features(run, config).select("video_id", "group_id", augmentation_index=pl.lit(0))


def clip_reader(config: RunConfig) -> Callable[[str, int], Pixels] | None:
    """Return the function that reads a clip by video id and augmentation index; None if the model sees no clips."""
    return None if config.of_features == "forensic" else ClipStore.of(config).read


def undecoded(folds: pl.DataFrame, clips: pl.DataFrame, protocol: pl.DataFrame | None = None) -> list[str]:
    """Return the sorted ids of videos of ``folds`` or ``protocol`` that have no row in ``clips`` (``made_samples``)."""
    used = folds if protocol is None else protocol.filter(pl.col("part") != LEFT_OUT)
    return sorted(set(used["video_id"]) - set(clips["video_id"]))


def earlier_openings(run: RunPaths, num_folds: int) -> EarlierOpenings:
    """Count the openings of the run's outer folds by trainings that have been replaced since."""
    replaced, unknown = 0, 0
    for fold in range(num_folds):
        folder = run.fold_checkpoints(fold)
        now = read_selection(folder)
        for place in run.superseded.glob(f"*/{folder.relative_to(run.root)}"):
            before = read_selection(place)
            if before is not None:
                replaced += now is None or before.weights != now.weights
            else:
                unknown += (place / SELECTION).exists()
    forked_from = read_json_object(run.run_json).get("forked_from", "")
    return EarlierOpenings(replaced, forked_from if isinstance(forked_from, str) else "", unknown)


# Results


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

    A protocol may test targets, such as held-out corpora or generators. Each target then has a scope ``target:NAME``,
    and the value over all folds is the mean over targets. A metric is null where it is undefined, as in a fold of one
    class. The order of the rows of the tables does not matter.

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
    model, trainings = with_targets(predictions, protocol), trainings_of(protocol, config, left_out)
    rows = _source_rows(MODEL, model, METRIC_NAMES + MODEL_ONLY_NAMES, config)
    for source, scored in all_controls(index, judged, predictions, seed=config.seed, trainings=trainings).items():
        rows += _source_rows(source, with_targets(scored, protocol), METRIC_NAMES, config)
    due, _ = possible_floor(index, folds, config, left_out, protocol)
    if due.height:
        rows += _trained_floor_rows(due, predictions, config, protocol)
    # The floor is over targets, like the model's value; over all videos if a target lacks a source.
    for scored in () if config.shuffle_labels else (model, predictions):
        floor = real_source_floor(index, scored, config)
        if floor is not None and math.isfinite(floor.value):
            value, low, high, *sizes = floor.row()
            rows.append((REAL_SOURCE_FLOOR, ALL_FOLDS, "roc_auc", value, low, high, None, None, *sizes))
            break
    return check_table(frame_of(rows, RESULTS).fill_nan(None), RESULTS, "kfold results")


def _trained_floor_rows(
    due: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None
) -> list[Row]:
    """Return the result rows of the real-source control, which is trained to tell two sources of reals apart.

    One row with null values if it has not been trained for all videos of ``due``. The last row is the margin: the
    model's AUC minus the control's.
    """
    scored = control_scores(due, predictions)
    if scored is None:
        missing = (None, None, None, None, None, due.height, due["group_id"].n_unique())
        return [(REAL_SOURCE_CONTROL, ALL_FOLDS, "roc_auc", *missing)]
    of_targets, judged = with_targets(scored, protocol), with_targets(predictions, protocol)
    metric, values = measured("roc_auc", of_targets)
    if math.isfinite(metric(fake_labels(of_targets), values)):  # else a target lacks a source: over all together
        scored = of_targets
    rows = [row for row in _source_rows(REAL_SOURCE_CONTROL, scored, ["roc_auc"], config) if row[1] != ALL_BY_GROUP]
    margin = margin_over_floor(judged, scored, config)
    value, low, high, *sizes = margin.row()
    return [*rows, (REAL_SOURCE_CONTROL, ALL_FOLDS, MARGIN, value, low, high, None, None, *sizes)]


def with_targets(scored: pl.DataFrame, protocol: pl.DataFrame | None) -> pl.DataFrame:
    """Return ``scored`` with a column ``target``, the tested target of each video; unchanged without targets."""
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
    check_folds(folds)
    due = folds.filter(~pl.col("video_id").is_in(sorted(left_out)))
    both = predictions.join(due, on="video_id", suffix="_due")
    moved = (pl.col("fold") != pl.col("fold_due")) | (pl.col("group_id") != pl.col("group_id_due"))
    relabelled = both.filter((pl.col("label") != pl.col("label_due")) & (not labels_were_shuffled))
    given = probabilities(predictions["logit"].to_numpy(), predictions["temperature"].to_numpy())
    differs = pl.Series(np.abs(given - predictions["score"].to_numpy()) > _SCORE_TOLERANCE)
    thresholds, temperatures = (pl.col(name).n_unique().over("fold") > 1 for name in ("threshold", "temperature"))
    for kind, rows, what in (
        (LeakageError, predictions.filter(pl.col("video_id").is_duplicated()), "videos are predicted more than once"),
        (DataError, due.join(predictions, on="video_id", how="anti"), "videos of the folds have no prediction"),
        (DataError, predictions.join(due, on="video_id", how="anti"), "videos are not in the folds (or were left out)"),
        (LeakageError, both.filter(moved), "videos are predicted in another fold or group than their own"),
        (DataError, relabelled, "predictions carry another label than the folds"),
        (DataError, predictions.filter(thresholds), "videos are of folds with more than one threshold"),
        (DataError, predictions.filter(temperatures), "videos are of folds with more than one temperature"),
        (DataError, predictions.filter(differs), "scores are not sigmoid(logit / temperature)"),
    ):
        if rows.height:
            ids = rows["video_id"].unique().sort()
            first = ", ".join(map(repr, ids.head(5)))
            raise kind(f"{len(ids)} {what}, the first: {first}. Run 04_fold_training again for these folds.")


def measured(name: str, scored: pl.DataFrame) -> tuple[Metric, FloatArray]:
    """Return the metric ``name`` over the folds of ``scored``, and the values (N,) that it is computed from, by row.

    Args:
        name: one of ``METRIC_NAMES`` or ``MODEL_ONLY_NAMES``.
        scored: columns ``fold score threshold``, for ``MODEL_ONLY_NAMES`` ``logit``, and maybe ``target``.
    """
    calibrated = name.removesuffix(UNCALIBRATED)
    scores = scored["score"].to_numpy() if name == calibrated else probabilities(scored["logit"].to_numpy(), 1.0)
    thresholds, folds = scored["threshold"].to_numpy(), scored["fold"].to_numpy()
    return measure_over_folds(calibrated, scores, thresholds, folds, targets_of(scored))


def interval_rows(
    scored: pl.DataFrame, measures: Sequence[tuple[Metric, FloatArray]], config: RunConfig, scope: str = ALL_FOLDS
) -> list[IntervalRow]:
    """Return (value, low, high, number of videos, number of groups) for each of ``measures``.

    The intervals of all measures are from the same bootstrap draws of groups.

    Args:
        scored: columns ``group_id label``.
        measures: metrics with their arguments (N,); see ``measured``.
        config: replicates, confidence and seed.
        scope: in ``ALL_BY_GROUP`` each group counts once.
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
    return [interval.row() for interval in intervals]


def _source_rows(source: str, scored: pl.DataFrame, names: Sequence[str], config: RunConfig) -> list[Row]:
    """Return the RESULTS rows of the model or one control, in every scope: all folds, by group, by target, by fold."""
    targets = scored["target"].unique().sort() if "target" in scored.columns else ()
    of_target = {f"target:{target}": scored.filter(target=target) for target in targets}
    of_fold = {fold: scored.filter(fold=fold) for fold in scored["fold"].unique().sort()}
    values = {
        fold: [METRICS[name.removesuffix(UNCALIBRATED)](fake_labels(part), measured(name, part)[1]) for name in names]
        for fold, part in of_fold.items()
    }
    rows: list[Row] = []
    for scope, part in {ALL_FOLDS: scored, ALL_BY_GROUP: scored, **of_target}.items():
        intervals = interval_rows(part, [measured(name, part) for name in names], config, scope)
        for number, (name, (value, low, high, *sizes)) in enumerate(zip(names, intervals, strict=True)):
            spread: tuple[float | None, float | None] = (None, None)
            if scope == ALL_FOLDS:
                defined = np.array([found[number] for found in values.values() if math.isfinite(found[number])])
                mean = float(defined.mean()) if defined.size else None
                spread = (mean, float(defined.std(ddof=1)) if defined.size > 1 else None)
            rows.append((source, scope, name, value, low, high, *spread, *sizes))
    for fold, part in of_fold.items():
        sizes = [part.height, part["group_id"].n_unique()]
        rows += [
            (source, f"fold_{fold}", name, float(value), None, None, None, None, *sizes)
            for name, value in zip(names, values[fold], strict=True)
        ]
    return rows


# Slices

# Fewer groups of a class make a slice small: with ten, the interval of a share near one half is about 0.6 wide.
SMALL_BELOW_GROUPS = 10
NOT_KNOWN = "not known"
ALL_OTHERS = "all others"
MOST_VALUES = 12  # per column; the other values make one slice

# Bins are half open, [from, to). Resolution counts pixels, so portrait and landscape videos fall into the same bins.
DURATION_EDGES_SECONDS = (5, 15, 60, 300)
RESOLUTION_EDGES = ((320, 240), (640, 360), (1280, 720), (1920, 1080))

# Columns that make slices, and the class that has the column: its slices are compared with all of the other class.
_SLICED = {
    "platform": "", "corpus": "", "label_source": "", "real_source": "real", "manipulation": "fake",
    "generator": "fake", "duration": "", "resolution": "", "codec": "",
}  # fmt: skip
_OF_BOTH_CLASSES = ("roc_auc", "balanced_accuracy")
_OF_CLASS = {"fake": "true_positive_rate", "real": "false_positive_rate"}  # fakes found, reals called fake


@Metric
def share_called_fake(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of rows that are called fake."""
    del labels
    return divide(weights @ decisions, weights.sum(axis=1))


def slice_table(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return AUC, balanced accuracy, and the shares of fakes and of reals called fake, of every slice (SLICES).

    Slices are by ``platform``, ``corpus``, ``label_source``, ``real_source``, ``manipulation``, ``generator`` (unless
    it equals the manipulation), ``duration``, ``resolution`` and ``codec``. Each source of reals is compared
    with all fakes, and each manipulation or generator with all reals. A column with one value makes no slice. Missing
    values form the slice ``not known``. A metric is null if a slice lacks a class that it needs.

    Args:
        index: columns of INDEX.
        predictions: PREDICTIONS schema, all folds together.
        config: replicates, confidence and seed of the intervals.

    Raises:
        DataError: a predicted video is not in the index.
    """
    absent = predictions.join(index, on="video_id", how="anti")
    if absent.height:
        raise DataError(
            f"{absent.height} predicted videos are not in the index, e.g. {absent['video_id'].min()!r}. Both must come "
            "from one run: run 01_data_index and what follows it again."
        )
    seconds, sizes = [f"{edge} s" for edge in DURATION_EDGES_SECONDS], [f"{w}x{h}" for w, h in RESOLUTION_EDGES]
    described = index.with_columns(
        duration=_binned(pl.col("duration_seconds"), DURATION_EDGES_SECONDS, seconds),
        resolution=_binned(pl.col("width") * pl.col("height"), [w * h for w, h in RESOLUTION_EDGES], sizes),
    ).select("video_id", pl.col("^(" + "|".join(_SLICED) + ")$"))
    known = predictions.join(described, on="video_id").sort("video_id")
    rows: list[Row] = []
    for column, label in _SLICED.items():
        part = known.filter(label=label) if label else known
        if column not in known.columns or (
            column == "generator" and part.filter(pl.col(column) != pl.col("manipulation").fill_null("")).is_empty()
        ):
            continue
        others = known.filter(pl.col("label") != label) if label else known.clear()
        for value, of_value in _by_value(part, column):
            rows += _slice_rows(column, value, pl.concat([of_value, others]).sort("video_id"), label, config)
    return check_table(frame_of(rows, SLICES), SLICES, "slices")


def _binned(value: pl.Expr, edges: Sequence[int], names: Sequence[str]) -> pl.Expr:
    """Return an expression for the name of the half-open bin [from, to) of ``value``; null if the value is missing."""
    labels = [f"under {names[0]}", *(f"{low} to {high}" for low, high in pairwise(names))]
    known = value.cast(pl.Float64).fill_nan(None)
    below = [pl.when(known < edge).then(pl.lit(label)) for edge, label in zip(edges, labels, strict=True)]
    return pl.coalesce(*below, pl.when(known >= edges[-1]).then(pl.lit(f"{names[-1]} and more")))


def _by_value(known: pl.DataFrame, column: str) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the most frequent values of ``column`` with their rows, and all other values as one.

    Yields nothing if the column has only one value.
    """
    filled = known.with_columns(pl.col(column).fill_null(NOT_KNOWN))
    values = filled.group_by(column).len().sort("len", column, descending=[True, False])[column].to_list()
    if len(values) > MOST_VALUES:
        rare, values = values[MOST_VALUES - 1 :], [*values[: MOST_VALUES - 1], ALL_OTHERS]
        filled = filled.with_columns(pl.col(column).replace(rare, ALL_OTHERS))
    if len(values) > 1:
        yield from ((value, filled.filter(pl.col(column) == value)) for value in values)


def _slice_rows(column: str, value: str, rows: pl.DataFrame, label: str, config: RunConfig) -> Iterator[Row]:
    """Yield the SLICES rows of one slice, one per metric.

    The share called fake is given for the class ``label``, for both classes if ``label`` is empty.
    """
    parts = {name: rows.filter(label=name) for name in LABELS}
    groups = {name: part["group_id"].n_unique() for name, part in parts.items()}
    sizes = (rows.height, *(part.height for part in parts.values()), rows["group_id"].n_unique())
    is_small = min(groups.values()) < SMALL_BELOW_GROUPS
    intervals = interval_rows(rows, [measured(name, rows) for name in _OF_BOTH_CLASSES], config)
    for metric, ends in zip(_OF_BOTH_CLASSES, intervals, strict=True):
        yield (column, value, metric, *ends[:3], *sizes, is_small)
    for name in [label] if label else _OF_CLASS:
        ends = _share_called_fake(parts[name], config)
        yield (column, value, _OF_CLASS[name], *ends[:3], *sizes, groups[name] < SMALL_BELOW_GROUPS)


def _share_called_fake(part: pl.DataFrame, config: RunConfig) -> IntervalRow:
    """Return the share of rows called fake with its interval, as in ``interval_rows``; None without rows."""
    if part.is_empty():
        return None, None, None, 0, 0
    return interval_rows(part, [(share_called_fake, measured("balanced_accuracy", part)[1])], config)[0]


# Decisions

_CONFUSION = {
    "label": pl.String, "called_fake": pl.Int64, "called_real": pl.Int64, "called_fake_share": pl.Float64,
    "low_share": pl.Float64, "high_share": pl.Float64, "num_groups": pl.Int64,
}  # fmt: skip


@Metric
def precision(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of fakes among rows that are called fake."""
    return divide(weights @ (labels * decisions), weights @ decisions)


def confusion_table(predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Count the decisions of all folds at their thresholds, for fakes and reals, with intervals over groups.

    The last of the three rows is the precision, the share of fakes among videos called fake. It depends on the share of
    fakes in the corpus. Columns: ``label called_fake called_real called_fake_share low_share high_share num_groups``. A
    class with fewer than two groups has no interval. ``predictions`` are those of all folds (PREDICTIONS).
    """
    decisions = decide(predictions["score"].to_numpy(), predictions["threshold"].to_numpy()).astype(float)
    decided = predictions.with_columns(called=pl.Series(decisions))
    rows: list[Row] = []
    for label in ("fake", "real"):
        part = decided.filter(label=label)
        called, ends = int(part["called"].sum()), _share_called_fake(part, config)
        rows.append((label, called, part.height - called, *ends[:3], ends[4]))
    ends = interval_rows(predictions, [(precision, decisions)], config)[0]
    rows.append(("precision", int(decisions.sum()), None, *ends[:3], ends[4]))
    return pl.DataFrame(rows, schema=_CONFUSION, orient="row")


def operating_sentence(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> str:
    """Return sentences on the operating point of the thresholds, and on whether the reals suffice to reach it."""
    chosen = [record.selection for record in selections if record is not None]
    if len({selection.operating_point for selection in chosen}) != 1:
        return "What the thresholds were chosen for is not recorded, or differs between the folds."
    point = operating_point(chosen[0].operating_point)
    sentence = f"Thresholds were chosen on inner validation videos for {point.says}."
    blind = [selection.num_real for selection in chosen if not point.is_resolved_by(selection.num_real)]
    if blind:
        sentence += (
            f" In {len(blind)} of {len(chosen)} folds that part has too few reals to resolve it (the least {min(blind)}"
            "): the threshold there is one that calls no real fake, which promises less than was asked for."
        )
    if at_one := [selection.num_real_at_one for selection in chosen if selection.threshold >= 1]:
        sentence += (
            f" In {len(at_one)} of {len(chosen)} folds the threshold is 1: only a score of 1 itself is called fake. "
            f"{sum(at_one)} reals of that part have it and are called fake against the operating point."
        )
    num_real = predictions.filter(label="real").height
    if not point.is_resolved_by(num_real):
        sentence += f" Nor can the {num_real} reals that were tested show whether it was kept."
    return sentence


# Models on features

_GAIN = {
    "compared": pl.String, "auc": pl.Float64, "auc_of_metadata": pl.Float64, "gain": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "p_value": pl.Float64,
}  # fmt: skip


def gain_over_metadata(
    paths: RunPaths,
    config: RunConfig,
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> pl.DataFrame:
    """Compare the AUC of a model on features with that of metadata alone, on the same videos.

    Args:
        paths: the run.
        config: its parameters.
        index: INDEX schema.
        predictions: PREDICTIONS of all folds.
        protocol: PROTOCOL schema; None: protocol ``kfold``.
        left_out: ids of videos that are in no part.

    Returns:
        Table ``compared auc auc_of_metadata gain low high p_value``, with one row for the model. For forensic features
        a second row is for a model of metadata and features. Empty for a network.
    """
    if not config.of_features:
        return pl.DataFrame(schema=_GAIN)
    scored, trainings = with_targets(predictions.sort("video_id"), protocol), trainings_of(protocol, config, left_out)
    judged = scored.select("video_id", "group_id", "label", "fold")

    def of_metadata(further: pl.DataFrame | None = None) -> pl.DataFrame:
        return with_targets(
            tested(lambda rows: metadata_only(index, rows, further=further), judged, trainings), protocol
        )

    compared = {"Metadata": of_metadata(), "The model": scored}
    if config.of_features == "forensic":
        compared["Metadata with features"] = of_metadata(forensic_features(paths, config).drop("group_id"))
    drawn = replicate_values(
        fake_labels(scored), [measured("roc_auc", each) for each in compared.values()],
        scored["group_id"].to_list(), replicates=config.bootstrap_replicates, seed=config.seed,
    )  # fmt: skip
    rows = []
    for number, name in list(enumerate(compared))[1:]:
        gain = paired_difference(drawn, 0, number, confidence=config.confidence)
        aucs = (float(drawn.values[number]), float(drawn.values[0]))
        rows.append((name, *aucs, gain.value, gain.low, gain.high, gain.p_value))
    return pl.DataFrame(rows, schema=_GAIN, orient="row").fill_nan(None)
