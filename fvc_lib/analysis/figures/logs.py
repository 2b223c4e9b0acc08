"""Figures of a run's logs, while and after it works: learning curves, and memory by phase, epoch and time."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import memory
from fvc_lib.analysis.dashboard.panels import MOST_METRICS, NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.memory import PROCESS, MemoryFindings, phase_text, where_text
from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.analysis.wording import count_text, duration_text, figure_text, megabytes_text, metric_name, number_text
from fvc_lib.metrics.declaration import is_share
from fvc_lib.services.tasks import TASK_OF_STAGE

# --- Learning curves

_SERIES = ("run_id", "stage", "fold")
_PHASE_COLORS = {"train": theme.CONTROL, "validation": theme.MODEL}
_FEW_POINTS = 7  # a curve of at most so many shows its points


def learning_curves_figure(curves: pl.DataFrame, metric: str = "loss", *, smoothing: float = 0.0) -> go.Figure:
    """Return a small panel per fold (and run), all on one scale, with train and validation.

    Args:
        curves: of ``queries.learning_curves``.
        metric: its name.
        smoothing: in [0, 1): 0 draws the logged values; towards 1 an exponential mean over more and more of them.
    """
    name = "Loss" if metric == "loss" and set(TASK_OF_STAGE) & set(curves["stage"]) else metric_name(metric)
    rows = curves.filter(pl.col("value").is_not_null(), metric=metric)
    if rows.is_empty():
        return theme.nothing_to_show(f"Learning curves of {name}", "No value of it has been logged yet.")
    parts = rows.partition_by(_SERIES, maintain_order=True)
    last = rows.sort("step").group_by(*_SERIES, "phase", maintain_order=True).last()
    means = last.group_by("phase", maintain_order=True).agg(pl.col("value").mean())
    ends = ", ".join(f"{number_text(value)} in {phase}" for phase, value in means.iter_rows())
    counted = f"n = {count_text(rows.height, 'logged value')} in {count_text(len(parts), 'panel')}"
    drawn, places = theme.panel_grid(
        f"{name} ends at {ends}", f"{counted}; the title has the mean of each curve's last value",
        [_series_name(part.row(0, named=True), rows) for part in parts],
        columns=3, panel_height=190, shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    named = set[str]()
    for part, where in zip(parts, places, strict=True):
        for points in part.partition_by("phase", maintain_order=True):
            phase = points["phase"][0]
            points = points.sort("step")
            color = _PHASE_COLORS.get(phase, theme.SERIES[1])
            mode = "lines+markers" if points.height <= _FEW_POINTS else "lines"
            values = smoothed(points["value"], smoothing).to_list()
            line = theme.add_line(drawn, points["step"].to_list(), values, phase, color, mode=mode, where=where)
            line.update(
                legendgroup=figure_text(phase), showlegend=phase not in named, customdata=points["epoch"].to_list()
            )
            line.hovertemplate = "step %{x}, epoch %{customdata}<br>%{y:.4f}"
            named.add(phase)
    drawn.update_xaxes(title_text="Step", row=places[-1]["row"])
    drawn.update_yaxes(title_text=figure_text(name), col=1)
    if is_share(metric):  # a curve that never moves would get an axis far beyond [0, 1]
        drawn.update_yaxes(range=[-0.03, 1.03])
    return drawn


def smoothed(values: pl.Series, smoothing: float) -> pl.Series:
    """Return the exponential mean with weight 1 - ``smoothing`` on the newest value.

    Raises:
        ValueError: ``smoothing`` is outside [0, 1).
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: got {smoothing}, wanted a number in [0, 1).")
    return values.cast(pl.Float64).ewm_mean(alpha=1 - smoothing, adjust=True)


def _series_name(row: Mapping[str, Any], among: pl.DataFrame) -> str:
    """Return the parts of run, stage and fold that tell this series from the others."""
    parts = [row["run_id"]] if among["run_id"].n_unique() > 1 else []
    parts += [row["stage"]] if row["fold"] is None or among["stage"].n_unique() > 1 else []
    parts += [f"fold {row['fold']}"] if row["fold"] is not None else []
    return ", ".join(parts)


# --- Memory

_NEAR_FACTOR = 2.5  # a budget further above the peak than this would flatten everything below it
_MOST_POINTS = 3000  # of a timeline
_EVENT_STYLES = {
    "micro_batch": ("diamond", theme.MODEL),
    "step_restored": ("square", theme.MODEL),
    "near_limit": ("triangle-up", theme.FAKE),
    "out_of_memory": ("x", theme.NOT_ABOVE_CONTROL),
}


def phase_peaks_figure(findings: MemoryFindings) -> go.Figure:
    """Return the highest memory of each stage and phase, with its range over the folds."""
    if findings.peaks.is_empty():
        return theme.nothing_to_show("Memory by phase", "No memory samples are recorded.")
    ticks = [_phase_tick(row) for row in findings.peaks.iter_rows(named=True)]
    peaks = findings.peaks.with_columns(tick=pl.Series(ticks, dtype=pl.String))
    used = pl.col("used_mb")
    rows = []
    for tick, most, least in peaks.group_by("tick", maintain_order=True).agg(used.max(), least=used.min()).iter_rows():
        rows.append(theme.Row(tick, most, least, most, theme.REAL, text=megabytes_text(most)))
    samples = count_text(int(peaks["num_samples"].sum()), "sample")
    stages = count_text(peaks.select("stage", "fold").n_unique(), "stage")
    drawn = theme.interval_chart(
        memory.peak_sentence(findings),
        f"n = {samples} of {stages}, with child processes; lines: range of the folds' peaks{_far_budget(findings)}",
        rows, names="Stage and phase", values="Peak memory (MB)", shown=None, chance=None, row_height=36,
    )  # fmt: skip
    _draw_budget(drawn.add_vline, "x", findings)
    return drawn.update_xaxes(rangemode="tozero")


def growth_figure(findings: MemoryFindings) -> go.Figure:
    """Return the median memory of each training epoch with its fitted slope; leaks are red."""
    points = memory.epoch_medians(findings.usage)
    if points.is_empty():
        return theme.nothing_to_show("Memory from epoch to epoch", "No training epoch has been sampled yet.")
    judged = findings.growth.sort(pl.col("verdict") != "leak", maintain_order=True)
    drawn = theme.figure(
        memory.growth_sentence(findings),
        f"n = {count_text(judged.height, 'training')}, {count_text(points.height, 'epoch')}; "
        "median of the samples of each epoch; lines: Theil-Sen slope without the first epoch",
    )
    keys = ("run_id", "stage", "fold", "attempt", "place", "phase")
    for position, row in enumerate(judged.iter_rows(named=True)):
        own = points.filter(*(pl.col(key).eq_missing(pl.lit(row[key])) for key in keys))
        color = theme.NOT_ABOVE_CONTROL if row["verdict"] == "leak" else theme.series_style(position)[0]
        name = _training_name(row, judged)
        epochs, used = own["epoch"].to_list(), own["used_mb"].to_list()
        theme.add_line(drawn, epochs, used, name, color, mode="markers", hovertemplate="epoch %{x}: %{y:.0f} MB")
        if row["slope_mb"] is not None:
            ends = epochs[1], epochs[-1]
            fitted = [row["level_mb"] + row["slope_mb"] * epoch for epoch in ends]
            theme.add_line(drawn, ends, fitted, name, color, showlegend=False, hoverinfo="skip")
    low, high = float(points["used_mb"].to_numpy().min()), float(points["used_mb"].to_numpy().max())
    # At least a quarter of the height is shown, so that a flat series looks flat.
    pad = max(0.05 * (high - low), (0.25 * high - (high - low)) / 2)
    drawn.update_xaxes(title_text="Epoch", tickformat="d")
    return drawn.update_yaxes(title_text="Memory in training (MB)", range=[max(low - pad, 0), high + pad])


def stage_timeline_figure(findings: MemoryFindings) -> go.Figure:
    """Return memory over the working time of all stages, laid end to end, with events."""
    rows = findings.usage.filter(pl.col("seconds").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Memory over time", "No memory samples are recorded.")
    spans = rows.group_by(_SERIES).agg(pl.col("seconds").max().alias("length")).sort(_SERIES)
    spans = spans.with_columns(start=pl.col("length").cum_sum() - pl.col("length"))
    rows = rows.join(spans, on=_SERIES, nulls_equal=True, maintain_order="left")
    rows = rows.with_columns(at=pl.col("start") + pl.col("seconds"))
    total = float(spans["length"].sum())
    stages = count_text(spans.height, "stage")
    subtitle = f"n = {stages} end to end, {duration_text(total)} of work{_far_budget(findings)}"
    drawn = theme.figure(memory.peak_sentence(findings), subtitle, height=440)
    most = max(200, _MOST_POINTS // spans.height)
    places = rows["place"].unique(maintain_order=True).to_list()
    # The line breaks between attempts: a killed process has given everything back.
    named = set[str]()
    for part in rows.partition_by("place", *_SERIES, "attempt", maintain_order=True):
        place = part["place"][0]
        color = theme.MODEL if place == PROCESS else theme.series_style(places.index(place))[0]
        # Of neighbours the highest is kept.
        bucket = pl.int_range(pl.len()) // -(-part.height // most)
        points = part.filter(pl.col("used_mb").rank("ordinal").over(bucket) == pl.len().over(bucket))
        name = "process with children" if place == PROCESS else place
        line = theme.add_line(drawn, points["at"].to_list(), points["used_mb"].to_list(), name, color, width=1.8)
        line.update(
            mode="lines" if points.height > 1 else "markers", showlegend=place not in named, legendgroup=line.name
        )
        line.text = [
            figure_text(f"{where_text(row)}, {phase_text(row['phase'])}") for row in points.iter_rows(named=True)
        ]
        line.hovertemplate = "%{y:.0f} MB<br>%{text}<extra></extra>"
        named.add(place)
    for number, row in enumerate(spans.iter_rows(named=True)):
        _draw_stage(drawn, row, total, shaded=number % 2 == 0)
    _draw_events(drawn, findings.events, rows)
    _draw_budget(drawn.add_hline, "y", findings)
    drawn.update_yaxes(title_text="Memory (MB)", rangemode="tozero")
    drawn.update_xaxes(title_text="Time at work, all stages (s)", showgrid=False, range=[0, total or 1])
    return drawn.update_layout(legend=theme.LEGEND_BELOW, margin={"b": 96})


def _draw_stage(drawn: go.Figure, span: Mapping[str, Any], total: float, *, shaded: bool) -> None:
    start, end = span["start"], span["start"] + span["length"]
    if shaded:
        drawn.add_vrect(x0=start, x1=end, fillcolor="#F4F5F7", line_width=0, layer="below")
    number = span["stage"].partition("_")[0]
    text = number if span["fold"] is None else f"{number}, fold {span['fold']}"
    if end - start > 0.0085 * len(text) * total:  # else it would lie on its neighbours
        drawn.add_annotation(
            x=(start + end) / 2, y=1, yref="y domain", yanchor="bottom", yshift=1, showarrow=False,
            text=figure_text(text), font={"size": 11, "color": theme.NEUTRAL},
        )  # fmt: skip


def _draw_events(drawn: go.Figure, events: pl.DataFrame, rows: pl.DataFrame) -> None:
    """Draw marks at the moment of each event, at the height of the nearest sample."""
    line = rows.select(*_SERIES, "start", "seconds", "used_mb").sort("seconds")
    for row in events.drop_nulls("seconds").iter_rows(named=True):
        near = line.filter(*(pl.col(key).eq_missing(pl.lit(row[key])) for key in _SERIES))
        near = near.sort((pl.col("seconds") - row["seconds"]).abs()).head(1)
        if near.is_empty() or row["kind"] not in _EVENT_STYLES:
            continue
        symbol, color = _EVENT_STYLES[row["kind"]]
        at, name = near["start"][0] + row["seconds"], row["kind"].replace("_", " ")
        mark = theme.add_line(drawn, [at], [near["used_mb"][0]], name, color, mode="markers", legendgroup=name)
        mark.marker = {"symbol": symbol, "size": 11, "color": color, "line": {"width": 1, "color": "white"}}
        mark.showlegend = all(other is mark or other.legendgroup != name for other in drawn.data)
        mark.update(text=[figure_text(row["message"])], hovertemplate="%{text}<extra></extra>")


def _draw_budget(draw: Any, axis: str, findings: MemoryFindings) -> None:
    """Draw the budget and its 90 % across ``axis``, unless they are far above the peak."""
    peak, budget = _peak_and_budget(findings)
    if budget is None or budget > _NEAR_FACTOR * peak:
        return
    for share, dash in ((1.0, "solid"), (memory.NEAR_LIMIT_PERCENT / 100, "dot")):
        text = "budget" if share == 1 else f"{share:.0%}"
        color = theme.NOT_ABOVE_CONTROL
        draw(**{axis: share * budget}, line={"color": color, "dash": dash}, annotation_text=text)


def _far_budget(findings: MemoryFindings) -> str:
    """Return words about a budget that is not drawn."""
    peak, budget = _peak_and_budget(findings)
    if budget is None:
        return "; no budget is recorded"
    return f"; budget {megabytes_text(budget)}, beyond the axis" if budget > _NEAR_FACTOR * peak else ""


def _peak_and_budget(findings: MemoryFindings) -> tuple[float, float | None]:
    peak = findings.peak
    return (0.0, None) if peak is None else (peak["used_mb"], peak["budget_mb"])


def _phase_tick(row: Mapping[str, Any]) -> str:
    place = "" if row["place"] == PROCESS else f", {row['place']}"
    return f"{figure_text(row['stage'])}:<br>{figure_text(phase_text(row['phase']) + place)}"


def _training_name(row: Mapping[str, Any], among: pl.DataFrame) -> str:
    parts = [row["stage"] if row["fold"] is None else f"fold {row['fold']}"]
    for name, text in (
        ("attempt", f"attempt {row['attempt']}"),
        ("phase", phase_text(row["phase"])),
        ("place", row["place"]),
    ):
        if among[name].n_unique() > 1:
            parts.append(text)
    return ", ".join(parts)


# --- Panels of the dashboard


def _declare_curves(number: int) -> None:
    follows = ("metrics", "folds", "smoothing")

    @PANELS.register_panel(f"learning curves {number + 1}", at=30 + number, follows=follows, is_live=True)
    def draw(selection: Selection) -> Shown:
        if number >= len(selection.metrics):
            return NOTHING
        metric = selection.metrics[number]
        curves = learning_curves([selection.detailed], metrics=[metric], folds=selection.folds).frame
        return learning_curves_figure(curves, metric, smoothing=selection.smoothing)


for _number in range(MOST_METRICS):
    _declare_curves(_number)


@PANELS.register_panel("memory", at=60, follows=("folds",), is_live=True)
def _memory_panel(selection: Selection) -> Shown:
    return stage_timeline_figure(memory.run_memory(selection.detailed, folds=selection.folds))
