"""What several figures of results are drawn with: a point with its interval, a band, a diagonal, and the n."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.headline import Score
from fvc_lib.analysis.wording import count_text, interval_text

# A trace that shows one fold says so here, and whoever highlights a fold finds it in every figure.
FOLD_KEY = "fold"
_FADED = 0.15


def fake_labels(predictions: pl.DataFrame) -> npt.NDArray[np.int64]:
    """``label`` as int64 (N,): 1 is fake."""
    return (predictions["label"] == "fake").cast(pl.Int64).to_numpy()


def videos_and_groups(predictions: pl.DataFrame) -> str:
    """``n = 96 videos (48 real, 48 fake) in 24 groups``."""
    fakes = int((predictions["label"] == "fake").sum())
    reals = predictions.height - fakes
    groups = count_text(predictions["group_id"].n_unique(), "group")
    return f"n = {count_text(predictions.height, 'video')} ({reals:,} real, {fakes:,} fake) in {groups}"


def of_fold(fold: int | None) -> dict[str, int] | None:
    """The ``meta`` of a trace that shows ``fold``."""
    return None if fold is None else {FOLD_KEY: fold}


def fold_line(fold: int, *, is_first: bool) -> dict[str, Any]:
    """How one fold's own curve is drawn behind the mean of all."""
    return {
        "mode": "lines", "name": "Single folds", "legendgroup": "folds", "showlegend": is_first,
        "line": {"color": theme.translucent(theme.CONTROL, 0.6), "width": 1}, "meta": of_fold(fold),
    }  # fmt: skip


def with_fold_highlighted(figure: go.Figure, fold: int | None) -> go.Figure:
    """``figure`` with what shows ``fold`` standing out and what shows other folds faded; unchanged without a fold."""
    for trace in figure.data if fold is not None else ():
        shown = (trace.meta or {}).get(FOLD_KEY) if isinstance(trace.meta, dict) else None
        if shown is None:
            continue
        trace.opacity = 1.0 if shown == fold else _FADED
        if shown == fold and isinstance(trace, go.Scatter) and trace.legendgroup == "folds":
            trace.line.color, trace.line.width = theme.HIGHLIGHT, 2.5
    return figure


def band_trace(x: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> go.Scatter:
    """The area between ``low`` and ``high``."""
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself", mode="lines",
        line={"width": 0}, fillcolor=theme.translucent(theme.MODEL, 0.13), name="Interval", hoverinfo="skip",
    )  # fmt: skip


def diagonal(name: str) -> go.Scatter:
    """A dashed line from (0, 0) to (1, 1)."""
    return level_line(name, (0.0, 1.0))


def level_line(name: str, heights: tuple[float, float]) -> go.Scatter:
    """A dashed line over [0, 1] between two heights: what to compare with."""
    return go.Scatter(
        x=[0, 1], y=list(heights), mode="lines", name=name, hoverinfo="skip",
        line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
    )  # fmt: skip


def interval_point(tick: str, score: Score, color: str, *, hollow: bool = False, size: float = 11) -> go.Scatter:
    """A value at the height ``tick`` (escaped) with a bar for its interval, without one where none is known."""
    known = score.value is not None and score.low is not None and score.high is not None
    up, down = (score.high - score.value, score.value - score.low) if known else (0.0, 0.0)  # type: ignore[operator]
    return go.Scatter(
        x=[score.value], y=[tick], mode="markers", name=tick,
        cliponaxis=False,
        marker={"size": size, "color": "white" if hollow else color, "line": {"color": color, "width": 2}},
        error_x={
            "type": "data", "symmetric": False, "array": [up], "arrayminus": [down], "color": color, "thickness": 2,
            "width": 5,
        },
        hovertemplate="%{x:.3f}<extra></extra>",
    )  # fmt: skip


def value_label(tick: str, score: Score) -> dict[str, object]:
    """The numbers of a point, in a column right of the plot where no line crosses them."""
    return {
        "x": 1, "xref": "paper", "xanchor": "left", "xshift": 14, "y": tick, "showarrow": False,
        "text": interval_text(score.value, score.low, score.high),
        "font": {"size": 12, "color": theme.MODEL if score.source == "model" else theme.NEUTRAL},
    }  # fmt: skip
