"""From out-of-fold predictions to the table of results: every number with an interval, and controls beside it.

What a value over all folds is computed from says ``metrics.over_folds``; the interval is of the same value. The metrics
called ``..._uncalibrated`` are the model's before its temperature, so that it can be seen what that did.

Scope ``all`` gives each video a vote, ``all_by_group`` each group: its videos weigh one over their number, so that a
clip that was copied a hundred times does not speak for the corpus. ``fold_mean`` and ``fold_std`` are the plain mean
and sample standard deviation over the folds where the metric is defined. They describe the folds; the standard
deviation is no interval, because folds share their training data.

What an interval covers: which groups a model is tested on. It takes the trained models as they are, the controls' too;
how much another training, or another shuffle of labels, would score is not in it. A control that scores all videos
alike (constant; group lookup by group) has an interval without width, because nothing about it is uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds
from fvc_lib.learning import controls
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.intervals import cluster_bootstrap_many, one_vote_per_group
from fvc_lib.metrics.over_folds import METRICS, PROBABILITY_METRICS, measure_over_folds
from fvc_lib.metrics.weighting import FloatArray, Metric
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import RESULTS, check_table

MODEL = "model"
ALL_FOLDS = "all"
ALL_BY_GROUP = "all_by_group"

# Shows what leakage would have claimed; a model is not expected to beat it.
DEMONSTRATIONS = frozenset({controls.GROUP_LOOKUP_BY_ROW})


METRIC_NAMES = tuple(METRICS)
UNCALIBRATED = "_uncalibrated"
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
) -> pl.DataFrame:
    """Every metric of the model and of each control, per fold and over all folds (RESULTS schema).

    A metric that is undefined (a fold of one class) is null. The result does not depend on the order of any table.

    Args:
        index: INDEX schema, what the metadata control learns from.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together.
        config: replicates, confidence and seed.
        left_out: videos of the folds that took no part because no clip could be decoded.

    Raises:
        LeakageError: a group in two folds, or a video predicted twice or in another fold than its own.
        DataError: videos without a prediction or unknown to the folds, another label than the folds give, several
            thresholds in one fold, scores that are not those of the logits, or fewer than two folds.
    """
    check_predictions(folds, predictions, left_out=left_out, labels_were_shuffled=config.shuffle_labels)
    predictions = predictions.sort("video_id")
    judged = predictions.select("video_id", "group_id", "label", "fold")  # with shuffle_labels the shuffled ones
    rows = _source_rows(MODEL, predictions, METRIC_NAMES + MODEL_ONLY_NAMES, config)
    for source, scored in controls.all_controls(index, judged, predictions, seed=config.seed).items():
        rows += _source_rows(source, scored, METRIC_NAMES, config)
    table = pl.DataFrame(
        rows, schema={name: column.dtype.type for name, column in RESULTS.columns.items()}, orient="row"
    )
    return check_table(table, RESULTS, "kfold results")


def check_predictions(
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    left_out: Collection[str] = (),
    labels_were_shuffled: bool = False,
) -> None:
    """Refuse predictions that are not exactly one for each video of ``folds``, made in that video's own fold.

    Videos that are ``left_out`` must not be predicted.

    Raises:
        LeakageError: a group in two folds; a video predicted twice, in another fold, or in another group.
        DataError: videos missing or unknown; other labels (unless shuffled on purpose); several thresholds or
            temperatures in a fold; a score that its logit and temperature do not give.
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
    """The metric called ``name`` over the folds of ``scored``, and the values (N,) it takes of each row.

    Args:
        name: one of ``METRIC_NAMES`` or ``MODEL_ONLY_NAMES``.
        scored: columns ``fold score threshold``, and for ``MODEL_ONLY_NAMES`` ``logit``.
    """
    calibrated = name.removesuffix(UNCALIBRATED)
    scores = scored["score"].to_numpy() if name == calibrated else probabilities(scored["logit"].to_numpy(), 1.0)
    return measure_over_folds(calibrated, scores, scored["threshold"].to_numpy(), scored["fold"].to_numpy())


def interval_rows(
    scored: pl.DataFrame,
    measures: Sequence[tuple[Metric, FloatArray]],
    config: RunConfig,
    scope: str = ALL_FOLDS,
) -> list[IntervalRow]:
    """(value, low, high, videos, groups) of each of ``measures``; all of them on the same draws of groups.

    Equal seeds and labels draw equal groups, so the sources of one run are paired as well, but for shuffled labels.

    Args:
        scored: columns ``group_id label``.
        measures: metrics, each with the values (N,) that it takes; see ``measured``.
        config: replicates, confidence and seed.
        scope: ``ALL_FOLDS`` or ``ALL_BY_GROUP``.
    """
    groups = scored["group_id"].to_list()
    intervals = cluster_bootstrap_many(
        controls.fake_labels(scored),
        measures,
        groups,
        row_weights=one_vote_per_group(groups) if scope == ALL_BY_GROUP else None,
        replicates=config.bootstrap_replicates,
        seed=config.seed,
        confidence=config.confidence,
    )
    return [
        (_or_none(each.value), _or_none(each.low), _or_none(each.high), each.num_rows, each.num_groups)
        for each in intervals
    ]


def _source_rows(
    source: str, scored: pl.DataFrame, names: Sequence[str], config: RunConfig
) -> list[tuple[object, ...]]:
    """RESULTS rows of one source: over all folds, by video and by group, then fold by fold."""
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
    for fold, values in per_fold.items():
        part = scored.filter(pl.col("fold") == fold)
        sizes = (part.height, part["group_id"].n_unique())
        rows += [
            (source, f"fold_{fold}", name, _or_none(value), None, None, None, None, *sizes)
            for name, value in values.items()
        ]
    return rows


def _fold_values(part: pl.DataFrame, names: Sequence[str]) -> dict[str, float]:
    """Of one fold by itself."""
    labels = controls.fake_labels(part)
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
