"""Results of out-of-fold predictions: the metrics of the model and of its controls, with intervals.

A control is a predictor that sees no pixel or learned other labels; the model must be better. The function
``cross_validation.measure_over_folds`` defines the value over all folds. Metrics called ``..._uncalibrated`` are those
of the model at a temperature of 1.

In scope ``all`` each video counts once. In ``all_by_group`` each group counts once, so that a clip copied a hundred
times does not dominate. ``fold_mean`` and ``fold_std`` are the mean and sample standard deviation over the folds; the
standard deviation is no interval, because folds share training data.

Intervals account for the random choice of test groups, but not for the random choice of seeds or shuffled labels. A
control that gives all videos the same score has an interval of width zero.

Slices are the AUCs of subsets of the videos, by platform, kind of fake, length, size and codec. They are many and
small, so some look good or bad by chance, and no interval is adjusted for their number. A kind of fake is compared with
all reals, since fakes alone have no AUC. The same reals are therefore in several slices.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds, make_folds, most_folds
from fvc_lib.corpus.protocols import separate_sources, source_expression
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.cases import CaseScore, case_scores
from fvc_lib.metrics.classification import SHARE, FloatArray, IntArray, Metric, decide, divide
from fvc_lib.metrics.cross_validation import METRICS, PROBABILITY_METRICS, measure_over_folds
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.metrics.intervals import (
    Interval,
    group_interval,
    group_intervals,
    one_vote_per_group,
)
from fvc_lib.metrics.operating_points import operating_point
from fvc_lib.services.atomic_files import read_json_object
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import (
    AUGMENTED,
    FEATURES,
    LEFT_OUT,
    RESULTS,
    SLICES,
    check_table,
    frame_of,
    read_table,
)
from fvc_lib.tasks.video.calibration import SELECTION, RecordedSelection, read_selection, too_few_groups
from fvc_lib.tasks.video.controls import (
    MARGIN,
    METADATA_ONLY,
    REAL_SOURCE_CONTROL,
    REAL_SOURCE_FLOOR,
    SHAPE_ONLY,
    all_controls,
    auc_within_folds,
    control_scores,
    fake_labels,
    interval_settings,
    margin_over_floor,
    metadata_only,
    possible_floor,
    real_source_floor,
    targets_of,
    trainings_of,
)
from fvc_lib.video.clips.store import ClipStore, Pixels
from fvc_lib.video.features.family import families_named

MODEL = "model"
ALL_FOLDS = "all"
ALL_BY_GROUP = "all_by_group"
SOURCE_SCOPE = "source:"  # prefix of the scope of the videos of one source
ACROSS_SOURCES = "across_sources"  # scores of models that saw none of the video's source
BY_CASE = "by_case"  # scope in which each case, several videos of one event, counts once
WITHIN_PIXELS = "within_pixels"  # scope of the videos without the fakes that pixels cannot show
# Values of ``manipulation`` that leave the pixels of real footage as they were.
OUTSIDE_PIXELS = ("staged", "out of context", "miscaptioned")
METRIC_NAMES = tuple(METRICS)
# Metrics that only the model has, because a control has no temperature.
MODEL_ONLY_NAMES = tuple(name + UNCALIBRATED for name in PROBABILITY_METRICS)

Row = tuple[object, ...]


# What a run made


def families_of(config: RunConfig) -> dict[str, str]:
    """Return a dict from feature column to the name of its family, for the feature families in ``config``."""
    return {column: family.name for family in families_named(config.feature_families) for column in family.columns()}


def forensic_features(path: Path, config: RunConfig) -> pl.DataFrame:
    """Read the forensic features of a run (FEATURES), for the videos with at least one known feature.

    Args:
        path: the file of the table.
        config: names the families of features to return.

    Returns:
        A table with the columns ``video_id group_id`` and the float64 features, null where missing, sorted by
        ``video_id``.

    Raises:
        DataError: there is no table, or it lacks a family that ``config`` names.
    """
    table = read_table(path, FEATURES).sort("video_id")
    family_of = families_of(config)
    names = [name for name in table.columns if name in family_of]
    stored = {family_of[name] for name in names}
    lacking = sorted(set(family_of.values()) - stored)
    if lacking:
        raise DataError(f"{str(path)!r} has no features of: {', '.join(lacking)}. Run 03b_forensic_features again.")
    measured = table.filter(pl.any_horizontal(pl.col(names).is_not_null()))
    return measured.select("video_id", "group_id", pl.col(names).cast(pl.Float64))


def made_samples(clips: Path, features: Path, config: RunConfig) -> pl.DataFrame:
    """Return the samples of a run: one row per clip, or one row per video for a model on forensic features.

    For a model on clips the result is the table AUGMENTED. A probe may also take forensic features; then only the rows
    of videos with such features are returned. For a model on forensic features alone, the columns are ``video_id
    group_id augmentation_index``, and the index is always 0.

    Args:
        clips: the run's file of AUGMENTED.
        features: the run's file of FEATURES.
        config: the run's parameters.
    """
    if config.of_features not in ("forensic", "both"):
        return read_table(clips, AUGMENTED)
    measured = forensic_features(features, config).select("video_id", "group_id", augmentation_index=pl.lit(0))
    if config.of_features == "forensic":
        return measured
    return read_table(clips, AUGMENTED).join(measured, on="video_id", how="semi", maintain_order="left")


def clip_reader(config: RunConfig) -> Callable[[str, int], Pixels] | None:
    """Return the function that reads a clip by video id and augmentation index; None if the model sees no clips."""
    return None if config.of_features == "forensic" else ClipStore.of(config).read


def undecoded(folds: pl.DataFrame, clips: pl.DataFrame, protocol: pl.DataFrame | None = None) -> list[str]:
    """Return the sorted ids of the videos without a sample, such as videos that could not be decoded.

    Args:
        folds: the videos that should have a sample (FOLDS); used only if ``protocol`` is None.
        clips: the samples (``made_samples``).
        protocol: the part of every video (PROTOCOL). Its videos should have a sample, except those that it leaves out.
    """
    used = folds if protocol is None else protocol.filter(pl.col("part") != LEFT_OUT)
    return used.join(clips, on="video_id", how="anti")["video_id"].unique().sort().to_list()


def earlier_openings(run_json: Path, superseded: Path, folders: Sequence[Path]) -> tuple[int, str]:
    """Count the trainings that opened an outer fold of a run (read its test labels) and were later replaced.

    Args:
        run_json: the record of the run.
        superseded: folder of the files that repeated stages replaced.
        folders: the checkpoint folder of every fold.

    Returns:
        ``(replaced, forked_from)``: the number of replaced trainings whose weights differ from those of the current
        training, or whose record is damaged; and the id of the run that this one was forked from, empty if none.
    """
    replaced = 0
    for folder in folders:
        now = read_selection(folder)
        for path in superseded.glob(f"*/{folder.relative_to(superseded.parent)}/{SELECTION}"):
            before = read_selection(path.parent)
            replaced += now is None or before is None or before.weights != now.weights
    return replaced, str(read_json_object(run_json).get("forked_from", ""))


# Results


def kfold_results(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    *,
    left_out: Collection[str] = (),
    protocol: pl.DataFrame | None = None,
    across: Mapping[str, pl.DataFrame] = MappingProxyType({}),
) -> pl.DataFrame:
    """Return every metric of the model and of each control, per fold, per target and over all folds (RESULTS).

    A protocol may test targets, such as held-out corpora or generators. A target then has a scope ``target:NAME``, and
    the value over all folds is the mean over targets. A metric is null where it is undefined, as in a fold of one
    class. The order of the rows of the tables does not matter.

    Args:
        index: INDEX schema; the metadata control learns from it.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together.
        config: gives replicates, confidence and seed.
        left_out: ids of videos without a clip (``undecoded``).
        protocol: PROTOCOL schema; None: protocol ``kfold``.
        across: results of ``scores_across_sources``, whose AUCs have the scope ``across_sources``.

    Raises:
        LeakageError, DataError: the predictions do not fit the folds (``check_predictions``).
    """
    check_predictions(folds, predictions, left_out=left_out, labels_were_shuffled=config.shuffle_labels)
    predictions = predictions.sort("video_id")
    judged = predictions.select("video_id", "group_id", "label", "fold")  # with shuffle_labels, shuffled labels
    model = with_targets(with_cases(predictions, index), protocol)
    trainings = trainings_of(protocol, config, left_out)
    rows = _source_rows(MODEL, model, METRIC_NAMES + MODEL_ONLY_NAMES, config)
    found = all_controls(index, judged, predictions, seed=config.seed, trainings=trainings, has_bars=sees_bars(config))
    for source, scored in found.items():
        rows += _source_rows(source, with_targets(with_cases(scored, index), protocol), METRIC_NAMES, config)
    parts = within_sources(index, predictions, config.source_column) | within_pixels(index, predictions)
    for scope, videos in parts.items():
        for source in (MODEL, METADATA_ONLY, SHAPE_ONLY):
            of_all = predictions if source == MODEL else found.get(source)
            if of_all is not None:
                of_part = of_all.join(videos, on="video_id", how="semi", maintain_order="left")
                rows.append(_row(source, scope, "roc_auc", auc_within_folds(of_part, config)))
    for source, scored in across.items():
        rows.append(_row(source, ACROSS_SOURCES, "roc_auc", auc_within_folds(scored, config)))
    due, _ = possible_floor(index, folds, config, left_out, protocol)
    if due.height:
        rows += _trained_floor_rows(due, model, config, protocol)
    # The floor is a mean over targets, like the model's value. If a target lacks a source of reals, it is computed on
    # all videos together.
    for scored in () if config.shuffle_labels else (model, predictions):
        floor = real_source_floor(index, scored, config)
        if floor is not None and math.isfinite(floor.value):
            rows.append(_row(REAL_SOURCE_FLOOR, ALL_FOLDS, "roc_auc", floor))
            break
    return check_table(frame_of(rows, RESULTS).fill_nan(None), RESULTS, "kfold results")


def sees_bars(config: RunConfig) -> bool:
    """Return whether the model's frames reveal the aspect ratio of a video.

    Letterboxed frames reveal it by black bars, and squashed frames by distortion. Cropped frames do not.
    """
    return config.of_features != "forensic" and not config.clips.view.fit.startswith("crop") and not config.crop


FEWEST_GROUPS_WITHIN = 5  # groups of each label that a source must have for a result of its own


def within_sources(index: pl.DataFrame, predictions: pl.DataFrame, column: str) -> dict[str, pl.DataFrame]:
    """Return ``{"source:NAME": videos}``, the predicted videos of every source as tables of ``video_id``.

    A source is a value of ``column``, a column of the index or manifest. Sources with fewer than 5 groups of a label
    are left out. The result is empty if all videos are of one source.
    """
    sources = index.select("video_id", source=source_expression(index, column))
    known = predictions.join(sources, on="video_id")
    if known["source"].n_unique() < 2:
        return {}
    groups = known.group_by("source", "label").agg(groups=pl.col("group_id").n_unique())
    large = groups.filter(pl.col("groups") >= FEWEST_GROUPS_WITHIN)
    of_both_labels = large.group_by("source").len().filter(len=2)
    names = of_both_labels["source"].drop_nulls().sort()
    return {f"{SOURCE_SCOPE}{name}": known.filter(source=name).select("video_id") for name in names}


def within_pixels(index: pl.DataFrame, predictions: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return ``{"within_pixels": videos}``: the predicted videos without the fakes whose footage is real.

    Pixels cannot reveal such a fake: it is staged, out of context or miscaptioned (``OUTSIDE_PIXELS``, values of the
    column ``manipulation``). ``videos`` is a table with the column ``video_id``. The result is empty if there are no
    such fakes.
    """
    manipulation = pl.col("manipulation").str.to_lowercase().str.replace_all("[-_]", " ")
    outside = index.filter(manipulation.is_in(OUTSIDE_PIXELS))
    left = predictions.join(outside, on="video_id", how="anti").select("video_id")
    return {WITHIN_PIXELS: left} if left.height < predictions.height else {}


def scores_across_sources(
    index: pl.DataFrame, folds: pl.DataFrame, config: RunConfig, logits_of: Callable[[pl.DataFrame], pl.DataFrame]
) -> dict[str, pl.DataFrame]:
    """Return out-of-fold scores on new folds, which keep all videos of a source together.

    So each video is scored by a model that was trained on no video of its source. The scores are those of the run's
    kind of model, and of a classifier that sees only metadata.

    Args:
        index: INDEX schema.
        folds: the run's folds (FOLDS schema), of videos that have clips.
        config: gives source_column (the column of the index or manifest that names the source), num_folds and seed.
        logits_of: called with a FOLDS table; returns the table with a column ``score``, the logits of models that were
            fitted to the other folds.

    Returns:
        Tables with the columns ``video_id group_id label fold score``, by the names ``model`` and ``metadata_only``.
        Empty if a label is in fewer than two separate sources, or labels were shuffled on purpose.
    """
    try:
        sources = separate_sources(index.join(folds, on="video_id", how="semi"), config.source_column)
    except DataError:
        return {}
    num_folds = min(config.num_folds, most_folds(sources))
    if num_folds < 2 or config.shuffle_labels:
        return {}
    across = make_folds(sources, num_folds, config.seed).drop("group_id")
    groups = folds.select("video_id", "group_id")
    across = across.join(groups, on="video_id").select(folds.columns)
    across = across.sort("video_id")
    return {MODEL: logits_of(across), METADATA_ONLY: metadata_only(index, across)}


def _trained_floor_rows(
    due: pl.DataFrame, model: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None
) -> list[Row]:
    """Return the result rows of the real-source control, which is trained to tell two sources of reals apart.

    The last row is the margin: the AUC of the model minus that of the control. If a video of ``due`` has no score by
    the control, a single row with null values is returned.

    Args:
        due: the videos that the control tests, labelled by source (``possible_floor``).
        model: the model's predictions with targets (``with_targets``).
        config: gives replicates, confidence and seed.
        protocol: PROTOCOL schema; None: protocol ``kfold``.
    """
    scored = control_scores(due, model)
    if scored is None:
        missing = (None, None, None, None, None, due.height, due["group_id"].n_unique())
        return [(REAL_SOURCE_CONTROL, ALL_FOLDS, "roc_auc", *missing)]
    of_targets = with_targets(scored, protocol)
    metric, values = measured("roc_auc", of_targets)
    if math.isfinite(metric(fake_labels(of_targets), values)):  # not finite: a target lacks a source
        scored = of_targets
    rows = [row for row in _source_rows(REAL_SOURCE_CONTROL, scored, ["roc_auc"], config) if row[1] != ALL_BY_GROUP]
    return [*rows, _row(REAL_SOURCE_CONTROL, ALL_FOLDS, MARGIN, margin_over_floor(model, scored, config))]


def _row(
    source: str, scope: str, metric: str, interval: Interval, mean: float | None = None, std: float | None = None
) -> Row:
    """Return a row of RESULTS.

    Args:
        source: the model or a control.
        scope: ``all``, ``all_by_group`` or ``target:NAME``.
        metric: name of the metric.
        interval: its value over all folds, with the interval.
        mean: mean of the folds' values; None: not defined.
        std: sample standard deviation of the folds' values; None: not defined.
    """
    value, low, high, *sizes = interval.row()
    return (source, scope, metric, value, low, high, mean, std, *sizes)


def with_targets(scored: pl.DataFrame, protocol: pl.DataFrame | None) -> pl.DataFrame:
    """Return ``scored`` with a column ``target``, or unchanged if the protocol tests no targets.

    Some protocols hold out whole corpora or generators for testing. ``target`` is the name of the held-out corpus or
    generator that the video belongs to.
    """
    if protocol is None or protocol["target"].drop_nulls().is_empty():
        return scored
    of_video = protocol.filter(part="test").select("video_id", "target")
    return scored.join(of_video, on="video_id", how="left", maintain_order="left")


def with_cases(scored: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Return ``scored`` with a column ``case``, the name of the set of videos that get one score together.

    A case is a set of videos of one event and one group. The name is ``GROUP: CASE`` with the case that the manifest
    states. A video without a stated case is a case of its own, named by the video id.
    """
    stated = pl.format("{}: {}", "group_id", source_expression(index, "case"))
    cases = index.select("video_id", case=pl.coalesce(stated, "video_id"))
    return scored.join(cases, on="video_id", how="left", maintain_order="left")


def of_cases(scored: pl.DataFrame, how: CaseScore) -> pl.DataFrame:
    """Combine the scores of the videos of each case, and return one row per case.

    A case is a set of videos of one event (column ``case`` of ``scored``). Its score is the mean or the maximum over
    its videos, as ``how`` says. If ``scored`` has a column ``logit``, logits are combined, otherwise scores. All videos
    of a case are in one fold, so they have the same temperature and threshold.
    """
    column = "logit" if "logit" in scored.columns else "score"
    rows, values = case_scores(scored[column], scored["case"], how)
    cases = scored[rows].with_columns(pl.Series(column, values))
    if column == "logit":
        scores = probabilities(values / cases["temperature"].to_numpy(), 1.0)
        cases = cases.with_columns(score=pl.Series(scores))
    return cases


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
        DataError: videos are missing or unknown; labels differ (unless shuffled on purpose).
    """
    check_folds(folds)
    due = folds.filter(~pl.col("video_id").is_in(sorted(left_out)))
    same = ["video_id"] if labels_were_shuffled else ["video_id", "label"]
    repeated = predictions.filter(pl.col("video_id").is_duplicated())
    missing = due.join(predictions, on="video_id", how="anti")
    unknown = predictions.join(due, on=same, how="anti")
    moved = predictions.join(due, on=["video_id", "fold", "group_id"], how="anti")
    for kind, rows, what in (
        (LeakageError, repeated, "videos are predicted more than once"),
        (DataError, missing, "videos of the folds have no prediction"),
        (DataError, unknown, "videos are not in the folds, or with another label"),
        (LeakageError, moved, "videos are predicted in another fold or group than their own"),
    ):
        if rows.height:
            first = rows["video_id"].min()
            raise kind(f"{rows.height} {what}, e.g. {first!r}. Run 04_fold_training again for these folds.")


def measured(name: str, scored: pl.DataFrame) -> tuple[Metric, FloatArray]:
    """Prepare the metric ``name`` over all folds: return a function and the values to call it with.

    The result is ``(metric, values)``; call ``metric(labels, values)``. ``values`` are float64 (N,): scores, or
    decisions at the thresholds, as the metric needs.

    Args:
        name: one of ``METRIC_NAMES`` or ``MODEL_ONLY_NAMES``.
        scored: N rows with columns ``fold score threshold`` and optionally ``target``; for ``MODEL_ONLY_NAMES`` also
            ``logit``.
    """
    calibrated = name.removesuffix(UNCALIBRATED)
    scores = scored["score"].to_numpy() if name == calibrated else probabilities(scored["logit"].to_numpy(), 1.0)
    thresholds = scored["threshold"].to_numpy()
    folds = scored["fold"].to_numpy()
    return measure_over_folds(calibrated, scores, thresholds, folds, targets_of(scored))


def _source_rows(source: str, scored: pl.DataFrame, names: Sequence[str], config: RunConfig) -> list[Row]:
    """Return the rows of RESULTS for the model or one control, in every scope.

    The scopes are all folds, all folds with one vote per group, every target (a held-out corpus or generator), all
    cases (sets of videos of one event), and every single fold.

    Args:
        source: the model or the control.
        scored: columns ``group_id label fold score threshold``, optionally ``target case logit``.
        names: names of the metrics (``measured``).
        config: gives replicates, confidence and seed.
    """
    of_folds: list[Row] = []
    values: dict[str, list[float]] = {name: [] for name in names}
    for fold in scored["fold"].unique().sort():
        part = scored.filter(fold=fold)
        labels = fake_labels(part)
        num_groups = part["group_id"].n_unique()
        for name in names:
            _, inputs = measured(name, part)
            metric = METRICS[name.removesuffix(UNCALIBRATED)]
            number = float(metric(labels, inputs))
            if math.isfinite(number):
                values[name].append(number)
            of_folds.append((source, f"fold_{fold}", name, number, *[None] * 4, part.height, num_groups))
    scopes = {ALL_FOLDS: scored, ALL_BY_GROUP: scored}
    if "target" in scored.columns:
        targets = scored["target"].unique().sort()
        scopes |= {f"target:{target}": scored.filter(target=target) for target in targets}
    if "case" in scored.columns and scored["case"].n_unique() < scored.height:
        scopes[BY_CASE] = of_cases(scored, config.case_score)
    rows: list[Row] = []
    for scope, part in scopes.items():
        groups = part["group_id"].to_list()
        votes = one_vote_per_group(groups) if scope == ALL_BY_GROUP else None
        measures = [measured(name, part) for name in names]
        found = group_intervals(fake_labels(part), measures, groups, row_weights=votes, **interval_settings(config))
        for name, interval in zip(names, found, strict=True):
            of_fold = values[name] if scope == ALL_FOLDS else []
            mean = float(np.mean(of_fold)) if of_fold else None
            std = float(np.std(of_fold, ddof=1)) if len(of_fold) > 1 else None
            rows.append(_row(source, scope, name, interval, mean, std))
    return rows + of_folds


# Slices

# A slice is small if a class has fewer groups: with ten, the interval of a share near one half is about 0.6 wide.
SMALL_BELOW_GROUPS = 10
NOT_KNOWN = "not known"
MOST_VALUES = 12  # slices per column, of its most frequent values

# Columns that make slices. A column that describes only one class names this class: its slices are compared with all
# videos of the other class. Empty: the column describes both classes.
_SLICED = {
    "platform": "", "corpus": "", "label_source": "", "real_source": "real", "manipulation": "fake",
    "generator": "fake", "duration": "", "resolution": "", "codec": "",
}  # fmt: skip
# Bins are half open, [from, to). Resolution counts pixels, so portrait and landscape videos fall into the same bins.
_DURATIONS = [5, 15, 60, 300]
_DURATION_NAMES = ["under 5 s", "5 s to 15 s", "15 s to 60 s", "60 s to 300 s", "300 s and more"]
_PIXELS = [320 * 240, 640 * 360, 1280 * 720, 1920 * 1080]
_PIXEL_NAMES = [
    "under 320x240", "320x240 to 640x360", "640x360 to 1280x720", "1280x720 to 1920x1080", "1920x1080 and more",
]  # fmt: skip


def slice_table(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return the table SLICES with the AUC of every slice, a subset of the videos.

    A slice has all videos with one value of ``platform``, ``corpus``, ``label_source``, ``real_source``,
    ``manipulation``, ``generator`` (unless it equals the manipulation), ``duration``, ``resolution`` or ``codec``. A
    source of reals is compared with all fakes, and a manipulation or generator with all reals. A column gives slices
    of its twelve most frequent values, and none if it has a single value. Missing values form the slice ``not known``.
    The AUC of a slice with one class is null.

    Args:
        index: INDEX schema.
        predictions: PREDICTIONS schema, all folds together.
        config: gives replicates, confidence and seed of the intervals.
    """
    described = index.with_columns(
        duration=_binned(pl.col("duration_seconds"), _DURATIONS, _DURATION_NAMES),
        resolution=_binned(pl.col("width") * pl.col("height"), _PIXELS, _PIXEL_NAMES),
    )
    described = described.select("video_id", pl.col(list(_SLICED)).fill_null(NOT_KNOWN))
    known = predictions.join(described, on="video_id").sort("video_id")
    rows: list[Row] = []
    for column, label in _SLICED.items():
        part = known.filter(label=label) if label else known
        if column == "generator" and part[column].equals(part["manipulation"]):
            continue
        counts = part.group_by(column).len().sort("len", column, descending=[True, False])
        names = counts[column].head(MOST_VALUES)
        others = known.filter(pl.col("label") != label) if label else known.clear()
        for name in names if names.len() > 1 else ():
            own = part.filter(pl.col(column) == name)
            of_slice = pl.concat([own, others]).sort("video_id")
            groups = of_slice.group_by("label").agg(pl.len(), pl.col("group_id").n_unique())
            real = groups.filter(label="real")["len"].sum()
            fake = groups.filter(label="fake")["len"].sum()
            large = groups.filter(pl.col("group_id") >= SMALL_BELOW_GROUPS)
            is_small = large.height < 2
            value, low, high, total, num_groups = auc_within_folds(of_slice, config).row()
            rows.append((column, name, "roc_auc", value, low, high, total, real, fake, num_groups, is_small))
    return check_table(frame_of(rows, SLICES), SLICES, "slices")


def _binned(value: pl.Expr, edges: Sequence[int], names: Sequence[str]) -> pl.Expr:
    """Return an expression for the name of the bin in which ``value`` lies; null if the value is missing.

    Args:
        value: expression of a number.
        edges: B ascending edges; a bin includes its lower edge and excludes its upper edge.
        names: B + 1 names; the first bin is below all edges, the last one above.
    """
    number = pl.sum_horizontal([value >= edge for edge in edges], ignore_nulls=False)
    return number.replace_strict(dict(enumerate(names)), return_dtype=pl.String)


# Decisions

_CONFUSION = ("label", "called_fake", "called_real", "called_fake_share", "low_share", "high_share", "num_groups")


@partial(Metric, bounds=SHARE)
def share_called_fake(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of rows that are called fake, float64 (R,).

    ``decisions`` are (N,), 1 for fake; ``weights`` are R sets of weights (R, N). ``labels`` have no effect.
    """
    del labels
    return divide(weights @ decisions, weights.sum(axis=1))


@partial(Metric, bounds=SHARE)
def precision(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of fakes among the rows that are called fake, float64 (R,).

    ``labels`` and ``decisions`` are (N,), 1 for fake; ``weights`` are R sets of weights (R, N).
    """
    return divide(weights @ (labels * decisions), weights @ decisions)


def confusion_table(predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Count the fakes and the reals that are called fake at the folds' thresholds, with intervals over groups.

    Args:
        predictions: PREDICTIONS schema, all folds together.
        config: gives replicates, confidence and seed.

    Returns:
        Three rows ``fake``, ``real`` and ``precision`` with the columns ``label called_fake called_real
        called_fake_share low_share high_share num_groups``. In the row ``precision``, ``called_fake_share`` is the
        share of fakes among the videos called fake. It depends on the share of fakes in the corpus. A class with fewer
        than two groups has no interval.
    """
    decisions = decide(predictions["score"].to_numpy(), predictions["threshold"].to_numpy())
    decided = predictions.with_columns(called=pl.Series(decisions))
    fakes, reals = decided.filter(label="fake"), decided.filter(label="real")
    rows: list[Row] = []
    for name, part, metric in (
        ("fake", fakes, share_called_fake), ("real", reals, share_called_fake), ("precision", decided, precision)
    ):  # fmt: skip
        called = part["called"].to_numpy()
        groups = part["group_id"].to_list()
        interval = group_interval(fake_labels(part), called, groups, metric, **interval_settings(config))
        share, low, high, total, num_groups = interval.row()
        num_called = called.sum()
        rows.append((name, int(num_called), int(total - num_called), share, low, high, num_groups))
    return pl.DataFrame(rows, schema=_CONFUSION, orient="row")


def chosen_table(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> pl.DataFrame:
    """Return the values that were chosen on the training groups of each fold, one row per fold.

    They are the temperature, the threshold and the epoch.

    Args:
        predictions: PREDICTIONS schema, all folds together.
        selections: the record of every fold's choices; None: missing.

    Returns:
        The columns ``fold temperature threshold num_test_videos num_test_groups called_fake_share epoch
        num_inner_videos num_inner_groups``. The last two count the videos, and their groups, on which the values were
        chosen. Null means not recorded, or that no epoch was chosen. ``called_fake_share`` is the share of test videos
        called fake.
    """
    names = ["fold", "epoch", "num_inner_videos", "num_inner_groups"]
    known = [(fold, record.selection) for fold, record in enumerate(selections) if record]
    rows = [(fold, one.best_epoch or None, one.num_videos, one.num_groups) for fold, one in known]
    inner = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")
    is_called_fake = pl.col("score") >= pl.col("threshold")
    outer = predictions.group_by("fold").agg(
        pl.col("temperature", "threshold").first(),
        num_test_videos=pl.len(),
        num_test_groups=pl.col("group_id").n_unique(),
        called_fake_share=is_called_fake.mean(),
    )
    return outer.sort("fold").join(inner, on="fold", how="left", maintain_order="left")


def operating_sentence(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> str:
    """Return a text on the goal of the thresholds, such as a false positive rate.

    The text also says if there are too few real videos to choose a threshold for the goal, or to test that it holds.

    Args:
        predictions: PREDICTIONS schema, all folds together.
        selections: the record of every fold's choices; None: missing. Without any record the text says so.
    """
    chosen = [record.selection for record in selections if record is not None]
    if not chosen:
        return "What the thresholds were chosen for is not recorded."
    point = operating_point(chosen[0].operating_point)
    others = "The command predict has other rates: it counts groups, keeps to --error-rate, and may say undecided."
    if few := [one.fewest_groups for one in chosen if not one.is_calibrated]:
        return f"In {len(few)} of {len(chosen)} folds thresholds and scores are {too_few_groups(min(few))}. {others}"
    on = "training videos, held out in turn," if chosen[0].is_held_out else "inner validation videos"
    sentence = f"Thresholds were chosen on {on} for {point.says}."
    blind = sum(not point.is_resolved_by(selection.num_real) for selection in chosen)
    if blind:
        sentence += f" In {blind} of {len(chosen)} folds there are too few reals: the threshold calls none fake."
    num_real = predictions.filter(label="real").height
    if not point.is_resolved_by(num_real):
        sentence += f" The {num_real} reals that were tested are too few to show whether it holds."
    return f"{sentence} {others}"
