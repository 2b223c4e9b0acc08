"""Figures of where memory went: peaks per phase, growth per epoch, and a timeline of all stages."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.memory import findings
from fvc_lib.analysis.memory.findings import NEAR_LIMIT_PERCENT, PROCESS, MemoryFindings, phase_text, where_text
from fvc_lib.analysis.wording import count_text, duration_text, figure_text, megabytes_text

# --- The look that figures of memory share: a colour for each phase, and the budget as a line where it is in sight

PHASE_COLORS = {
    "setup": "#B8BDC4", "whole_stage": "#B8BDC4", "preflight": "#CC79A7", "fits": "#E3B5CF",
    "batch_size_sweep": "#E3B5CF",
    "train": "#0072B2", "validation": "#E69F00", "test": "#009E73",
    "control_train": "#7FB8D8", "control_validation": "#F2CF80", "control_test": "#80CEB9",
    "sources_train": "#BFDCEB", "sources_validation": "#F8E8BF", "sources_test": "#BFE6DC",
    "report": "#D9DCE1",
}  # fmt: skip
_NEAR_FACTOR = 2.5  # a budget further above the peak than this would flatten everything below it


def far_budget_text(found: MemoryFindings) -> str:
    """For a subtitle: the budget where it is not drawn, or that none is recorded."""
    known = _budget(found)
    if known is None:
        return "; no budget is recorded"
    return f"; budget {megabytes_text(known[0])}, out of sight" if known[0] > _NEAR_FACTOR * known[1] else ""


def draw_budget(figure: go.Figure, found: MemoryFindings, *, horizontal: bool) -> None:
    """The budget and its 90% as lines at their height (or place on the x axis), unless far above the peak."""
    known = _budget(found)
    if known is None or known[0] > _NEAR_FACTOR * known[1]:
        return
    near = known[0] * NEAR_LIMIT_PERCENT / 100
    for value, text, dash in ((known[0], "budget", "solid"), (near, f"{NEAR_LIMIT_PERCENT:.0f}%", "dot")):
        line = {"color": theme.NOT_ABOVE_CONTROL, "width": 1.2, "dash": dash}
        note = {"text": text, "font": {"size": 11, "color": theme.NOT_ABOVE_CONTROL}, "showarrow": False}
        across, along = ("y", "x") if horizontal else ("x", "y")
        ends: dict[str, Any] = {f"{across}0": value, f"{across}1": value, f"{along}0": 0, f"{along}1": 1}
        figure.add_shape(type="line", line=line, **ends, **{f"{along}ref": f"{along} domain"})
        place: dict[str, Any] = {across: value, along: 1, f"{along}ref": f"{along} domain", "yanchor": "bottom"}
        figure.add_annotation(xanchor="right" if horizontal else "center", **place, **note)


def _budget(found: MemoryFindings) -> tuple[float, float] | None:
    """The budget of where the peak is and that peak, in MB."""
    peak = found.peak
    return None if peak is None or peak["budget_mb"] is None else (peak["budget_mb"], peak["used_mb"])


_FEW_EPOCHS = 12


def phase_peaks_figure(found: MemoryFindings) -> go.Figure:
    """The highest memory of each stage and phase; folds of a stage as one bar with its highest, each fold a mark."""
    if found.peaks.is_empty():
        return theme.nothing_to_show("Memory by phase", "No memory samples are recorded.")
    rows = found.peaks.with_columns(pl.Series("name", map(_bar_name, found.peaks.iter_rows(named=True))))
    of_bar = (pl.col("used_mb").max(), pl.col("phase").first(), pl.col("num_samples").sum())
    bars = rows.group_by("name", maintain_order=True).agg(*of_bar)
    highest = max(bars["used_mb"].to_list())
    samples, stages = int(rows["num_samples"].sum()), rows.select("run_id", "stage", "fold").n_unique()
    figure = theme.figure(
        findings.peak_sentence(found),
        f"n = {count_text(samples, 'sample')} of {count_text(stages, 'stage')}, processes with their children; "
        f"marks: single folds{far_budget_text(found)}",
        height=140 + 36 * bars.height,
    )
    figure.add_trace(
        go.Bar(
            x=bars["used_mb"].to_list(), y=list(map(_tick, bars["name"])), orientation="h",
            marker={"color": [PHASE_COLORS.get(phase, theme.NEUTRAL) for phase in bars["phase"]]},
            text=[f" {megabytes_text(value)} " for value in bars["used_mb"]], cliponaxis=False,
            # At the foot of a long bar the text is clear of the budget's lines and of the marks.
            insidetextanchor="start",
            textposition=["inside" if value > highest / 2 else "outside" for value in bars["used_mb"]],
            customdata=bars["num_samples"].to_list(), width=0.62,
            hovertemplate="%{y}: %{x:.0f} MB<br>%{customdata} samples<extra></extra>", showlegend=False,
        )
    )  # fmt: skip
    folds = rows.filter(pl.col("fold").is_not_null())
    if folds.height:
        figure.add_trace(
            go.Scatter(
                x=folds["used_mb"].to_list(), y=list(map(_tick, folds["name"])), mode="markers", showlegend=False,
                marker={"symbol": "line-ns-open", "size": 10, "color": theme.INK},
                customdata=folds["fold"].to_list(), hovertemplate="fold %{customdata}: %{x:.0f} MB<extra></extra>",
            )
        )  # fmt: skip
    draw_budget(figure, found, horizontal=False)
    figure.update_yaxes(title_text="Stage and phase", autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="Peak memory (MB)", rangemode="tozero")
    figure.update_layout(margin={"r": 80})
    return figure


def growth_figure(found: MemoryFindings) -> go.Figure:
    """The median memory of each training epoch with its fitted slope; leaks stand out."""
    points = findings.epoch_medians(found.usage)
    if points.is_empty():
        return theme.nothing_to_show("Memory from epoch to epoch", "No training epoch has been sampled yet.")
    judged = found.growth.sort(pl.col("verdict") != "leak", maintain_order=True)
    figure = theme.figure(
        findings.growth_sentence(found),
        f"n = {count_text(judged.height, 'training')}, {count_text(points.height, 'epoch')}; "
        "median of the samples of each epoch; lines: Theil-Sen slope without the first epoch",
    )
    for position, row in enumerate(judged.iter_rows(named=True)):
        own = points.filter(_same({key: row[key] for key in ("run_id", "stage", "fold", "attempt", "place", "phase")}))
        leak = row["verdict"] == "leak"
        color, dash = (theme.NOT_ABOVE_CONTROL, "solid") if leak else theme.series_style(position)
        name = figure_text(_training_name(row, judged))
        figure.add_trace(
            go.Scatter(
                x=own["epoch"].to_list(), y=own["used_mb"].to_list(), mode="markers", name=name, legendgroup=name,
                marker={"color": color, "size": 7},
                hovertemplate="epoch %{x}: %{y:.0f} MB<extra>" + name + "</extra>",
            )
        )  # fmt: skip
        if row["slope_mb"] is not None:
            ends = [own["epoch"][1], own["epoch"][-1]]
            figure.add_trace(
                go.Scatter(
                    x=ends, y=[row["level_mb"] + row["slope_mb"] * epoch for epoch in ends], mode="lines",
                    legendgroup=name, showlegend=False, hoverinfo="skip",
                    line={"color": color, "dash": dash, "width": 3 if leak else 1.5},
                )
            )  # fmt: skip
    _pad_flat_range(figure, points["used_mb"])
    # Few epochs would get ticks between them.
    few = max(points["epoch"].to_list()) <= _FEW_EPOCHS
    figure.update_xaxes(title_text="Epoch", tickformat="d", dtick=1 if few else None)
    figure.update_yaxes(title_text="Memory in training (MB)")
    return figure


def _pad_flat_range(figure: go.Figure, values: pl.Series) -> None:
    """A flat series must look flat: at least a quarter of its height is shown."""
    low, high = float(values.min()), float(values.max())  # type: ignore[arg-type]  # numbers, as the query gave them
    pad = max(0.05 * (high - low), (0.25 * high - (high - low)) / 2)
    figure.update_yaxes(range=[max(low - pad, 0), high + pad])


def _bar_name(row: dict[str, Any]) -> str:
    place = "" if row["place"] == PROCESS else f", {row['place']}"
    return f"{row['stage']}: {phase_text(row['phase'])}{place}"


def _tick(bar_name: str) -> str:
    """In two lines: beside one a phone has no room for the plot."""
    return figure_text(bar_name).replace(": ", ":<br>", 1)


def _training_name(row: dict[str, Any], among: pl.DataFrame) -> str:
    parts = [str(row["stage"])] if row["fold"] is None else [f"fold {row['fold']}"]
    parts += [f"attempt {row['attempt']}"] if among["attempt"].n_unique() > 1 else []
    parts += [phase_text(row["phase"])] if "phase" in row and among["phase"].n_unique() > 1 else []
    parts += [str(row["place"])] if among["place"].n_unique() > 1 else []
    return ", ".join(parts)


# --- One timeline of a whole run's memory: all stages end to end, with their phases, events and the budget

_EVENT_STYLES = {
    "out_of_memory": ("x", theme.NOT_ABOVE_CONTROL),
    "near_limit": ("triangle-up", theme.FAKE),
    "micro_batch": ("diamond", theme.MODEL),
    "step_restored": ("square", theme.MODEL),
    "nonfinite": ("star", "#CC79A7"),
    "loader_restarted": ("cross", "#7A5C99"),
    "disk_full": ("hourglass", theme.NOT_ABOVE_CONTROL),
}
_QUIET_KINDS = ("policy", "measuring", "preflight", "recording")  # said at every start or end; no mark on the timeline
_MOST_POINTS = 3000  # of the whole figure; more cannot be told apart
_FEWEST_POINTS = 200  # of each stage all the same
_LETTER_SHARE = 0.0085  # of the timeline's width that a letter of a stage's name takes


def stage_timeline_figure(found: MemoryFindings) -> go.Figure:
    """Memory over the working time of all stages laid end to end: bands are stages, the strip below is phases."""
    drawn = found.usage.filter(pl.col("seconds").is_not_null())
    rows = drawn.filter(~pl.col("between"))
    if rows.is_empty():
        return theme.nothing_to_show("Memory over time", "No memory samples are recorded.")
    bands, total = _bands(found)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.93, 0.07], vertical_spacing=0.02)
    marked = found.events.filter(~pl.col("kind").is_in(_QUIET_KINDS))
    finding = f"Memory over {duration_text(total)} of work: {_course(found, drawn)}"
    finding = finding if len(bands) > 1 else findings.peak_sentence(found)
    counted = f"n = {count_text(len(bands), 'stage')} end to end, {count_text(marked.height, 'event')}"
    figure.update_layout(theme.figure(finding, counted + far_budget_text(found), height=440).layout)
    most = max(_FEWEST_POINTS, _MOST_POINTS // len(bands))
    for number, place in enumerate(drawn["place"].unique(maintain_order=True)):
        color, dash = (theme.MODEL, "solid") if place == PROCESS else theme.series_style(number)
        named = False
        for stage, start, _ in bands:
            # A killed process has given everything back before the next attempt begins: the line breaks there.
            for points in drawn.filter(_same(stage), pl.col("place") == place).partition_by("attempt"):
                line = _course_line(_thinned(points, most), start, place, color, dash)
                figure.add_trace(line.update(showlegend=not named, meta=theme.of_fold(stage["fold"])), 1, 1)
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
    half = rows.filter(pl.col("place") == peak["place"]).filter(pl.col("used_mb") > pl.col("used_mb").max() / 2)
    above = half.select("run_id", "stage", "fold").n_unique()
    stages = rows.select("run_id", "stage", "fold").n_unique()
    highest = megabytes_text(half["used_mb"].max())  # type: ignore[arg-type]  # a column of floats
    return f"{above} of {count_text(stages, 'stage')} rise above half of the peak of {highest}"


def _course_line(points: pl.DataFrame, start: float, place: str, color: str, dash: str) -> go.Scatter:
    name = figure_text("process with children" if place == PROCESS else place)
    return go.Scatter(
        x=[start + second for second in points["seconds"]], y=points["used_mb"].to_list(), name=name, legendgroup=name,
        mode="lines" if points.height > 1 else "markers", marker={"size": 5, "color": color},
        line={"color": color, "dash": dash, "width": 1.8},
        customdata=[
            "<br>".join(map(figure_text, (where_text(row), phase_text(row["phase"]))))
            + ("" if row["epoch"] is None else f", epoch {row['epoch']}")
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
