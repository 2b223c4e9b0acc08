"""``runs/index.html``: all runs with their headline numbers; opens from a file manager, needs no server.

Nothing but run folders is needed to write it, whoever left them and in whatever condition. What a finished run's row
says is kept in ``.index_rows.json`` beside it, so that the next index need not read every log again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import polars as pl
from plotly.offline import get_plotlyjs

import fvc_lib
from fvc_lib.analysis.figures.leakage import audit_facts
from fvc_lib.analysis.memory.findings import run_memory
from fvc_lib.analysis.memory.wording import megabytes_text, memory_facts
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.pages.report import badge, interval_bar, page, provenance_html, write_report
from fvc_lib.analysis.pages.style import SCRIPT
from fvc_lib.analysis.read import headline as headline_measure
from fvc_lib.analysis.read.headline import (
    DISHONEST_CONTROLS,
    ReportHeadline,
    Score,
    run_headline,
    sampled_peaks,
    task_facts,
)
from fvc_lib.analysis.read.records import read_json_object, read_tables, run_status
from fvc_lib.analysis.wording import (
    NOT_RECORDED,
    bytes_text,
    clean_text,
    count_text,
    duration_text,
    interval_text,
    number_text,
    source_name,
    time_text,
)
from fvc_lib.metrics import comparison as above_control
from fvc_lib.services.atomic_files import path_to_text, sha256_of_file, sha256_of_json, write_json, write_text
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import IMAGES, TASK_RESULTS
from fvc_lib.services.tasks import STAGES

# ----------------------------------------------------------------------------------------------------
# Each executed notebook as one offline page with live figures, what became of it said first.


PARTIAL = ".partial"
_FORMAT = 1  # of the pages; another number writes them all anew
_HEAD_CHARACTERS = 4000
_RUN_FOLDER = "../../"  # from notebooks/reports


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

    Returns:
        Why a record could not be shown, by its task's key.

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
    """Write the page of one record, unless the page that is there tells of the same; returns its path.

    Args:
        run: the run.
        key: the task's.
        record: the executed notebook, whole or partial.
        stage: what ``status.json`` holds of the task.

    Raises:
        DataError: the record is missing or is no notebook.
        OSError: the page cannot be written.
    """
    known: Mapping[str, Any] = stage if isinstance(stage, dict) else {}
    output = run.record_html(key)
    stamp = _stamp(record, known)
    if _stamp_of(output) == stamp:
        return output
    rendered = render_notebook(record, "r", run_folder=_RUN_FOLDER)
    body = f'{_top(run, rendered, known)}<main class="record">{_head(rendered, known)}{rendered.body}</main>'
    scripts = (get_plotlyjs(), SCRIPT) if rendered.num_figures else (SCRIPT,)
    write_text(output, page(f"{rendered.title} · {path_to_text(run.run_id)}", body, scripts, stamp=stamp))
    return output


def _stamp(record: Path, stage: Mapping[str, Any]) -> str:
    """Of all that a page shows."""
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


def _top(run: RunPaths, rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    state = clean_text(stage.get("state") or "")
    badge = f'<span class="badge state-{escape(state.split(" ")[0])}">{escape(state)}</span>' if state else ""
    name = escape(clean_text(path_to_text(run.run_id)))
    return (
        f'<header class="top"><p class="title">{escape(rendered.title)}</p>{badge}<span class="number back">'
        f'<a href="{_RUN_FOLDER}report.html">{name}</a> · <a href="{_RUN_FOLDER}../../index.html">all runs</a>'
        "</span></header>"
    )


def _head(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    """What went wrong, if something did, and the task's own facts."""
    return _alarm(rendered, stage) + _facts(rendered, stage)


def _alarm(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    unfinished = rendered.num_never_ran
    ended_badly = stage.get("state") in ("failed", "interrupted") or rendered.error
    if not ended_badly and not unfinished:
        return ""
    missing = f" {count_text(unfinished, 'code cell')} of {rendered.num_code_cells} never ran." if unfinished else ""
    if rendered.tells_its_end:  # right below
        return f'<p class="alarm"><b>This record is not whole.</b>{missing}</p>'
    error = stage.get("error")
    told = f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else stage.get("reason")
    what = clean_text(rendered.error or told or "It did not come to its end.")
    what = what if what.endswith((".", "!", "?")) else f"{what}."
    advice = f" Next setting to try: {clean_text(stage['next_setting'])}." if stage.get("next_setting") else ""
    return f'<p class="alarm"><b>This record is not whole.</b> {escape(what)}{missing}{escape(advice)}</p>'


def _facts(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    seconds, peak = stage.get("duration_seconds"), stage.get("peak_rss_bytes")
    facts = {
        "Record": rendered.file_name,
        "Started": time_text(str(stage["started_utc"])) if stage.get("started_utc") else None,
        "Duration": duration_text(seconds) if isinstance(seconds, int | float) else None,
        "Peak memory": bytes_text(peak) if isinstance(peak, int | float) else None,
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
    words = (clean_text(value if name == "Record" else f"{name.lower()} {value}") for name, value in shown.items())
    return f'<p class="under">{escape(" · ".join(words))}</p>'


_HEADS = (
    "Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory",
    "Records",
)  # fmt: skip
# What reading a damaged or foreign folder can raise; one such run is a row that says so.
_TROUBLE = (
    FvcError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    duckdb.Error, pl.exceptions.PolarsError,
)  # fmt: skip

_AT_ONCE = 50  # runs whose memory logs are read together


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html`` into ``runs_dir`` over all runs found there, newest first, and return its path.

    Raises:
        DataError: there is an ``index.html`` that is no list of runs; it stands.
        OSError: the file cannot be written.
    """
    output = runs_dir / "index.html"
    if output.is_file() and b"<title>FVC runs</title>" not in output.read_bytes()[:4096]:
        raise DataError(f"{output}: is no list of runs, and is left as it is. Move it away, or the runs elsewhere.")
    runs = list_runs(runs_dir)[::-1]
    rows = "".join(_rows(runs, runs_dir))
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    table = (
        f'<table class="runs"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        if runs
        else "<p>No run has been started here yet.</p>"
    )
    body = (
        f'<div class="plain"><p class="lead">{escape(count_text(len(runs), "run"))}</p>'
        '<p class="under">Newest first. A run is above control when its score exceeds that of each control by more '
        f"than both intervals together leave open, unless its leakage audit did not pass.</p>{table}</div>"
    )
    write_text(output, page("FVC runs", body))
    return output


def _rows(runs: Sequence[RunPaths], runs_dir: Path) -> list[str]:
    """A row of each run, from the rows kept where the run is as it was."""
    store = runs_dir / ".index_rows.json"
    look = [sha256_of_file(Path(path)) for path in (__file__, headline_measure.__file__, above_control.__file__)]
    names = [path_to_text(run.root.relative_to(runs_dir.absolute())) for run in runs]
    stamps = [sha256_of_json([look, _index_stamp(run)]) for run in runs]
    kept = _kept(store)
    known = {name: kept[name] for name, stamp in zip(names, stamps, strict=True) if _holds(kept.get(name), stamp)}
    peaks = _sampled_peaks([run for run, name in zip(runs, names, strict=True) if name not in known])
    rows, now = [], {}
    for run, name, stamp in zip(runs, names, stamps, strict=True):
        row, lasting = (known[name][1], True) if name in known else _row_or_trouble(run, runs_dir, peaks.get(run.root))
        rows.append(row)
        if lasting:
            now[name] = [stamp, row]
    if now != kept:
        write_json(store, now)
    return rows


def _holds(entry: object, stamp: str) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp and isinstance(entry[1], str)


def _sampled_peaks(runs: Sequence[RunPaths]) -> dict[Path, int]:
    """By the run's folder; nothing for those whose logs make trouble, which then is their own row's."""
    found: dict[Path, int] = {}
    for start in range(0, len(runs), _AT_ONCE):
        # By id, since ids are what the logs are told apart by: a copy of a run in another experiment comes alone.
        some = {run.run_id: run for run in runs[start : start + _AT_ONCE]}
        try:
            peaks = sampled_peaks(list(some.values()))
        except _TROUBLE:
            continue
        found |= {run.root: peaks[name] for id_, run in some.items() if (name := path_to_text(id_)) in peaks}
    return found


def _kept(store: Path) -> dict[str, Any]:
    try:
        document = json.loads(store.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _index_stamp(run: RunPaths) -> list[list[int]]:
    """When and how large what a finished run's row is made of was; of folders, when something was put in or taken."""
    tables = (run.results, run.task_results, run.leakage_audit)
    files = (run.run_json, run.status_json, run.params_yaml, *tables, run.report_html)
    folders = (run.task_status("").parent, run.reports, run.memory("").parent)
    stamps = []
    for path in (*files, *folders):
        try:
            status = path.stat()
        except OSError:
            stamps.append([0, 0])
        else:
            stamps.append([status.st_mtime_ns, status.st_size])
    return stamps


def _row_or_trouble(run: RunPaths, runs_dir: Path, sampled_peak: int | None) -> tuple[str, bool]:
    """The run's row, and whether it stays true as long as nobody touches the run."""
    try:
        headline = run_headline(run, sampled_peak=sampled_peak)
        return _row(run, headline, runs_dir), headline.state == "done"
    except _TROUBLE as error:
        name = escape(clean_text(path_to_text(run.run_id)))
        why = escape(clean_text(f"{type(error).__name__}: {error}"))[:500]
        told = f'<td><div class="run">{name}</div></td><td colspan="{len(_HEADS) - 1}">'
        return f'<tr>{told}<span class="warning">cannot be read:</span> {why}</td></tr>', False


def _row(run: RunPaths, headline: ReportHeadline, runs_dir: Path) -> str:
    score, best = headline.model_score, headline.verdict.best_control
    counted = headline.num_samples is not None
    data = [count_text(headline.num_samples or 0, headline.measure.one)] if counted else [NOT_RECORDED]
    data += [count_text(headline.num_groups, "group")] if headline.num_groups is not None else []
    bar = interval_bar(score, best.value if best else None) if score else ""
    control = (
        f"{number_text(best.value)}<div class='sub'>{escape(source_name(best.source))}</div>" if best else NOT_RECORDED
    )
    name = f"<div class='run'>{_link(run, headline, runs_dir)}</div><div class='sub'>{_about(headline)}</div>"
    cells = (
        name + _damage(run),
        f"{badge(headline.verdict)}{_state(headline)}",
        _number(score, headline.measure.name),
        bar,
        control,
        "<br>".join(data),
        duration_text(headline.duration_seconds),
        bytes_text(headline.peak_rss_bytes),
        _records(run, runs_dir),
    )
    kinds = ("", "", ' class="number"', ' class="bar"', "", "", "", "", ' class="records"')
    return "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"


def _number(score: Score | None, name: str) -> str:
    number = interval_text(score.value, score.low, score.high) if score else NOT_RECORDED
    return f"{number}<div class='sub'>{escape(clean_text(name))}</div>"


def _link(run: RunPaths, headline: ReportHeadline, runs_dir: Path) -> str:
    name = escape(clean_text(headline.run_id))
    if not run.report_html.is_file():
        return f"{name}<div class='sub'>no report yet</div>"
    return f'<a href="{_address(run.report_html, runs_dir)}">{name}</a>'


def _records(run: RunPaths, runs_dir: Path) -> str:
    """A link to the page of each record: ``01 02 03 04·0 04·1``; one that is not whole is marked."""
    links = []
    for key, record in records_of(run).items():
        output = run.record_html(key)
        stage, _, fold = key.rpartition("_fold_")
        short = key.partition("_")[0] + (f"·{fold}" if stage and fold.isdecimal() else "")
        if output.is_file():
            partial = ' class="warning" title="not whole"' if ".partial" in record.name else ""
            text = escape(clean_text(path_to_text(short)))
            links.append(f'<a{partial} href="{_address(output, runs_dir)}">{text}</a>')
    return " ".join(links)


def _address(path: Path, runs_dir: Path) -> str:
    return escape(quote(os.fsencode(path.relative_to(runs_dir.absolute()))))


def _about(headline: ReportHeadline) -> str:
    parts = (headline.experiment, headline.model, time_text(headline.started_utc))
    return escape(" · ".join(clean_text(part) for part in parts if part))


def _damage(run: RunPaths) -> str:
    """Which of the files that every run has cannot be read."""
    bad = [path.name for path in (run.run_json, run.status_json) if not read_json_object(path)]
    return f"<div class='sub warning'>{' and '.join(bad)} cannot be read</div>" if bad else ""


def _state(headline: ReportHeadline) -> str:
    if headline.state == "done":
        return ""
    state = clean_text(headline.state or NOT_RECORDED)
    return f' <span class="badge state-{escape(state.split(" ")[0])}">{escape(state)}</span>'


# ----------------------------------------------------------------------------------------------------
# What a run leaves for people: its report, the list of all runs, and a short table for the terminal.


# The answer first, then how it came about.
SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))


def write_run_report(run: RunPaths) -> None:
    """Write a page of each record, ``report.html`` from the records so far (a failed one's first), and the index.

    Raises:
        OSError: a page cannot be written.
    """
    unreadable = write_record_pages(run)
    records = {key: path for key, path in records_of(run).items() if key not in unreadable}
    ordered = sorted(records.values(), key=lambda path: _rank(path.name))
    if ordered:
        facts = (*_results_facts(run), *audit_facts(run), *memory_facts(run_memory(run)))
        headline = replace(run_headline(run), more_facts=facts)
        pages = {path: quote(os.fsencode(run.record_html(key).relative_to(run.root))) for key, path in records.items()}
        write_report(
            ordered,
            run.report_html,
            title=f"FVC {run.run_id}",
            headline=headline,
            pages=pages,
            provenance=provenance_html(run),
            notes=[f"A record cannot be shown. {problem}" for problem in unreadable.values()],
        )
    write_runs_index(run.root.parent.parent)


def summary_lines(run: RunPaths) -> list[str]:
    """The run in a few lines of text: the model's number beside its controls, peak memory, duration, report."""
    headline = run_headline(run)
    lines = ["", f"{headline.run_id}: {headline.state or 'not recorded'}"]
    if headline.scores:
        name = clean_text(headline.measure.name).replace("ROC AUC", "ROC-AUC")
        lines += ["", f"  {name} with interval", *(f"    {_score_line(score)}" for score in headline.scores)]
        lines += ["", f"  {headline.verdict.sentence}", *(f"  {caution}" for caution in headline.cautions)]
    told = [f"  {name:<30} {clean_text(text)}" for name, text in _results_facts(run)]
    lines += ["", *told, *([""] if told else []), *_summary_facts(run, headline)]
    if run.report_html.is_file():
        lines.append(f"  report        {run.report_html}")
    return lines


def _results_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """Of a run of a task without folds; a run of task video has none of these results."""
    found = read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
    return tuple((clean_text(name), text) for name, text in task_facts(found.frame))


def _also_tested(run: RunPaths) -> str:
    """Of images that were tested on their numbers only, which the headline's count leaves out."""
    tested = read_tables([("", run.images)], IMAGES).frame.filter(part="test")
    without = tested.filter(pl.col("class_label").is_null())
    if without.is_empty() or without.height == tested.height:
        return ""
    groups = count_text(tested["group_id"].n_unique(), "group")
    return f" with a class; {without.height} more have numbers only: {tested.height} images tested in {groups}"


def _rank(name: str) -> tuple[bool, int, str]:
    position = next((i for i, stage in enumerate(SECTION_ORDER) if name.startswith(stage)), len(SECTION_ORDER))
    return (not name.endswith(".partial.ipynb"), position, name)


def _score_line(score: Score) -> str:
    remark = "  (what a split by row would claim)" if score.source in DISHONEST_CONTROLS else ""
    return f"{source_name(score.source):<40} {interval_text(score.value, score.low, score.high)}{remark}"


def _summary_facts(run: RunPaths, headline: ReportHeadline) -> list[str]:
    counted = headline.num_samples is not None
    what = f"{headline.measure.one}s"
    measuring = run_memory(run).preflight_peak_mb
    before = f"; {megabytes_text(measuring)} while steps were measured before the training" if measuring else ""
    return [
        *(
            [f"  {what:<13} {headline.num_samples} in {headline.num_groups} groups{_also_tested(run)}"]
            if counted
            else []
        ),
        f"  peak memory   {bytes_text(headline.peak_rss_bytes)}{before}",
        f"  duration      {duration_text(headline.duration_seconds)}",
    ]
