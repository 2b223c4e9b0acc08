"""Executed notebooks as one offline HTML file: the number, its controls and the verdict first, then the record."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from fvc_lib.analysis.headline import DISHONEST_CONTROLS, ReportHeadline, Score, Verdict
from fvc_lib.analysis.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.page_style import SCRIPT, content_policy, style_sheet
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
