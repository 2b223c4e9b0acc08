"""Executed notebooks as one offline HTML file: the number, its controls and the verdict first, then the record."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from plotly.offline import get_plotlyjs

from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.pages.style import SCRIPT, content_policy, style_sheet
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline, Score, Verdict
from fvc_lib.analysis.read.records import read_json_object, run_status
from fvc_lib.analysis.wording import (
    NOT_RECORDED,
    bytes_text,
    clean_text,
    count_text,
    duration_text,
    interval_text,
    source_name,
    time_text,
)
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.run_paths import RunPaths

STANDING_CLASSES = {"above control": "above", "not above control": "below"}


def write_report(
    notebooks: Sequence[Path],
    output: Path,
    *,
    title: str,
    headline: ReportHeadline | None = None,
    pages: Mapping[Path, str] | None = None,
    provenance: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Write ``output``: one HTML file with everything in it that opens without a network or a server.

    Args:
        notebooks: executed notebooks in the order of their sections, results first. The first section is open.
        output: the file, replaced atomically.
        title: plain text.
        headline: of the run; without one (a notebook on its own) the head is the title alone.
        pages: where the page of each notebook alone is, as seen from ``output``.
        provenance: HTML of a last section on how the run came about.
        notes: plain sentences that are shown first.

    Raises:
        DataError: a notebook is missing or unreadable.
    """
    pages = pages or {}
    sections = [render_notebook(path, f"s{number}", run_folder="") for number, path in enumerate(notebooks, start=1)]
    contents = "".join(
        _section(section, number, pages.get(path))
        for number, (path, section) in enumerate(zip(notebooks, sections, strict=True), start=1)
    )
    told = "".join(f'<p class="alarm">{escape(clean_text(note))}</p>' for note in notes)
    body = (
        f"{_top(title, headline)}<div class='page'>{_navigation(sections, bool(provenance))}"
        f"<main>{told}{_hero(headline) if headline else ''}{contents}{_last_section(provenance)}</main></div>"
    )
    # plotly.js is by far the largest part, so a page without figures goes without it.
    scripts = (get_plotlyjs(), SCRIPT) if any(s.num_figures for s in sections) else (SCRIPT,)
    write_text(output, page(title, body, scripts))


def page(title: str, body: str, scripts: tuple[str, ...] = (), *, stamp: str = "") -> str:
    """A whole HTML document around ``body``, with the style and ``scripts`` embedded and everything else shut out.

    ``stamp`` is written into its head, to be found there when the page might have to be written again.
    """
    embedded = "".join(f"<script>{text}</script>" for text in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'{f"""<meta name="fvc-stamp" content="{escape(stamp)}">""" if stamp else ""}'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(content_policy(scripts))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An empty icon of our own, or the browser would ask for one.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(clean_text(title))}</title><style>{style_sheet()}</style></head>\n"
        f"<body>{body}{embedded}</body></html>\n"
    )


def badge(verdict: Verdict) -> str:
    """The verdict's word in its colour."""
    return f'<span class="badge {STANDING_CLASSES.get(verdict.standing, "")}">{escape(verdict.standing)}</span>'


def interval_bar(score: Score, control: float | None = None, color: str = "#1b2a41") -> str:
    """A small drawing of a value with its interval on [0, 1]: a tick at 0.5, a grey mark where the control stands.

    What lies outside (an R² may) is drawn at the edge.
    """
    if score.value is None or not math.isfinite(score.value):
        return ""
    low, high = (_on_scale(score.value if end is None else end) for end in (score.low, score.high))
    marks = '<line x1="50%" x2="50%" y1="2" y2="18" stroke="#c9cdd2" stroke-dasharray="2 2"/>'
    marks += '<line x1="0" x2="100%" y1="10" y2="10" stroke="#e3e6ea"/>'
    if control is not None:
        place = f"{_on_scale(control):.2%}"
        marks += f'<line x1="{place}" x2="{place}" y1="4" y2="16" stroke="#8a8f98" stroke-width="3"/>'
    marks += f'<line x1="{low:.2%}" x2="{high:.2%}" y1="10" y2="10" stroke="{color}" stroke-width="2.5"/>'
    marks += f'<circle cx="{_on_scale(score.value):.2%}" cy="10" r="4.5" fill="{color}"/>'
    told = f"{interval_text(score.value, score.low, score.high)} on a scale from 0 to 1"
    return f'<svg role="img" aria-label="{told}" overflow="visible">{marks}</svg>'


def _on_scale(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _top(title: str, headline: ReportHeadline | None) -> str:
    named = f'<p class="title">{escape(clean_text(title))}</p>'
    if headline is None:
        return f'<header class="top">{named}</header>'
    score = headline.model_score
    name = escape(clean_text(headline.measure.name)).replace("ROC AUC", "AUC")
    number = f"{name} <b>{interval_text(score.value, score.low, score.high)}</b>" if score else ""
    return f'<header class="top">{named}{badge(headline.verdict)}<span class="number">{number}</span></header>'


def _navigation(sections: Sequence[NotebookHtml], has_provenance: bool) -> str:
    links = "".join(
        f'<li><a href="#section-{number}"{" class=failed" if section.error else ""}>{escape(_short(section.title))}'
        f"{' (failed)' if section.error else ''}</a></li>"
        for number, section in enumerate(sections, start=1)
    )
    links += '<li><a href="#section-provenance">How this came about</a></li>' if has_provenance else ""
    return (
        f'<nav class="sections" aria-label="Sections"><ol>{links}</ol>'
        f"{_toggle('details.section', 'Open all sections', 'Close all sections')}"
        f"{_toggle('details.code', 'Show all code', 'Hide all code')}</nav>"
    )


def _short(title: str) -> str:
    """``Fold training, fold 2`` of ``Fold training: can a network tell fakes it has never seen?, fold 2``."""
    name, _, rest = title.partition(": ")
    fold = re.search(r", fold \d+$", rest)
    return name + (fold[0] if fold else "")


def _toggle(what: str, closed: str, opened: str) -> str:
    return f'<button data-toggle="{what}" data-off="{closed}" data-on="{opened}">{closed}</button>'


def _hero(headline: ReportHeadline) -> str:
    verdict = headline.verdict
    state = headline.state or NOT_RECORDED
    alarm = "" if state == "done" else _alarm(headline, state)
    return (
        f'{alarm}<p class="lead {STANDING_CLASSES.get(verdict.standing, "")}">{escape(verdict.sentence)}</p>'
        f'<p class="under">{_circumstances(headline)}{"".join(map(_caution, headline.cautions))}</p>'
        f'<div class="hero">{_scores(headline)}{_facts(headline)}</div>'
    )


def _caution(text: str) -> str:
    return f" <strong>{escape(text)}</strong>"


def _alarm(headline: ReportHeadline, state: str) -> str:
    told = f" {clean_text(headline.failure).removesuffix('.')}." if headline.failure else ""
    return f'<p class="alarm"><b>The run is not complete (state: {escape(clean_text(state))}).</b>{escape(told)}</p>'


def _circumstances(headline: ReportHeadline) -> str:
    return escape(clean_text(headline.measure.circumstances(headline.num_samples, headline.num_groups)))


def _scores(headline: ReportHeadline) -> str:
    if not headline.scores:
        return "<p>No score is recorded.</p>"
    rows = "".join(_score_row(score) for score in headline.scores)
    measure = headline.measure
    scale = "0 · 0.5 · 1" if measure.chance is None else f"0 · chance {measure.chance} · 1"
    return (
        f'<table class="scores"><thead><tr><th>Scored by</th><th class="number">{escape(clean_text(measure.name))} '
        f"[interval]</th><th>{scale}</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _score_row(score: Score) -> str:
    model, aside = score.source == "model", score.source in DISHONEST_CONTROLS
    kind = "model" if model else "aside" if aside else ""
    note = " (not an honest split)" if aside else ""
    return (
        f'<tr class="{kind}"><td class="name">{escape(clean_text(source_name(score.source)))}{note}</td>'
        f'<td class="number">{interval_text(score.value, score.low, score.high)}</td>'
        f'<td class="bar">{interval_bar(score, color="#1b2a41" if model else "#8a8f98")}</td></tr>'
    )


def _facts(headline: ReportHeadline) -> str:
    facts = {
        "Run": headline.run_id,
        "Experiment": headline.experiment,
        "State": headline.state or NOT_RECORDED,
        "Model": headline.model or NOT_RECORDED,
        "Started": time_text(headline.started_utc),
        "Duration": duration_text(headline.duration_seconds),
        "Peak memory": bytes_text(headline.peak_rss_bytes),
        **dict(headline.more_facts),
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(clean_text(value))}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _section(section: NotebookHtml, number: int, alone: str | None) -> str:
    opened = " open" if number == 1 or section.error else ""
    missing = f" {count_text(section.num_never_ran, 'code cell')} never ran." if section.num_never_ran else ""
    alarm = f'<p class="alarm"><b>A cell failed.</b> {escape(section.error)}{missing}</p>' if section.error else ""
    name = escape(section.file_name)
    link = f'<a href="{escape(alone)}">{name}</a>' if alone else name
    return (
        f'<details class="section" id="section-{number}"{opened}><summary><h2>{escape(section.title)}</h2>'
        f'<span class="file">{link}</span></summary>'
        f'<div class="cells">{alarm}{section.body}</div></details>'
    )


def _last_section(provenance: str) -> str:
    if not provenance:
        return ""
    return (
        '<details class="section" id="section-provenance"><summary><h2>How this came about</h2>'
        f'<span class="file">run.json</span></summary><div class="cells">{provenance}</div></details>'
    )


# ----------------------------------------------------------------------------------------------------
# How a run came about: code, versions, machine, attempts, and the commands that repeat it, as a part of a page.


_NOT_WORTH_A_ROW = frozenset({"python_build", "torch_build"})


def provenance_html(run: RunPaths) -> str:
    """The body of "How this came about", for a page in the run's folder. What is not recorded is said to be so."""
    record = read_json_object(run.run_json)
    attempts = [each for each in _list(record.get("attempts")) if isinstance(each, dict)]
    first = attempts[0] if attempts else {}
    versions, hardware = _mapping(first.get("versions")), _mapping(first.get("hardware"))
    parts = (
        _repeat(record),
        "<h3>Code and machine</h3>",
        (
            f'<div class="two">{_provenance_facts(_code_facts(run, first))}'
            f"{_provenance_facts(_machine_facts(hardware, first))}</div>"
        ),
        _attempts(attempts),
        _accounting(run),
        _versions(versions),
    )
    return "".join(parts)


def _repeat(record: Mapping[str, Any]) -> str:
    commands = [clean_text(line) for line in _list(record.get("repeat")) if isinstance(line, str)]
    if not commands:
        return ""
    text = escape(" &&\n".join(commands))  # what follows a step that failed would run other code
    return (
        "<p>These commands repeat the run, from a checkout of the project:</p>"
        f'<div class="copyable"><pre id="repeat">{text}</pre><button data-copy="repeat">Copy</button></div>'
    )


def _code_facts(run: RunPaths, attempt: Mapping[str, Any]) -> dict[str, str]:
    """Names and HTML."""
    code = _mapping(attempt.get("code"))
    commit = _text(code.get("commit"))
    facts = {"Command": f"<code>{escape(_text(attempt.get('command')) or NOT_RECORDED)}</code>"}
    facts["Commit"] = f"<code>{escape(commit)}</code>" if commit else NOT_RECORDED
    if branch := _text(code.get("branch")):
        facts["Branch"] = escape(branch)
    facts["Changed since"] = _changes(run, code)
    if left_out := [_text(each) for each in _list(code.get("left_out"))]:
        facts["Not in the patch"] = escape("; ".join(filter(None, left_out)))
    if problem := _text(code.get("problem")):
        facts["Git said"] = escape(problem)
    return facts


def _changes(run: RunPaths, code: Mapping[str, Any]) -> str:
    changed = code.get("changed_since_commit")
    if changed is None:
        return NOT_RECORDED
    if not changed:
        return "nothing: the code is the commit's"
    if not run.code_patch.is_file():
        return '<span class="warning">yes, and no patch was kept</span>'
    name = os.fsdecode(run.code_patch.name)
    return f'yes: <a href="{escape(quote(name))}">{escape(name)}</a>, {bytes_text(run.code_patch.stat().st_size)}'


def _machine_facts(hardware: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, str]:
    slurm = _mapping(attempt.get("slurm"))
    gpus = [_text(each) or "?" for each in _list(hardware.get("gpus"))]
    threads = _text(hardware.get("omp_num_threads"))
    cores = hardware.get("cores")
    told = {
        "Started": time_text(_text(attempt.get("started_utc"))),
        "Host": _text(hardware.get("host")),
        "System": _text(hardware.get("system")),
        "Processor": _text(hardware.get("processor")),
        "Cores": f"{cores}" + (f", OMP_NUM_THREADS={threads}" if threads else "") if cores else None,
        "Memory": _memory(hardware),
        "Accelerators": ", ".join(gpus) or "none" if "gpus" in hardware else None,
        "SLURM": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in slurm.items()) or None,
    }
    return {name: escape(clean_text(value)) for name, value in told.items() if value}


def _memory(hardware: Mapping[str, Any]) -> str | None:
    total, limit = _number(hardware.get("memory_bytes")), _number(hardware.get("memory_limit_bytes"))
    if total is None:
        return None
    limited = limit is not None and limit < total
    by = f", limited to {bytes_text(limit)} by {hardware.get('memory_limit_from')}" if limited else ""
    return bytes_text(total) + by


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> str:
    if len(attempts) < 2:
        return ""
    rows = []
    for number, attempt in enumerate(attempts, start=1):
        hardware, slurm = _mapping(attempt.get("hardware")), _mapping(attempt.get("slurm"))
        differs = [f"{name}: {_change(pair)}" for name, pair in _mapping(attempt.get("differs")).items()]
        differs += [f"{name}: {_change(pair)}" for name, pair in _mapping(attempt.get("code_differs")).items()]
        cells = (
            str(number),
            time_text(_text(attempt.get("started_utc"))),
            _text(hardware.get("host")) or NOT_RECORDED,
            _text(slurm.get("job_id")) or "",
            _text(attempt.get("command")) or NOT_RECORDED,
            "; ".join(differs) or ("" if number == 1 else "nothing that counts"),
        )
        rows.append(cells)
    return f"<h3>{count_text(len(attempts), 'attempt')}</h3>" + _table(
        ("", "Started", "Host", "Job", "Command", "Differs from the one before"), rows
    )


def _change(pair: object) -> str:
    values = [_short_digest(each) for each in _list(pair)]
    return " → ".join(values)


def _short_digest(value: object) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text


def _accounting(run: RunPaths) -> str:
    """SLURM's own figures beside ours, where the site keeps accounts."""
    jobs = [
        each for each in _list(read_json_object(run.slurm / "accounting.json").get("jobs")) if isinstance(each, dict)
    ]
    if not jobs:
        return ""
    stages = run_status(run)["stages"]
    rows = []
    for job in jobs:
        task = _text(job.get("task")) or NOT_RECORDED
        ours = _number(_mapping(stages.get(task)).get("peak_rss_bytes"))
        theirs, seconds = _number(job.get("max_rss_bytes")), _number(job.get("elapsed_seconds"))
        row = (str(job.get("job_id")), task, str(job.get("state")), duration_text(seconds), bytes_text(theirs))
        rows.append((*row, bytes_text(ours)))
    return "<h3>Memory and time, as SLURM accounts for them</h3>" + _table(
        ("Job", "Task", "State", "Elapsed", "MaxRSS", "Our own peak"), rows
    )


def _versions(versions: Mapping[str, Any]) -> str:
    if not versions:
        return ""
    shown = {name: _text(value) or "not installed" for name, value in versions.items() if name not in _NOT_WORTH_A_ROW}
    for name, build in (("python", "python_build"), ("torch", "torch_build")):
        if name in shown and _text(versions.get(build)):
            shown[name] += f" ({versions[build]})"
    rows = _provenance_facts({name: escape(clean_text(value)) for name, value in shown.items()})
    summary = f"{count_text(len(shown), 'version')} of what it worked with"
    return f'<details class="code"><summary>{summary}</summary>{rows}</details>'


def _provenance_facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(clean_text(name))}</dt><dd>{value}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(clean_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="output"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
