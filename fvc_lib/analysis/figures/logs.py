"""Figures of a run's logs, during and after the run: learning curves, and memory by phase, epoch and time."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import memory
from fvc_lib.analysis.dashboard.panels import MOST_METRICS, NOTHING, PANELS, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.memory import PROCESS, MemoryFindings, phase_text, where_text
from fvc_lib.analysis.read.queries import Selection, learning_curves, memory_events, memory_samples
from fvc_lib.analysis.wording import count_text, duration_text, figure_text, megabytes_text, metric_name, number_text
from fvc_lib.metrics.declaration import is_share

_STAGE = ("stage", "fold")

# --- Learning curves

_PHASE_COLORS = {"train": theme.CONTROL, "validation": theme.MODEL}


def learning_curves_figure(curves: pl.DataFrame, metric: str = "loss", *, smoothing: float = 0.0) -> go.Figure:
    """Return a figure of one metric over training steps, with the curves of training and validation.

    There is one small panel per stage and fold. All panels have the same vertical scale.

    Args:
        curves: rows of ``queries.learning_curves`` of one run.
        metric: name of the metric to draw.
        smoothing: strength of exponential smoothing in [0, 1). 0 draws the logged values.
    """
    name = "Loss" if metric == "loss" else metric_name(metric)
    rows = curves.filter(metric=metric).drop_nulls("value").sort(*_STAGE, "step", nulls_last=True)
    if rows.is_empty():
        return theme.nothing_to_show(f"Learning curves of {name}", "No value of it has been logged yet.")
    last_values = rows.group_by(*_STAGE, "phase").last()
    last = last_values.group_by("phase").agg(pl.col("value").mean()).sort("phase")
    ends = [f"{number_text(value)} in {phase}" for phase, value in last.iter_rows()]
    parts = rows.partition_by(_STAGE, maintain_order=True)
    titles = [where_text(part.row(0, named=True)) for part in parts]
    drawn, places = theme.panel_grid(
        f"{name} ends at {', '.join(ends)}",
        f"n = {count_text(rows.height, 'logged value')}; the title has the mean of the last values of all curves",
        titles, columns=3, panel_height=190, shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    named = set[str]()
    for part, where in zip(parts, places, strict=True):
        for points in part.partition_by("phase", maintain_order=True):
            phase = points["phase"][0]
            values = points["value"].cast(pl.Float64).ewm_mean(alpha=1 - smoothing).to_list()
            look = {"where": where, "legendgroup": figure_text(phase), "showlegend": phase not in named}
            color = _PHASE_COLORS.get(phase, theme.SERIES[1])
            theme.add_line(drawn, points["step"].to_list(), values, phase, color, mode="lines+markers", **look)
            named.add(phase)
    drawn.update_traces(marker={"size": 4})
    drawn.update_xaxes(title_text="Step", row=places[-1]["row"])
    drawn.update_yaxes(title_text=figure_text(name), col=1)
    if is_share(metric):  # plotly's axis of a constant curve would reach far beyond [0, 1]
        drawn.update_yaxes(range=[-0.03, 1.03])
    return drawn


# --- Memory

_NEAR_FACTOR = 2.5  # a line at a budget of more than this times the peak would flatten all curves
_MOST_POINTS = 3000  # drawn points of a timeline
_EVENT_STYLES = {
    "step_restored": ("square", theme.MODEL),
    "near_limit": ("triangle-up", theme.FAKE),
    "out_of_memory": ("x", theme.NOT_ABOVE_CONTROL),
}


def phase_peaks_figure(findings: MemoryFindings) -> go.Figure:
    """Return a figure of the peak memory in MB, one row per stage, phase and place.

    A stage is the part of a run that one notebook does. A phase is a part of a stage, such as training or validation.
    A place is main memory or an accelerator. The point is the maximum over the folds. A line reaches from the smallest
    peak of a fold to the largest.
    """
    if findings.peaks.is_empty():
        return theme.nothing_to_show("Memory by phase", "No memory samples are recorded.")
    used = pl.col("used_mb")
    over_folds = findings.peaks.group_by("stage", "phase", "place", maintain_order=True)
    peaks = over_folds.agg(used.max(), least=used.min())
    rows = []
    for stage, phase, place, most, least in peaks.iter_rows():
        device = "" if place == PROCESS else f", {place}"
        tick = f"{figure_text(stage)}:<br>{figure_text(phase_text(phase) + device)}"
        rows.append(theme.Row(tick, most, least, most, text=megabytes_text(most)))
    samples = count_text(int(findings.peaks["num_samples"].sum()), "sample")
    drawn = theme.interval_chart(
        memory.peak_sentence(findings),
        f"n = {samples}, with child processes; lines: range of the folds' peaks",
        rows, names="Stage and phase", values="Peak memory (MB)", chance=None,
    )  # fmt: skip
    _draw_budget(drawn.add_vline, "x", findings)
    return drawn


def growth_figure(findings: MemoryFindings) -> go.Figure:
    """Return a figure of the median memory in MB of each training epoch, with a fitted line for each training.

    If the memory of a training leaks (``memory.LEAK_RULE``), the training is red and has its own entry in the legend.
    Other trainings have one colour for each phase and place (main memory or an accelerator).
    """
    points = memory.epoch_medians(findings.usage)
    if points.is_empty():
        return theme.nothing_to_show("Memory from epoch to epoch", "No training epoch has been sampled yet.")
    counted = f"n = {count_text(findings.growth.height, 'training')}, {count_text(points.height, 'epoch')}"
    drawn = theme.figure(
        memory.growth_sentence(findings),
        f"{counted}; median of the samples of each epoch; lines: Theil-Sen slope without the first epoch",
    )
    keys = ["run_id", *_STAGE, "attempt", "place", "phase"]
    judged = findings.growth.sort(pl.col("verdict") != "leak", maintain_order=True)
    named = list[str]()
    colors = (theme.MODEL, *theme.SERIES[1:5], *theme.SERIES[6:])
    for position, row in enumerate(judged.iter_rows(named=True)):
        shown = points.join(judged[position], on=keys, how="semi", nulls_equal=True)
        where = f"{where_text(row)}, attempt {row['attempt']}"
        name = f"{phase_text(row['phase'])}, {row['place']}"
        name = f"{where}, {name}: leaks" if row["verdict"] == "leak" else name
        is_new = name not in named
        named += [name] * is_new
        color = colors[named.index(name) % 7]
        color = theme.NOT_ABOVE_CONTROL if row["verdict"] == "leak" else color
        epochs, used = shown["epoch"].to_list(), shown["used_mb"].to_list()
        hover = f"{figure_text(where)}<br>epoch %{{x}}: %{{y:.0f}} MB<extra></extra>"
        look = {"legendgroup": figure_text(name), "hovertemplate": hover}
        theme.add_line(drawn, epochs, used, name, color, mode="markers", showlegend=is_new, **look)
        if row["slope_mb"] is not None:
            ends = epochs[1], epochs[-1]
            fitted = [row["level_mb"] + row["slope_mb"] * epoch for epoch in ends]
            theme.add_line(drawn, ends, fitted, name, color, showlegend=False, **look)
    drawn.update_xaxes(title_text="Epoch", tickformat="d")
    # From zero, so that a flat series looks flat.
    drawn.update_yaxes(title_text="Memory in training (MB)", rangemode="tozero")
    return drawn.update_layout(legend=theme.LEGEND)


def stage_timeline_figure(findings: MemoryFindings) -> go.Figure:
    """Return a figure of memory in MB over time in seconds, with marks for events such as an out-of-memory.

    The stages follow each other on the time axis. Pauses between stages and between attempts are left out.
    """
    rows = findings.usage.drop_nulls("seconds")
    if rows.is_empty():
        return theme.nothing_to_show("Memory over time", "No memory samples are recorded.")
    spans = rows.group_by(_STAGE).agg(length=pl.col("seconds").max()).sort(_STAGE)
    spans = spans.with_columns(start=pl.col("length").cum_sum() - pl.col("length"))
    at = pl.col("start") + pl.col("seconds")
    rows = rows.join(spans, on=_STAGE, nulls_equal=True, maintain_order="left").with_columns(at=at)
    total = float(spans["length"].sum())
    subtitle = f"n = {count_text(spans.height, 'stage')} end to end, {duration_text(total)} of work"
    drawn = theme.figure(memory.peak_sentence(findings), subtitle, height=440)
    for stage, fold, length, start in spans.iter_rows():
        text = stage.partition("_")[0] + ("" if fold is None else f", fold {fold}")
        fits = length > 0.0085 * len(text) * total  # else it would lie on its neighbours
        look = {
            "line": {"color": "#E6E8EB"},
            "layer": "below",
            "annotation_position": "top right",
            "annotation_yanchor": "bottom",
        }
        drawn.add_vline(start, annotation_text=figure_text(text) if fits else "", **look)
    places = rows["place"].unique(maintain_order=True).to_list()
    most = max(200, _MOST_POINTS // spans.height)
    named = set[str]()
    # Each attempt gets a line of its own, because the memory of the process before it has been freed.
    for part in rows.partition_by("place", *_STAGE, "attempt", maintain_order=True):
        place = part["place"][0]
        # Of every ``bucket`` of neighbouring samples, only the highest is drawn.
        bucket_size = -(-part.height // most)  # rounded up
        bucket = pl.int_range(pl.len()) // bucket_size
        rank = pl.col("used_mb").rank("ordinal").over(bucket)
        points = part.filter(rank == pl.len().over(bucket))
        texts = [figure_text(f"{where_text(row)}, {phase_text(row['phase'])}") for row in points.to_dicts()]
        colors = (theme.MODEL, *theme.SERIES[1:])
        color = colors[places.index(place) % len(theme.SERIES)]
        line = theme.add_line(drawn, points["at"].to_list(), points["used_mb"].to_list(), place, color, text=texts)
        line.update(legendgroup=figure_text(place), showlegend=place not in named)
        named.add(place)
    events = findings.events.join(spans, on=_STAGE, nulls_equal=True).drop_nulls("seconds").with_columns(at=at)
    for kind, (symbol, color) in _EVENT_STYLES.items():
        marked = events.filter(kind=kind)
        if marked.height:
            look = {"mode": "markers", "marker": {"symbol": symbol, "size": 11, "color": color}}
            texts = list(map(figure_text, marked["message"]))
            zeros = [0.0] * marked.height
            theme.add_line(drawn, marked["at"].to_list(), zeros, kind.replace("_", " "), color, text=texts, **look)
    _draw_budget(drawn.add_hline, "y", findings)
    drawn.update_yaxes(title_text="Memory (MB)", rangemode="tozero")
    drawn.update_xaxes(title_text="Time at work, all stages (s)", showgrid=False, range=[0, total or 1])
    return drawn.update_layout(legend=theme.LEGEND_BELOW, margin={"b": 96})


def _draw_budget(draw: Callable[..., Any], axis: str, findings: MemoryFindings) -> None:
    """Add a line at the memory budget (the allowed memory) if the budget is at most 2.5 times the peak.

    ``draw`` is the figure's method that adds the line: ``add_vline`` if ``axis`` is "x", or ``add_hline`` if it is "y".
    """
    peak = findings.peak
    if peak is not None and peak["budget_mb"] is not None and peak["budget_mb"] <= _NEAR_FACTOR * peak["used_mb"]:
        draw(**{axis: peak["budget_mb"]}, line={"color": theme.NOT_ABOVE_CONTROL}, annotation_text="budget")


# --- Panels of the dashboard


def _declare_curves(number: int) -> None:
    follows = ("metrics", "folds", "smoothing")

    @PANELS.register_panel(f"learning curves {number + 1}", at=30 + number, follows=follows)
    def draw(selection: Selection) -> Shown:
        if number >= len(selection.metrics):
            return NOTHING
        metric = selection.metrics[number]
        curves = learning_curves([selection.detailed], metrics=[metric], folds=selection.folds).frame
        return learning_curves_figure(curves, metric, smoothing=selection.smoothing)


for _number in range(MOST_METRICS):
    _declare_curves(_number)


@PANELS.register_panel("memory", at=60, follows=("folds",))
def _memory_panel(selection: Selection) -> Shown:
    samples = memory_samples([selection.detailed])
    events = memory_events([selection.detailed])
    return stage_timeline_figure(memory.run_memory(samples, events, folds=selection.folds))
