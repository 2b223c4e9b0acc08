"""An executed notebook as HTML that loads nothing: cells, outputs, and figures from the stored plotly mimetype.

nbconvert's filters do markdown, highlighting and terminal colours; its exporters' templates are not used because they
fetch MathJax, require.js and widgets from the network and drop plotly's mimetype. HTML that a notebook holds is
cleaned to an allow-list: a file name with a tag in it, shown by somebody's own table, stays harmless.
"""

import base64
import json
import math
import re
from dataclasses import dataclass, field
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import bleach
import nbformat
from bleach.css_sanitizer import CSSSanitizer
from nbconvert.filters import Highlight2HTML, ansi2html, markdown2html

from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import as_mapping, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import undamaged_content

WIDGET = "application/vnd.jupyter.widget-view+json"
_IMAGES = ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp")
_NO_WIDTH = "\N{ZERO WIDTH SPACE}"  # what a display shows that has nothing to show for now
_TEXT_LIMIT = 100_000  # characters of one text output; the executed notebook keeps the rest
_TAGS = frozenset(
    {
        "a", "abbr", "b", "blockquote", "br", "caption", "code", "dd", "del", "details", "div", "dl", "dt", "em",
        "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd", "li", "mark", "ol", "p",
        "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead",
        "tr", "u", "ul", "var",
    }
)  # fmt: skip
_ATTRIBUTES = {
    "*": ["class", "title", "style"],
    "a": ["href"],
    "img": ["src", "alt", "width", "height"],
    "td": ["colspan", "rowspan"],
    "th": ["colspan", "rowspan", "scope"],
    "ol": ["start"],
    "details": ["open"],
}
_HIDDEN_TEXT = re.compile(r"<(script|style)\b.*?(</\1\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"^# +(?P<title>.+?)\s*#*\s*$", re.MULTILINE)
_ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>&#182;</a>')
_FOLDED_TAG = "folded"  # of prose on the record itself, which a page does not begin with
_END_TAG = "papermill-error-cell-tag"  # of the cell that the runner puts before all others
_LOG_LINK = re.compile(r'(<a\b[^>]*\bhref=")\.\./logs/')
_VIDEO_PAGE = re.compile(r"videos/\d{4,}_[\w-]*\.html", re.ASCII)  # beside a page of verdicts
_FOLD = re.compile(r"_fold_(\d+)$")
_TITLE_PIXELS = 50  # of a figure's upper margin: what a title and subtitle of one line each take (theme.figure)
_LEAST_MARGIN_PIXELS = 34  # what stands on the plot: a legend, a verdict
_TAG = re.compile(r"<[^>]*>")
_BESIDE_LEGEND_PIXELS = 46  # with a legend in the place of the title, above titles of panels
_HIGHLIGHT = Highlight2HTML(pygments_lexer="ipython3")  # type: ignore[no-untyped-call]  # nbconvert is half typed


@dataclass(frozen=True)
class NotebookHtml:
    """One notebook, rendered: HTML of all cells in ``body``, everything else plain text.

    ``title`` is its first heading, with the fold where the file name has one; ``error`` the first error's name and
    message, or empty; ``num_never_ran`` of ``num_code_cells`` were not come to; ``tells_its_end`` where it begins with
    the runner's own account of how it ended badly.
    """

    title: str
    file_name: str
    body: str
    num_figures: int
    error: str = ""
    num_never_ran: int = 0
    num_code_cells: int = 0
    tells_its_end: bool = False


@dataclass
class _Page:
    """What is counted while the cells of one notebook are rendered."""

    prefix: str
    run_folder: str | None = None
    num_figures: int = 0
    num_never_ran: int = 0
    num_code_cells: int = 0
    errors: list[str] = field(default_factory=list)


def render_notebook(path: Path, prefix: str, *, run_folder: str | None = None) -> NotebookHtml:
    """Render an executed notebook; ``prefix``, unique within a page, starts the id of each figure.

    ``run_folder`` is the way from the page to the run's folder, ``""`` or like ``"../../"``, for links to the run's
    logs; without it they become plain text.

    Raises:
        DataError: the file is missing, is no notebook, or is not the one that its finished stage left.
    """
    document = _load(path)
    title, heading_cell = _title(document, path)
    page = _Page(prefix, run_folder)
    cells = []
    for number, cell in enumerate(document.cells):
        source = _TITLE.sub("", cell.source, count=1) if number == heading_cell else cell.source
        cells.append(_cell(cell, source, page))
    return NotebookHtml(
        title,
        path_to_text(path.name),
        "\n".join(cells),
        page.num_figures,
        page.errors[0] if page.errors else "",
        page.num_never_ran,
        page.num_code_cells,
        any(_END_TAG in cell.get("metadata", {}).get("tags", []) for cell in document.cells),
    )


def clean_html(html: str, run_folder: str | None = None) -> str:
    """``html`` reduced to harmless tags and attributes: no script, no style sheet, no image from elsewhere.

    Links to the run's own logs, written from the notebooks' folder, lead there from ``run_folder`` on.
    """
    cleaner = bleach.Cleaner(
        tags=_TAGS,
        attributes=_allowed_attribute if run_folder is None else _allowed_with_logs,
        protocols={"http", "https", "mailto", "data"},
        strip=True,
        css_sanitizer=CSSSanitizer(),
    )
    cleaned = str(cleaner.clean(_HIDDEN_TEXT.sub("", html)))
    return cleaned if run_folder is None else _LOG_LINK.sub(rf"\1{run_folder}logs/", cleaned)


def _allowed_attribute(tag: str, name: str, value: str) -> bool:
    if tag == "img" and name == "src":
        return value.lower().startswith("data:image/")
    if tag == "a" and name == "href":
        return value.lower().startswith(("http://", "https://", "mailto:", "#")) or bool(_VIDEO_PAGE.fullmatch(value))
    return name in _ATTRIBUTES["*"] or name in _ATTRIBUTES.get(tag, ())


def _allowed_with_logs(tag: str, name: str, value: str) -> bool:
    if tag == "a" and name == "href" and value.startswith("../logs/"):
        # As a browser reads it: with escapes, and with backslashes for slashes.
        return ".." not in unquote(value).replace("\\", "/").removeprefix("../").split("/")
    return _allowed_attribute(tag, name, value)


def _load(path: Path) -> Any:
    try:
        text = undamaged_content(path).decode()
        stored = json.loads(text)
        is_notebook = isinstance(stored, dict) and stored.get("nbformat") == 4 and isinstance(stored.get("cells"), list)
        why = "" if is_notebook else "got JSON without cells in notebook format 4"
    except (OSError, ValueError) as error:
        why = str(error.strerror) if isinstance(error, OSError) else f"is no notebook ({error})"
    if why:
        raise DataError(f"{path_to_text(path)}: {why}. Run the stage that writes this record again.")
    # Not validated against nbformat's schema: a record with a repeated cell id is still worth reading.
    return nbformat.v4.reads(text)


def _title(document: Any, path: Path) -> tuple[str, int | None]:
    """The first heading's text and the number of the cell it stands in."""
    fold = _FOLD.search(path.name.split(".")[0])
    suffix = f", fold {fold[1]}" if fold else ""
    for number, cell in enumerate(document.cells):
        match = _TITLE.search(cell.source) if cell.cell_type == "markdown" else None
        if match:
            return clean_text(match["title"]).replace("`", "") + suffix, number
    return clean_text(path_to_text(path.name.split(".")[0])), None


def _cell(cell: Any, source: str, page: _Page) -> str:
    tags = cell.get("metadata", {}).get("tags", [])
    if cell.cell_type == "markdown":
        prose = _prose(source) if source.strip() else ""
        if _FOLDED_TAG in tags:
            return f'<details class="code"><summary>About this record</summary>{prose}</details>'
        return f'<div class="alarm">{prose}</div>' if _END_TAG in tags else prose
    if cell.cell_type != "code":
        return ""
    label = "Parameters" if "parameters" in tags else "Code"
    label = "Parameters set by the run" if "injected-parameters" in tags else label
    code = _code(source, label) if source.strip() else ""
    outputs = "".join(_output(output, page) for output in _merged(cell.outputs))
    return code + outputs + _how_far(cell, page) if code else outputs


def _how_far(cell: Any, page: _Page) -> str:
    """A remark on a cell that was not run to its end, as the runner noted."""
    page.num_code_cells += 1
    status = cell.get("metadata", {}).get("papermill", {}).get("status")
    if status == "pending":
        page.num_never_ran += 1
        return '<p class="fvc-remark never">This cell never ran.</p>'
    remark = {"running": "This cell was running.", "stopped": "This cell was asked to stop, and did."}.get(status)
    return f'<p class="fvc-remark never">{remark}</p>' if remark else ""


def _prose(source: str) -> str:
    return f'<div class="prose">{clean_html(_ANCHOR.sub("", markdown2html(source)))}</div>'


def _code(source: str, label: str) -> str:
    lines = count_text(len(source.strip().splitlines()), "line")
    highlighted = _HIGHLIGHT(source.strip())
    return f'<details class="code"><summary>{label}, {lines}</summary>{highlighted}</details>'


def _merged(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one output, as they appeared on the screen."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            merged[-1] = nbformat.from_dict({**last, "text": last.text + output.text})
        else:
            merged.append(output)
    return merged


def _output(output: Any, page: _Page) -> str:
    if output.output_type == "stream":
        return _text(_after_carriage_returns(output.text), "stderr" if output.name == "stderr" else "stdout")
    if output.output_type == "error":
        return _error(output, page)
    return _rich(output.get("data", {}), page)


def _rich(data: dict[str, Any], page: _Page) -> str:
    """The best form that needs nothing but this page; a widget without a kernel is its plain text."""
    if PLOTLY in data and isinstance(data[PLOTLY], dict):
        return _figure(data[PLOTLY], page)
    if _joined(data.get("text/plain", "")) == _NO_WIDTH:
        return ""
    if "text/html" in data and WIDGET not in data:
        html = clean_html(_joined(data["text/html"]), page.run_folder)
        if html.strip():
            return f'<div class="output html">{html}</div>'
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, _joined(data[kind]))
    if "text/markdown" in data:
        return f'<div class="output">{_prose(_joined(data["text/markdown"]))}</div>'
    plain = next((_joined(data[kind]) for kind in ("text/plain", "text/latex") if kind in data), "")
    return _text(plain, "plain")


def _figure(spec: dict[str, Any], page: _Page) -> str:
    page.num_figures += 1
    return figure_html(spec, f"{page.prefix}-figure-{page.num_figures}")


def figure_html(spec: dict[str, Any], name: str) -> str:
    """HTML of one figure as a notebook stores it, drawn later by the page's script; ``name`` is the element's id."""
    layout = dict(spec.get("layout") or {})
    title = _lift_title(layout)
    data = spec.get("data") or []
    if title and not data:  # nothing to show, and the reason is said
        return title
    layout.pop("width", None)
    layout["autosize"] = True
    height = layout.get("height")
    pixels = int(height) if isinstance(height, int | float) and 50 <= height <= 5000 else 400
    content = json.dumps(json_safe({"data": data, "layout": layout}), separators=(",", ":"))
    # The one thing that could end the element early is a "<", and JSON lets it be spelt otherwise.
    content = content.replace("<", "\\u003c")
    return (
        f'{title}<div class="figure" id="{name}" style="height:{pixels}px">'
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
    title, margin, legend = (as_mapping(layout.get(name)) for name in ("title", "margin", "legend"))
    subtitle, top, height = as_mapping(title.get("subtitle")), margin.get("t"), layout.get("height")
    if not subtitle or not isinstance(top, int | float) or not isinstance(height, int | float):
        return ""
    at_edge = legend.get("yref") == "container"
    remaining: float = _BESIDE_LEGEND_PIXELS if at_edge else _LEAST_MARGIN_PIXELS
    remaining = max(remaining, min(top, 84) - _TITLE_PIXELS)
    layout["margin"] = {**margin, "t": remaining}
    layout["height"] = height - (top - remaining)
    if at_edge:
        layout["legend"] = {**legend, "y": 1}
    del layout["title"]
    finding, below = (_as_text(text) for text in (title.get("text"), subtitle.get("text")))
    return f'<p class="finding">{finding}</p><p class="basis">{below}</p>'


def _as_text(title: Any) -> str:
    """One of plotly's titles, which are a little HTML, as HTML of its text alone."""
    return escape(unescape(_TAG.sub(" ", str(title or ""))), quote=False)


def _image(kind: str, content: str) -> str:
    # An SVG inside <img> can neither run scripts nor load anything.
    encoded = base64.b64encode(content.encode()).decode() if kind == "image/svg+xml" else "".join(content.split())
    return f'<div class="output"><img alt="" src="data:{kind};base64,{escape(encoded)}"></div>'


def _error(output: Any, page: _Page) -> str:
    headline = f"{output.get('ename', 'Error')}: {output.get('evalue', '')}"
    page.errors.append(clean_text(headline))
    trace = _terminal_html("\n".join(output.get("traceback", [])))
    return f'<div class="output error"><strong>{escape(clean_text(headline))}</strong><pre>{trace}</pre></div>'


def _text(text: str, kind: str) -> str:
    if not text.replace(_NO_WIDTH, "").strip():
        return ""
    left_out = len(text) - _TEXT_LIMIT
    remark = (
        f'<p class="fvc-remark">{left_out:,} more characters are in the executed notebook.</p>' if left_out > 0 else ""
    )
    return f'<div class="output text {kind}"><pre>{_terminal_html(text[:_TEXT_LIMIT].rstrip())}</pre>{remark}</div>'


def _terminal_html(text: str) -> str:
    return str(ansi2html(text))  # type: ignore[no-untyped-call]  # nbconvert is half typed


def _after_carriage_returns(text: str) -> str:
    """What a terminal would show in the end of lines that a progress bar has overwritten."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def _joined(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)
