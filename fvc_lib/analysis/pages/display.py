"""A stored plotly figure as HTML: its title and subtitle as text that wraps and can be searched, and its data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape, unescape
from typing import Any

import plotly.graph_objects as go

PLOTLY = "application/vnd.plotly.v1+json"  # what a notebook stores of a figure
_TITLE_PIXELS = 50  # of a figure's upper margin: what a title and subtitle of one line each take (theme.figure)
_LEAST_MARGIN_PIXELS = 34  # what stands on the plot: a legend, a verdict
_TAG = re.compile(r"<[^>]*>")
_BESIDE_LEGEND_PIXELS = 46  # with a legend in the place of the title, above titles of panels


def figure_html(spec: dict[str, Any], name: str) -> str:
    """HTML of one figure, drawn later by the page's script from the JSON beside it.

    Args:
        spec: ``data`` and ``layout`` as a notebook stores them.
        name: id of the element, unique in the page.
    """
    layout = dict(spec.get("layout") or {})
    told = _lift_title(layout)
    data = spec.get("data") or []
    if told and not data:  # nothing to show, and the reason is said
        return told
    layout.pop("width", None)
    layout["autosize"] = True
    height = layout.get("height")
    pixels = int(height) if isinstance(height, int | float) and 50 <= height <= 5000 else 400
    content = json.dumps(json_safe({"data": data, "layout": layout}), separators=(",", ":"))
    # The one thing that could end the element early is a "<", and JSON lets it be spelt otherwise.
    content = content.replace("<", "\\u003c")
    return (
        f'{told}<div class="figure" id="{name}" style="height:{pixels}px">'
        "<noscript>This figure needs JavaScript.</noscript></div>"
        f'<script type="application/json" id="{name}-data">{content}</script>'
    )


def json_safe(value: Any) -> Any:
    """NaN and infinities, which Python reads in a notebook but no browser does, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list | tuple) else value


def _lift_title(layout: dict[str, Any]) -> str:
    """Take the title and subtitle of a figure of ours out of ``layout``, with the room they took; their HTML.

    A figure without a subtitle, or with an upper margin or height that plotly chooses, stays as it is.
    """
    title, margin, legend = (_mapping(layout.get(name)) for name in ("title", "margin", "legend"))
    subtitle, top, height = _mapping(title.get("subtitle")), margin.get("t"), layout.get("height")
    if not subtitle or not isinstance(top, int | float) or not isinstance(height, int | float):
        return ""
    at_edge = legend.get("yref") == "container"
    kept: float = _BESIDE_LEGEND_PIXELS if at_edge else _LEAST_MARGIN_PIXELS
    kept = max(kept, min(top, 84) - _TITLE_PIXELS)
    layout["margin"] = {**margin, "t": kept}
    layout["height"] = height - (top - kept)
    if at_edge:
        layout["legend"] = {**legend, "y": 1}
    del layout["title"]
    finding, below = (_as_text(text) for text in (title.get("text"), subtitle.get("text")))
    return f'<p class="finding">{finding}</p><p class="basis">{below}</p>'


def _as_text(title: Any) -> str:
    """One of plotly's titles, which are a little HTML, as HTML of its text alone."""
    return escape(unescape(_TAG.sub(" ", str(title or ""))), quote=False)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# ----------------------------------------------------------------------------------------------------
# How a notebook shows figures and tables: as data that its record keeps, small and without HTML of plotly's own.


def figure_bundle(figure: go.Figure) -> dict[str, Any]:
    """What a notebook stores of a figure: plotly's small mimetype and the title as plain text, nothing else."""
    spec = {key: value for key, value in figure.to_plotly_json().items() if key in {"data", "layout"}}
    title = figure.layout.title.text or "figure"
    return {PLOTLY: {**spec, "config": {"displaylogo": False}}, "text/plain": title.replace("<br>", " ")}


def show_figures(figures: Sequence[go.Figure]) -> None:
    """Display ``figures`` in a notebook, each as its plotly mimetype, whatever plotly's default renderer is."""
    for figure in figures:
        show_bundle(figure_bundle(figure))


def show_bundle(bundle: dict[str, Any]) -> Any:
    """Send ``bundle`` to the front end, if any, and into the record; the handle returned can update it."""
    from IPython.display import display  # only a notebook has it at hand, and only a notebook comes here

    return display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython is half typed
