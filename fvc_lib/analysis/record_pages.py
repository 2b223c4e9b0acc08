"""Each executed notebook as one offline page with live figures, what became of it said first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

import fvc_lib
from fvc_lib.analysis.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.page_style import SCRIPT
from fvc_lib.analysis.report import page
from fvc_lib.analysis.run_state import run_status
from fvc_lib.analysis.wording import bytes_text, clean_text, count_text, duration_text, time_text
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

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
