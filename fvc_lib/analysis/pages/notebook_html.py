"""Executed notebooks as HTML: cells, outputs, and figures from the stored plotly mimetype.

The templates of nbconvert fetch MathJax and widgets from the network and drop plotly's mimetype. This module therefore
uses the project's template with nbconvert's filters. HTML inside a notebook is reduced to a list of allowed tags.
"""

import base64
import itertools
import json
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import bleach
import nbformat
from bleach.css_sanitizer import CSSSanitizer
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, ansi2html, markdown2html
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from plotly.utils import PlotlyJSONEncoder

from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.pages.page import render
from fvc_lib.analysis.wording import clean_text
from fvc_lib.services.atomic_files import as_mapping, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import undamaged_content

WIDGET = "application/vnd.jupyter.widget-view+json"
END_TAG = "papermill-error-cell-tag"  # tag of the cell in which the runner reports how the notebook ended
_KINDS = ("text/html", "image/png", "image/jpeg", "image/gif", "image/webp", "text/markdown")  # in this preference
_NOTHING = "\N{ZERO WIDTH SPACE}"  # the text of a display that is empty for now
_REMARKS = {
    "pending": "This cell never ran.",
    "running": "This cell was running.",
    "stopped": "This cell was asked to stop, and did.",
}
_TAGS = frozenset(
    {
        "a", "abbr", "b", "blockquote", "br", "caption", "code", "dd", "del", "details", "div", "dl", "dt", "em",
        "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd", "li", "mark", "ol", "p",
        "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead",
        "tr", "u", "ul", "var",
    }
)  # fmt: skip
_ATTRIBUTES = frozenset(
    {"class", "title", "style", "alt", "width", "height", "colspan", "rowspan", "scope", "start", "open"}
)
_SCRIPT_OR_STYLE = re.compile(r"<(script|style)\b.*?(</\1\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"^# +(?P<title>.+?)\s*#*\s*$", re.MULTILINE)
_ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>&#182;</a>')
# Allowed targets of links: the web, the page of a judged video, and a log (relative to the folder of the notebooks).
_LINK = re.compile(
    r"((?i:https?://|mailto:)|#).*|videos/\d{4,}_[\w-]*\.html|\.\./logs/([\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII
)
_HIGHLIGHT = Highlight2HTML(pygments_lexer="ipython3")  # type: ignore[no-untyped-call]  # nbconvert is half typed


@dataclass(frozen=True)
class NotebookHtml:
    """A rendered notebook.

    Attributes:
        title: the first heading, and the fold if the file name has one, as plain text.
        file_name: name of the file, plain text.
        body: HTML of all cells. Links are relative to the run's folder.
        num_figures: number of figures in ``body``.
        error: name and message of the first error, plain text. Empty: none.
        num_never_ran: number of code cells that were not reached.
        num_code_cells: number of code cells that are not empty.
    """

    title: str
    file_name: str
    body: Markup
    num_figures: int
    error: str = ""
    num_never_ran: int = 0
    num_code_cells: int = 0


def render_notebook(path: Path, prefix: str) -> NotebookHtml:
    """Return an executed notebook as HTML. The id of each figure begins with ``prefix``.

    Raises:
        DataError: the file is missing, is no notebook or is damaged.
    """
    try:
        # Not checked against nbformat's schema: a record with a repeated cell id is still worth reading.
        cells = nbformat.v4.reads(undamaged_content(path).decode()).cells
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        why = f"{path_to_text(path)}: is no readable notebook ({type(error).__name__}: {error})"
        raise DataError(f"{why}. Run the stage that writes this record again.") from error
    code = [cell for cell in cells if cell.cell_type == "code"]
    for cell in code:
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)  # type: ignore[no-untyped-call]
    title = _take_title(cells, path_to_text(path.name.split(".")[0]))
    figures = itertools.count(1)
    body = render(
        "notebook.html", cells=cells, best=_best, plotly=PLOTLY, end_tag=END_TAG, remarks=_REMARKS, clean=clean_html,
        figure=lambda spec: figure_html(spec, f"{prefix}-figure-{next(figures)}"),
        prose=lambda text: clean_html(_ANCHOR.sub("", markdown2html(text))),
        code=lambda text: Markup(_HIGHLIGHT(text)),
        terminal=lambda text: Markup(ansi2html(text)),  # type: ignore[no-untyped-call]
    )  # fmt: skip
    errors = [f"{out.ename}: {out.evalue}" for cell in code for out in cell.outputs if out.output_type == "error"]
    written = [cell for cell in code if cell.source.strip()]
    states = [cell.get("metadata", {}).get("papermill", {}).get("status") for cell in written]
    return NotebookHtml(
        title=clean_text(title),
        file_name=path_to_text(path.name),
        body=Markup(str(body).replace('href="../logs/', 'href="logs/')),
        num_figures=next(figures) - 1,
        error=clean_text(errors[0] if errors else ""),
        num_never_ran=states.count("pending"),
        num_code_cells=len(written),
    )


def _take_title(cells: list[Any], name: str) -> str:
    """Remove the first level-1 heading from ``cells`` and return its text. Without a heading return ``name``.

    ``name`` is the file name of the notebook without ending. If it ends in ``_fold_2``, the text ends in ", fold 2".
    """
    for cell in cells:
        heading = _TITLE.search(cell.source) if cell.cell_type == "markdown" else None
        if heading:
            cell.source = _TITLE.sub("", cell.source, count=1)
            fold = re.search(r"_fold_(\d+)$", name)
            return heading["title"].replace("`", "") + (f", fold {fold[1]}" if fold else "")
    return name


def _best(data: dict[str, Any]) -> tuple[str, Any]:
    """Return ``(mimetype, content)`` of the preferred form of an output that needs neither kernel nor network.

    ``data`` maps the mimetypes of one output to contents. Of an empty display or a widget, only plain text is returned.
    """
    if isinstance(data.get(PLOTLY), dict):
        return PLOTLY, data[PLOTLY]
    plain = str(data.get("text/plain") or data.get("text/latex") or "")
    if plain == _NOTHING or WIDGET in data:
        return "text/plain", plain.replace(_NOTHING, "")
    if "image/svg+xml" in data:  # within <img> it can neither run scripts nor load anything
        return "image/svg+xml", base64.b64encode(data["image/svg+xml"].encode()).decode()
    return next(((kind, str(data[kind])) for kind in _KINDS if kind in data), ("text/plain", plain))


def clean_html(html: str) -> Markup:
    """Return ``html`` with allowed tags and attributes only: no scripts, no style sheets, nothing from the network."""

    def is_allowed(tag: str, name: str, value: str) -> bool:
        if (tag, name) == ("img", "src"):
            return value.lower().startswith("data:image/")
        return bool(_LINK.fullmatch(value)) if (tag, name) == ("a", "href") else name in _ATTRIBUTES

    protocols, styles = {"http", "https", "mailto", "data"}, CSSSanitizer()
    text = _SCRIPT_OR_STYLE.sub("", html)
    return Markup(bleach.clean(text, _TAGS, is_allowed, protocols, strip=True, css_sanitizer=styles))


def figure_html(spec: dict[str, Any], name: str) -> Markup:
    """Return HTML for a stored plotly figure, which the page's script draws.

    Title and subtitle become text above the figure, because text wraps on a narrow screen. For a figure without data,
    only title and subtitle are returned.

    Args:
        spec: plotly's JSON with ``data`` and ``layout``.
        name: id of the element.
    """
    layout, data = dict(spec.get("layout") or {}), spec.get("data") or []
    title, legend = as_mapping(layout.pop("title", None)), as_mapping(layout.get("legend"))
    above = Markup()
    for kind, part in (("finding", title), ("basis", as_mapping(title.get("subtitle")))):
        # plotly's titles hold a little HTML, whose tags are removed.
        text = unescape(re.sub(r"<[^>]*>", " ", str(part.get("text") or "")))
        above += Markup('<p class="{}">{}</p>').format(kind, text)
    if not data:
        return above
    layout |= {"margin": {**as_mapping(layout.get("margin")), "t": 46}, "width": None, "autosize": True}
    if legend.get("yref") == "container":  # placed below the title, which is not part of the drawing here
        layout["legend"] = {**legend, "y": 1}
    content = json.dumps({"data": data, "layout": layout}, cls=PlotlyJSONEncoder)
    height = layout.get("height")
    pixels = int(height) if isinstance(height, int | float) and 50 <= height <= 5000 else 400
    return above + Markup(
        '<div class="figure" id="{0}" style="height:{1}px"><noscript>This figure needs JavaScript.</noscript></div>'
        '<script type="application/json" id="{0}-data">{2}</script>'
    ).format(name, pixels, Markup(content.replace("<", "\\u003c")))  # only a "<" could end the element early
