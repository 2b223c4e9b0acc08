"""Figures and tables of a result: the model and its controls, its scores, its slices, and the leakage audit.

``results``, ``slices``, ``audit`` and ``predictions`` are one run's rows of RESULTS, SLICES, LEAKAGE_AUDIT and
PREDICTIONS in ``services.tables``. ``confidence`` is the coverage of the intervals in them. A control is a simple
predictor that the model must beat.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read import headline
from fvc_lib.analysis.read.queries import (
    Selection,
    confidence_of,
    fold_table,
    of_folds,
    parameter_differences,
    table_of,
    task_of,
)
from fvc_lib.analysis.wording import better_direction, count_text, figure_text, interval_text, metric_name
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.services.atomic_files import path_to_text

BY_VIDEO, BY_GROUP = "all", "all_by_group"
_BY = {BY_VIDEO: "by_video", BY_GROUP: "by_group", headline.BY_CASE: "by_case"}  # columns of a table, by scope
_MAIN = headline.HEADLINE_METRIC
_MEASURED = ("codec", "duration", "resolution")  # properties of a file that no corpus declares

# --- Tables


def metric_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return the model's metrics over all folds, one row per metric.

    Columns are ``metric better by_video by_group fold_mean fold_std``. ``better`` is ``higher`` or ``lower``.
    ``by_video`` and ``by_group`` are values as text with intervals. In ``by_video`` every video has the same weight, in
    ``by_group`` every group. ``fold_mean`` and ``fold_std`` are mean and standard deviation of the values of the folds.
    If the corpus states cases (events with several videos), ``by_case`` has the values with one score per case.
    """
    model = results.filter(source="model")
    intervals = model.select("value", "low", "high").rows()
    texts = [None if row[0] is None else interval_text(*row) for row in intervals]
    model = model.with_columns(text=pl.Series(texts, dtype=pl.String))
    over_all_folds = model.filter(pl.col("scope").is_in(list(_BY)))
    of_scopes = over_all_folds.pivot("scope", index="metric", values="text").rename(_BY, strict=False)
    joined = of_scopes.join(model.filter(scope=BY_VIDEO), on="metric", maintain_order="left")
    return joined.select(NAME_OF_METRIC, BETTER_DIRECTION, *of_scopes.columns[1:], "fold_mean", "fold_std")


NAME_OF_METRIC = pl.col("metric").map_elements(metric_name, pl.String)
BETTER_DIRECTION = pl.col("metric").map_elements(better_direction, pl.String).alias("better")


def control_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return the metrics of the model and of its controls (simple predictors) over all folds, one row per metric.

    The first columns are ``metric`` and ``better``, which is ``higher`` or ``lower``. The model and each control have a
    column with their values.
    """
    # Only the model has metrics of scores before the temperature. The margin is a difference of two scores.
    is_uncalibrated = pl.col("metric").str.ends_with(UNCALIBRATED)
    of_model = is_uncalibrated | (pl.col("metric") == headline.MARGIN)
    rows = results.filter((pl.col("scope") == BY_VIDEO) & ~of_model)
    source = pl.col("source").map_elements(wording.source_name, pl.String)
    values = rows.select(NAME_OF_METRIC, BETTER_DIRECTION, source, "value")
    return values.pivot("source", index=["metric", "better"], values="value")


def audit_table(audit: pl.DataFrame) -> pl.DataFrame:
    """Return one row per leakage check, as text for readers: ``check finding verdict``.

    ``verdict`` is "passed", "FAILED", or "for information" if the check only reports a fact and cannot fail.
    """
    words = {True: "passed", False: "FAILED", None: "for information"}
    verdict = pl.col("passed").replace_strict(words, return_dtype=pl.String)
    check = pl.col("check").str.replace_all("_", " ", literal=True)
    return audit.select(check, "finding", verdict=verdict)


def failed_checks(audit: pl.DataFrame) -> list[str]:
    """Return the findings of the leakage checks that did not pass. Checks for information do not count."""
    return audit.filter(passed=False)["finding"].to_list()


# --- The model and its controls


def controls_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the ROC AUC of the model and of its controls over all folds, with intervals.

    The title states numbers, not whether the model is above its controls: a verdict needs more than ``results``.

    Args:
        results: rows of ``tables.RESULTS``.
        confidence: coverage of the recorded intervals, which the subtitle states.
    """
    scores = [score for score in headline.overall_scores(results) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(_MAIN)} over all folds is recorded.")
    rows = []
    for score in scores:
        is_dishonest = score.source in headline.DISHONEST_CONTROLS
        remark = "<br><i>not an honest split</i>" * is_dishonest
        tick = figure_text(wording.source_name(score.source)) + remark
        color = theme.MODEL if score.source == "model" else theme.CONTROL
        rows.append(Row(tick, score.value, score.low, score.high, color, is_dishonest))
    of_videos = results.filter(scope=BY_VIDEO, metric=_MAIN)
    videos, groups = of_videos.select("num_videos", "num_groups").row(0)
    first, *others = (f"{wording.source_name(score.source).lower()} {score.value:.3f}" for score in scores)
    highest = f"; highest control: {others[0]}" if others else "; no control has a score"
    drawn = theme.interval_chart(
        f"{metric_name(_MAIN)}: {first}{highest}",
        f"{theme.in_groups(videos, 'video', groups)}; dark: the model, grey: controls, ring: not an honest split; "
        f"bars: {confidence:.0%} intervals over groups; dashed: chance",
        rows, names="Scored by", values=metric_name(_MAIN),
    )  # fmt: skip
    return drawn.update_layout(meta=theme.ANSWER)


def score_distribution_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return a figure with two histograms of scores, of reals and of fakes, in bins of 0.05.

    Dotted lines mark the decision thresholds of the folds.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Scores", "No predictions are recorded.")
    called_fake = predictions["score"] >= predictions["threshold"]
    is_right = called_fake == (predictions["label"] == "fake")
    share_right = is_right.to_numpy().mean()
    drawn = theme.figure(
        f"{share_right:.0%} of the videos fall on the right side of their fold's threshold",
        theme.videos_and_groups(predictions),
    )
    edges = np.arange(21) / 20
    for label, color in theme.LABEL_COLORS.items():
        # Binned here rather than by plotly, so that the size of a page does not grow with the number of videos.
        scores = predictions.filter(label=label)["score"]
        counts = np.histogram(scores, edges)[0]
        # Side by side, because two colours on each other would be a third one.
        at = edges[:-1] + (0.0125 if label == "real" else 0.0375)
        drawn.add_bar(x=at, y=counts, width=0.023, name=f"{label} ({counts.sum():,})", marker={"color": color})
    for threshold in predictions["threshold"].unique():
        drawn.add_vline(x=threshold, line={"color": theme.INK, "width": 1, "dash": "dot"})
    drawn.update_xaxes(title_text="Score (probability of fake); dotted: thresholds of the folds", range=[0, 1])
    drawn.update_yaxes(title_text="Videos")
    return drawn.update_layout(barmode="overlay", legend=theme.LEGEND)


# --- Slices


def slices_figure(slices: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the model's ROC AUC in each slice, with intervals.

    A slice holds the videos with one value of a property that the corpus declares, such as one generator. Slices with
    few groups are pale. A slice of one class has no point.

    Args:
        slices: rows of ``tables.SLICES``.
        confidence: coverage of the recorded intervals, which the subtitle states.
    """
    name = metric_name(_MAIN)
    rows = slices.filter(pl.col("slice_by").is_in(_MEASURED).not_(), metric=_MAIN)
    rows = rows.sort("slice_by", -pl.col("num_videos"), "value")
    if rows.is_empty():
        why = f"The corpus declares no property with several values. By {', '.join(_MEASURED)}: tables/slices.parquet."
        return theme.nothing_to_show(f"{name} by slice", why)
    points = []
    for row in rows.iter_rows(named=True):
        property_name = row["slice_by"].replace("_", " ")
        slice_name = theme.shortened(f"{property_name} {row['value']}", 36)
        tick = figure_text(f"{slice_name} (n = {row['num_videos']:,})")
        ends = (row["number"], row["low"], row["high"])
        text = "one class only" if row["number"] is None else ""
        color = theme.CONTROL if row["is_small"] else theme.MODEL
        points.append(Row(tick, *ends, color, row["is_small"], text))
    of_large = rows.filter(~pl.col("is_small"))["number"]
    large = of_large.drop_nulls().sort()
    finding = f"The lowest {name} of a large slice is {large[0]:.2f}" if len(large) else "No slice is large enough"
    num_small = rows["is_small"].sum()
    return theme.interval_chart(
        finding,
        f"n = {count_text(rows.height, 'slice')}, {num_small} small (grey rings: few groups of a class); "
        f"bars: {confidence:.0%} intervals over groups, not adjusted for the number of slices",
        points, names="Slice", values=name,
    )  # fmt: skip


# --- Panels of the dashboard


PANELS.register_panel("controls", at=10, tasks=("video",))(
    lambda selection: controls_figure(table_of(selection, "results"), confidence=confidence_of(selection))
)


@PANELS.register_panel("folds", at=40, follows=("folds",), tasks=("video",))
def _folds_panel(selection: Selection) -> Shown:
    needless = cs.by_name("run_id", require_all=False) | cs.ends_with(UNCALIBRATED)
    folds = fold_table([selection.detailed]).frame.select(~needless)
    table = of_folds(selection, folds)
    caption = f"{path_to_text(selection.detailed.run_id)}: the model on each outer fold; –: undefined, or too few reals"
    return HtmlTable(table, caption=caption, missing="–") if table.height else NOTHING


PANELS.register_panel("slices", at=44, tasks=("video",))(
    lambda selection: slices_figure(table_of(selection, "slices"), confidence=confidence_of(selection))
)


@PANELS.register_panel("parameters", at=72, follows=("runs",))
def _parameters_panel(selection: Selection) -> Shown:
    """Return a table of the parameters in which the chosen runs differ, with one column per run.

    Only runs with the same task as the run that is shown in detail are included.
    """
    task = task_of(selection.detailed)
    runs = [run for run in selection.runs if task_of(run) == task]
    differing = parameter_differences(runs).frame
    if differing.is_empty():
        return NOTHING
    table = differing.pivot("run_id", index=["parameter", "changes_numbers"], values="value")
    names = {run_id: run_id for run_id in table.columns[2:]}
    return HtmlTable(table, caption=f"Parameters with several values in the {len(runs)} chosen runs", names=names)
