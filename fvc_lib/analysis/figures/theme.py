"""Colours, fonts and layout of all figures, and one helper for each kind of chart.

The colours are Okabe and Ito's ("Color Universal Design", 2008), which colour-blind readers can tell apart. They differ
in lightness too, so a grey print tells real from fake and model from control.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.wording import count_text, figure_text, interval_text

REAL = "#0072B2"
FAKE = "#D55E00"
MODEL = "#1B2A41"
CONTROL = "#6F747D"
NOT_ABOVE_CONTROL = "#B3261E"
NEUTRAL = "#6B7280"
INK = "#22262B"

STANDING_COLORS = {"above control": "#00735C", "not above control": NOT_ABOVE_CONTROL}
ANSWER = "answer"  # ``layout.meta`` of a figure that shows the answer of a run, as the head of its report does
LABEL_COLORS = {"real": REAL, "fake": FAKE}
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5C99", "#4D4D4D")

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# The legend stands above the plot on the left. On the right, plotly's buttons would cover it.
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal"}
LEGEND_BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
_TITLE_CHARACTERS = 88
_LINE_PIXELS = 19

Floats = npt.NDArray[np.float64]

_AXIS = {
    "showgrid": True, "gridcolor": "#E6E8EB", "gridwidth": 1, "zeroline": False, "showline": True,
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
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"font": {"size": 12}, "bgcolor": "rgba(255,255,255,0)", "borderwidth": 0},
        "margin": {"l": 64, "r": 24, "t": 84, "b": 56},
        "hoverlabel": {"font": {"size": 12}},
    }
)  # fmt: skip


def figure(finding: str, subtitle: str, *, height: int = 380) -> go.Figure:
    """Return a figure without data, with title, subtitle and the common layout.

    Args:
        finding: the title, one plain sentence that states the result.
        subtitle: the sample size and the method, plain text.
        height: height in pixels if title and subtitle take one line. Further lines add to it.
    """
    title = textwrap.wrap(finding, _TITLE_CHARACTERS, break_on_hyphens=False)
    below = textwrap.wrap(subtitle, _TITLE_CHARACTERS + 24, break_on_hyphens=False)
    more = _LINE_PIXELS * (len(title) - 1)
    extra = more + _LINE_PIXELS * max(len(below) - 1, 0)
    texts = ["<br>".join(map(figure_text, lines)) for lines in (title, below)]
    # plotly.js anchors a title at its last line, so further lines would leave the figure at the top.
    layout = {"text": texts[0], "subtitle": {"text": texts[1]}, "y": 1 - more / (height + extra)}
    return go.Figure().update_layout(template=TEMPLATE, title=layout, height=height + extra, margin={"t": 84 + extra})


def nothing_to_show(what: str, why: str) -> go.Figure:
    """Return a small figure without data that says ``what`` is missing (title) and ``why`` (subtitle)."""
    empty = figure(f"{what}: nothing to show", why, height=150)
    return empty.update_xaxes(visible=False).update_yaxes(visible=False)


def translucent(color: str, alpha: float) -> str:
    """Return the colour ``#RRGGBB`` as ``rgba(...)`` text with the opacity ``alpha`` in [0, 1]."""
    red, green, blue = bytes.fromhex(color[1:])
    return f"rgba({red},{green},{blue},{alpha:g})"


def shortened(text: str, characters: int) -> str:
    """Return ``text`` with at most ``characters`` characters. A cut text ends in "…"."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def fake_labels(predictions: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Return the column ``label`` of ``predictions``, a frame of N rows, as int64 (N,): 1 is fake, 0 is real."""
    return (predictions["label"] == "fake").cast(pl.Int64).to_numpy()


def in_groups(count: int, one: str, num_groups: int) -> str:
    """Return text for a subtitle, such as ``n = 96 videos in 24 groups``.

    ``one`` is the name of a sample in the singular, such as ``video``.
    """
    return f"n = {count_text(count, one)} in {count_text(num_groups, 'group')}"


def by_label(counts: Mapping[str, int]) -> str:
    """Return text for a subtitle, such as ``n = 96 videos (48 real, 48 fake)``.

    ``counts`` maps ``real`` and ``fake`` to the number of videos.
    """
    labels = ", ".join(f"{counts.get(label, 0):,} {label}" for label in LABEL_COLORS)
    return f"n = {count_text(sum(counts.values()), 'video')} ({labels})"


def videos_and_groups(predictions: pl.DataFrame) -> str:
    """Return text for a subtitle, such as ``n = 96 videos (48 real, 48 fake) in 24 groups``.

    ``predictions`` need the columns ``label`` and ``group_id``.
    """
    counts = dict(predictions["label"].value_counts().iter_rows())
    return f"{by_label(counts)} in {count_text(predictions['group_id'].n_unique(), 'group')}"


# --- Points with intervals


@dataclass(frozen=True)
class Row:
    """One row of an interval chart.

    Attributes:
        tick: name on the axis, escaped for plotly.
        value: value of the point. None: no point is drawn.
        low: lower end of the interval. None: no interval is drawn.
        high: upper end of the interval. None: no interval is drawn.
        color: colour of point and interval, ``#RRGGBB``.
        hollow: whether the point is drawn as a ring.
        text: text to the right of the plot, escaped. Empty: the value with its interval.
    """

    tick: str
    value: float | None
    low: float | None = None
    high: float | None = None
    color: str = MODEL
    hollow: bool = False
    text: str = ""


def interval_chart(
    finding: str, subtitle: str, rows: Sequence[Row], *, names: str, values: str, chance: float | None = 0.5
) -> go.Figure:
    """Return a chart of values with intervals, one row per value. The numbers stand to the right of the chart.

    Args:
        finding: the title.
        subtitle: sample size and method.
        rows: the rows to draw, the first on top.
        names: title of the vertical axis, which has the names of the rows.
        values: title of the horizontal axis, which has the values.
        chance: score of guessing, marked by a dashed line. The axis then ends at 1. If None, there is no line, and the
            axis begins at 0.
    """
    row_height = 42 if any("<br>" in row.tick for row in rows) else 30
    drawn = figure(finding, subtitle, height=150 + row_height * len(rows))
    for place, row in enumerate(rows):
        marker = {"size": 10, "color": "white" if row.hollow else row.color, "line": {"color": row.color, "width": 2}}
        look = {"mode": "markers", "marker": marker, "cliponaxis": False, "hovertemplate": "%{x:.3f}<extra></extra>"}
        point = go.Scatter(x=[row.value], y=[place], name=row.tick, **look)
        if row.value is not None and row.low is not None and row.high is not None:
            point.error_x = error_bar([row.value], [row.low], [row.high], row.color)
        drawn.add_trace(point)
        text = row.text or interval_text(row.value, row.low, row.high)
        beside = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 14, "showarrow": False}
        drawn.add_annotation(y=place, text=text, font={"size": 12, "color": row.color}, **beside)
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [row.tick for row in rows]}
    drawn.update_yaxes(title_text=names, showgrid=False, range=[len(rows) - 0.5, -0.5], **ticks)
    drawn.update_xaxes(title_text=figure_text(values), rangemode="tozero")
    if chance is not None:
        ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
        least = min([*ends, chance - 0.1])
        drawn.update_xaxes(range=[least - 0.03, 1.03])
        drawn.add_vline(x=chance, line={"color": NEUTRAL, "width": 1, "dash": "dash"}, layer="above")
    return drawn.update_layout(showlegend=False, margin={"r": 170})


def error_bar(
    values: Sequence[float] | Floats, low: Sequence[float] | Floats, high: Sequence[float] | Floats, color: str
) -> dict[str, Any]:
    """Return the value for plotly's ``error_x`` or ``error_y`` of N points, as a dict.

    The bars reach from ``low`` (N,) to ``high`` (N,), and ``values`` (N,) are the positions of the points. An end that
    is NaN is not drawn.
    """
    reaches = [np.subtract(high, values), np.subtract(values, low)]
    up, down = np.nan_to_num(reaches)
    return {"symmetric": False, "array": up, "arrayminus": down, "color": color, "thickness": 1.5, "width": 4}


# --- Bars and lines


def bar_chart(
    finding: str,
    subtitle: str,
    counts: pl.DataFrame,
    colors: Mapping[str, str],
    *,
    names: Sequence[str],
    titles: tuple[str, str],
) -> go.Figure:
    """Return a chart of horizontal, stacked bars.

    Args:
        finding: the title.
        subtitle: sample size and method.
        counts: three columns in this order: name of the bar, series and number. Rows with names or series that are not
            in ``names`` and ``colors`` are left out.
        colors: colour of each series, in the order of stacking.
        names: names of the bars, the first on top.
        titles: ``(title of the vertical axis with the names, title of the horizontal axis with the numbers)``.
    """
    drawn = figure(finding, subtitle, height=150 + 34 * max(len(names), 3))
    # The axis has numbers with tick texts. A category axis would interpret HTML in names, and merge bars whose
    # shortened names are equal.
    places = {name: place for place, name in enumerate(names)}
    for series, color in colors.items():
        rows = [(places[name], number) for name, of, number in counts.iter_rows() if of == series and name in places]
        if rows:
            at, numbers = zip(*rows, strict=True)
            drawn.add_bar(x=numbers, y=at, orientation="h", name=figure_text(series), marker={"color": color})
    tick_texts = [figure_text(shortened(name, 32)) for name in names]
    ticks = {"tickvals": list(range(len(names))), "ticktext": tick_texts}
    drawn.update_yaxes(title_text=figure_text(titles[0]), showgrid=False, autorange="reversed", **ticks)
    drawn.update_xaxes(title_text=figure_text(titles[1]), rangemode="tozero")
    return drawn.update_layout(barmode="stack", bargap=0.3, legend=LEGEND)


def add_line(drawn: go.Figure, x: Any, y: Any, name: str, color: str, **look: Any) -> go.Scatter:
    """Add a line through the points ``x`` and ``y`` to the figure ``drawn``, and return the trace.

    Args:
        drawn: the figure.
        x: positions (N,).
        y: values (N,).
        name: name in the legend, plain text.
        color: ``#RRGGBB`` or ``rgba(...)``.
        look: ``dash`` and ``width`` of the line, ``where`` (a position from ``panel_grid``), and any field of plotly's
            ``Scatter``.
    """
    line = {"color": color, "dash": look.pop("dash", "solid"), "width": look.pop("width", 2)}
    where = look.pop("where", {})
    trace = go.Scatter(x=x, y=y, name=figure_text(name), line=line, **{"mode": "lines", **look})
    drawn.add_trace(trace, **where)
    return drawn.data[-1]


def thinned(size: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most ``most`` indices in [0, ``size``), int64, evenly spread, including the first and the last."""
    evenly = np.linspace(0, size - 1, min(size, most))
    return np.unique(evenly.round().astype(np.int64))


def shares(drawn: go.Figure, x: str, y: str) -> go.Figure:
    """Prepare both axes of the figure ``drawn`` for shares, and return the figure.

    The axes get the range [0, 1] and the titles ``x`` and ``y``.
    """
    drawn.update_xaxes(title_text=x, range=[-0.02, 1.02])
    return drawn.update_yaxes(title_text=y, range=[-0.02, 1.04])


def panel_grid(
    finding: str, subtitle: str, titles: Sequence[str], *, columns: int, panel_height: int, **axes: Any
) -> tuple[go.Figure, list[dict[str, int]]]:
    """Return ``(figure, positions)``: a figure with one empty panel per title, and the position of each panel.

    A position is a dict such as ``{"row": 1, "col": 2}``, which plotly's ``add_trace`` takes. Both count from 1.

    Args:
        finding: title of the figure.
        subtitle: sample size and method.
        titles: titles of the panels, plain text.
        columns: the most panels in a row.
        panel_height: height of a panel in pixels.
        axes: further arguments of plotly's ``make_subplots``.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    height = 160 + panel_height * rows
    spacing = 80 / height if rows > 1 else 0
    shown = list(map(figure_text, titles))
    drawn = make_subplots(rows=rows, cols=columns, vertical_spacing=spacing, subplot_titles=shown, **axes)
    drawn.update_annotations(font={"size": 12, "color": NEUTRAL})
    drawn.update_layout(figure(finding, subtitle, height=height).layout)
    # The legend stands next to the subtitle, because the titles of the panels are above the panels.
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1 - 42 / height, "yref": "container"}
    drawn.update_layout(legend={**legend, "yanchor": "top"})
    places = [{"row": number // columns + 1, "col": number % columns + 1} for number in range(len(titles))]
    return drawn, places
