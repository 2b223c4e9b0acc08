"""The result by platform, codec, length and the like: where it holds, where it does not, and where nobody knows."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import interval_point
from fvc_lib.analysis.headline import HEADLINE_METRIC, Score
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text

# Of the metrics of a slice the first that says anything is drawn: a slice of one class has no AUC.
_CHANCE = {"roc_auc": 0.5, "balanced_accuracy": 0.5}


def slices_figure(slices: pl.DataFrame, metric: str = HEADLINE_METRIC, *, confidence: float = 0.95) -> go.Figure:
    """One metric in each slice as a point with its interval, grouped by what the slices are by; small ones are pale.

    Args:
        slices: one run's rows of ``tables.SLICES``.
        metric: which metric; a slice where it is undefined is listed without a point.
        confidence: coverage of the intervals, for the subtitle.
    """
    rows = slices.filter(pl.col("metric") == metric)
    if rows.is_empty():
        return theme.nothing_to_show("Slices", f"No {metric_name(metric)} by slice is recorded.")
    rows = rows.with_columns(order=pl.col("slice_by").rank("dense")).sort("order", -pl.col("num_videos"), "value")
    figure = theme.figure(_finding(rows, metric), _subtitle(rows, confidence), height=150 + 27 * rows.height)
    names: list[list[str]] = [[], []]
    for row in rows.iter_rows(named=True):
        _add_slice(figure, row, names)
    chance = _CHANCE.get(metric)
    if chance is not None:
        figure.add_vline(x=chance, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
    shown = [v for v in (*rows["number"], *rows["low"], *rows["high"]) if v is not None]
    low, high = (min(0.4, *shown), max(1.0, *shown)) if shown else (0.0, 1.0)
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=[low - 0.03, high + 0.03])
    figure.update_yaxes(title_text="Slice", autorange="reversed", showgrid=False, type="multicategory")
    figure.update_yaxes(showdividers=True, dividercolor=theme.GRID)
    figure.update_layout(showlegend=False, margin={"r": 150})
    return figure


def _add_slice(figure: go.Figure, row: dict[str, object], names: list[list[str]]) -> None:
    """A point, or a note where there is none, and its numbers; ``names`` collects what stands on the axis."""
    by = figure_text(str(row["slice_by"]).replace("_", " "))
    small = ", small" if row["is_small"] else ""
    tick = f"{figure_text(_shortened(row['value']))} (n = {row['num_videos']:,}{small})"
    score = Score("slice", *(_number(row[name]) for name in ("number", "low", "high")))
    color = theme.translucent(theme.CONTROL, 0.75) if row["is_small"] else theme.MODEL
    point = interval_point(tick, score, color, hollow=bool(row["is_small"]), size=9)
    point.y = [[by], [tick]]
    point.customdata = [[figure_text(row["value"]), row["num_real"], row["num_fake"], row["num_groups"]]]
    point.hovertemplate = (
        "%{customdata[0]}: %{x:.3f}<br>%{customdata[1]} real, %{customdata[2]} fake, %{customdata[3]} groups"
        "<extra></extra>"
    )
    figure.add_trace(point)
    position = len(names[0])
    names[0].append(by)
    names[1].append(tick)
    text = interval_text(score.value, score.low, score.high, 2) if score.value is not None else "one class only"
    ink = theme.CONTROL if row["is_small"] or score.value is None else theme.MODEL
    figure.add_annotation(
        x=1, xref="paper", xanchor="left", xshift=12, y=position, yref="y", showarrow=False, text=text,
        font={"size": 11.5, "color": ink},
    )  # fmt: skip


def _finding(rows: pl.DataFrame, metric: str) -> str:
    """The lowest and the highest of the slices that are large enough to say something."""
    told = rows.filter(~pl.col("is_small") & pl.col("number").is_not_null()).sort("number")
    if told.is_empty():
        return "Every slice is too small, or of one class: none says how well the network does there"
    low, high = told.row(0, named=True), told.row(-1, named=True)
    name, least, most = metric_name(metric), *(number_text(row["number"], 2) for row in (low, high))
    if told.height == 1:
        return f"{name} is {least} for {_named(low)}, the one slice large enough"
    if least == most:
        return f"{name} is {least} in each of the {told.height} slices that are large enough"
    return f"{name} is lowest for {_named(low)}, {least}, and highest for {_named(high)}, {most}"


def _subtitle(rows: pl.DataFrame, confidence: float) -> str:
    num_small = int(rows["is_small"].sum())
    return (
        f"n = {count_text(_num_videos(rows), 'video')} in {count_text(rows.height, 'slice')}, {num_small} "
        f"of them small (pale: few groups of a class); bars: {confidence:.0%} cluster bootstrap over groups, not "
        "adjusted for how many slices are looked at"
    )


def _num_videos(rows: pl.DataFrame) -> int:
    """All videos: what slices by one property add up to; those by manipulation share their reals."""
    sums = rows.group_by("slice_by").agg(pl.col("num_videos", "num_fake").sum(), pl.col("num_real").max())
    shared = pl.col("slice_by") == "manipulation"
    counted = pl.when(shared).then(pl.col("num_fake") + pl.col("num_real")).otherwise("num_videos")
    return int(sums.select(counted.max()).item())


def _named(row: dict[str, object]) -> str:
    return f"{str(row['slice_by']).replace('_', ' ')} {_shortened(row['value'])}"


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:31]}…"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
