"""How far predicted numbers are off, of all targets in one figure, beside what always says the mean."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import interval_point
from fvc_lib.analysis.headline_measure import Score
from fvc_lib.analysis.task_figures import best_control, model_score
from fvc_lib.analysis.wording import count_text, figure_text, subject_name

_MOST_TARGETS = 12
_MOST_CHARACTERS = 24


def target_errors_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """The mean absolute error of each target as a share of the mean predictor's, with the errors in their unit beside.

    So targets of different units share one axis: below 1 something of the picture was read, at 1 nothing.

    Args:
        results: rows of ``task_tables.TASK_RESULTS``.
        confidence: coverage of the intervals.
    """
    rows = _rows(results)
    if not rows:
        return theme.nothing_to_show("Errors of the numbers", "No error of a target beside the mean's is recorded.")
    shown = rows[:_MOST_TARGETS]
    left_out = f"; the first {len(shown)} of {len(rows)} targets" if len(rows) > len(shown) else ""
    figure = theme.figure(
        _finding(rows),
        f"{_counted(results)}; bars: {confidence:.0%} cluster-bootstrap intervals over groups, at the mean predictor's "
        f"own error; left of 1 is better{left_out}",
        height=160 + 44 * len(shown),
    )
    for tick, relative, _, told in shown:
        color = theme.MODEL if (relative.high or relative.value or 0.0) < 1 else theme.NOT_ABOVE_CONTROL
        figure.add_trace(interval_point(tick, relative, color))
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=14, y=tick, showarrow=False, text=figure_text(told),
            font={"size": 12, "color": theme.MODEL}, bgcolor="rgba(255,255,255,0.8)",
        )  # fmt: skip
    figure.add_vline(x=1, line={"color": theme.CONTROL, "width": 2}, layer="below")
    figure.add_annotation(
        x=1, y=1, yref="paper", yanchor="bottom", xanchor="right", text="mean predictor ", showarrow=False,
        font={"size": 11, "color": theme.NEUTRAL},
    )  # fmt: skip
    ends = [end for _, relative, _, _ in shown for end in (relative.value, relative.high) if end is not None]
    figure.update_xaxes(title_text="Error, as a share of the mean predictor's", range=[0, max(1.1, *ends) + 0.05])
    ticks = [tick for tick, *_ in shown]
    figure.update_yaxes(title_text="Target", categoryorder="array", categoryarray=ticks[::-1], showgrid=False)
    figure.update_layout(showlegend=False, margin={"r": 190})
    return figure


def _rows(results: pl.DataFrame) -> list[tuple[str, Score, str, str]]:
    """Tick, share of the mean predictor's error, name, and both errors in words, of each target that has both."""
    subjects = results.filter(pl.col("subject").str.starts_with("target:"))["subject"].unique(maintain_order=True)
    rows = []
    for subject in subjects:
        model, mean = model_score(results, subject, "mae"), best_control(results, subject, "mae")
        if model is None or model.value is None or mean is None or not mean.value:
            continue
        ends = [None if end is None else end / mean.value for end in (model.value, model.low, model.high)]
        of_it = (pl.col("subject") == subject) & (pl.col("metric") == "mae")
        unit = results.filter(of_it)["unit"][0]
        told = f"{_number(model.value)} {unit}".strip() + f" (mean: {_number(mean.value)})"
        name = subject_name(subject)
        tick = figure_text(name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…")
        rows.append((tick, Score("model", *ends), name, told))
    return rows


def _finding(rows: list[tuple[str, Score, str, str]]) -> str:
    better = [name for _, relative, name, _ in rows if relative.high is not None and relative.high < 1]
    _, _, name, told = rows[0]
    first = f"{name} is off by {told}"
    if len(rows) == 1:
        return first
    some = f"All {len(rows)} targets" if len(better) == len(rows) else f"{len(better)} of {len(rows)} targets"
    return f"{some} {'is' if len(better) == 1 else 'are'} closer than always saying the mean; {first}"


def _counted(results: pl.DataFrame) -> str:
    of_it = pl.col("subject").str.starts_with("target:") & (pl.col("metric") == "mae") & (pl.col("source") == "model")
    counts = results.filter(of_it).select(pl.col("num_samples", "num_groups"))
    sizes, groups = sorted(counts["num_samples"].to_list()), max(counts["num_groups"].to_list())
    images = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"n = {images} test images in at most {count_text(groups, 'group')}"


def _number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
