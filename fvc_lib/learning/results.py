"""From out-of-fold predictions to the table of results: every number with an interval, and controls beside it.

How a value over all folds comes about, which the interval is of, too:

- Ranking metrics (AUC, average precision, equal error rate, true positives at 5 % false positives) are computed inside
  each fold and averaged, a fold counting as its pairs of a fake and a real video: ``metrics.within_folds`` says why one
  ranking over all folds is wrong.
- Metrics of decisions (F1, balanced accuracy, Matthews correlation) count the decisions of all folds together, each
  made with its own fold's threshold: averages of per-fold F1 are biased (Forman and Scholz 2010).
- Brier score and calibration error take all videos together: a probability means the same in every fold. Those called
  ``..._uncalibrated`` are the model's before its temperature, so that it can be seen what that did.

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
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds
from fvc_lib.learning import controls
from fvc_lib.metrics.calibration import expected_calibration_error, probabilities
from fvc_lib.metrics.classification import (
    average_precision,
    balanced_accuracy,
    brier_score,
    equal_error_rate,
    f1,
    matthews_correlation,
    roc_auc,
    true_positive_rate_at,
)
from fvc_lib.metrics.intervals import cluster_bootstrap_many, one_vote_per_group
from fvc_lib.metrics.thresholds import decide
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric
from fvc_lib.metrics.within_folds import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import RESULTS, check_table

MODEL = "model"
ALL_FOLDS = "all"
ALL_BY_GROUP = "all_by_group"

# Shows what leakage would have claimed; a model is not expected to beat it.
DEMONSTRATIONS = frozenset({controls.GROUP_LOOKUP_BY_ROW})


_SCORE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Measure:
    """A metric of the table: its name there, and what of the predictions it takes.

    Ranking metrics take scores and are computed within folds.
    """

    name: str
    metric: Metric
    takes: Literal["ranking", "decisions", "scores", "uncalibrated"]


MEASURES = (
    Measure("roc_auc", roc_auc, "ranking"),
    Measure("average_precision", average_precision, "ranking"),
    Measure("equal_error_rate", equal_error_rate, "ranking"),
    Measure("true_positive_rate_at_5_percent", true_positive_rate_at, "ranking"),
    Measure("f1", f1, "decisions"),
    Measure("balanced_accuracy", balanced_accuracy, "decisions"),
    Measure("matthews_correlation", matthews_correlation, "decisions"),
    Measure("brier_score", brier_score, "scores"),
    Measure("expected_calibration_error", expected_calibration_error, "scores"),
)
METRIC_NAMES = tuple(measure.name for measure in MEASURES)

# Of the model alone: no control has a temperature.
UNCALIBRATED = (
    Measure("brier_score_uncalibrated", brier_score, "uncalibrated"),
    Measure("expected_calibration_error_uncalibrated", expected_calibration_error, "uncalibrated"),
)
# Of MEASURES and UNCALIBRATED, those where less is better.
LOWER_IS_BETTER = frozenset(
    {"equal_error_rate", "brier_score", "expected_calibration_error", *(measure.name for measure in UNCALIBRATED)}
)


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
    rows = _source_rows(MODEL, predictions, MEASURES + UNCALIBRATED, config)
    for source, scored in controls.all_controls(index, judged, predictions, seed=config.seed).items():
        rows += _source_rows(source, scored, MEASURES, config)
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


def _source_rows(
    source: str, scored: pl.DataFrame, measures: Sequence[Measure], config: RunConfig
) -> list[tuple[object, ...]]:
    """RESULTS rows of one source: over all folds, by video and by group, then fold by fold."""
    per_fold = {
        int(key[0]): _fold_values(part, measures)
        for key, part in scored.sort("fold").group_by("fold", maintain_order=True)
    }
    rows: list[tuple[object, ...]] = []
    for scope in (ALL_FOLDS, ALL_BY_GROUP):
        for measure, row in zip(measures, interval_rows(scored, measures, config, scope), strict=True):
            of_folds = [values[measure.name] for values in per_fold.values()] if scope == ALL_FOLDS else []
            rows.append((source, scope, measure.name, *row[:3], *_mean_and_deviation(of_folds), *row[3:]))
    for fold, values in per_fold.items():
        part = scored.filter(pl.col("fold") == fold)
        sizes = (part.height, part["group_id"].n_unique())
        rows += [
            (source, f"fold_{fold}", name, _or_none(value), None, None, None, None, *sizes)
            for name, value in values.items()
        ]
    return rows


IntervalRow = tuple[float | None, float | None, float | None, int, int]


def interval_rows(
    scored: pl.DataFrame, measures: Sequence[Measure], config: RunConfig, scope: str = ALL_FOLDS
) -> list[IntervalRow]:
    """(value, low, high, videos, groups) of each measure over all folds; all of them on the same draws of groups.

    Equal seeds draw equal groups, so the sources of one run are paired as well.

    Args:
        scored: columns ``group_id label fold score threshold``, and for uncalibrated measures ``logit``.
        measures: what is wanted.
        config: replicates, confidence and seed.
        scope: ``ALL_FOLDS`` or ``ALL_BY_GROUP``.
    """
    values, folds, groups = _inputs(scored, measures), scored["fold"].to_numpy(), scored["group_id"].to_list()
    intervals = cluster_bootstrap_many(
        controls.fake_labels(scored),
        [
            (within_folds(measure.metric, folds) if measure.takes == "ranking" else measure.metric, value)
            for measure, value in zip(measures, values, strict=True)
        ],
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


def _fold_values(part: pl.DataFrame, measures: Sequence[Measure]) -> dict[str, float]:
    labels = controls.fake_labels(part)
    values = _inputs(part, measures)
    return {each.name: each.metric(labels, value) for each, value in zip(measures, values, strict=True)}


def _inputs(scored: pl.DataFrame, measures: Sequence[Measure]) -> list[FloatArray | IntArray]:
    """What each measure takes, (N,) in the order of the rows."""
    scores = scored["score"].to_numpy()
    known: dict[str, Any] = {"ranking": scores, "scores": scores}
    known["decisions"] = decide(scores, scored["threshold"].to_numpy())
    if any(measure.takes == "uncalibrated" for measure in measures):
        known["uncalibrated"] = probabilities(scored["logit"].to_numpy(), 1.0)
    return [known[measure.takes] for measure in measures]


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
