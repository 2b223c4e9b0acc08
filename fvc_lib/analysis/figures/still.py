"""Still pictures of plotly figures, drawn by matplotlib, for readers without plotly: GitHub, nbconvert, paper.

Only what the figures of ``fvc_lib.analysis.figures`` use is drawn: lines, points, bars, heat maps, reference
lines, notes and legends. Hover texts are left out.
"""

import base64
import io
import re
import warnings
from typing import Any

import numpy as np
import plotly.graph_objects as go
from PIL import Image

from fvc_lib.analysis.figures.theme import INK, NEUTRAL, SERIES
from fvc_lib.analysis.wording import plain_text

_WIDTH, _DPI = 900, 100  # pixels, and pixels per inch
_COLORS = 128  # of a picture; about a third of the size of one in all colours
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_SYMBOLS = {"circle": "o", "diamond": "D", "square": "s", "triangle-up": "^", "x": "X"}


def still_picture(figure: go.Figure) -> str:
    """Return a PNG of ``figure`` in base64, 900 pixels wide and as high as the figure."""
    # matplotlib takes a third of a second to load.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = figure.layout.to_plotly_json()
    height, title = layout.get("height", 400), layout["title"]
    drawn = Figure((_WIDTH / _DPI, height / _DPI), _DPI, layout="constrained")
    canvas: Any = FigureCanvasAgg(drawn)
    stream = io.BytesIO()
    # The font lacks letters of some languages, of which matplotlib warns. A "$" is no formula.
    with rc_context({"text.parse_math": False, "font.size": 8}), warnings.catch_warnings(action="ignore"):
        panels = _panels(drawn, layout)
        for number, trace in enumerate(figure.data):
            panel = panels[(trace.xaxis or "x")[1:]]
            color = SERIES[number % len(SERIES)]
            _draw_trace(panel, trace.to_plotly_json(), color, is_stacked=layout.get("barmode") == "stack")
        for name, panel in panels.items():
            for axis in "xy":
                _set_axis(panel, axis, layout.get(f"{axis}axis{name}", {}))
        _add_notes(list(panels.values()), layout)
        finding, basis = (plain_text(of.get("text", "")) for of in (title, title.get("subtitle", {})))
        # Empty lines of the title keep the room of the subtitle, which the layout does not count.
        empty_lines = [""] * len(basis.split("\n"))
        heading = "\n".join([finding, *empty_lines])
        drawn.suptitle(heading, x=0.01, ha="left", fontsize=11, weight="bold")
        title_height = 12 + 18 * len(finding.split("\n"))
        top = 1 - title_height / height
        drawn.text(0.01, top, basis, va="top", color=NEUTRAL)
        shown = [panel.get_legend_handles_labels() for panel in panels.values()]
        legend = {label: handle for handles, labels in shown for handle, label in zip(handles, labels, strict=True)}
        if len(legend) > 1 and layout.get("showlegend") is not False:
            drawn.legend(legend.values(), legend, loc="outside lower left", ncols=4, frameon=False)
        canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    picture.quantize(_COLORS).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def _panels(drawn: Any, layout: dict[str, Any]) -> dict[str, Any]:
    """Add one panel to the matplotlib figure ``drawn`` for each x-axis in plotly's ``layout``. Return the panels.

    A panel is matplotlib's axes object. Its key in the result is the number in the name of plotly's axis, as text:
    ``2`` for ``xaxis2``, and empty for ``xaxis``.
    """
    names = [name[5:] for name in layout if re.fullmatch("xaxis[0-9]*", name)] or [""]
    corners = {}
    for name in names:
        axes = (layout.get(f"xaxis{name}", {}), layout.get(f"yaxis{name}", {}))
        corners[name] = [axis.get("domain", (0, 1))[0] for axis in axes]
    columns, rows = (sorted(set(begins)) for begins in zip(*corners.values(), strict=True))
    grid = drawn.add_gridspec(len(rows), len(columns))
    panels = dict[str, Any]()
    for name, (left, low) in corners.items():
        matched = layout.get(f"yaxis{name}", {}).get("matches", "-")
        same = panels.get(matched[1:])  # has the same vertical scale
        row_from_top = len(rows) - 1 - rows.index(low)
        panel = drawn.add_subplot(grid[row_from_top, columns.index(left)], sharey=same)
        panel.spines[["top", "right"]].set_visible(False)
        panels[name] = panel
    return panels


def _draw_trace(panel: Any, trace: dict[str, Any], color: str, *, is_stacked: bool) -> None:
    """Draw one trace of a plotly figure into ``panel``, an axes object of matplotlib.

    ``trace`` is plotly's JSON. ``color`` is used if the trace has no colour. ``is_stacked`` says whether horizontal
    bars are stacked on the bars of earlier traces.
    """
    marker = trace.get("marker", {})
    line = trace.get("line", {})
    kind = trace["type"]
    paint = _color(line.get("color") or marker.get("color") or color)
    label = "_" if trace.get("showlegend") is False else plain_text(trace.get("name", ""))
    look = {"label": label, "color": paint, "zorder": 3}
    x, y = ([] if trace.get(axis) is None else list(trace[axis]) for axis in "xy")
    if kind == "bar" and trace.get("orientation") == "h":
        # The bars of earlier traces at the same place, on which this one stands.
        earlier = [(round(bar.get_y() + bar.get_height() / 2), bar.get_width()) for bar in panel.patches]
        starts = [sum(width for at, width in earlier if at == place and is_stacked) for place in y]
        panel.barh(y, x, 0.7, starts, **look)
    elif kind == "bar":
        panel.bar(x, y, trace.get("width", 0.7), **look)
    elif kind == "heatmap":
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("", [shade for _, shade in trace["colorscale"]])
        panel.imshow(np.asarray(trace["z"], float), cmap=shades, aspect="auto", zorder=3)
        for (row, column), text in np.ndenumerate(np.asarray(trace["text"])):
            panel.text(column, row, str(text), ha="center", va="center", zorder=4)
        panel.set_xticks(range(len(x)), list(map(plain_text, x)))
        panel.set_yticks(range(len(y)), list(map(plain_text, y)))
    elif "fill" in trace:
        panel.fill(x, y, **look | {"color": _color(trace["fillcolor"]), "linewidth": 0})
    else:
        mode = trace.get("mode", "lines")
        symbol = _SYMBOLS[marker.get("symbol", "circle")] if "markers" in mode else ""
        style = _DASHES[line.get("dash", "solid")] if "lines" in mode else ""
        look |= {"linewidth": 0.7 * line.get("width", 2), "markersize": 0.7 * marker.get("size", 6)}
        face = _color(marker["color"]) if "color" in marker else paint
        look |= {"markerfacecolor": face, "markeredgecolor": marker.get("line", {}).get("color", paint)}
        panel.plot(x, y, linestyle=style, marker=symbol, **look)
        for axis in "xy":
            bars = trace.get(f"error_{axis}", {})
            if bars.get("array") is not None:
                ends = {f"{axis}err": np.abs([bars["arrayminus"], bars["array"]])}
                panel.errorbar(x, y, fmt="none", ecolor=_color(bars["color"]), elinewidth=1, capsize=2, **ends)


def _set_axis(panel: Any, name: str, axis: dict[str, Any]) -> None:
    """Give an axis of ``panel`` the title, ticks, scale and range of plotly's ``axis``. ``name`` is "x" or "y"."""
    of = {"x": panel.xaxis, "y": panel.yaxis}[name]
    of.set_label_text(plain_text(axis.get("title", {}).get("text", "")))
    panel.axison = panel.has_data()
    panel.grid(axis.get("showgrid") is not False, axis=name, color="#E6E8EB")
    if axis.get("type") == "log":  # to set another scale would remove the names of categories
        panel.set(**{f"{name}scale": "log"})
    if axis.get("tickvals") is not None:
        of.set_ticks(list(axis["tickvals"]), list(map(plain_text, axis["ticktext"])))
    limits = axis.get("range") or ((0, None) if axis.get("rangemode") == "tozero" else None)
    if limits:
        panel.set(**{f"{name}lim": limits})
    if axis.get("autorange") == "reversed":
        of.set_inverted(True)


def _add_notes(panels: list[Any], layout: dict[str, Any]) -> None:
    """Add what plotly's ``layout`` holds besides traces: reference lines, notes and the titles of panels.

    ``panels`` are the axes objects of matplotlib to draw into. Lines and notes go into the first one.
    """
    first, waiting = panels[0], list(panels)
    for shape in layout.get("shapes", ()):
        line = shape["line"]
        draw, at = (first.axvline, "x0") if shape["x0"] == shape["x1"] else (first.axhline, "y0")
        style = _DASHES[line.get("dash", "solid")]
        draw(shape[at], color=line.get("color", INK), linestyle=style, linewidth=1)
    for note in layout.get("annotations", ()):
        refs = [note.get(f"{axis}ref", axis) for axis in "xy"]
        look = {"color": note.get("font", {}).get("color", INK), "fontsize": 8}
        if refs == ["paper", "paper"]:
            waiting.pop(0).set_title(plain_text(note["text"]), **look)
            continue
        across = first.transData if refs[0] == "x" else first.transAxes
        upward = first.transData if refs[1] == "y" else first.transAxes
        sides = [note.get(f"{axis}anchor", "center").replace("middle", "center") for axis in "xy"]
        look |= {"ha": sides[0], "va": sides[1], "xycoords": (across, upward), "textcoords": "offset points"}
        shift = (note.get("xshift", 0) * 72 / _DPI, note.get("yshift", 0) * 72 / _DPI)
        first.annotate(plain_text(note["text"]), (note["x"], note["y"]), shift, annotation_clip=False, **look)


def _color(text: str) -> Any:
    """Return a colour of plotly in a form that matplotlib accepts.

    ``rgba(0,0,0,0.5)`` becomes a tuple of four numbers in [0, 1]. Other texts, such as ``#0072B2``, are unchanged.
    """
    parts = re.findall(r"[\d.]+", text) if text.startswith("rgba") else []
    return tuple(float(part) / (255 if place < 3 else 1) for place, part in enumerate(parts)) or text
