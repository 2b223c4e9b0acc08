"""A run's numbers as MLflow's points: key, step, timestamp and value.

Keys: ``train/loss`` and ``validation/roc_auc`` as the training logged them (``STAGE/phase/metric`` for other stages);
``all/model/roc_auc`` with ``/low`` and ``/high`` beside it for results over all folds, ``all/metadata_only/roc_auc``
for a control, ``all_by_group/...`` with one vote per group, ``outer_fold/model/roc_auc`` in a fold's own run;
``test/model/text_to_video/recall@1`` for results of a task without folds.

MLflow's SQL stores keep NaN, and turn an infinity into 1.8e308, which reads as a number. So both become NaN there, a
gap in the curve, and a tag says which steps were what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import polars as pl

from fvc_lib.analysis.mlflow_names import key_of

POINTS = ["key", "step", "timestamp", "value"]
_SCHEMA = {"key": pl.String, "step": pl.Int64, "timestamp": pl.Int64, "value": pl.Float64}
_EXTRAS = ("low", "high", "fold_mean", "fold_std")
_LATEST_MS = 2**50  # beyond the year 37,000 a clock was wrong
_STEPS_NAMED = 20


def log_points(curves: pl.DataFrame, start_ms: int | None, plain_stage: str | None = None) -> pl.DataFrame:
    """Points of metric lines (``queries.learning_curves``); a missing or impossible time becomes ``start_ms``.

    Lines of ``plain_stage`` are called ``phase/metric``, those of others have their stage in front.
    """
    time = (pl.col("ts") * 1000).round()
    possible = time.is_finite() & (time >= 0) & (time < _LATEST_MS)
    names = _names(curves, plain_stage)
    return curves.join(names, on=["stage", "phase", "metric"], how="left").select(
        "key",
        "step",
        pl.when(possible).then(time).otherwise(start_ms or 0).cast(pl.Int64).alias("timestamp"),
        pl.col("value").fill_null(math.nan),
    )


def result_points(table: pl.DataFrame, end_ms: int | None, fold: int | None = None) -> pl.DataFrame:
    """Points of the results, at step 0: of the model on one fold, or all that is said over all folds with controls.

    What is null is undefined or does not apply, and has no point.
    """
    over_all = ~pl.col("scope").str.starts_with("fold_")
    of_fold = (pl.col("scope") == f"fold_{fold}") & (pl.col("source") == "model")
    rows = table.filter(over_all if fold is None else of_fold)
    numbers: dict[str, float] = {}
    for row in rows.iter_rows(named=True):
        scope = row["scope"] if fold is None else "outer_fold"
        key = key_of(scope, row["source"], row["metric"])
        named = {key: row["value"], **{f"{key}/{extra}": row[extra] for extra in _EXTRAS}}
        numbers |= {name: value for name, value in named.items() if value is not None}
    return _at_once(numbers, end_ms)


def task_result_points(table: pl.DataFrame, end_ms: int | None) -> pl.DataFrame:
    """Points of the results of a task without folds (``task_tables.TASK_RESULTS``), at step 0, controls among them."""
    numbers: dict[str, float] = {}
    for row in table.iter_rows(named=True):
        key = key_of("test", row["source"], row["subject"], row["metric"])
        named = {key: row["value"], **{f"{key}/{bound}": row[bound] for bound in ("low", "high")}}
        numbers |= {name: value for name, value in named.items() if value is not None}
    return _at_once(numbers, end_ms)


def number_points(numbers: Mapping[str, float], end_ms: int | None) -> pl.DataFrame:
    """Single numbers of a finished training, as ``outcome/NAME`` at step 0."""
    return _at_once({key_of("outcome", name): value for name, value in numbers.items()}, end_ms)


def not_finite(curves: pl.DataFrame) -> dict[str, str]:
    """A tag that says which values were not finite, by metric and step; none where all were."""
    rows = curves.filter(pl.col("value").is_null()).sort("stage", "phase", "metric", "flag", "step")
    if rows.is_empty():
        return {}
    parts = []
    for (phase, metric, flag), steps in rows.group_by("phase", "metric", "flag", maintain_order=True):
        listed = steps["step"].to_list()
        more = f" and {len(listed) - _STEPS_NAMED:,} more" if len(listed) > _STEPS_NAMED else ""
        where = ", ".join(map(str, listed[:_STEPS_NAMED])) + more
        parts.append(f"{key_of(str(phase), str(metric))}: {flag} at step {where}")
    return {"fvc.not_finite": "; ".join(parts)}


def _names(curves: pl.DataFrame, plain_stage: str | None) -> pl.DataFrame:
    """The key of each stage, phase and metric: few, so they are made one by one."""
    distinct = curves.select("stage", "phase", "metric").unique().sort("stage", "phase", "metric")
    keys = [
        key_of(phase, metric) if stage == plain_stage else key_of(stage, phase, metric)
        for stage, phase, metric in distinct.iter_rows()
    ]
    return distinct.with_columns(pl.Series("key", keys, dtype=pl.String))


def _at_once(numbers: Mapping[str, float], end_ms: int | None) -> pl.DataFrame:
    finite = {key: value if math.isfinite(value) else math.nan for key, value in numbers.items()}
    rows = {"key": list(finite), "step": [0] * len(finite), "timestamp": [end_ms or 0] * len(finite)}
    return pl.DataFrame({**rows, "value": list(finite.values())}, schema=_SCHEMA)
