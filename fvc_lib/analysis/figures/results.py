"""Figures and tables of a result: the model and its controls, its scores, its slices, and the leakage audit.

``results``, ``slices``, ``audit`` and ``predictions`` are one run's rows of RESULTS, SLICES, LEAKAGE_AUDIT and
PREDICTIONS in ``services.tables``. ``confidence`` is the coverage of the intervals in them. A control is a simple
predictor that the model must beat.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard import panels
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read import headline
from fvc_lib.analysis.read.naming import run_names
from fvc_lib.analysis.read.queries import fold_table, parameter_differences
from fvc_lib.analysis.wording import better_direction, count_text, figure_text, interval_text, metric_name, number_text
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.services.atomic_files import path_to_text

BY_VIDEO, BY_GROUP = "all", "all_by_group"
_MAIN = headline.HEADLINE_METRIC

# --- Tables


def metric_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return the model's metrics over all folds: ``metric better by_video by_group fold_mean fold_std``.

    In ``by_video`` every video has the same weight, in ``by_group`` every group. Both are text with intervals.
    """
    model = results.filter(source="model")
    texts = [None if row[0] is None else interval_text(*row) for row in model.select("value", "low", "high").rows()]
    model = model.with_columns(text=pl.Series(texts, dtype=pl.String))
    by_group = model.filter(scope=BY_GROUP).select("metric", by_group="text")
    joined = model.filter(scope=BY_VIDEO).join(by_group, on="metric", how="left", maintain_order="left")
    return joined.select(*_METRIC, pl.col("text").alias("by_video"), "by_group", "fold_mean", "fold_std")


_METRIC = (
    pl.col("metric").map_elements(metric_name, pl.String),
    pl.col("metric").map_elements(better_direction, pl.String).alias("better"),
)


def control_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return every metric over all folds: ``metric better``, and one column for the model and for each control."""
    # No control has a temperature, so metrics before it are the model's alone; the margin is between two rows.
    of_model = pl.col("metric").str.ends_with(UNCALIBRATED) | (pl.col("metric") == headline.MARGIN)
    rows = results.filter((pl.col("scope") == BY_VIDEO) & ~of_model)
    source = pl.col("source").map_elements(wording.source_name, pl.String)
    return rows.select(*_METRIC, source, "value").pivot("source", index=["metric", "better"], values="value")


def chosen_table(predictions: pl.DataFrame, epochs: Mapping[int, tuple[int | None, int, int]]) -> pl.DataFrame:
    """Return for each fold what its inner validation part chose, and the size of its test part.

    Args:
        predictions: predictions of all folds.
        epochs: maps a fold to the chosen epoch, and the numbers of videos and groups in the inner validation part.

    Returns:
        ``fold epoch temperature threshold num_inner_videos num_inner_groups num_test_videos num_test_groups
        called_fake_share``. Null means not recorded. ``called_fake_share`` is the share of test videos called fake.
    """
    names = dict.fromkeys(("fold", "epoch", "num_inner_videos", "num_inner_groups"), pl.Int64)
    inner = pl.DataFrame([(fold, *chosen) for fold, chosen in epochs.items()], schema=names, orient="row")
    outer = predictions.group_by("fold").agg(
        pl.col("temperature", "threshold").first(),
        num_test_videos=pl.len(),
        num_test_groups=pl.col("group_id").n_unique(),
        called_fake_share=(pl.col("score") >= pl.col("threshold")).mean(),
    )
    joined = outer.sort("fold").join(inner, on="fold", how="left", maintain_order="left")
    chosen = ("epoch", "temperature", "threshold", "num_inner_videos", "num_inner_groups")
    return joined.select("fold", *chosen, "num_test_videos", "num_test_groups", "called_fake_share")


def audit_table(audit: pl.DataFrame) -> pl.DataFrame:
    """Return one row per leakage check, as text for readers: ``check finding verdict``."""
    words = {True: "passed", False: "FAILED", None: "for information"}
    verdict = pl.col("passed").replace_strict(words, return_dtype=pl.String)
    return audit.select(pl.col("check").str.replace_all("_", " ", literal=True), "finding", verdict=verdict)


def failed_checks(audit: pl.DataFrame) -> list[str]:
    """Return the findings of the leakage checks that did not pass; checks for information do not count."""
    return audit.filter(passed=False)["finding"].to_list()


# --- The model and its controls


def controls_figure(
    results: pl.DataFrame, *, confidence: float = 0.95, verdict: headline.Verdict | None = None
) -> go.Figure:
    """Return a figure of the ROC AUC of the model and of its controls over all folds, with intervals.

    ``verdict`` is the verdict of the run, which becomes the title. None: the title is judged from ``results`` alone.
    """
    scores = [score for score in headline.overall_scores(results) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(_MAIN)} over all folds is recorded.")
    over_all = results.filter(scope=BY_VIDEO).sort(pl.col("source") != "model", maintain_order=True)
    num_videos, num_groups = over_all.select("num_videos", "num_groups").row(0)
    subtitle = f"{theme.in_groups(num_videos, 'video', num_groups)}; bars: {confidence:.0%} intervals over groups"
    for score in headline.overall_scores(results, headline.MARGIN):
        if score.value is not None:
            subtitle += f"; margin over the trained floor: {interval_text(score.value, score.low, score.high)}"
    rows = []
    for score in scores:
        is_dishonest = score.source in headline.DISHONEST_CONTROLS
        tick = figure_text(wording.source_name(score.source)) + "<br><i>not an honest split</i>" * is_dishonest
        color = theme.MODEL if score.source == "model" else theme.CONTROL
        rows.append(Row(tick, score.value, score.low, score.high, color, is_dishonest))
    return theme.interval_chart(
        (verdict or headline.judge(scores, ())).sentence,
        f"{subtitle}; dashed: chance",
        rows,
        names="Scored by",
        values=metric_name(_MAIN),
        row_height=44,
    )


def score_distribution_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return a histogram of the scores of reals and of fakes in bins of 0.05, with the thresholds of the folds."""
    if predictions.is_empty():
        return theme.nothing_to_show("Scores", "No predictions are recorded.")
    is_right = (predictions["score"] >= predictions["threshold"]) == (predictions["label"] == "fake")
    drawn = theme.figure(
        f"{is_right.to_numpy().mean():.0%} of the videos fall on the right side of their fold's threshold",
        theme.videos_and_groups(predictions),
    )
    edges = np.arange(21) / 20
    names = [f"{low:.2f} to {low + 0.05:.2f}" for low in edges[:-1]]
    for label, color in theme.LABEL_COLORS.items():
        # Counted here: a page holds a number for each bin, however many videos there are.
        scores = predictions.filter(label=label)["score"].to_numpy()
        counts, _ = np.histogram(scores, edges)
        look = {
            "marker": {"color": theme.translucent(color, 0.6), "line": {"color": color, "width": 1}},
            "hovertemplate": "score %{customdata}<br>%{y} videos<extra>" + label + "</extra>",
        }
        middles, name = (edges[:-1] + edges[1:]) / 2, f"{label} (n = {scores.size:,})"
        drawn.add_trace(go.Bar(x=middles, y=counts, width=edges[1], customdata=names, name=name, **look))
    for threshold in predictions["threshold"].unique().sort():
        drawn.add_vline(x=threshold, line={"color": theme.INK, "width": 1, "dash": "dot"})
    drawn.update_xaxes(title_text="Score (probability of fake); dotted: thresholds of the folds", range=[0, 1])
    drawn.update_yaxes(title_text="Videos")
    return drawn.update_layout(barmode="overlay", legend=theme.LEGEND)


# --- Slices

_MOST_OF_ALL = 0.8  # a slice of more of the videos repeats the overall result


def slices_figure(slices: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the ROC AUC in each slice, the videos with one value of a property.

    The property whose slices differ most comes first. Small slices are pale. A slice of one class has no point.
    """
    rows, name = slices.filter(metric=_MAIN), metric_name(_MAIN)
    if rows.is_empty():
        return theme.nothing_to_show("Slices", f"No {name} by slice is recorded.")
    # Between small slices chance alone makes a gap.
    number = pl.col("number").filter(~pl.col("is_small"))
    gap = (number.max() - number.min()).over("slice_by").fill_null(0)
    rows = rows.sort(-gap, "slice_by", -pl.col("num_videos"), "value")
    num_videos = _num_videos(rows)
    large = rows.filter(~pl.col("is_small") & pl.col("number").is_not_null()).sort("number")
    comparable = large.filter(pl.col("num_videos") <= _MOST_OF_ALL * num_videos)
    finding = "No two slices can be compared: they are small, of one class, or hold nearly all videos"
    if comparable.height > 1:
        low, high = (
            f"{_slice_name(row)}, {number_text(row['number'], 2)}"
            for row in (comparable.row(0, named=True), comparable.row(-1, named=True))
        )
        finding = f"{name} is lowest for {low}, and highest for {high}"
    num_small = rows["is_small"].sum()
    return theme.interval_chart(
        finding,
        f"n = {count_text(num_videos, 'video')} in {count_text(rows.height, 'slice')}, {num_small} small (pale: few "
        f"groups of a class); bars: {confidence:.0%} intervals over groups, not adjusted for the number of slices",
        [_slice_row(row) for row in rows.iter_rows(named=True)],
        names="Slice",
        values=name,
        row_height=27,
    )


def _slice_row(row: Mapping[str, Any]) -> Row:
    tick = figure_text(f"{_slice_name(row, 20)} (n = {row['num_videos']:,})")
    color = theme.CONTROL if row["is_small"] else theme.MODEL
    ends = (row["number"], row["low"], row["high"])
    text = "one class only" if row["number"] is None else interval_text(*ends, 2)
    return Row(tick, *ends, color, row["is_small"], text)


def _slice_name(row: Mapping[str, Any], characters: int = 32) -> str:
    return f"{row['slice_by'].replace('_', ' ')} {theme.shortened(row['value'], characters)}"


def _num_videos(rows: pl.DataFrame) -> int:
    """Return the number of all videos from ``rows`` of slices, the largest over properties.

    Slices by generator share their reals, and slices by real source share their fakes, so these count once.
    """
    real, fake, first = pl.col("num_real"), pl.col("num_fake"), pl.col("slice_by").first()
    total = (
        pl.when(first.is_in(["manipulation", "generator"])).then(fake.sum() + real.max())
        .when(first == "real_source").then(real.sum() + fake.max())
        .otherwise(pl.col("num_videos").sum())
    )  # fmt: skip
    return int(rows.group_by("slice_by").agg(total.alias("total"))["total"].max())  # type: ignore[arg-type]


# --- Panels of the dashboard


@PANELS.register_panel("controls", at=10, tasks=("video",))
def _controls_panel(selection: Selection) -> Shown:
    verdict = headline.run_verdict(selection.detailed, headline.measured_scores(selection.detailed))
    confidence = panels.confidence_of(selection)
    return controls_figure(panels.table_of(selection, "results"), confidence=confidence, verdict=verdict)


@PANELS.register_panel("folds", at=40, follows=("folds",), tasks=("video",))
def _folds_panel(selection: Selection) -> Shown:
    needless = cs.by_name("run_id", require_all=False) | cs.ends_with(UNCALIBRATED)
    table = panels.of_folds(selection, fold_table([selection.detailed]).frame.select(~needless))
    caption = f"{path_to_text(selection.detailed.run_id)}: the model on each outer fold; –: undefined, or too few reals"
    return HtmlTable(table, caption=caption, missing="–")


@PANELS.register_panel("slices", at=44, tasks=("video",))
def _slices_panel(selection: Selection) -> Shown:
    return slices_figure(panels.table_of(selection, "slices"), confidence=panels.confidence_of(selection))


@PANELS.register_panel("parameters", at=72, follows=("runs",))
def _parameters_panel(selection: Selection) -> Shown:
    """Return a table of the parameters in which the chosen runs differ, with one column per run.

    Only runs with the task of the run in detail are included.
    """
    task = panels.task_of(selection.detailed)
    runs = [run for run in selection.runs if panels.task_of(run) == task]
    differing = parameter_differences(runs).frame
    if differing.is_empty():
        return NOTHING
    columns = [f"run {number}" for number in range(len(runs))]  # not their ids: a copied run has the same
    grouped = differing.group_by("parameter", maintain_order=True).agg("value", pl.col("changes_numbers").first())
    values = [pl.col("value").list.get(number).alias(name) for number, name in enumerate(columns)]
    names = dict(zip(columns, map(path_to_text, run_names(runs)), strict=True))
    caption = (
        f"{count_text(grouped.height, 'parameter')} with several values in the {len(runs)} chosen runs of this task"
    )
    table = grouped.select("parameter", *values, "changes_numbers")
    return HtmlTable(table, caption=caption, names={**names, "changes_numbers": "Can change a number"})
