"""Executed notebooks as HTML: cells, outputs, and figures from the stored plotly mimetype.

nbconvert's own templates fetch MathJax and widgets from the network and drop plotly's mimetype, so this has a template
of its own. Its filters render prose, code and terminal colours. HTML that a notebook holds is cleaned to an allow-list.
"""

import base64
import itertools
import json
import re
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
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
END_TAG = "papermill-error-cell-tag"  # of the cell in which the runner says how the notebook ended
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
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
_LINK = re.compile(r"(https?://|mailto:|#).*|videos/\d{4,}_[\w-]*\.html", re.ASCII | re.IGNORECASE)
_LOG = re.compile(r"\.\./(logs/([\w-][\w.-]*/)*[\w-][\w.-]*)", re.ASCII)  # from the folder of the notebooks
_HIGHLIGHT = Highlight2HTML(pygments_lexer="ipython3")  # type: ignore[no-untyped-call]  # nbconvert is half typed


@dataclass(frozen=True)
class NotebookHtml:
    """A rendered notebook.

    Attributes:
        title: its first heading, with the fold if the file name has one; plain text.
        file_name: plain text.
        body: HTML of all cells.
        num_figures: in ``body``.
        error: name and message of the first error, plain text; empty if there is none.
        num_never_ran: code cells that were not reached, of ``num_code_cells``.
        tells_its_end: whether it begins with the runner's account of its end.
    """

    title: str
    file_name: str
    body: Markup
    num_figures: int
    error: str = ""
    num_never_ran: int = 0
    num_code_cells: int = 0
    tells_its_end: bool = False


def render_notebook(path: Path, prefix: str, *, run_folder: str | None = None) -> NotebookHtml:
    """Render an executed notebook.

    Args:
        path: of the notebook.
        prefix: unique within the page; starts the id of each figure.
        run_folder: address of the run's folder from the page, such as ``"../../"``, for links to the run's logs; None:
            these links become plain text.

    Raises:
        DataError: the file is missing, is no notebook or is damaged.
    """
    cells = _load(path).cells
    title = path_to_text(path.name.split(".")[0])
    fold = re.search(r"_fold_(\d+)$", title)
    for cell in cells:
        if cell.cell_type == "markdown" and (heading := _TITLE.search(cell.source)):
            title = heading["title"].replace("`", "") + (f", fold {fold[1]}" if fold else "")
            cell.source = _TITLE.sub("", cell.source, count=1)
            break
    code = [cell for cell in cells if cell.cell_type == "code"]
    for cell in code:
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)  # type: ignore[no-untyped-call]
    errors = [each for cell in code for each in cell.outputs if each.output_type == "error"]
    figures, clean = itertools.count(1), partial(clean_html, run_folder=run_folder)
    body = render(
        "notebook.html", cells=cells, best=_best, plotly=PLOTLY, end_tag=END_TAG, remarks=_REMARKS,
        figure=lambda spec: figure_html(spec, f"{prefix}-figure-{next(figures)}"), clean=clean,
        prose=lambda text: Markup('<div class="prose">{}</div>').format(clean(_ANCHOR.sub("", markdown2html(text)))),
        code=lambda text: Markup(_HIGHLIGHT(text)),
        terminal=lambda text: Markup(ansi2html(text)),  # type: ignore[no-untyped-call]
    )  # fmt: skip
    written = [cell for cell in code if cell.source.strip()]
    states = [cell.get("metadata", {}).get("papermill", {}).get("status") for cell in written]
    return NotebookHtml(
        clean_text(title),
        path_to_text(path.name),
        body,
        next(figures) - 1,
        clean_text(f"{errors[0].ename}: {errors[0].evalue}") if errors else "",
        states.count("pending"),
        len(written),
        any(END_TAG in cell.get("metadata", {}).get("tags", []) for cell in cells),
    )


def _load(path: Path) -> Any:
    try:
        text = undamaged_content(path).decode()
        stored = json.loads(text)
        if isinstance(stored, dict) and stored.get("nbformat") == 4 and isinstance(stored.get("cells"), list):
            # Not checked against nbformat's schema: a record with a repeated cell id is still worth reading.
            return nbformat.v4.reads(text)
        why = "got JSON without cells in notebook format 4"
    except OSError as error:
        why = str(error.strerror)
    except ValueError as error:
        why = f"is no notebook ({error})"
    raise DataError(f"{path_to_text(path)}: {why}. Run the stage that writes this record again.")


def _best(data: dict[str, Any]) -> tuple[str, Any]:
    """Return the mimetype and content of the best form that needs neither a kernel nor the network."""
    if isinstance(data.get(PLOTLY), dict):
        return PLOTLY, data[PLOTLY]
    plain = str(data.get("text/plain") or data.get("text/latex") or "")
    if plain == _NOTHING or WIDGET in data:
        return "text/plain", plain.replace(_NOTHING, "")
    if "image/svg+xml" in data:  # within <img> it can neither run scripts nor load anything
        return "image/svg+xml", base64.b64encode(data["image/svg+xml"].encode()).decode()
    kinds = ("text/html", *_IMAGES, "text/markdown")
    kind = next((kind for kind in kinds if kind in data), None)
    return (kind, str(data[kind])) if kind else ("text/plain", plain)


def clean_html(html: str, run_folder: str | None = None) -> Markup:
    """Reduce ``html`` to harmless tags and attributes: no script, no style sheet, nothing loaded from elsewhere.

    Links to the run's own logs lead there from ``run_folder``, an address; without it they go.
    """

    def is_allowed(tag: str, name: str, value: str) -> bool:
        if (tag, name) == ("img", "src"):
            return value.lower().startswith("data:image/")
        if (tag, name) == ("a", "href"):
            return bool(_LINK.fullmatch(value) or (run_folder is not None and _LOG.fullmatch(value)))
        return name in _ATTRIBUTES

    cleaner = bleach.Cleaner(
        tags=_TAGS, attributes=is_allowed, protocols={"http", "https", "mailto", "data"}, strip=True,
        css_sanitizer=CSSSanitizer(),
    )  # fmt: skip
    cleaned = str(cleaner.clean(_SCRIPT_OR_STYLE.sub("", html)))
    return Markup(re.sub(rf'href="{_LOG.pattern}"', rf'href="{run_folder or ""}\1"', cleaned))


def figure_html(spec: dict[str, Any], name: str) -> Markup:
    """Return the HTML of a figure as a notebook stores it; the page's script draws it. ``name`` is the element's id."""
    layout = dict(spec.get("layout") or {})
    title, data = _lift_title(layout), spec.get("data") or []
    if title and not data:  # the title says why there is nothing to show
        return title
    layout.pop("width", None)
    content = json.dumps({"data": data, "layout": layout | {"autosize": True}}, cls=PlotlyJSONEncoder)
    height = layout.get("height")
    return title + Markup(
        '<div class="figure" id="{0}" style="height:{1}px"><noscript>This figure needs JavaScript.</noscript></div>'
        '<script type="application/json" id="{0}-data">{2}</script>'
    ).format(
        name,
        int(height) if isinstance(height, int | float) and 50 <= height <= 5000 else 400,
        Markup(content.replace("<", "\\u003c")),  # only a "<" could end the element early
    )


def _lift_title(layout: dict[str, Any]) -> Markup:
    """Take title and subtitle out of the layout of a figure from ``theme.figure``, with their room; return their HTML.

    Text above the figure wraps on a narrow screen.
    """
    title, margin, legend = (as_mapping(layout.get(name)) for name in ("title", "margin", "legend"))
    subtitle, top, height = as_mapping(title.get("subtitle")), margin.get("t"), layout.get("height")
    if not subtitle or not isinstance(top, int | float) or not isinstance(height, int | float):
        return Markup()
    has_legend_on_top = legend.get("yref") == "container"
    remaining = max(46 if has_legend_on_top else 34, min(top, 84) - 50)  # pixels; a title of two lines takes 50
    layout["margin"], layout["height"] = {**margin, "t": remaining}, height - (top - remaining)
    if has_legend_on_top:
        layout["legend"] = {**legend, "y": 1}
    del layout["title"]
    # plotly's titles hold a little HTML, of which the text is kept.
    texts = [unescape(re.sub(r"<[^>]*>", " ", str(each.get("text") or ""))) for each in (title, subtitle)]
    finding, basis = (Markup(escape(text, quote=False)) for text in texts)
    return Markup('<p class="finding">{}</p><p class="basis">{}</p>').format(finding, basis)
