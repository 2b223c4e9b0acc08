"""Figures of where memory went: peak per phase, growth per epoch, and a timeline of all stages."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import memory
from fvc_lib.analysis.dashboard.panels import MEMORY, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.memory import PROCESS, MemoryFindings, phase_text, where_text
from fvc_lib.analysis.wording import count_text, duration_text, figure_text, megabytes_text

_STAGE = ("run_id", "stage", "fold")
_NEAR_FACTOR = 2.5  # a budget further above the peak than this would flatten everything below it
_FEW_EPOCHS = 12
_MOST_POINTS = 3000  # of a timeline; more cannot be told apart
_EVENT_STYLES = {
    "micro_batch": ("diamond", theme.MODEL),
    "step_restored": ("square", theme.MODEL),
    "near_limit": ("triangle-up", theme.FAKE),
    "out_of_memory": ("x", theme.NOT_ABOVE_CONTROL),
}


def phase_peaks_figure(found: MemoryFindings) -> go.Figure:
    """Return bars of the highest memory of each stage and phase over the folds, with a mark for each fold."""
    if found.peaks.is_empty():
        return theme.nothing_to_show("Memory by phase", "No memory samples are recorded.")
    rows = found.peaks.with_columns(tick=pl.Series([_tick(row) for row in found.peaks.iter_rows(named=True)]))
    bars = rows.group_by("tick", maintain_order=True).agg(pl.col("used_mb").max(), pl.col("num_samples").sum())
    samples, stages = int(rows["num_samples"].sum()), rows.select(_STAGE).n_unique()
    figure = theme.figure(
        memory.peak_sentence(found),
        f"n = {count_text(samples, 'sample')} of {count_text(stages, 'stage')}, processes with their children; marks: "
        f"single folds{_far_budget(found)}",
        height=140 + 36 * bars.height,
    )
    figure.add_trace(
        go.Bar(
            x=bars["used_mb"].to_list(), y=bars["tick"].to_list(), orientation="h", marker={"color": theme.REAL},
            text=[f" {megabytes_text(value)} " for value in bars["used_mb"]], cliponaxis=False, width=0.62,
            customdata=bars["num_samples"].to_list(), showlegend=False,
            hovertemplate="%{y}: %{x:.0f} MB<br>%{customdata} samples<extra></extra>",
        )
    )  # fmt: skip
    folds = rows.filter(pl.col("fold").is_not_null())
    figure.add_trace(
        go.Scatter(
            x=folds["used_mb"].to_list(), y=folds["tick"].to_list(), mode="markers", showlegend=False,
            marker={"symbol": "line-ns-open", "size": 10, "color": theme.INK}, customdata=folds["fold"].to_list(),
            hovertemplate="fold %{customdata}: %{x:.0f} MB<extra></extra>",
        )
    )  # fmt: skip
    _draw_budget(figure, found, axis="x")
    figure.update_yaxes(title_text="Stage and phase", autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="Peak memory (MB)", rangemode="tozero")
    figure.update_layout(margin={"r": 80})
    return figure


def growth_figure(found: MemoryFindings) -> go.Figure:
    """Return the median memory of each training epoch with its fitted slope; leaks stand out."""
    points = memory.epoch_medians(found.usage)
    if points.is_empty():
        return theme.nothing_to_show("Memory from epoch to epoch", "No training epoch has been sampled yet.")
    judged = found.growth.sort(pl.col("verdict") != "leak", maintain_order=True)
    figure = theme.figure(
        memory.growth_sentence(found),
        f"n = {count_text(judged.height, 'training')}, {count_text(points.height, 'epoch')}; "
        "median of the samples of each epoch; lines: Theil-Sen slope without the first epoch",
    )
    for position, row in enumerate(judged.iter_rows(named=True)):
        own = points.filter(_same({key: row[key] for key in (*_STAGE, "attempt", "place", "phase")}))
        color, dash = theme.series_style(position)
        if row["verdict"] == "leak":
            color, dash = theme.NOT_ABOVE_CONTROL, "solid"
        name = figure_text(_training_name(row, judged))
        figure.add_scatter(
            x=own["epoch"].to_list(), y=own["used_mb"].to_list(), mode="markers", name=name, legendgroup=name,
            marker={"color": color, "size": 7},
            hovertemplate="epoch %{x}: %{y:.0f} MB<extra>" + name + "</extra>",
        )  # fmt: skip
        if row["slope_mb"] is not None:
            ends = [own["epoch"][1], own["epoch"][-1]]
            figure.add_scatter(
                x=ends, y=[row["level_mb"] + row["slope_mb"] * epoch for epoch in ends], mode="lines",
                legendgroup=name, showlegend=False, hoverinfo="skip", line={"color": color, "dash": dash},
            )  # fmt: skip
    low, high = min(points["used_mb"].to_list()), max(points["used_mb"].to_list())
    # A flat series must look flat: at least a quarter of its height is shown.
    pad = max(0.05 * (high - low), (0.25 * high - (high - low)) / 2)
    few = max(points["epoch"].to_list()) <= _FEW_EPOCHS  # few epochs would get ticks between them
    figure.update_xaxes(title_text="Epoch", tickformat="d", dtick=1 if few else None)
    figure.update_yaxes(title_text="Memory in training (MB)", range=[max(low - pad, 0), high + pad])
    return figure


def stage_timeline_figure(found: MemoryFindings) -> go.Figure:
    """Return memory over the working time of all stages laid end to end, with events."""
    rows = found.usage.filter(pl.col("seconds").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Memory over time", "No memory samples are recorded.")
    spans = rows.group_by(_STAGE).agg(pl.col("seconds").max()).sort(_STAGE)
    spans = spans.with_columns(end=pl.col("seconds").cum_sum()).with_columns(start=pl.col("end") - pl.col("seconds"))
    rows = rows.join(spans.select(*_STAGE, "start"), on=_STAGE, nulls_equal=True, maintain_order="left")
    total = float(spans["end"][-1])
    figure = theme.figure(
        memory.peak_sentence(found),
        f"n = {count_text(spans.height, 'stage')} end to end, {duration_text(total)} of work{_far_budget(found)}",
        height=440,
    )
    most = max(200, _MOST_POINTS // spans.height)
    # A killed process has given everything back before the next attempt begins: the line breaks there.
    lines = rows.partition_by("place", *_STAGE, "attempt", maintain_order=True)
    places, named = rows["place"].unique(maintain_order=True).to_list(), set[str]()
    for points in lines:
        place = points["place"][0]
        color, dash = (theme.MODEL, "solid") if place == PROCESS else theme.series_style(places.index(place))
        line = _course(_thinned(points, most), place, color, dash)
        figure.add_trace(line.update(showlegend=place not in named, meta=theme.of_fold(points["fold"][0])))
        named.add(place)
    for number, row in enumerate(spans.iter_rows(named=True)):
        _draw_stage(figure, row, total, shaded=number % 2 == 0)
    _draw_events(figure, found.events, rows)
    _draw_budget(figure, found, axis="y")
    figure.update_yaxes(title_text="Memory (MB)", rangemode="tozero")
    figure.update_xaxes(title_text="Time at work, all stages (s)", showgrid=False, range=[0, total or 1])
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}, margin={"b": 96, "t": 92})
    return figure


def _course(points: pl.DataFrame, place: str, color: str, dash: str) -> go.Scatter:
    name = figure_text("process with children" if place == PROCESS else place)
    return go.Scatter(
        x=(points["start"] + points["seconds"]).to_list(), y=points["used_mb"].to_list(), name=name, legendgroup=name,
        mode="lines" if points.height > 1 else "markers", marker={"size": 5, "color": color},
        line={"color": color, "dash": dash, "width": 1.8},
        customdata=[
            figure_text(f"{where_text(row)}, {phase_text(row['phase'])}")
            + ("" if row["epoch"] is None else f", epoch {row['epoch']}")
            for row in points.select("stage", "fold", "phase", "epoch").iter_rows(named=True)
        ],
        hovertemplate="%{y:.0f} MB<br>%{customdata}<extra></extra>",
    )  # fmt: skip


def _thinned(points: pl.DataFrame, most: int) -> pl.DataFrame:
    """Return at most ``most`` rows, of neighbours the highest."""
    bucket = pl.int_range(pl.len()) // -(-points.height // most)
    return points.filter(pl.col("used_mb").rank("ordinal").over(bucket) == pl.len().over(bucket))


def _draw_stage(figure: go.Figure, row: Mapping[str, Any], total: float, *, shaded: bool) -> None:
    start, end = row["start"], row["end"]
    if shaded:
        figure.add_vrect(x0=start, x1=end, fillcolor="#F4F5F7", line_width=0, layer="below")
    number = str(row["stage"]).partition("_")[0]
    text = number if row["fold"] is None else f"{number}, fold {row['fold']}"
    figure.add_annotation(
        x=(start + end) / 2, y=1, yref="y domain", yanchor="bottom", yshift=1, showarrow=False,
        text=figure_text(text) if end - start > 0.0085 * len(text) * total else "",
        font={"size": 11, "color": theme.NEUTRAL}, hovertext=figure_text(where_text(row)),
    )  # fmt: skip


def _draw_events(figure: go.Figure, events: pl.DataFrame, rows: pl.DataFrame) -> None:
    """Draw marks at an event's moment and at the height of the line there."""
    line = rows.select(*_STAGE, "start", "seconds", y="used_mb").sort("seconds")
    known = events.filter(pl.col("seconds").is_not_null()).sort("seconds")
    placed = [
        known.filter(_same(key)).join_asof(line.filter(_same(key)), on="seconds", strategy="nearest")
        for key in line.select(_STAGE).unique(maintain_order=True).iter_rows(named=True)
    ]
    marks = pl.concat(placed)
    for kind, (symbol, color) in _EVENT_STYLES.items():
        same = marks.filter(pl.col("kind") == kind)
        if same.height:
            figure.add_scatter(
                x=(same["start"] + same["seconds"]).to_list(), y=same["y"].to_list(), mode="markers",
                name=kind.replace("_", " "), customdata=[figure_text(message) for message in same["message"]],
                marker={"symbol": symbol, "size": 11, "color": color, "line": {"width": 1, "color": "white"}},
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip


def _draw_budget(figure: go.Figure, found: MemoryFindings, *, axis: str) -> None:
    """Draw the budget and its 90 % across ``axis``, unless they are far above the peak."""
    known = _budget(found)
    if known is None or known[0] > _NEAR_FACTOR * known[1]:
        return
    draw = figure.add_vline if axis == "x" else figure.add_hline
    for share, dash in ((1.0, "solid"), (memory.NEAR_LIMIT_PERCENT / 100, "dot")):
        text = "budget" if share == 1 else f"{share:.0%}"
        line: dict[str, Any] = {axis: share * known[0], "line": {"color": theme.NOT_ABOVE_CONTROL, "dash": dash}}
        draw(**line, annotation_text=text, annotation_font={"size": 11, "color": theme.NOT_ABOVE_CONTROL})


def _far_budget(found: MemoryFindings) -> str:
    """Return words about a budget that is not drawn."""
    known = _budget(found)
    if known is None:
        return "; no budget is recorded"
    return f"; budget {megabytes_text(known[0])}, out of sight" if known[0] > _NEAR_FACTOR * known[1] else ""


def _budget(found: MemoryFindings) -> tuple[float, float] | None:
    """Return the budget at the peak and the peak, in MB."""
    peak = found.peak
    return None if peak is None or peak["budget_mb"] is None else (peak["budget_mb"], peak["used_mb"])


def _same(values: Mapping[str, Any]) -> pl.Expr:
    return pl.all_horizontal(pl.col(key).eq_missing(pl.lit(value)) for key, value in values.items())


def _tick(row: Mapping[str, Any]) -> str:
    place = "" if row["place"] == PROCESS else f", {row['place']}"
    return f"{figure_text(row['stage'])}:<br>{figure_text(phase_text(row['phase']) + place)}"


def _training_name(row: Mapping[str, Any], among: pl.DataFrame) -> str:
    parts = [str(row["stage"])] if row["fold"] is None else [f"fold {row['fold']}"]
    parts += [f"attempt {row['attempt']}"] if among["attempt"].n_unique() > 1 else []
    parts += [phase_text(row["phase"])] if among["phase"].n_unique() > 1 else []
    parts += [str(row["place"])] if among["place"].n_unique() > 1 else []
    return ", ".join(parts)


@PANELS.register_panel("memory", at=60, follows=("folds", "highlight"), reads=MEMORY)
def _memory_panel(selection: Selection) -> Shown:
    return stage_timeline_figure(memory.run_memory(selection.detailed, folds=selection.folds))
