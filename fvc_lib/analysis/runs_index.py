"""``runs/index.html``: all runs with their headline numbers; opens from a file manager, needs no server."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from fvc_lib.analysis.headline import ReportHeadline, run_headline
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
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.run_paths import RunPaths, list_runs


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html`` into ``runs_dir`` over all runs found there, newest first, and return its path."""
    runs = list_runs(runs_dir)[::-1]
    rows = "".join(_row(run, run_headline(run), runs_dir) for run in runs)
    heads = (
        "Run",
        "Standing",
        "ROC AUC [interval]",
        "0 · chance · 1",
        "Best control",
        "Data",
        "Duration",
        "Peak memory",
    )
    table = (
        f'<table class="runs"><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
        if runs
        else "<p>No run has been started here yet.</p>"
    )
    body = (
        f'<div class="plain"><p class="lead">{escape(count_text(len(runs), "run"))}</p>'
        '<p class="under">Newest first. A run is above control when its AUC lies above its best control\'s interval '
        f"and its own interval above that control's value.</p>{table}</div>"
    )
    output = runs_dir / "index.html"
    write_text(output, page("FVC runs", body))
    return output


def _row(run: RunPaths, headline: ReportHeadline, runs_dir: Path) -> str:
    score, best = headline.model_score, headline.verdict.best_control
    data = [count_text(headline.num_videos, "video")] if headline.num_videos is not None else [NOT_RECORDED]
    data += [count_text(headline.num_groups, "group")] if headline.num_groups is not None else []
    bar = interval_bar(score, best.value if best else None) if score else ""
    control = (
        f"{number_text(best.value)}<div class='sub'>{escape(source_name(best.source))}</div>" if best else NOT_RECORDED
    )
    cells = (
        f"<div class='run'>{_link(run, headline, runs_dir)}</div><div class='sub'>{_about(headline)}</div>",
        f"{badge(headline.verdict)}{_state(headline)}",
        interval_text(score.value, score.low, score.high) if score else NOT_RECORDED,
        bar,
        control,
        "<br>".join(data),
        duration_text(headline.duration_seconds),
        bytes_text(headline.peak_rss_bytes),
    )
    kinds = ("", "", ' class="number"', ' class="bar"', "", "", "", "")
    return "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"


def _link(run: RunPaths, headline: ReportHeadline, runs_dir: Path) -> str:
    name = escape(clean_text(headline.run_id))
    if not run.report_html.is_file():
        return f"{name}<div class='sub'>no report yet</div>"
    relative = run.report_html.relative_to(runs_dir.absolute())
    return f'<a href="{escape(quote(os.fsencode(relative)))}">{name}</a>'


def _about(headline: ReportHeadline) -> str:
    parts = (headline.experiment, headline.model, time_text(headline.started_utc))
    return escape(" · ".join(clean_text(part) for part in parts if part))


def _state(headline: ReportHeadline) -> str:
    if headline.state == "done":
        return ""
    state = clean_text(headline.state or NOT_RECORDED)
    return f' <span class="badge state-{escape(state)}">{escape(state)}</span>'
