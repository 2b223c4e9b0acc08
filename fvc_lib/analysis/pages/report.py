"""The offline pages: of a run one for each record and the report over all of them.

The templates lie in ``templates``. Whatever they print becomes one clean line and is escaped, unless it is HTML
already. A page embeds its style and scripts and loads nothing from anywhere.
"""

import base64
import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import polars as pl
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from pygments.formatters.html import HtmlFormatter

import fvc_lib
from fvc_lib.analysis import wording
from fvc_lib.analysis.memory.findings import memory_facts, run_memory
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.cautions import audit_facts
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline, Score, Verdict
from fvc_lib.analysis.read.naming import run_parameters, trial_text
from fvc_lib.analysis.read.records import read_tables, run_status
from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object, sha256_of_json, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, LEFT_OUT, PROTOCOL, REJECTED, SCORES, TASK_RESULTS, VIDEO_FRAMES
from fvc_lib.services.tasks import STAGES

TEMPLATES = Path(__file__).with_name("templates")
SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")
VIDEOS_SCRIPT = (TEMPLATES / "videos.js").read_text(encoding="utf-8")
# Of the table of all videos: name in the script, heading, class
_VIDEO_COLUMNS = (
    ("path", "Video", "path"), ("label", "Label", "label"), ("right", "Decided", "right-or-wrong"),
    ("score", "Score", "number score"), ("spread", "Spread", "number spread"),
    ("threshold", "Threshold", "number threshold"), ("fold", "Fold", "number fold"), ("group", "Group", "group"),
)  # fmt: skip
_MOST_TABLE_BYTES = 8_000_000  # of the table of all videos; with figures a report stays under 20 MB
PAGE_ROWS = 50  # at once; a browser of a phone turns over 10,000 rows in a moment, and lays out 50
PARTIAL = ".partial"
_FACTS = frozenset({("video_to_text", "recall"), ("captions", "content_word_recall")})
_MOST_FACTS = 6
# Of the report: the answer first, then how it came about.
SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))
_FORMAT = 3  # of the pages; another number writes them all anew
_HEAD_CHARACTERS = 4000
_RUN_FOLDER = "../../"  # from notebooks/reports


# --- Templates


def render(template: str, **values: object) -> Markup:
    """HTML of ``template`` with ``values``."""
    return Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else wording.clean_text(value),
    )
    environment.filters |= {
        "interval": lambda score: wording.interval_text(score.value, score.low, score.high),
        "number": wording.number_text, "bytes": wording.bytes_text, "duration": wording.duration_text,
        "source_name": wording.source_name, "count": wording.count_text, "short": _short,
    }  # fmt: skip
    environment.globals |= {
        "interval_bar": interval_bar, "standing_class": standing_class, "dishonest": DISHONEST_CONTROLS,
    }  # fmt: skip
    return environment


def page(title: str, body: Markup, scripts: tuple[str, ...] = (), *, stamp: str = "") -> str:
    """A whole HTML document with style and ``scripts`` embedded, all else shut out, and ``stamp`` in its head."""
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    style += str(HtmlFormatter(style="default").get_style_defs(".highlight"))
    return render(
        "page.html",
        title=title,
        body=body,
        scripts=[Markup(text) for text in scripts],
        stamp=stamp,
        policy=content_policy(scripts),
        style=Markup(style),
    )


def content_policy(scripts: tuple[str, ...]) -> str:
    """A Content-Security-Policy that runs exactly ``scripts`` and loads nothing from any network."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def standing_class(verdict: Verdict) -> str:
    """The class of CSS for a verdict's colour."""
    return {"above control": "above", "not above control": "below"}.get(verdict.standing, "")


def interval_bar(score: Score, control: float | None = None, color: str = "#1b2a41") -> Markup:
    """A small drawing of a value with its interval on [0, 1], what is outside at its edge; a mark for the control."""
    if score.value is None or not math.isfinite(score.value):
        return Markup()
    low, high = (_on_scale(score.value if end is None else end) for end in (score.low, score.high))
    marks = '<line x1="50%" x2="50%" y1="2" y2="18" stroke="#c9cdd2" stroke-dasharray="2 2"/>'
    marks += '<line x1="0" x2="100%" y1="10" y2="10" stroke="#e3e6ea"/>'
    if control is not None:
        place = f"{_on_scale(control):.2%}"
        marks += f'<line x1="{place}" x2="{place}" y1="4" y2="16" stroke="#8a8f98" stroke-width="3"/>'
    marks += f'<line x1="{low:.2%}" x2="{high:.2%}" y1="10" y2="10" stroke="{color}" stroke-width="2.5"/>'
    marks += f'<circle cx="{_on_scale(score.value):.2%}" cy="10" r="4.5" fill="{color}"/>'
    text = f"{wording.interval_text(score.value, score.low, score.high)} on a scale from 0 to 1"
    # Of numbers alone.
    return Markup(f'<svg role="img" aria-label="{text}" overflow="visible">{marks}</svg>')


def _on_scale(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _short(title: str) -> str:
    """``Fold training, fold 2`` of ``Fold training: can a network tell fakes it has never seen?, fold 2``."""
    name, _, rest = title.partition(": ")
    fold = re.search(r", fold \d+$", rest)
    return name + (fold[0] if fold else "")


# --- The report


def write_run_report(run: RunPaths) -> None:
    """Write a page of each record, and ``report.html`` from the records so far, a failed one's first (``OSError``)."""
    unreadable = write_record_pages(run)
    records = {key: path for key, path in records_of(run).items() if key not in unreadable}
    if not records:
        return
    headline = headlines.run_headline(run)
    of_results = () if headline.earlier else (*_results_facts(run), *audit_facts(run))
    write_report(
        sorted(records.values(), key=lambda path: _rank(path.name)),
        run.report_html,
        title=f"FVC {run.run_id}",
        headline=replace(headline, more_facts=(*of_results, *memory_facts(run_memory(run)))),
        pages={path: quote(os.fsencode(run.record_html(key).relative_to(run.root))) for key, path in records.items()},
        videos="" if headline.earlier else videos_html(run),
        provenance=provenance_html(run),
        notes=[*headline.notes, *(f"A record cannot be shown. {problem}" for problem in unreadable.values())],
    )


def write_report(
    notebooks: Sequence[Path],
    output: Path,
    *,
    title: str,
    headline: ReportHeadline | None = None,
    pages: Mapping[Path, str] | None = None,
    videos: Markup | str = "",
    provenance: Markup | str = "",
    notes: Sequence[str] = (),
    answer: Sequence[str] = (),
) -> None:
    """Write ``output``: one HTML file with everything in it that opens without a network or a server.

    Executed notebooks come in the order given, the first one open, each with a link to its own page in ``pages``;
    without a headline the head is ``title`` alone; ``videos`` and ``provenance`` are HTML, ``notes`` plain sentences
    shown first, then those of ``answer``, where there is no headline.

    Raises:
        DataError: a notebook is missing or unreadable.
    """
    rendered = [render_notebook(path, f"s{number}", run_folder="") for number, path in enumerate(notebooks, start=1)]
    sections = [(each, (pages or {}).get(path)) for path, each in zip(notebooks, rendered, strict=True)]
    facts = _run_facts(headline) if headline else {}
    body = render(
        "report.html", title=title, headline=headline, sections=sections, run_facts=facts, provenance=provenance,
        notes=notes, answer=answer, videos=videos,
    )  # fmt: skip
    # plotly.js is by far the largest part, so a page without figures goes without it.
    plotly = [get_plotlyjs()] if any(each.num_figures for each in rendered) else []
    write_text(output, page(title, body, (*plotly, SCRIPT, *([VIDEOS_SCRIPT] if videos else []))))


def videos_html(run: RunPaths) -> Markup | str:
    """The table of all tested videos; empty where the run has none (``tables/scores.csv``); of very many the first."""
    data, num_shown, num_videos, num_frames, notes = _videos_data(run)
    if not num_videos:
        return Markup("").join(Markup('<p class="under">{}</p>').format(note) for note in notes)
    if num_shown < num_videos:
        told = f"These are the first {num_shown:,} of {num_videos:,} videos; tables/scores.csv has all of them."
        notes = (*notes, told)
    return render(
        "videos.html", notes=notes, data=data, num_frames=num_frames, page_rows=PAGE_ROWS, columns=_VIDEO_COLUMNS
    )


def _videos_data(run: RunPaths) -> tuple[Markup, int, int, int, tuple[str, ...]]:
    """JSON of the run's scores for the page's script, of how many of how many videos, and how many of them have frames.

    It is of the first videos, as many as ``_MOST_TABLE_BYTES`` hold. Empty, and 0 three times, where there are no
    scores (``tables/scores.csv``) or they cannot be read. Behind them what is to be said of tables that cannot be read.
    """
    found = read_tables([("", run.scores)], SCORES)
    scores = found.frame
    if scores.is_empty():
        return Markup(), 0, 0, 0, found.notes
    pictured = read_tables([("", run.video_frames)], VIDEO_FRAMES)
    frames = pictured.frame
    strips = dict(frames.select("video_id", "jpeg_base64").iter_rows())
    numbers = [pl.col(name).round(4) for name in ("score", "score_std", "threshold")]
    shown = scores.select("path", "label", *numbers, "fold", "group_id", "is_right", "video_id")
    rows: list[str] = []
    pictures, size = {}, 0
    for place, (path, *values, group, is_right, video_id) in enumerate(shown.iter_rows()):
        row = [wording.clean_text(path), *values, wording.clean_text(group), int(is_right)]
        rows.append(json.dumps(row, separators=(",", ":")))
        size += len(rows[-1]) + 1
        if size > _MOST_TABLE_BYTES:
            rows.pop()
            break
        if video_id in strips:
            pictures[place] = strips[video_id]
    others = json.dumps({"frames": pictures, "page": PAGE_ROWS}, separators=(",", ":"))
    text = f'{{"rows":[{",".join(rows)}],{others[1:]}'
    # Within a script element, whatever a path is called.
    return (
        Markup(text.replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")),
        len(rows),
        scores.height,
        len(pictures),
        pictured.notes,
    )


def _run_facts(headline: ReportHeadline) -> dict[str, str]:
    return {
        "Run": headline.run_id,
        "Experiment": headline.experiment,
        "State": headline.state or wording.NOT_RECORDED,
        "Model": headline.model or wording.NOT_RECORDED,
        **({"Protocol": headline.protocol} if headline.protocol else {}),
        "Corpus": headline.corpus or wording.NOT_RECORDED,
        "Started": wording.time_text(headline.started_utc),
        "Duration": wording.duration_text(headline.duration_seconds),
        "Peak memory": wording.bytes_text(headline.peak_rss_bytes),
        **dict(headline.more_facts),
    }


def _results_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    found = read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
    return tuple((wording.clean_text(name), text) for name, text in _task_facts(found.frame))


def _task_facts(results: pl.DataFrame) -> tuple[tuple[str, str], ...]:
    """Names and texts of what else is worth knowing at a glance of ``tables.TASK_RESULTS``."""
    known = {(row["source"], row["subject"], row["metric"]): row for row in results.iter_rows(named=True)}
    facts = []
    targets = [subject for source, subject, metric in known if (source, metric) == ("model", "mae")]
    for subject in targets[:_MOST_FACTS]:
        row, mean = known["model", subject, "mae"], known.get(("mean_predictor", subject, "mae"))
        beside = f" (mean predictor {wording.number_text(mean['value'], 1)})" if mean else ""
        off = f"{wording.number_text(row['value'], 1)} {row['unit']}".strip()
        facts.append((f"{wording.subject_name(subject)} off by", f"{off}{beside}"))
    for (source, subject, metric), row in known.items():
        if source == "model" and (subject, metric.partition("@")[0]) in _FACTS:
            facts.append(
                (f"{wording.metric_name(metric)}, {wording.subject_name(subject)}", wording.number_text(row["value"]))
            )
    return tuple(facts[:_MOST_FACTS])


def _rank(name: str) -> tuple[bool, int, str]:
    position = next((i for i, stage in enumerate(SECTION_ORDER) if name.startswith(stage)), len(SECTION_ORDER))
    return (not name.endswith(".partial.ipynb"), position, name)


# --- A page of each record


def records_of(run: RunPaths) -> dict[str, Path]:
    """The newest record of each task, by the task's key."""
    found: dict[str, Path] = {}
    for path in sorted(run.notebooks.glob("[!.]*.ipynb")):
        key = path.stem.removesuffix(PARTIAL)
        if key not in found or path.stat().st_mtime_ns > found[key].stat().st_mtime_ns:
            found[key] = path
    return found


def write_record_pages(run: RunPaths) -> dict[str, str]:
    """Write ``notebooks/reports/KEY.html`` for every record that has changed since its page was written.

    Returns why a record could not be shown, by its task's key.

    Raises:
        OSError: a page cannot be written.
    """
    stages = run_status(run)["stages"]
    problems = {}
    for key, record in records_of(run).items():
        try:
            write_record_page(run, key, record, stages.get(key))
        except DataError as error:
            problems[key] = str(error)
    return problems


def write_record_page(run: RunPaths, key: str, record: Path, stage: object = None) -> Path:
    """Write the page of the record of task ``key``, unless the one there tells of the same; ``stage`` is its status.

    Raises:
        DataError: the record is missing or is no notebook.
        OSError: the page cannot be written.
    """
    known = as_mapping(stage)
    output = run.record_html(key)
    stamp = _stamp(record, known)
    if stamp_of(output) == stamp:
        return output
    rendered = render_notebook(record, "r", run_folder=_RUN_FOLDER)
    body = render(
        "record.html", rendered=rendered, run_id=path_to_text(run.run_id), run_folder=_RUN_FOLDER,
        state=wording.clean_text(known.get("state") or ""), alarm=_alarm(rendered, known),
        facts=_record_facts(rendered, known),
    )  # fmt: skip
    scripts = (get_plotlyjs(), SCRIPT) if rendered.num_figures else (SCRIPT,)
    write_text(output, page(f"{rendered.title} · {path_to_text(run.run_id)}", body, scripts, stamp=stamp))
    return output


def _stamp(record: Path, stage: Mapping[str, Any]) -> str:
    try:
        status = record.stat()
    except OSError:
        return ""
    return sha256_of_json(
        [_FORMAT, fvc_lib.__version__, status.st_mtime_ns, status.st_size, repr(sorted(stage.items()))]
    )


def stamp_of(page_path: Path) -> str | None:
    """The stamp in a page's head, if it has one."""
    try:
        with page_path.open(encoding="utf-8", errors="replace") as stream:
            head = stream.read(_HEAD_CHARACTERS)
    except OSError:
        return None
    _, found, after = head.partition('<meta name="fvc-stamp" content="')
    return after.partition('"')[0] if found else None


def _alarm(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str | None:
    unfinished = rendered.num_never_ran
    ended_badly = stage.get("state") in ("failed", "interrupted") or rendered.error
    if not ended_badly and not unfinished:
        return None
    cells = f"{wording.count_text(unfinished, 'code cell')} of {rendered.num_code_cells}"
    missing = f" {cells} never ran." if unfinished else ""
    if rendered.tells_its_end:  # right below
        return missing
    error = stage.get("error")
    reason = f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else stage.get("reason")
    what = wording.clean_text(rendered.error or reason or "It did not come to its end.")
    what = what if what.endswith((".", "!", "?")) else f"{what}."
    advice = f" Next setting to try: {wording.clean_text(stage['next_setting'])}." if stage.get("next_setting") else ""
    return f"{what}{missing}{advice}"


def _record_facts(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    seconds, peak = stage.get("duration_seconds"), stage.get("peak_rss_bytes")
    facts = {
        "Record": rendered.file_name,
        "Started": wording.time_text(str(stage["started_utc"])) if stage.get("started_utc") else None,
        "Duration": wording.duration_text(seconds) if isinstance(seconds, int | float) else None,
        "Peak memory": wording.bytes_text(peak) if isinstance(peak, int | float) else None,
        "Attempts": str(stage["attempts"]) if stage.get("attempts") else None,
        "Host": stage.get("host"),
        "SLURM job": stage.get("job_id"),
        "Killed by": stage.get("killed_by"),
        "Last step": stage.get("last_step"),
        "Last metric": stage.get("last_metric"),
    }
    shown = {name: value for name, value in facts.items() if value}
    if stage.get("state") == "done":  # how far it had come is of interest when it did not arrive
        shown = {name: value for name, value in shown.items() if not name.startswith("Last")}
    words = (
        wording.clean_text(value if name == "Record" else f"{name.lower()} {value}") for name, value in shown.items()
    )
    return " · ".join(words)


# --- How a run came about: code, versions, machine, attempts, and the commands that repeat it


def provenance_html(run: RunPaths) -> Markup:
    """The body of "How this came about", for a page in the run's folder. What is not recorded is said to be so."""
    record = read_json_object(run.run_json)
    attempts = [each for each in _list(record.get("attempts")) if isinstance(each, dict)]
    first = attempts[0] if attempts else {}
    worked = next((each for each in attempts if not each.get("submits")), first)  # the login node computed nothing
    return render(
        "provenance.html",
        commands=[line for line in _list(record.get("repeat")) if isinstance(line, str)],
        code=_code_facts(run, first) | _content_facts(as_mapping(record.get("contents"))),
        machine=_machine_facts(as_mapping(worked.get("hardware")), worked),
        attempts=_attempts(attempts),
        jobs=_accounting(run),
        versions=_versions(as_mapping(worked.get("versions"))),
    )


def _code_facts(run: RunPaths, attempt: Mapping[str, Any]) -> dict[str, str]:
    code = as_mapping(attempt.get("code"))
    commit = _text(code.get("commit"))
    code_of = Markup("<code>{}</code>")
    facts = {
        "Command": code_of.format(wording.clean_text(_text(attempt.get("command")) or wording.NOT_RECORDED)),
        "Commit": code_of.format(commit) if commit else wording.NOT_RECORDED,
        "Branch": _text(code.get("branch")),
        "Changed since": _changes(run, code),
        "Not in the patch": "; ".join(filter(None, map(_text, _list(code.get("left_out"))))),
        "Git said": _text(code.get("problem")),
    }
    return {name: value for name, value in facts.items() if value}


def _content_facts(contents: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the user's files and of the weights that the parameters name."""
    named = {name: _text(value) for name, value in contents.items()}
    return {f"SHA-256 of {name}": value.replace("@", ": ") for name, value in named.items() if value}


def _changes(run: RunPaths, code: Mapping[str, Any]) -> str:
    changed = code.get("changed_since_commit")
    if not changed:
        return wording.NOT_RECORDED if changed is None else "nothing: the code is the commit's"
    if not run.code_patch.is_file():
        return Markup('<span class="warning">yes, and no patch was kept</span>')
    name, size = run.code_patch.name, wording.bytes_text(run.code_patch.stat().st_size)
    return Markup('yes: <a href="{}">{}</a>, {}').format(quote(name), name, size)


def _machine_facts(hardware: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, str]:
    slurm = as_mapping(attempt.get("slurm"))
    gpus = [_text(each) or "?" for each in _list(hardware.get("gpus"))]
    threads, cores = _text(hardware.get("omp_num_threads")), hardware.get("cores")
    total, limit = _number(hardware.get("memory_bytes")), _number(hardware.get("memory_limit_bytes"))
    memory = None if total is None else wording.bytes_text(total)
    if total is not None and limit is not None and limit < total:
        memory = f"{memory}, limited to {wording.bytes_text(limit)} by {hardware.get('memory_limit_from')}"
    facts = {
        "Started": wording.time_text(_text(attempt.get("started_utc"))),
        "Host": _text(hardware.get("host")),
        "System": _text(hardware.get("system")),
        "Processor": _text(hardware.get("processor")),
        "Cores": f"{cores}" + (f", OMP_NUM_THREADS={threads}" if threads else "") if cores else None,
        "Memory": memory,
        "Accelerators": ", ".join(gpus) or "none" if "gpus" in hardware else None,
        "SLURM": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in slurm.items()) or None,
    }
    return {name: value for name, value in facts.items() if value}


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, attempt in enumerate(attempts, start=1):
        changed = {**as_mapping(attempt.get("differs")), **as_mapping(attempt.get("code_differs"))}
        differs = [f"{name}: {' → '.join(map(_short_digest, _list(pair)))}" for name, pair in changed.items()]
        rows.append(
            (
                str(number),
                wording.time_text(_text(attempt.get("started_utc"))),
                _text(as_mapping(attempt.get("hardware")).get("host")) or wording.NOT_RECORDED,
                _text(as_mapping(attempt.get("slurm")).get("job_id")) or "",
                _text(attempt.get("command")) or wording.NOT_RECORDED,
                "; ".join(differs) or ("" if number == 1 else "nothing that counts"),
            )
        )
    return rows


def _short_digest(value: object) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text


def _accounting(run: RunPaths) -> list[tuple[str, ...]]:
    """SLURM's own figures beside ours, where the site keeps accounts."""
    accounting = read_json_object(run.slurm / "accounting.json")
    stages = run_status(run)["stages"]
    rows: list[tuple[str, ...]] = []
    for job in (each for each in _list(accounting.get("jobs")) if isinstance(each, dict)):
        task = _text(job.get("task")) or wording.NOT_RECORDED
        took = wording.duration_text(_number(job.get("elapsed_seconds")))
        peaks = (job.get("max_rss_bytes"), as_mapping(stages.get(task)).get("peak_rss_bytes"))
        memory = (wording.bytes_text(_number(peak)) for peak in peaks)
        rows.append((str(job.get("job_id")), task, str(job.get("state")), took, *memory))
    return rows


def _versions(versions: Mapping[str, Any]) -> dict[str, str]:
    shown = {name: _text(value) or "not installed" for name, value in versions.items() if not name.endswith("_build")}
    builds = {name: _text(versions.get(f"{name}_build")) for name in ("python", "torch")}
    return {name: f"{value} ({builds[name]})" if builds.get(name) else value for name, value in shown.items()}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- The end of a run in the terminal


def summary_lines(run: RunPaths) -> list[str]:
    """The run in a few lines of text: the model's number beside its controls, peak memory and duration."""
    headline = headlines.run_headline(run)
    trial = trial_text(run_parameters(run))
    name = ", ".join(filter(None, (f"{headline.run_id}: {headline.state or 'not recorded'}", trial)))
    lines = ["", name, *(f"  {note}" for note in headline.notes)]
    if headline.scores:
        name = wording.clean_text(headline.measure.name).replace("ROC AUC", "ROC-AUC")
        earlier = f", {headline.earlier}" if headline.earlier else ""
        lines += ["", f"  {name} with interval{earlier}", *(f"    {_score_line(score)}" for score in headline.scores)]
        lines += ["", f"  {headline.verdict.sentence}"]
        if headline.measure.leaks not in headline.verdict.sentence:
            lines.append(f"  {headline.measure.leaks}")
        lines += [f"  {caution}" for caution in headline.cautions]
    facts = () if headline.earlier else _results_facts(run)
    shown = [f"  {name:<30} {wording.clean_text(text)}" for name, text in facts]
    lines += ["", *shown, *([""] if shown else [])]
    if headline.num_samples is not None:
        counted = f"{headline.num_samples} in {headline.num_groups} groups{_also_tested(run)}"
        lines.append(f"  {headline.measure.one + 's':<13} {counted}")
        lines += [*_not_used(run), *_unused_clips(run)]
    lines.append(f"  peak memory   {wording.bytes_text(headline.peak_rss_bytes)}")
    lines.append(f"  duration      {wording.duration_text(headline.duration_seconds)}")
    return lines


def _not_used(run: RunPaths) -> list[str]:
    """How many listed files the index left out, and why: whoever gave 43 must not find 38 without a word."""
    rejected = read_tables([("", run.rejected)], REJECTED).frame
    if rejected.is_empty():
        return []
    kinds = ", ".join(
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in Counter(rejected["reason"].sort()).most_common()
    )
    told = wording.count_text(rejected.height, "listed file was", "listed files were")
    return [f"  {'not used':<13} {told} left out ({kinds}): tables/rejected.parquet and the report say why"]


def _unused_clips(run: RunPaths) -> list[str]:
    """Of how many videos clips were made that no training of the run's protocol takes."""
    protocol = read_tables([("", run.protocol)], PROTOCOL).frame
    used = protocol.filter(pl.col("part") != LEFT_OUT)["video_id"].n_unique()
    unused = protocol["video_id"].n_unique() - used
    if not unused:
        return []
    told = wording.count_text(unused, "more takes", "more take")
    return [f"  {'':<13} {told} no part in this protocol; their clips were made as well, for a fork to another one"]


def _also_tested(run: RunPaths) -> str:
    """Of images that were tested on their numbers only, which the headline's count leaves out."""
    tested = read_tables([("", run.images)], IMAGES).frame.filter(part="test")
    without = tested.filter(pl.col("class_label").is_null())
    if without.is_empty() or without.height == tested.height:
        return ""
    groups = wording.count_text(tested["group_id"].n_unique(), "group")
    return f" with a class; {without.height} more have numbers only: {tested.height} images tested in {groups}"


def _score_line(score: Score) -> str:
    remark = "  (what a split by row would claim)" if score.source in DISHONEST_CONTROLS else ""
    return (
        f"{wording.source_name(score.source):<40} {wording.interval_text(score.value, score.low, score.high)}{remark}"
    )
