"""The offline report of a run, and ``runs/index.html``, the list of all runs.

A report shows the main result of a run, the executed notebook of each stage (its record), all tested videos, and the
provenance (code, versions, machine and commands).
"""

import base64
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bleach
import nbformat
import polars as pl
from bleach.css_sanitizer import CSSSanitizer
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, ansi2html, markdown2html
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from plotly.utils import PlotlyJSONEncoder

from fvc_lib.analysis import wording
from fvc_lib.analysis.figures.theme import ANSWER
from fvc_lib.analysis.memory import memory_facts, run_memory
from fvc_lib.analysis.pages.display import LEAD, PLOTLY
from fvc_lib.analysis.pages.page import PLOTLY_FILE, TEMPLATES, render, write_page
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, audit_facts
from fvc_lib.analysis.read.queries import memory_events, memory_samples
from fvc_lib.analysis.read.runs import (
    as_list,
    as_number,
    effective_parameters,
    read_tables,
    run_marks,
    run_parameters,
    run_status,
    trial_text,
)
from fvc_lib.analysis.wording import NOT_RECORDED, bytes_text, clean_text, count_text, time_text
from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object
from fvc_lib.services.config import DEFAULTS, OF_MODEL, meaning
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import REJECTED, SCORES, VIDEO_FRAMES
from fvc_lib.services.tasks import STAGES

MOST_VIDEOS = 50_000  # in the report's table; a row takes some 150 bytes
PAGE_ROWS = 50  # rows of the table that are shown at once
# Columns of the table of all videos: name in the script, heading, and CSS class.
_VIDEO_COLUMNS = (
    ("path", "Video", "path"), ("label", "Label", "label"), ("right", "Decided", "right-or-wrong"),
    ("score", "Score", "number score"), ("spread", "Spread", "number spread"),
    ("threshold", "Threshold", "number threshold"), ("fold", "Fold", "number fold"), ("group", "Group", "group"),
)  # fmt: skip
_PARTIAL = ".partial"
# Stages in the order of the report: results first, then the steps that led to them.
_SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))
_HEADS = ("Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory")


@dataclass(frozen=True)
class NotebookHtml:
    """An executed notebook as HTML, with counts of its figures and cells.

    Attributes:
        title: the first heading, and the fold if the file name has one, as plain text.
        file_name: name of the file, plain text.
        body: HTML of all cells. Links are relative to the run's folder.
        num_figures: number of figures in ``body``.
        error: name and message of the first error, plain text. Empty: none.
        num_never_ran: number of code cells that were not reached.
        num_code_cells: number of code cells that are not empty.
        says_end: whether a cell of ``body`` says how the notebook ended.
    """

    title: str
    file_name: str
    body: Markup
    num_figures: int
    error: str = ""
    num_never_ran: int = 0
    num_code_cells: int = 0
    says_end: bool = False


@dataclass(frozen=True)
class Section:
    """One section of a report: the executed notebook of a stage, and how the stage went.

    Attributes:
        key: name of the stage and fold, such as ``04_fold_training_fold_2``.
        notebook: the rendered notebook.
        stage: entry of the stage in the run's status: state, times, memory and error. Empty if there is none.
    """

    key: str
    notebook: NotebookHtml
    stage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alarm(self) -> str:
        """Sentences on the error of the notebook and on its cells that never ran. Empty if it ran to its end."""
        notebook, stage = self.notebook, self.stage
        has_failed = stage.get("state") in ("failed", "interrupted")
        if not notebook.num_never_ran and not notebook.error and not has_failed:
            return ""
        error = as_mapping(stage.get("error"))
        recorded = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
        cells = f"{count_text(notebook.num_never_ran, 'code cell')} of {notebook.num_code_cells} never ran"
        why = str(notebook.error or recorded or "it did not come to its end")
        parts = [cells] if notebook.says_end else [why[:1].upper() + why[1:], cells, stage.get("advice") or ""]
        sentences = [f"{str(part).rstrip('.')}." for part in parts if part]
        return clean_text(" ".join(sentences))

    @property
    def facts(self) -> str:
        """Facts about the stage as one line of text: notebook file, start, duration, peak memory, host and job."""
        stage = self.stage
        known = {
            "started": time_text(str(stage.get("started_utc") or "")),
            "duration": wording.duration_text(as_number(stage.get("duration_seconds"))),
            "peak memory": bytes_text(as_number(stage.get("peak_rss_bytes"))),
            "host": stage.get("host"),
            "job id": stage.get("job_id"),
        }
        facts = [f"{name} {value}" for name, value in known.items() if value and value != NOT_RECORDED]
        return clean_text(" · ".join([self.notebook.file_name, *facts]))


def write_run_report(run: RunPaths) -> None:
    """Write the report of a run, ``report.html``, from the executed notebooks that its stages have left so far.

    If a stage and fold has several notebooks, the newest is shown. If there is no notebook, no file is written.

    Raises:
        OSError: the file cannot be written.
    """
    newest_last = sorted(run.notebooks.glob("[!.]*.ipynb"), key=lambda path: path.stat().st_mtime_ns)
    records = {path.stem.removesuffix(_PARTIAL): path for path in newest_last}
    if not records:
        return
    headline = headlines.run_headline(run)
    stages = run_status(run)["stages"]
    notes = list(headline.notes)
    sections: list[Section] = []
    # Records that did not end come first. The others are in the order of their stages.
    order = {
        key: (not path.stem.endswith(_PARTIAL), [not key.startswith(stage) for stage in _SECTION_ORDER], key)
        for key, path in records.items()
    }
    for key in sorted(records, key=order.__getitem__):
        path = records[key]
        try:
            notebook = render_notebook(path, f"s{len(sections) + 1}", in_report=True)
        except DataError as error:
            notes.append(f"A record cannot be shown. {error}")
            continue
        sections.append(Section(path_to_text(key), notebook, as_mapping(stages.get(key))))
    audit = () if headline.earlier else audit_facts(run)
    memory = memory_facts(run_memory(memory_samples([run]), memory_events([run])))
    facts = {
        "Corpus": headline.corpus or NOT_RECORDED,
        "Protocol": headline.protocol,
        **dict(audit),
        "Model": headline.model or NOT_RECORDED,
        "Experiment": headline.experiment,
        "State": headline.state or NOT_RECORDED,
        "Started": time_text(headline.started_utc),
        "Duration": wording.duration_text(headline.duration_seconds),
        **dict(memory or [("Peak memory", bytes_text(headline.peak_rss_bytes))]),
    }
    known_facts = {name: value for name, value in facts.items() if value}
    plotly = run.root.parent.parent / PLOTLY_FILE  # one for all runs
    videos = "" if headline.earlier else videos_html(run)
    _write(
        run.report_html, f"FVC {run.run_id}", sections, plotly=plotly, headline=headline, notes=notes, videos=videos,
        provenance=provenance_html(run), parameters=_parameter_rows(run), run_facts=known_facts,
    )  # fmt: skip


def write_report(
    notebooks: Sequence[Path], output: Path, *, title: str, answer: Sequence[str] = (), videos: Markup | str = ""
) -> None:
    """Write an HTML page that works offline, with one section per executed notebook. The first section is open.

    Args:
        notebooks: paths of executed notebooks.
        output: path of the page. plotly.js is written next to it if there are figures.
        title: title of the page, plain text.
        answer: sentences on the main result, shown at the top, plain text.
        videos: HTML of the table of all videos.

    Raises:
        DataError: a notebook is missing or unreadable.
        OSError: the page cannot be written.
    """
    sections = [Section(path.stem, render_notebook(path, f"s{number}")) for number, path in enumerate(notebooks, 1)]
    _write(output, title, sections, plotly=output.with_name(PLOTLY_FILE), answer=answer, videos=videos)


def _write(output: Path, title: str, sections: Sequence[Section], *, plotly: Path, **parts: Any) -> None:
    empty = dict.fromkeys(("headline", "notes", "answer", "videos", "parameters", "provenance", "run_facts"), ())
    body = render("report.html", title=title, sections=sections, **empty | parts)
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.js", "videos.js")]
    has_figures = any(section.notebook.num_figures for section in sections)
    used = scripts if parts.get("videos") else scripts[:1]
    write_page(output, title, body, used, plotly=plotly if has_figures else None)


def videos_html(run: RunPaths) -> Markup | str:
    """Return an HTML table of all tested videos of ``run``, with scores and decisions.

    Without tested videos, return only notes on tables that could not be read, or an empty text. If there are more than
    ``MOST_VIDEOS`` videos, only the first are shown, and a note says so.
    """
    stored = read_tables([("", run.scores)], SCORES)
    pictured = read_tables([("", run.video_frames)], VIDEO_FRAMES)
    notes = [*stored.notes, *pictured.notes]
    if stored.frame.is_empty():
        return Markup("").join(Markup('<p class="under">{}</p>').format(note) for note in notes)
    shown = stored.frame.head(MOST_VIDEOS)
    if shown.height < stored.frame.height:
        notes.append(
            f"The first {shown.height:,} of {stored.frame.height:,} videos; tables/scores.csv has all of them."
        )
    strips = dict(pictured.frame.select("video_id", "jpeg_base64").iter_rows())
    frames = {place: strips[video] for place, video in enumerate(shown["video_id"]) if video in strips}
    path, group = (pl.col(name).map_elements(clean_text, pl.String) for name in ("path", "group_id"))
    numbers = pl.col("score", "score_std", "threshold").round(3)
    is_right = pl.col("is_right").cast(pl.Int8)
    rows = shown.select(path, "label", numbers, "fold", group, is_right).rows()
    data = json.dumps({"rows": rows, "frames": frames, "page": PAGE_ROWS}, separators=(",", ":"))
    values = {"notes": notes, "num_frames": len(frames), "page_rows": PAGE_ROWS, "columns": _VIDEO_COLUMNS}
    return render("videos.html", data=Markup(data.replace("<", "\\u003c")), **values)


def _parameter_rows(run: RunPaths) -> list[tuple[str, object, object, str, bool]]:
    """Return a tuple ``(name, value, default, meaning, differs)`` for each parameter of a run.

    ``value`` is the value that the run works with. It may come from the model, if the user set none. ``meaning`` is a
    text that explains the parameter. ``differs`` is whether the recorded value is not the default.
    """
    recorded = run_parameters(run)
    shown = effective_parameters(run)
    rows = []
    for name in recorded.keys() & DEFAULTS.keys():
        declared = DEFAULTS[name]
        default = list(declared) if isinstance(declared, tuple) else declared
        usual = "the model's" if name in OF_MODEL and not default else default
        differs = recorded[name] != default
        rows.append((name, shown[name], usual, meaning(name), differs))
    return sorted(rows, key=lambda row: list(DEFAULTS).index(row[0]))


# --- Provenance


def provenance_html(run: RunPaths) -> Markup:
    """Return HTML on how the results of a run were made. Its links are relative to the run's folder.

    It shows the code, versions, machine, attempts (starts of the run) and the commands that repeat the run.
    """
    record = read_json_object(run.run_json)
    attempts = [as_mapping(attempt) for attempt in as_list(record.get("attempts"))]
    first = attempts[0] if attempts else {}
    # Show the machine that computed. An attempt that only submitted jobs ran on a login node.
    worked = next((attempt for attempt in attempts if not attempt.get("submits")), first)
    rows = []
    for number, attempt in enumerate(attempts, start=1):
        changed = as_mapping(attempt.get("differs")) | as_mapping(attempt.get("code_differs"))
        pairs = [f"{name}: {' → '.join(str(value)[:12] for value in as_list(of))}" for name, of in changed.items()]
        host = as_mapping(attempt.get("hardware")).get("host")
        job = as_mapping(attempt.get("slurm")).get("job_id")
        columns = [attempt.get("started_utc"), host, job, attempt.get("command"), "; ".join(pairs)]
        rows.append((number, *(value or "" for value in columns)))
    code = {"command": first.get("command") or NOT_RECORDED, "commit": NOT_RECORDED, **as_mapping(first.get("code"))}
    code |= {f"SHA-256 of {name}": value for name, value in as_mapping(record.get("contents")).items()}
    if run.code_patch.is_file():
        code["patch"] = Markup('<a href="{0}">{0}</a>').format(run.code_patch.name)
    elif code.get("changed_since_commit"):
        code["patch"] = "none was kept"
    commands = [line for line in as_list(record.get("repeat")) if isinstance(line, str)]
    machine = as_mapping(worked.get("hardware")) | as_mapping(worked.get("slurm"))
    recorded = as_mapping(worked.get("versions"))
    return render(
        "provenance.html",
        commands=commands,
        code=_facts(code),
        machine=_facts(machine),
        attempts=rows,
        versions={name: version or "not installed" for name, version in recorded.items()},
    )


def _facts(recorded: Mapping[str, Any]) -> dict[str, object]:
    """Return recorded values for readers, as a dict from readable name to readable value.

    For example, ``memory_bytes`` becomes ``Memory``, and its value becomes ``16.00 GB``. Empty values are left out.
    """
    facts: dict[str, object] = {}
    for name, value in recorded.items():
        shown = value
        if name.endswith("_bytes"):
            shown = bytes_text(as_number(value))
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        if shown:
            words = name.removesuffix("_bytes").replace("_", " ")
            facts[words[:1].upper() + words[1:]] = shown
    return facts


# --- Executed notebooks as HTML
#
# The templates of nbconvert fetch MathJax and widgets from the network and drop plotly's mimetype. So the project's
# template is used, with nbconvert's filters. HTML inside a notebook is reduced to a list of allowed tags.

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
# In the JSON of displays that a report shows elsewhere: the answer as text and figure, and the table of parameters.
_AT_THE_HEAD = (json.dumps(LEAD)[1:-1], f'"meta": "{ANSWER}"', r"Parameter\tValue\tMeaning")
_CONTRACT = "**Headless**"  # in the cell that says what a notebook reads and writes
# A heading of a notebook is one level below that of its section. A table without headings needs no row for them.
_HEADING = re.compile(r"(</?h)([1-5])(?=[ >])")
_deeper = partial(_HEADING.sub, lambda found: f"{found[1]}{int(found[2]) + 1}")
_NO_HEADS = re.compile(r"<thead>\s*<tr>\s*(<th[^>]*>\s*</th>\s*)+</tr>\s*</thead>")
_ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>&#182;</a>')
# Allowed targets of links: the web, the page of a judged video, and a log (relative to the folder of the notebooks).
_LINK = re.compile(
    r"((?i:https?://|mailto:)|#).*|videos/\d{4,}_[\w-]*\.html|\.\./logs/([\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII
)
_HIGHLIGHT = Highlight2HTML(pygments_lexer="ipython3")  # type: ignore[no-untyped-call]  # nbconvert is half typed


def render_notebook(path: Path, prefix: str, *, in_report: bool = False) -> NotebookHtml:
    """Return an executed notebook as HTML. The id of each figure begins with ``prefix``.

    Args:
        path: path of the notebook.
        prefix: beginning of the ids.
        in_report: whether the page is the report of a run. The report itself shows the main result and the parameters,
            so they are left out of the notebook.

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
    for cell in cells:
        tags = cell.get("metadata", {}).get("tags", [])
        if cell.cell_type == "markdown" and _CONTRACT in cell.source:
            cell.setdefault("metadata", {})["tags"] = ["folded"]
        elif in_report and "lead" in tags:
            cell.source = ""
        elif in_report and cell.cell_type == "code":
            is_parameters = not {"parameters", "injected-parameters"}.isdisjoint(tags)
            cell.source = "" if is_parameters else cell.source
            texts = [json.dumps(output.get("data", {})) for output in cell.outputs]
            shown = zip(cell.outputs, texts, strict=True)
            cell.outputs = [output for output, text in shown if not any(mark in text for mark in _AT_THE_HEAD)]
    figures = itertools.count(1)
    body = render(
        "notebook.html", cells=cells, best=_best, plotly=PLOTLY, end_tag=END_TAG, remarks=_REMARKS, clean=clean_html,
        figure=lambda spec, still: figure_html(spec, f"{prefix}-figure-{next(figures)}", still),
        prose=lambda text: clean_html(_NO_HEADS.sub("", _deeper(_ANCHOR.sub("", markdown2html(text))))),
        code=lambda text: Markup(_HIGHLIGHT(text)),
        terminal=lambda text: Markup(ansi2html(text)),  # type: ignore[no-untyped-call]
    )  # fmt: skip
    errors = [f"{out.ename}: {out.evalue}" for cell in code for out in cell.outputs if out.output_type == "error"]
    written = [cell for cell in code if cell.source.strip()]
    states = [cell.get("metadata", {}).get("papermill", {}).get("status") for cell in written]
    tags_of_cells = [cell.get("metadata", {}).get("tags", []) for cell in cells]
    text = str(body).replace('href="../logs/', 'href="logs/')
    return NotebookHtml(
        title=clean_text(title),
        file_name=path_to_text(path.name),
        body=Markup(text),
        num_figures=next(figures) - 1,
        error=clean_text(errors[0] if errors else ""),
        num_never_ran=states.count("pending"),
        num_code_cells=len(written),
        says_end=any(END_TAG in tags for tags in tags_of_cells),
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
            of_fold = f", fold {fold[1]}" if fold else ""
            return heading["title"].replace("`", "") + of_fold
    return name


def _best(data: dict[str, Any]) -> tuple[str, Any]:
    """Return ``(mimetype, content)``: the best form of a notebook output that needs neither kernel nor network.

    A plotly figure is preferred, then SVG, HTML, other pictures, Markdown and plain text. An empty display or a widget
    gives plain text. ``data`` maps the mimetypes of the output to contents.
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
    """Return ``html`` without scripts, style sheets and anything that is loaded from the network.

    Only allowed tags, attributes and targets of links remain. The text within other tags remains too.
    """

    def is_allowed(tag: str, name: str, value: str) -> bool:
        if (tag, name) == ("img", "src"):
            return value.lower().startswith("data:image/")
        return bool(_LINK.fullmatch(value)) if (tag, name) == ("a", "href") else name in _ATTRIBUTES

    protocols, styles = {"http", "https", "mailto", "data"}, CSSSanitizer()
    text = _SCRIPT_OR_STYLE.sub("", html)
    return Markup(bleach.clean(text, _TAGS, is_allowed, protocols, strip=True, css_sanitizer=styles))


def figure_html(spec: dict[str, Any], name: str, still: str = "") -> Markup:
    """Return HTML for a plotly figure from a notebook. The script of the page draws it over its still picture.

    Title and subtitle become text above the figure, because text wraps on a narrow screen. For a figure without data,
    only title and subtitle are returned.

    Args:
        spec: plotly's JSON with ``data`` and ``layout``.
        name: id of the element.
        still: PNG of the figure in base64, for readers without plotly.js. Empty: there is none.
    """
    layout = dict(spec.get("layout") or {})
    data = spec.get("data") or []
    title = as_mapping(layout.pop("title", None))
    legend = as_mapping(layout.get("legend"))
    above = Markup()
    subtitle = as_mapping(title.get("subtitle"))
    for kind, part in (("finding", title), ("basis", subtitle)):
        above += Markup('<p class="{}">{}</p>').format(kind, wording.plain_text(part.get("text") or ""))
    if not data:
        return above
    # Title and subtitle stand above the drawing, so its top margin is for the legend and titles of panels alone.
    has_legend = len(data) > 1 and layout.get("showlegend") is not False
    top = 46 if has_legend or "xaxis2" in layout else 24
    layout |= {"margin": {**as_mapping(layout.get("margin")), "t": top}, "width": None, "autosize": True}
    if legend.get("yref") == "container":  # placed below the title, which is not part of the drawing here
        layout["legend"] = {**legend, "y": 1}
    content = json.dumps({"data": data, "layout": layout}, cls=PlotlyJSONEncoder)
    height = layout.get("height")
    pixels = int(height) if isinstance(height, int | float) and 50 <= height <= 5000 else 400
    alternative = wording.plain_text(title.get("text") or "figure")
    picture = Markup('<img alt="{}" src="data:image/png;base64,{}">').format(alternative, still) if still else ""
    inert = Markup(content.replace("<", "\\u003c"))  # only a "<" could end the element early
    return above + Markup(
        '<div class="figure" id="{0}" style="height:{1}px">{2}</div>'
        '<script type="application/json" id="{0}-data">{3}</script>'
    ).format(name, pixels, picture, inert)


# --- The list of all runs


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html``, the list of all runs in ``runs_dir``, newest first, and return its path.

    Comparisons and ensembles are linked above the list.

    Raises:
        DataError: ``index.html`` exists, but is no list of runs. It is not overwritten.
        OSError: the file cannot be written.
    """
    output = runs_dir / "index.html"
    if output.is_file() and b"<title>FVC runs</title>" not in output.read_bytes()[:4096]:
        raise DataError(f"{output}: is no list of runs, and is left as it is. Move it away, or the runs elsewhere.")
    runs = list_runs(runs_dir)[::-1]
    pages = sorted((*runs_dir.glob("*/comparison*/comparison.html"), *runs_dir.glob("*/*/ensemble.html")))
    links = [(_address(page, runs_dir), path_to_text(str(page.parent.relative_to(runs_dir)))) for page in pages]
    rows = [_row(run, runs_dir, mark) for run, mark in zip(runs, run_marks(runs), strict=True)]
    write_page(output, "FVC runs", render("index.html", heads=_HEADS, rows=rows, links=links))
    return output


def _row(run: RunPaths, runs_dir: Path, mark: Sequence[str]) -> Markup:
    try:
        headline = headlines.run_headline(run)
        report = _address(run.report_html, runs_dir) if run.report_html.is_file() else ""
        title = " · ".join(filter(None, mark))
        about = " · ".join(filter(None, (headline.experiment, time_text(headline.started_utc))))
        damaged = [path.name for path in (run.run_json, run.status_json) if not read_json_object(path)]
        return render(
            "index_row.html", trouble="", headline=headline, report=report, title=title, about=about, damaged=damaged,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  # a damaged or foreign folder must not hide the others
        why = clean_text(f"{type(error).__name__}: {error}")[:500]
        return render("index_row.html", trouble=why, name=path_to_text(run.run_id), columns=len(_HEADS))


def _address(path: Path, runs_dir: Path) -> str:
    return quote(os.fsencode(path.absolute().relative_to(runs_dir.absolute())))


# --- The end of a run in the terminal


def summary_lines(run: RunPaths) -> list[str]:
    """Return a summary of the run for the terminal: scores of the model and controls, peak memory and duration."""
    headline = headlines.run_headline(run)
    state = ", ".join(filter(None, (headline.state or NOT_RECORDED, trial_text(run_parameters(run)))))
    lines = ["", f"{headline.run_id}: {state}", *(f"  {note}" for note in headline.notes)]
    if headline.scores:
        name = clean_text(headline.measure.name).replace("ROC AUC", "ROC-AUC")
        earlier = f", {headline.earlier}" if headline.earlier else ""
        lines += ["", f"  {name} with interval{earlier}"]
        for score in headline.scores:
            remark = "  (what a split by row would claim)" if score.source in DISHONEST_CONTROLS else ""
            interval = wording.interval_text(score.value, score.low, score.high)
            lines.append(f"    {wording.source_name(score.source):<40} {interval}{remark}")
        sentence, leaks = headline.verdict.sentence, headline.measure.leaks
        sentences = (sentence, "" if leaks in sentence else leaks, *headline.cautions)
        lines += ["", *(f"  {text}" for text in sentences if text)]
    lines.append("")
    if headline.num_samples is not None:
        lines.append(f"  {headline.measure.one + 's':<13} {headline.num_samples} in {headline.num_groups} groups")
        rejected = read_tables([("", run.rejected)], REJECTED).frame.height
        files = count_text(rejected, "listed file")
        lines += [f"  not used      {files}: tables/rejected.parquet and the report say why"] * (rejected > 0)
    lines.append(f"  peak memory   {bytes_text(headline.peak_rss_bytes)}")
    return [*lines, f"  duration      {wording.duration_text(headline.duration_seconds)}"]
