"""The offline pages: of a run one for each record and the report over all of them, and the list of all runs.

The templates lie in ``templates``. Whatever they print becomes one clean line and is escaped, unless it is HTML
already. A page embeds its style and scripts and loads nothing from anywhere.
"""

import base64
import functools
import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import jinja2
import polars as pl
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from pygments.formatters.html import HtmlFormatter

import fvc_lib
from fvc_lib.analysis import wording
from fvc_lib.analysis.memory.findings import memory_facts, run_memory
from fvc_lib.analysis.pages.all_videos import PAGE_ROWS, videos_data
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline, Score, Verdict
from fvc_lib.analysis.read.records import read_tables, run_status
from fvc_lib.metrics import paired_difference
from fvc_lib.services.atomic_files import (
    as_mapping,
    path_to_text,
    read_json_object,
    sha256_of_file,
    sha256_of_json,
    write_json,
    write_text,
)
from fvc_lib.services.digests import recorded_files
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import IMAGES, TASK_RESULTS
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
PARTIAL = ".partial"
# Of the report: the answer first, then how it came about.
SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))
_FORMAT = 2  # of the pages; another number writes them all anew
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
        "few_groups_told": headlines.FEW_GROUPS_TOLD,
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
    of_results = () if headline.earlier else (*_results_facts(run), *headlines.audit_facts(run))
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
    """The table of all tested videos; empty where the run has none (``tables/scores.csv``)."""
    data, num_videos, num_frames = videos_data(run)
    if not num_videos:
        return ""
    return render("videos.html", data=data, num_frames=num_frames, page_rows=PAGE_ROWS, columns=_VIDEO_COLUMNS)


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
    return tuple((wording.clean_text(name), text) for name, text in headlines.task_facts(found.frame))


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
    if _stamp_of(output) == stamp:
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


def _stamp_of(page_path: Path) -> str | None:
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
    return render(
        "provenance.html",
        commands=[line for line in _list(record.get("repeat")) if isinstance(line, str)],
        code=_code_facts(run, first) | _content_facts(as_mapping(record.get("contents"))),
        machine=_machine_facts(as_mapping(first.get("hardware")), first),
        attempts=_attempts(attempts),
        jobs=_accounting(run),
        versions=_versions(as_mapping(first.get("versions"))),
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
    trial = headlines.trial_text(headlines.run_parameters(run))
    name = ", ".join(filter(None, (f"{headline.run_id}: {headline.state or 'not recorded'}", trial)))
    lines = ["", name, *(f"  {note}" for note in headline.notes)]
    if headline.scores:
        name = wording.clean_text(headline.measure.name).replace("ROC AUC", "ROC-AUC")
        earlier = f", {headline.earlier}" if headline.earlier else ""
        lines += ["", f"  {name} with interval{earlier}", *(f"    {_score_line(score)}" for score in headline.scores)]
        lines += ["", f"  {headline.verdict.sentence}", *(f"  {caution}" for caution in headline.cautions)]
    facts = () if headline.earlier else _results_facts(run)
    shown = [f"  {name:<30} {wording.clean_text(text)}" for name, text in facts]
    lines += ["", *shown, *([""] if shown else [])]
    if headline.num_samples is not None:
        counted = f"{headline.num_samples} in {headline.num_groups} groups{_also_tested(run)}"
        lines.append(f"  {headline.measure.one + 's':<13} {counted}")
    measuring = run_memory(run).preflight_peak_mb
    before = f"; {wording.megabytes_text(measuring)} while steps were measured before the training" if measuring else ""
    lines.append(f"  peak memory   {wording.bytes_text(headline.peak_rss_bytes)}{before}")
    lines.append(f"  duration      {wording.duration_text(headline.duration_seconds)}")
    return lines


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


# --- ``runs/index.html``: all runs with their headline numbers; opens from a file manager, needs no server
#
# Nothing but run folders is needed to write it, whoever left them and in whatever condition. What a finished run's row
# says is kept in ``.index_rows.json`` beside it, so that the next index need not read every log again.

_HEADS = (
    "Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory",
    "Records",
)  # fmt: skip
# What reading a damaged or foreign folder can raise; one such run is a row that says so.
_TROUBLE = (
    FvcError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    duckdb.Error, pl.exceptions.PolarsError,
)  # fmt: skip


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html`` into ``runs_dir`` over all runs found there, newest first, and return its path.

    Runs of an experiment that has a comparison stand together below a link to it, told apart among themselves.

    Raises:
        DataError: there is an ``index.html`` that is no list of runs; it stands.
        OSError: the file cannot be written.
    """
    output = runs_dir / "index.html"
    if output.is_file() and b"<title>FVC runs</title>" not in output.read_bytes()[:4096]:
        raise DataError(f"{output}: is no list of runs, and is left as it is. Move it away, or the runs elsewhere.")
    runs = list_runs(runs_dir)[::-1]
    pages = {
        each: sorted((runs_dir / each).glob("comparison*/comparison.html")) for each in {r.experiment for r in runs}
    }
    parts: dict[str, list[RunPaths]] = {}  # in the order of the newest run of each
    for run in runs:
        parts.setdefault(run.experiment if pages[run.experiment] else "", []).append(run)
    rows = iter(_rows([run for part in parts.values() for run in part], list(parts.values()), runs_dir))
    blocks = [
        {
            "experiment": path_to_text(experiment),
            "comparisons": [_address(path.absolute(), runs_dir) for path in pages.get(experiment, ())],
            "rows": [Markup(next(rows)) for _ in part],
        }
        for experiment, part in parts.items()
    ]
    write_text(output, page("FVC runs", render("index.html", heads=_HEADS, num_runs=len(runs), blocks=blocks)))
    return output


def _rows(runs: Sequence[RunPaths], parts: Sequence[Sequence[RunPaths]], runs_dir: Path) -> list[str]:
    """A row of each run, from the rows kept where the run is as it was; each of ``parts`` has marks of its own."""
    store = runs_dir / ".index_rows.json"
    sources = (__file__, headlines.__file__, paired_difference.__file__, TEMPLATES / "index_row.html")
    look = [sha256_of_file(Path(path)) for path in sources]
    stored = read_json_object(store)
    rows, now = [], {}
    marks = [mark for part in parts for mark in headlines.run_marks(part)]
    for run, mark in zip(runs, marks, strict=True):
        name = path_to_text(run.root.relative_to(runs_dir.absolute()))
        stamp = sha256_of_json([look, mark, _index_stamp(run)])
        entry = stored.get(name)
        if isinstance(entry, list) and entry[:1] == [stamp]:
            row, lasting = str(entry[1]), True
        else:
            row, lasting = _row_or_trouble(run, runs_dir, mark)
        rows.append(row)
        if lasting:
            now[name] = [stamp, row]
    if now != stored:
        write_json(store, now)
    return rows


def _index_stamp(run: RunPaths) -> list[list[int]]:
    """When and how large what a finished run's row is made of was; of folders, when something was put in or taken."""
    tables = (run.results, run.task_results, run.leakage_audit)
    files = (run.run_json, run.status_json, run.params_yaml, *tables, run.report_html)
    folders = (run.task_status("").parent, run.reports, run.memory("").parent)
    return [_mark(path) for path in (*files, *folders, *recorded_files(run.root))]


def _mark(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # not there, gone this moment, or another user's
        return [0, 0]
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]


def _row_or_trouble(run: RunPaths, runs_dir: Path, mark: Sequence[str]) -> tuple[str, bool]:
    """The run's row, and whether it stays true as long as nobody touches the run."""
    try:
        headline = headlines.run_headline(run)
        return _row(run, headline, runs_dir, mark), headline.state == "done"
    except _TROUBLE as error:
        why = wording.clean_text(f"{type(error).__name__}: {error}")[:500]
        return render("index_row.html", trouble=why, name=path_to_text(run.run_id), columns=len(_HEADS)), False


def _row(run: RunPaths, headline: ReportHeadline, runs_dir: Path, mark: Sequence[str]) -> str:
    return render(
        "index_row.html",
        trouble="",
        headline=headline,
        report=_address(run.report_html, runs_dir) if run.report_html.is_file() else "",
        title=" · ".join(filter(None, mark)),
        about=" · ".join(filter(None, (headline.experiment, wording.time_text(headline.started_utc)))),
        damaged=[path.name for path in (run.run_json, run.status_json) if not read_json_object(path)],
        records=_records(run, runs_dir),
    )


def _records(run: RunPaths, runs_dir: Path) -> list[tuple[str, str, bool]]:
    """Name, address and whether it is partial of each record's page: ``01 02 03 04·0 04·1``."""
    links = []
    for key, record in records_of(run).items():
        output = run.record_html(key)
        stage, _, fold = key.rpartition("_fold_")
        short = key.partition("_")[0] + (f"·{fold}" if stage and fold.isdecimal() else "")
        if output.is_file():
            links.append((path_to_text(short), _address(output, runs_dir), PARTIAL in record.name))
    return links


def _address(path: Path, runs_dir: Path) -> str:
    return quote(os.fsencode(path.relative_to(runs_dir.absolute())))
