"""``runs/index.html``: all runs with their headline numbers; opens from a file manager, needs no server.

Nothing but run folders is needed to write it, whoever left them and in whatever condition. What a finished run's row
says is kept in ``.index_rows.json`` beside it, so that the next index need not read every log again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import polars as pl

from fvc_lib.analysis import headline_measure
from fvc_lib.analysis.headline import ReportHeadline, Score, run_headline, sampled_peaks
from fvc_lib.analysis.record_pages import records_of
from fvc_lib.analysis.records import read_json_object
from fvc_lib.analysis.report import badge, interval_bar, page
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
from fvc_lib.metrics import above_control
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json, write_json, write_text
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths, list_runs

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
    stamps = [sha256_of_json([look, _stamp(run)]) for run in runs]
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


def _stamp(run: RunPaths) -> list[list[int]]:
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
