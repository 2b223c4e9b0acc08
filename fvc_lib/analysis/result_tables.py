"""Tables of a result: every metric by video and by group, and what each fold chose before it saw its test videos."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from fvc_lib.analysis.wording import interval_text, metric_name, source_name
from fvc_lib.metrics import over_folds

BY_VIDEO, BY_GROUP = "all", "all_by_group"
# Of the model before its temperature: no control has one.
UNCALIBRATED = ("brier_score_uncalibrated", "expected_calibration_error_uncalibrated")
LOWER_IS_BETTER = over_folds.LOWER_IS_BETTER | frozenset(UNCALIBRATED)


def metric_table(results: pl.DataFrame) -> pl.DataFrame:
    """The model's metrics over all folds, with intervals: a vote for each video, and a vote for each group.

    Args:
        results: one run's rows of ``tables.RESULTS``.

    Returns:
        ``metric better by_video by_group fold_mean fold_std``; the two columns between are text with intervals.
    """
    model = results.filter(pl.col("source") == "model")
    by_group = {row["metric"]: row for row in model.filter(pl.col("scope") == BY_GROUP).iter_rows(named=True)}
    rows = [
        {
            "metric": metric_name(row["metric"]),
            "better": "lower" if row["metric"] in LOWER_IS_BETTER else "higher",
            "by_video": _interval(row),
            "by_group": _interval(by_group.get(row["metric"])),
            "fold_mean": row["fold_mean"],
            "fold_std": row["fold_std"],
        }
        for row in model.filter(pl.col("scope") == BY_VIDEO).iter_rows(named=True)
    ]
    return pl.DataFrame(rows, schema=_METRIC_SCHEMA)


def control_table(results: pl.DataFrame) -> pl.DataFrame:
    """Every metric over all folds, a row each: ``metric better`` and a column for each source, named in words."""
    rows = results.filter((pl.col("scope") == BY_VIDEO) & ~pl.col("metric").is_in(UNCALIBRATED))
    better = pl.when(pl.col("metric").is_in(LOWER_IS_BETTER)).then(pl.lit("lower")).otherwise(pl.lit("higher"))
    rows = rows.with_columns(
        better=better,
        metric=pl.col("metric").map_elements(metric_name, return_dtype=pl.String),
        source=pl.col("source").map_elements(source_name, return_dtype=pl.String),
    )
    return rows.pivot("source", index=["metric", "better"], values="value")


def chosen_table(predictions: pl.DataFrame, epochs: Mapping[int, tuple[int, int, int]] | None = None) -> pl.DataFrame:
    """What each fold's inner validation part chose, and the test videos that it was then applied to, once.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        epochs: by fold the epoch chosen, and the videos and groups of the inner validation part that chose it.

    Returns:
        ``fold epoch temperature threshold num_inner_videos num_inner_groups num_test_videos num_test_groups
        called_fake_share`` in the order of the folds; null is not recorded.
    """
    known = epochs or {}
    inner = pl.DataFrame(
        [(fold, *known.get(fold, (None, None, None))) for fold in predictions["fold"].unique().sort()],
        schema=_INNER_SCHEMA, orient="row",
    )  # fmt: skip
    outer = predictions.group_by("fold").agg(
        pl.col("temperature").first(),
        pl.col("threshold").first(),
        num_test_videos=pl.len(),
        num_test_groups=pl.col("group_id").n_unique(),
        called_fake_share=(pl.col("score") >= pl.col("threshold")).mean(),
    )
    return inner.join(outer, on="fold", how="left", maintain_order="left").select(
        "fold", "epoch", "temperature", "threshold", "num_inner_videos", "num_inner_groups", "num_test_videos",
        "num_test_groups", "called_fake_share",
    )  # fmt: skip


_INNER_SCHEMA = {
    "fold": pl.Int64, "epoch": pl.Int64, "num_inner_videos": pl.Int64, "num_inner_groups": pl.Int64,
}  # fmt: skip
_METRIC_SCHEMA = {
    "metric": pl.String, "better": pl.String, "by_video": pl.String, "by_group": pl.String, "fold_mean": pl.Float64,
    "fold_std": pl.Float64,
}  # fmt: skip


def _interval(row: dict[str, float | None] | None) -> str | None:
    return None if row is None else interval_text(row["value"], row["low"], row["high"])
