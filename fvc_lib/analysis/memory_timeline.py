"""One timeline of a whole run's memory: all stages end to end, with their phases, events and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis import theme
from fvc_lib.analysis.memory_findings import PROCESS, MemoryFindings
from fvc_lib.analysis.memory_look import PHASE_COLORS, draw_budget, far_budget_text
from fvc_lib.analysis.memory_wording import megabytes_text, phase_text, where_text
from fvc_lib.analysis.wording import count_text, duration_text, figure_text

_EVENT_STYLES = {
    "out_of_memory": ("x", theme.NOT_ABOVE_CONTROL),
    "near_limit": ("triangle-up", theme.FAKE),
    "micro_batch": ("diamond", theme.MODEL),
    "step_restored": ("square", theme.MODEL),
    "nonfinite": ("star", "#CC79A7"),
    "loader_restarted": ("cross", "#7A5C99"),
    "disk_full": ("hourglass", theme.NOT_ABOVE_CONTROL),
}
_QUIET_KINDS = ("policy", "preflight", "recording")  # said at every start or end; no mark on the timeline
_MOST_POINTS = 3000  # of the whole figure; more cannot be told apart
_FEWEST_POINTS = 200  # of each stage all the same
_LETTER_SHARE = 0.0085  # of the timeline's width that a letter of a stage's name takes


def stage_timeline_figure(found: MemoryFindings) -> go.Figure:
    """Memory over the working time of all stages laid end to end: bands are stages, the strip below is phases."""
    rows = found.usage.filter(pl.col("seconds").is_not_null() & ~pl.col("between"))
    if rows.is_empty():
        return theme.nothing_to_show("Memory over time", "No memory samples are recorded.")
    bands, total = _bands(found)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.93, 0.07], vertical_spacing=0.02)
    marked = found.events.filter(~pl.col("kind").is_in(_QUIET_KINDS))
    finding = f"Memory over {duration_text(total)} of work: {_course(found, rows)}"
    counted = f"n = {count_text(len(bands), 'stage')} end to end, {count_text(marked.height, 'event')}"
    figure.update_layout(theme.figure(finding, counted + far_budget_text(found), height=440).layout)
    most = max(_FEWEST_POINTS, _MOST_POINTS // len(bands))
    for number, place in enumerate(rows["place"].unique(maintain_order=True)):
        color, dash = (theme.MODEL, "solid") if place == PROCESS else theme.series_style(number)
        named = False
        for stage, start, _ in bands:
            # A killed process has given everything back before the next attempt begins: the line breaks there.
            for points in rows.filter(_same(stage), pl.col("place") == place).partition_by("attempt"):
                line = _course_line(_thinned(points, most), start, place, color, dash)
                figure.add_trace(line.update(showlegend=not named), 1, 1)
                named = True
    for number, (stage, start, end) in enumerate(bands):
        _draw_band(figure, stage, (start, end), total, shaded=number % 2 == 0, many=len(bands) > 1)
    _draw_phases(figure, rows, bands, most)
    _draw_events(figure, marked, rows, bands)
    draw_budget(figure, found, horizontal=True)
    figure.update_yaxes(title_text="Memory (MB)", rangemode="tozero", row=1)
    figure.update_yaxes(visible=False, fixedrange=True, row=2)
    figure.update_xaxes(range=[0, total or 1])
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False, row=1)
    figure.update_xaxes(title_text="Time at work, all stages (s)", showgrid=False, row=2)
    figure.update_layout(
        barmode="overlay", legend={"orientation": "h", "x": 0, "y": -0.24, "yanchor": "top"}, margin={"b": 96, "t": 92}
    )
    return figure


Band = tuple[dict[str, Any], float, float]  # a stage's run_id, stage and fold, and its [start, end) in seconds


def _bands(found: MemoryFindings) -> tuple[list[Band], float]:
    spans = found.usage.group_by("run_id", "stage", "fold").agg(pl.col("seconds").max()).sort("run_id", "stage", "fold")
    bands, start = [], 0.0
    # A stage of one sample still has to be seen.
    least = 0.01 * (float(spans["seconds"].sum()) or 1.0)
    for row in spans.iter_rows(named=True):
        end = start + max(row.pop("seconds"), least)
        bands.append((row, start, end))
        start = end
    return bands, start


def _same(stage: dict[str, Any]) -> pl.Expr:
    return pl.all_horizontal(pl.col(key).eq_missing(pl.lit(value)) for key, value in stage.items())


def _course(found: MemoryFindings, rows: pl.DataFrame) -> str:
    peak = found.peak or {}
    half = rows.filter(pl.col("place") == peak["place"], pl.col("used_mb") > peak["used_mb"] / 2)
    above = half.select("run_id", "stage", "fold").n_unique()
    stages = rows.select("run_id", "stage", "fold").n_unique()
    return f"{above} of {count_text(stages, 'stage')} rise above half of the peak of {megabytes_text(peak['used_mb'])}"


def _course_line(points: pl.DataFrame, start: float, place: str, color: str, dash: str) -> go.Scatter:
    name = figure_text("process with children" if place == PROCESS else place)
    return go.Scatter(
        x=[start + second for second in points["seconds"]], y=points["used_mb"].to_list(), name=name, legendgroup=name,
        mode="lines" if points.height > 1 else "markers", marker={"size": 5, "color": color},
        line={"color": color, "dash": dash, "width": 1.8},
        customdata=[
            f"{figure_text(where_text(row))}<br>{figure_text(phase_text(row['phase']))}{_epoch_text(row['epoch'])}"
            for row in points.select("stage", "fold", "phase", "epoch").iter_rows(named=True)
        ],
        hovertemplate="%{y:.0f} MB<br>%{customdata}<extra></extra>",
    )  # fmt: skip


def _thinned(points: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most ``most`` of them, of neighbours always the highest."""
    every = -(-points.height // most)
    if every <= 1:
        return points
    bucket = pl.int_range(pl.len()) // every
    return points.filter(pl.col("used_mb").rank("ordinal").over(bucket) == pl.len().over(bucket))


def _draw_band(
    figure: go.Figure, stage: dict[str, Any], span: tuple[float, float], total: float, *, shaded: bool, many: bool
) -> None:
    start, end = span
    if shaded and many:
        figure.add_shape(
            type="rect", x0=start, x1=end, y0=0, y1=1, yref="y domain", fillcolor="#F4F5F7", line_width=0, layer="below"
        )
    number = str(stage["stage"]).split("_", 1)[0]
    names = (number,) if stage["fold"] is None else (f"{number}, fold {stage['fold']}", f"fold {stage['fold']}")
    room = (end - start) / (total or 1.0) / _LETTER_SHARE
    text = next((name for name in (where_text(stage), *names) if len(name) <= room), "")
    figure.add_annotation(
        x=(start + end) / 2, y=1, yref="y domain", yanchor="bottom", yshift=1, text=figure_text(text), showarrow=False,
        font={"size": 11, "color": theme.NEUTRAL}, hovertext=figure_text(where_text(stage)),
    )  # fmt: skip


def _draw_phases(figure: go.Figure, rows: pl.DataFrame, bands: Sequence[Band], most: int) -> None:
    """A phase lasts from its first sample to the first of the next."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for stage, start, end in bands:
        inside = _thinned(rows.filter(_same(stage)).unique("line", keep="first").sort("line"), most)
        runs = inside.with_columns(pl.col("phase").rle_id().alias("run")).group_by("run", maintain_order=True)
        firsts = runs.agg(pl.col("phase").first(), pl.col("seconds").first())
        begins = [start, *(start + second for second in firsts["seconds"][1:])]
        for phase, begin, until in zip(firsts["phase"], begins, [*begins[1:], end], strict=True):
            spans.setdefault(phase, []).append((begin, until))
    for phase in sorted(spans, key=lambda name: [*PHASE_COLORS, name].index(name)):
        lengths = [until - begin for begin, until in spans[phase]]
        figure.add_trace(
            go.Bar(
                base=[begin for begin, _ in spans[phase]], x=lengths, y=[0] * len(lengths), orientation="h",
                width=1, name=figure_text(phase_text(phase)), hoverinfo="name",
                marker={"color": PHASE_COLORS.get(phase, theme.NEUTRAL), "line": {"width": 0}},
            ), 2, 1,
        )  # fmt: skip


def _draw_events(figure: go.Figure, events: pl.DataFrame, rows: pl.DataFrame, bands: Sequence[Band]) -> None:
    """Marks at an event's moment and at the height that the line has there."""
    placed = pl.concat([events.clear().with_columns(x=pl.lit(0.0), y=pl.lit(0.0)), *_placed(events, rows, bands)])
    # The gravest last, over what followed from it at the same moment.
    gravity = [kind for kind in reversed(_EVENT_STYLES) if kind in placed["kind"]]
    others = [kind for kind in placed["kind"].unique(maintain_order=True) if kind not in _EVENT_STYLES]
    for kind in (*others, *gravity):
        same = placed.filter(pl.col("kind") == kind)
        symbol, color = _EVENT_STYLES.get(kind, ("circle-open", theme.NEUTRAL))
        figure.add_trace(
            go.Scatter(
                x=same["x"].to_list(), y=same["y"].to_list(), mode="markers", name=figure_text(kind.replace("_", " ")),
                customdata=[figure_text(message) for message in same["message"]],
                marker={"symbol": symbol, "size": 11, "color": color, "line": {"width": 1, "color": "white"}},
                hovertemplate="%{customdata}<extra></extra>",
            ), 1, 1,
        )  # fmt: skip


def _placed(events: pl.DataFrame, rows: pl.DataFrame, bands: Sequence[Band]) -> list[pl.DataFrame]:
    """The events of each band with ``x`` and ``y``; those of a stage without samples have no place."""
    placed = []
    for stage, start, _ in bands:
        line = rows.filter(_same(stage)).select("seconds", y="used_mb").sort("seconds")
        own = events.filter(_same(stage)).with_columns(x=start + pl.col("seconds")).sort("seconds")
        placed.append(own.join_asof(line, on="seconds", strategy="nearest"))
    return placed


def _epoch_text(epoch: int | None) -> str:
    return "" if epoch is None else f", epoch {epoch}"
