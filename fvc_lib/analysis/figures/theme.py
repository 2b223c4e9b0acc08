"""The look of all figures, and one helper for each kind of chart.

The colours are Okabe and Ito's, which colour-blind readers can tell apart ("Color Universal Design", 2008). They also
differ in lightness, so a grey print tells real from fake and model from control.
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
CONTROL = "#8A8F98"
ABOVE_CONTROL = "#00735C"
NOT_ABOVE_CONTROL = "#B3261E"
NEUTRAL = "#6B7280"
GRID = "#E6E8EB"
INK = "#22262B"

STANDING_COLORS = {
    "above control": ABOVE_CONTROL,
    "not above control": NOT_ABOVE_CONTROL,
    "not shown": NEUTRAL,
    "no result": NEUTRAL,
}
LABEL_COLORS = {"real": REAL, "fake": FAKE}
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5C99", "#4D4D4D")
DASHES = ("solid", "dash", "dot", "dashdot")

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
HEIGHT = 380
# Above the plot on the left; on the right it would lie under the figure's own buttons.
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal"}
LEGEND_BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
_TITLE_CHARACTERS = 88
_LINE_PIXELS = 19

Floats = npt.NDArray[np.float64]


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
    """Return an empty figure with its title.

    Args:
        finding: the title, one plain sentence that states the result.
        subtitle: the sample size and the method, plain text.
        height: pixels with a title of one line; further lines add to it.
    """
    title, title_lines = _wrapped(finding, _TITLE_CHARACTERS)
    below, subtitle_lines = _wrapped(subtitle, _TITLE_CHARACTERS + 24)
    extra = _LINE_PIXELS * (title_lines - 1 + subtitle_lines - 1)
    # plotly.js anchors a title at its last line, so further lines would leave the figure at the top.
    top = 1 - _LINE_PIXELS * (title_lines - 1) / (height + extra)
    title_layout = {"text": title, "subtitle": {"text": below}, "y": top}
    empty = go.Figure()
    return empty.update_layout(template=TEMPLATE, title=title_layout, height=height + extra, margin={"t": 84 + extra})


def nothing_to_show(what: str, why: str) -> go.Figure:
    """Return a small figure with a sentence in place of data."""
    empty = figure(f"{what}: nothing to show", why, height=150)
    empty.update_xaxes(visible=False)
    return empty.update_yaxes(visible=False)


def _wrapped(text: str, characters: int) -> tuple[str, int]:
    lines = textwrap.wrap(text, characters, break_on_hyphens=False) or [""]
    return "<br>".join(figure_text(line) for line in lines), len(lines)


def series_style(position: int) -> tuple[str, str]:
    """Return colour and dash of a series; the first 32 all differ."""
    return SERIES[position % len(SERIES)], DASHES[position // len(SERIES) % len(DASHES)]


def translucent(color: str, alpha: float) -> str:
    """Return ``#RRGGBB`` as ``rgba(...)`` with ``alpha`` in [0, 1]."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def shortened(text: object, characters: int) -> str:
    """Return ``text`` cut to at most ``characters``."""
    whole = str(text)
    return whole if len(whole) <= characters else f"{whole[: characters - 1]}…"


def fake_labels(predictions: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Return ``label`` as int64 (N,); 1 is fake."""
    return (predictions["label"] == "fake").cast(pl.Int64).to_numpy()


def in_groups(count: int, one: str, num_groups: int) -> str:
    """Return ``n = 96 videos in 24 groups``."""
    return f"n = {count_text(count, one)} in {count_text(num_groups, 'group')}"


def by_label(real: int, fake: int) -> str:
    """Return ``n = 96 videos (48 real, 48 fake)``."""
    return f"n = {count_text(real + fake, 'video')} ({real:,} real, {fake:,} fake)"


def videos_and_groups(predictions: pl.DataFrame) -> str:
    """Return ``n = 96 videos (48 real, 48 fake) in 24 groups``."""
    fakes = int((predictions["label"] == "fake").sum())
    groups = count_text(predictions["group_id"].n_unique(), "group")
    return f"{by_label(predictions.height - fakes, fakes)} in {groups}"


# --- Points with intervals


@dataclass(frozen=True)
class Row:
    """One row of an interval chart.

    Attributes:
        tick: name on the axis, escaped for plotly.
        value: the point; None: none is drawn.
        low: lower end of the interval, if known.
        high: upper end of the interval, if known.
        color: of point and interval.
        hollow: whether the point is drawn as a ring.
        text: on the right, escaped; empty: the value with its interval.
    """

    tick: str
    value: float | None
    low: float | None = None
    high: float | None = None
    color: str = MODEL
    hollow: bool = False
    text: str = ""


def interval_chart(
    finding: str,
    subtitle: str,
    rows: Sequence[Row],
    *,
    names: str,
    values: str,
    shown: tuple[float, float] | None = (0.4, 1.0),
    chance: float | None = 0.5,
    row_height: int = 40,
) -> go.Figure:
    """Return rows of points with intervals, from top to bottom, their numbers to the right.

    Args:
        finding: the title.
        subtitle: sample size and method.
        rows: the first stands on top.
        names: title of the axis of names.
        values: title of the axis of values.
        shown: range of values shown at least; None: plotly chooses.
        chance: value of a dashed line; None: no line.
        row_height: pixels.
    """
    drawn = figure(finding, subtitle, height=150 + row_height * len(rows))
    for place, row in enumerate(rows):
        drawn.add_trace(_interval_point(row, place))
        ink = row.color if row.color.startswith("#") else CONTROL
        drawn.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=14, y=place, showarrow=False, align="left",
            text=row.text or interval_text(row.value, row.low, row.high), font={"size": 12, "color": ink},
        )  # fmt: skip
    places = list(range(len(rows)))
    ticks = [row.tick for row in rows]
    drawn.update_yaxes(title_text=names, showgrid=False, tickvals=places, ticktext=ticks, range=[len(rows) - 0.5, -0.5])
    drawn.update_xaxes(title_text=figure_text(values))
    if shown is not None:
        ends = [end for row in rows for end in (row.value, row.low, row.high, *shown) if end is not None]
        drawn.update_xaxes(range=[min(ends) - 0.03, max(ends) + 0.03])
    if chance is not None:
        drawn.add_vline(x=chance, line={"color": NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
    return drawn.update_layout(showlegend=False, margin={"r": 170})


def _interval_point(row: Row, place: int) -> go.Scatter:
    point = go.Scatter(x=[row.value], y=[place], mode="markers", name=row.tick, cliponaxis=False)
    fill = "white" if row.hollow else row.color
    point.marker = {"size": 10, "color": fill, "line": {"color": row.color, "width": 2}}
    point.hovertemplate = "%{x:.3f}<extra></extra>"
    if row.value is not None and row.low is not None and row.high is not None:
        bar = error_bar([row.value], [row.low], [row.high], row.color)
        point.error_x = bar
    return point


def error_bar(
    values: Sequence[float] | Floats, low: Sequence[float] | Floats, high: Sequence[float] | Floats, color: str
) -> dict[str, Any]:
    """Return plotly's error bar from ``low`` to ``high``, each (N,); NaN ends draw nothing."""
    middle = np.asarray(values, float)
    up = np.nan_to_num(np.asarray(high, float) - middle)
    down = np.nan_to_num(middle - np.asarray(low, float))
    look = {"color": color, "thickness": 1.5, "width": 4}
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **look}


# --- Bars


def bar_chart(
    finding: str,
    subtitle: str,
    counts: pl.DataFrame,
    colors: Mapping[str, str],
    *,
    names: Sequence[str],
    titles: tuple[str, str],
    upright: bool = False,
) -> go.Figure:
    """Return stacked bars.

    Args:
        finding: the title.
        subtitle: sample size and method.
        counts: columns name, series and number, in this order.
        colors: of each series, in the order of stacking.
        names: a bar each, from the top or from the left.
        titles: of the axis of names and of the axis of numbers.
        upright: whether the bars stand.
    """
    known = {(name, series): number for name, series, number in counts.iter_rows()}
    drawn = figure(finding, subtitle, height=340 if upright else 150 + 34 * len(names))
    ticks = unique_ticks(names)
    for series, color in colors.items():
        numbers = [known.get((name, series), 0) for name in names]
        if not any(numbers):
            continue
        label = figure_text(series)
        bars = go.Bar(name=label, marker={"color": color}, orientation="v" if upright else "h")
        bars.x, bars.y = (ticks, numbers) if upright else (numbers, ticks)
        drawn.add_trace(bars)
    name_axis, number_axis = ("xaxis", "yaxis") if upright else ("yaxis", "xaxis")
    drawn.layout[name_axis].update(title_text=figure_text(titles[0]), showgrid=False, type="category")
    drawn.layout[number_axis].update(title_text=figure_text(titles[1]), rangemode="tozero")
    if not upright:
        drawn.update_yaxes(categoryorder="array", categoryarray=ticks[::-1])
    return drawn.update_layout(barmode="stack", bargap=0.3, legend=LEGEND, showlegend=len(drawn.data) > 1)


def unique_ticks(names: Sequence[str], characters: int = 32) -> list[str]:
    """Return names for an axis, shortened and escaped; equal ones get a number."""
    ticks: list[str] = []
    for number, name in enumerate(names):
        text = figure_text(shortened(name, characters))
        ticks.append(text if text not in ticks else f"{text} ({number})")
    return ticks


def commonest(values: pl.Series, limit: int) -> list[str]:
    """Return the ``limit`` most frequent values, most frequent first."""
    counts = values.rename("value").value_counts().sort(["count", "value"], descending=[True, False])
    return counts["value"].head(limit).to_list()


# --- Lines


def add_line(drawn: go.Figure, x: Any, y: Any, name: str, color: str, **look: Any) -> go.Scatter:
    """Add a line and return its trace; ``look`` may have ``dash``, ``width``, ``where`` and fields of the trace."""
    line = {"color": color, "dash": look.pop("dash", "solid"), "width": look.pop("width", 2)}
    where = look.pop("where", {})
    drawn.add_trace(go.Scatter(x=x, y=y, name=figure_text(name), line=line, **{"mode": "lines", **look}), **where)
    return drawn.data[-1]


def add_reference(drawn: go.Figure, name: str, begin: float, end: float) -> None:
    """Add a dashed line over [0, 1] from height ``begin`` to ``end``."""
    add_line(drawn, [0, 1], [begin, end], name, NEUTRAL, dash="dash", width=1, hoverinfo="skip")


def add_band(drawn: go.Figure, x: Floats, low: Floats, high: Floats) -> None:
    """Add the area between ``low`` and ``high``."""
    around, heights = np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])
    band = add_line(drawn, around, heights, "Interval", MODEL, width=0, fill="toself", hoverinfo="skip")
    band.fillcolor = translucent(MODEL, 0.13)


def thinned(size: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most ``most`` places out of ``size``, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def shares(drawn: go.Figure, x: str, y: str) -> go.Figure:
    """Name the axes of a figure whose values are shares in [0, 1]."""
    drawn.update_xaxes(title_text=x, range=[-0.02, 1.02])
    return drawn.update_yaxes(title_text=y, range=[-0.02, 1.04])


# --- Heat maps and grids of panels


def heat_map(
    drawn: go.Figure, z: Floats, x: Sequence[str], y: Sequence[str], *, colors: Sequence[str], low: float, **look: Any
) -> go.Figure:
    """Draw ``z`` (Y, X) from ``low`` to 1 in evenly spaced ``colors``; the first row is on top."""
    steps = np.linspace(0, 1, len(colors))
    scale = [[float(at), color] for at, color in zip(steps, colors, strict=True)]
    drawn.add_trace(go.Heatmap(z=z, x=x, y=y, zmin=low, zmax=1, colorscale=scale, xgap=1, ygap=1, **look))
    drawn.update_yaxes(autorange="reversed", showgrid=False, type="category", dtick=1)
    return drawn.update_xaxes(showgrid=False, type="category")


def panel_grid(
    finding: str, subtitle: str, titles: Sequence[str], *, columns: int, panel_height: int, **axes: Any
) -> tuple[go.Figure, list[dict[str, int]]]:
    """Return a figure with a panel for each of ``titles`` (plain text), and the row and column of each panel."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    height = 160 + panel_height * rows
    spacing = 80 / height if rows > 1 else 0
    texts = [figure_text(title) for title in titles]
    drawn = make_subplots(rows=rows, cols=columns, subplot_titles=texts, vertical_spacing=spacing, **axes)
    drawn.update_annotations(font={"size": 12, "color": NEUTRAL})
    drawn.update_layout(figure(finding, subtitle, height=height).layout)
    # Next to the subtitle: the titles of the panels take the place above them.
    beside = {"y": 1 - 42 / height, "yref": "container", "yanchor": "top"}
    drawn.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", **beside})
    places = [{"row": number // columns + 1, "col": number % columns + 1} for number in range(len(titles))]
    return drawn, places
