"""The one look of all figures: a plotly template, fixed colours, and titles that say what was found.

Colours are Okabe and Ito's, which stay apart for colour-blind readers ("Color Universal Design", 2008); lightness
differs too, so a grey print still tells real from fake and model from control.
"""

from __future__ import annotations

import textwrap

import plotly.graph_objects as go

from fvc_lib.analysis.wording import figure_text

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
    "no control": NEUTRAL,
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
    """An empty figure in this look.

    Args:
        finding: the title: one sentence saying what is to be seen. Plain text; wrapped and escaped here.
        subtitle: n and how it was computed. Plain text.
        height: pixels of the whole figure at one title line; more lines add their own height.
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
    """A small figure that says in words why there is nothing in it."""
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
    lines = textwrap.wrap(text, characters) or [""]
    return "<br>".join(figure_text(line) for line in lines), len(lines)
