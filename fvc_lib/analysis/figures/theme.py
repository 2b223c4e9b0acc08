"""The one look of all figures: a plotly template, fixed colours, and titles that say what was found.

Colours are Okabe and Ito's, which stay apart for colour-blind readers ("Color Universal Design", 2008); lightness
differs too, so a grey print still tells real from fake and model from control.
"""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.wording import count_text, figure_text, interval_text

REAL = "#0072B2"
FAKE = "#D55E00"
MODEL = "#1B2A41"
CONTROL = "#8A8F98"
ABOVE_CONTROL = "#00735C"
NOT_ABOVE_CONTROL = "#B3261E"
NEUTRAL = "#6B7280"
HIGHLIGHT = "#E69F00"
GRID = "#E6E8EB"
INK = "#22262B"

STANDING_COLORS = {
    "above control": ABOVE_CONTROL,
    "not above control": NOT_ABOVE_CONTROL,
    "not shown": NEUTRAL,
    "no result": NEUTRAL,
}
LABEL_COLORS = {"real": REAL, "fake": FAKE}
# One per fold or run, in this order and then from the start again with another dash.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5C99", "#4D4D4D")
DASHES = ("solid", "dash", "dot", "dashdot")

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
HEIGHT = 380
_TITLE_CHARACTERS = 88
_LINE_PIXELS = 19


def _axis() -> dict[str, object]:
    return {
        "showgrid": True, "gridcolor": GRID, "gridwidth": 1, "zeroline": False, "showline": True,
        "linecolor": "#9AA0A6", "linewidth": 1, "ticks": "outside", "ticklen": 4, "tickcolor": "#9AA0A6",
        "title": {"font": {"size": 13}, "standoff": 8}, "tickfont": {"size": 12}, "automargin": True,
    }  # fmt: skip


TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": list(SERIES),
        "title": {
            "x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top",
            "pad": {"l": 12, "t": 10}, "font": {"size": 16, "weight": 600},
            "subtitle": {"font": {"size": 12.5, "color": NEUTRAL}},
        },
        "xaxis": _axis(),
        "yaxis": _axis(),
        "legend": {"font": {"size": 12}, "bgcolor": "rgba(255,255,255,0)", "borderwidth": 0},
        "margin": {"l": 64, "r": 24, "t": 84, "b": 56},
        "hoverlabel": {"font": {"size": 12}},
    }
)  # fmt: skip


def figure(finding: str, subtitle: str, *, height: int = HEIGHT) -> go.Figure:
    """Return an empty figure; ``height`` is in pixels with one title line, and more lines add to it.

    ``finding`` is the title, one sentence saying what is to be seen, ``subtitle`` n and how it was computed; plain
    text.
    """
    title, title_lines = _wrapped(finding, _TITLE_CHARACTERS)
    below, subtitle_lines = _wrapped(subtitle, _TITLE_CHARACTERS + 24)
    extra = _LINE_PIXELS * (title_lines - 1 + subtitle_lines - 1)
    # plotly.js hangs a title by its last line, so each further line would stand above the figure's edge.
    top = 1 - _LINE_PIXELS * (title_lines - 1) / (height + extra)
    empty = go.Figure()
    empty.update_layout(
        template=TEMPLATE,
        title={"text": title, "subtitle": {"text": below}, "y": top},
        height=height + extra,
        margin={"t": 84 + extra},
    )
    return empty


def nothing_to_show(what: str, why: str) -> go.Figure:
    """Return a small figure with a sentence in place of data."""
    empty = figure(f"{what}: nothing to show", why, height=150)
    empty.update_xaxes(visible=False)
    empty.update_yaxes(visible=False)
    return empty


def series_style(position: int) -> tuple[str, str]:
    """Colour and dash of the ``position``-th series; no two of the first 32 are alike."""
    return SERIES[position % len(SERIES)], DASHES[position // len(SERIES) % len(DASHES)]


def translucent(color: str, alpha: float) -> str:
    """``#RRGGBB`` as ``rgba(...)`` with ``alpha`` in [0, 1]."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def _wrapped(text: str, characters: int) -> tuple[str, int]:
    lines = textwrap.wrap(text, characters, break_on_hyphens=False) or [""]
    return "<br>".join(figure_text(line) for line in lines), len(lines)


# --- What several figures of results are drawn with: a point with its interval, a band, a diagonal, and the n

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
    """Return the ``meta`` of a trace that shows ``fold``."""
    return None if fold is None else {FOLD_KEY: fold}


def fold_line(fold: int, *, is_first: bool) -> dict[str, Any]:
    """How one fold's own curve is drawn behind the mean of all."""
    return {
        "mode": "lines", "name": "Single folds", "legendgroup": "folds", "showlegend": is_first,
        "line": {"color": translucent(CONTROL, 0.6), "width": 1}, "meta": of_fold(fold),
    }  # fmt: skip


def with_fold_highlighted(figure: go.Figure, fold: int | None) -> go.Figure:
    """``figure`` with what shows ``fold`` standing out and what shows other folds faded; unchanged without a fold."""
    for trace in figure.data if fold is not None else ():
        shown = (trace.meta or {}).get(FOLD_KEY) if isinstance(trace.meta, dict) else None
        if shown is None:
            continue
        trace.opacity = 1.0 if shown == fold else _FADED
        if shown == fold and isinstance(trace, go.Scatter) and trace.legendgroup == "folds":
            trace.line.color, trace.line.width = HIGHLIGHT, 2.5
    return figure


def band_trace(x: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> go.Scatter:
    """Return the area between ``low`` and ``high``."""
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself", mode="lines",
        line={"width": 0}, fillcolor=translucent(MODEL, 0.13), name="Interval", hoverinfo="skip",
    )  # fmt: skip


def diagonal(name: str) -> go.Scatter:
    """Return a dashed line from (0, 0) to (1, 1)."""
    return level_line(name, (0.0, 1.0))


def level_line(name: str, heights: tuple[float, float]) -> go.Scatter:
    """Return a dashed reference line over [0, 1] between two heights."""
    return go.Scatter(
        x=[0, 1], y=list(heights), mode="lines", name=name, hoverinfo="skip",
        line={"color": NEUTRAL, "width": 1, "dash": "dash"},
    )  # fmt: skip


def interval_point(tick: str, score: Score, color: str, *, hollow: bool = False, size: float = 11) -> go.Scatter:
    """Return a point at the height ``tick`` (escaped) with a bar for its interval, if known."""
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
    """Return the text of a point, in a column right of the plot."""
    return {
        "x": 1, "xref": "paper", "xanchor": "left", "xshift": 14, "y": tick, "showarrow": False,
        "text": interval_text(score.value, score.low, score.high),
        "font": {"size": 12, "color": MODEL if score.source == "model" else NEUTRAL},
    }  # fmt: skip


Points = Sequence[tuple[go.Scatter, Score]]  # of ``interval_point``


def draw_intervals(
    figure: go.Figure, points: Points, names: str, values: str, shown: list[float] | None = None
) -> None:
    """Points from top to bottom, their numbers beside them; with titles of the axes and the range of values."""
    for point, score in points:
        figure.add_trace(point)
        figure.add_annotation(value_label(point.y[0], score))
    figure.update_yaxes(title_text=names, autorange="reversed", showgrid=False, type="category")
    figure.update_xaxes(title_text=figure_text(values), range=shown)
    figure.update_layout(showlegend=False, margin={"r": 170})


def draw_chance(figure: go.Figure, value: float | None) -> None:
    """Draw a dashed line at the value of guessing, if known."""
    if value is not None:
        figure.add_vline(x=value, line={"color": NEUTRAL, "width": 1, "dash": "dash"}, layer="below")


def range_of(scores: Iterable[Score], low: float) -> list[float]:
    """From a little below the lowest value shown to a little above the highest, at least [low, 1]."""
    known = [end for score in scores for end in (score.value, score.low, score.high) if end is not None]
    return [min(low, *known) - 0.03, max(1.0, *known) + 0.03]


def shortened(text: object, characters: int) -> str:
    """``text`` with at most so many characters."""
    whole = str(text)
    return whole if len(whole) <= characters else f"{whole[: characters - 1]}…"
