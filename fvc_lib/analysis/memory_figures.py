"""Figures of where memory went: peaks per phase, growth per epoch, prediction beside measurement."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.memory_findings import PROCESS, MemoryFindings, epoch_medians
from fvc_lib.analysis.memory_look import PHASE_COLORS, draw_budget, far_budget_text
from fvc_lib.analysis.memory_wording import (
    growth_sentence,
    megabytes_text,
    peak_sentence,
    phase_text,
    prediction_sentence,
)
from fvc_lib.analysis.wording import count_text, figure_text

_FEW_EPOCHS = 12


def phase_peaks_figure(found: MemoryFindings) -> go.Figure:
    """The highest memory of each stage and phase; folds of a stage as one bar with its highest, each fold a mark."""
    if found.peaks.is_empty():
        return theme.nothing_to_show("Memory by phase", "No memory samples are recorded.")
    rows = found.peaks.with_columns(pl.Series("name", map(_bar_name, found.peaks.iter_rows(named=True))))
    bars = rows.group_by("name", maintain_order=True).agg(
        pl.col("used_mb").max(), pl.col("phase").first(), pl.col("num_samples").sum()
    )
    highest = max(bars["used_mb"].to_list())
    samples, stages = int(rows["num_samples"].sum()), rows.select("run_id", "stage", "fold").n_unique()
    figure = theme.figure(
        peak_sentence(found),
        f"n = {count_text(samples, 'sample')} of {count_text(stages, 'stage')}, processes with their children; "
        f"marks: single folds{far_budget_text(found)}",
        height=140 + 30 * bars.height,
    )
    figure.add_trace(
        go.Bar(
            x=bars["used_mb"].to_list(), y=_texts(bars["name"]), orientation="h",
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
                x=folds["used_mb"].to_list(), y=_texts(folds["name"]), mode="markers", showlegend=False,
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
    points = epoch_medians(found.usage)
    if points.is_empty():
        return theme.nothing_to_show("Memory from epoch to epoch", "No training epoch has been sampled yet.")
    judged = found.growth.sort(pl.col("verdict") != "leak", maintain_order=True)
    figure = theme.figure(
        growth_sentence(found),
        f"n = {count_text(judged.height, 'training')}, {count_text(points.height, 'epoch')}; "
        "median of the samples of each epoch; lines: Theil-Sen slope without the first epoch",
    )
    for position, row in enumerate(judged.iter_rows(named=True)):
        keys = ("run_id", "stage", "fold", "attempt", "place", "phase")
        own = points.filter(pl.col(key).eq_missing(pl.lit(row[key])) for key in keys)
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


def prediction_figure(found: MemoryFindings) -> go.Figure:
    """The preflight's predicted peak beside the measured one, for each training."""
    rows = found.predictions.filter(pl.col("measured_mb").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Prediction and measurement", prediction_sentence(found) + ".")
    names = [figure_text(_training_name(row, rows)) for row in rows.iter_rows(named=True)]
    figure = theme.figure(
        prediction_sentence(found),
        f"n = {count_text(rows.height, 'training')}; measured: the highest of training and validation",
        height=150 + 40 * rows.height,
    )
    for name, row in zip(names, rows.iter_rows(named=True), strict=True):
        color = theme.NOT_ABOVE_CONTROL if row["is_off"] else theme.GRID
        figure.add_shape(
            type="line", x0=row["predicted_mb"], x1=row["measured_mb"], y0=name, y1=name, layer="below",
            line={"color": color, "width": 6},
        )  # fmt: skip
        figure.add_annotation(
            x=max(row["predicted_mb"], row["measured_mb"]), y=name, text=f"{row['error_percent']:+.0f}%",
            xanchor="left", xshift=12, showarrow=False, font={"size": 12, "color": theme.NEUTRAL},
        )  # fmt: skip
    for label, symbol, color in (("predicted", "diamond-open", theme.FAKE), ("measured", "circle", theme.MODEL)):
        figure.add_trace(
            go.Scatter(
                x=rows[f"{label}_mb"].to_list(), y=names, mode="markers", name=label,
                marker={"symbol": symbol, "size": 11, "color": color, "line": {"width": 2, "color": color}},
                hovertemplate="%{y}<br>" + label + " %{x:.0f} MB<extra></extra>",
            )
        )  # fmt: skip
    figure.update_yaxes(title_text="Training", range=[len(names) - 0.4, -0.6], showgrid=False, type="category")
    figure.update_xaxes(title_text="Peak memory (MB)", rangemode="tozero")
    figure.update_layout(margin={"r": 60})
    return figure


def _pad_flat_range(figure: go.Figure, values: pl.Series) -> None:
    """A flat series must look flat: at least a quarter of its height is shown."""
    low, high = float(values.min()), float(values.max())  # type: ignore[arg-type]  # numbers, as the query gave them
    pad = max(0.05 * (high - low), (0.25 * high - (high - low)) / 2)
    figure.update_yaxes(range=[max(low - pad, 0), high + pad])


def _bar_name(row: dict[str, Any]) -> str:
    place = "" if row["place"] == PROCESS else f", {row['place']}"
    return f"{row['stage']}: {phase_text(row['phase'])}{place}"


def _training_name(row: dict[str, Any], among: pl.DataFrame) -> str:
    parts = [str(row["stage"])] if row["fold"] is None else [f"fold {row['fold']}"]
    parts += [f"attempt {row['attempt']}"] if among["attempt"].n_unique() > 1 else []
    parts += [phase_text(row["phase"])] if "phase" in row and among["phase"].n_unique() > 1 else []
    parts += [str(row["place"])] if among["place"].n_unique() > 1 else []
    return ", ".join(parts)


def _texts(names: pl.Series) -> list[str]:
    return [figure_text(name) for name in names]
