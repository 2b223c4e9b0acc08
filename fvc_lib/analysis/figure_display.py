"""How a notebook shows figures and tables: as data that its record keeps, small and without HTML of plotly's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fvc_lib.analysis.figure_html import PLOTLY


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
