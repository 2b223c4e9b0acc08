"""From out-of-fold predictions to the table of results: every number with an interval, and controls beside it.

How the value of scope ``all`` comes about, which the interval is of, too:

- Ranking metrics (AUC, average precision, equal error rate) are computed inside each fold and averaged, a fold counting
  as its pairs of a fake and a real video: ``metrics.within_folds`` says why one ranking over all folds is wrong.
- Metrics of decisions (F1, balanced accuracy) count the decisions of all folds together, each made with its own fold's
  threshold: averages of per-fold F1 are biased (Forman and Scholz 2010).
- Brier score and calibration error take all videos together: a probability means the same in every fold.

``fold_mean`` and ``fold_std`` are the plain mean and sample standard deviation over the folds where the metric is
defined. They describe the folds; the standard deviation is no interval, because folds share their training data.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import polars as pl

from fvc_lib.corpus.folds import check_folds
from fvc_lib.learning import controls
from fvc_lib.metrics.calibration import expected_calibration_error
from fvc_lib.metrics.classification import (
    average_precision,
    balanced_accuracy,
    brier_score,
    equal_error_rate,
    f1,
    roc_auc,
)
from fvc_lib.metrics.intervals import Interval, cluster_bootstrap
from fvc_lib.metrics.thresholds import decide
from fvc_lib.metrics.weighting import FloatArray, IntArray, Metric
from fvc_lib.metrics.within_folds import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import RESULTS, check_table

MODEL = "model"
ALL_FOLDS = "all"

# Shows what leakage would have claimed; a model is not expected to beat it.
DEMONSTRATIONS = frozenset({controls.GROUP_LOOKUP_BY_ROW})

RANKING_METRICS = (roc_auc, average_precision, equal_error_rate)
DECISION_METRICS = (f1, balanced_accuracy)
PROBABILITY_METRICS = (brier_score, expected_calibration_error)
METRIC_NAMES = tuple(metric.__name__ for metric in RANKING_METRICS + DECISION_METRICS + PROBABILITY_METRICS)


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
            thresholds in one fold, or fewer than two folds.
    """
    check_predictions(folds, predictions, left_out=left_out, labels_were_shuffled=config.shuffle_labels)
    predictions = predictions.sort("video_id")
    model = predictions.select(controls.SCORED_COLUMNS)
    judged = model.select("video_id", "group_id", "label", "fold")  # with shuffle_labels the shuffled ones
    sources = {MODEL: model, **controls.all_controls(index, judged, predictions, seed=config.seed)}
    rows = [row for source, scored in sources.items() for row in _source_rows(source, scored, config)]
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
        DataError: videos missing or unknown; other labels (unless shuffled on purpose); several thresholds in a fold.
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
    several = predictions.group_by("fold").agg(pl.col("threshold").n_unique()).filter(pl.col("threshold") > 1)
    _refuse(several["fold"], DataError, "folds have more than one threshold", again)


def _source_rows(source: str, scored: pl.DataFrame, config: RunConfig) -> list[tuple[object, ...]]:
    """RESULTS rows of one source: first over all folds, then fold by fold."""
    per_fold = {
        int(key[0]): _fold_values(part) for key, part in scored.sort("fold").group_by("fold", maintain_order=True)
    }
    rows: list[tuple[object, ...]] = []
    for interval, name in zip(_intervals(scored, config), METRIC_NAMES, strict=True):
        mean, deviation = _mean_and_deviation([values[name] for values in per_fold.values()])
        ends = (_or_none(interval.value), _or_none(interval.low), _or_none(interval.high))
        rows.append((source, ALL_FOLDS, name, *ends, mean, deviation, interval.num_rows, interval.num_groups))
    for fold, values in per_fold.items():
        part = scored.filter(pl.col("fold") == fold)
        sizes = (part.height, part["group_id"].n_unique())
        rows += [
            (source, f"fold_{fold}", name, _or_none(values[name]), None, None, None, None, *sizes)
            for name in METRIC_NAMES
        ]
    return rows


def _intervals(scored: pl.DataFrame, config: RunConfig) -> list[Interval]:
    """Intervals over all folds in the order of ``METRIC_NAMES``; all sources and metrics draw the same groups."""
    labels, scores, decisions = _columns(scored)
    folds, groups = scored["fold"].to_numpy(), scored["group_id"].to_list()
    measures: list[tuple[Metric, FloatArray | IntArray]] = [
        *((within_folds(metric, folds), scores) for metric in RANKING_METRICS),
        *((metric, decisions) for metric in DECISION_METRICS),
        *((metric, scores) for metric in PROBABILITY_METRICS),
    ]
    return [
        cluster_bootstrap(
            labels,
            values,
            groups,
            metric,
            replicates=config.bootstrap_replicates,
            seed=config.seed,
            confidence=config.confidence,
        )
        for metric, values in measures
    ]


def _fold_values(part: pl.DataFrame) -> dict[str, float]:
    labels, scores, decisions = _columns(part)
    values = {metric.__name__: metric(labels, scores) for metric in RANKING_METRICS + PROBABILITY_METRICS}
    return values | {metric.__name__: metric(labels, decisions) for metric in DECISION_METRICS}


def _columns(scored: pl.DataFrame) -> tuple[IntArray, FloatArray, IntArray]:
    scores = scored["score"].to_numpy()
    return controls.fake_labels(scored), scores, decide(scores, scored["threshold"].to_numpy())


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
