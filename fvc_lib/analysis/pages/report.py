"""The offline pages of a run: one for each record, and the report over all of them."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
from markupsafe import Markup

import fvc_lib
from fvc_lib.analysis import wording
from fvc_lib.analysis.memory import memory_facts, run_memory
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.pages.page import PLOTLY_FILE, TEMPLATES, page, render, share_plotly, stamp_of
from fvc_lib.analysis.pages.provenance import provenance_html
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.cautions import audit_facts
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline
from fvc_lib.analysis.read.naming import run_parameters, trial_text
from fvc_lib.analysis.read.records import as_number, read_tables, run_status
from fvc_lib.services.atomic_files import as_mapping, path_to_text, sha256_of_json, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, LEFT_OUT, PROTOCOL, REJECTED, SCORES, TASK_RESULTS, VIDEO_FRAMES
from fvc_lib.services.tasks import STAGES

SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")
VIDEOS_SCRIPT = (TEMPLATES / "videos.js").read_text(encoding="utf-8")
# Of the table of all videos: name in the script, heading, class
_VIDEO_COLUMNS = (
    ("path", "Video", "path"), ("label", "Label", "label"), ("right", "Decided", "right-or-wrong"),
    ("score", "Score", "number score"), ("spread", "Spread", "number spread"),
    ("threshold", "Threshold", "number threshold"), ("fold", "Fold", "number fold"), ("group", "Group", "group"),
)  # fmt: skip
MOST_VIDEOS = 50_000  # in the report's table; a row takes some 150 bytes
PAGE_ROWS = 50  # shown at once
PARTIAL = ".partial"
_FACTS = frozenset({("video_to_text", "recall"), ("captions", "content_word_recall")})
_MOST_FACTS = 6
# The answer first, then the way to it.
SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))
_FORMAT = 4  # of the pages; another number writes all of them again
_RUN_FOLDER = "../../"  # from notebooks/reports


# --- The report


def write_run_report(run: RunPaths) -> None:
    """Write a page of each record, and ``report.html`` over the records so far.

    Raises:
        OSError: a page cannot be written.
    """
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
    """Write ``output``, an HTML page that opens without a network or a server; plotly.js goes next to it.

    Args:
        notebooks: executed notebooks, a section each, the first one open.
        output: the page.
        title: plain text.
        headline: the head of the page; None: the title and ``answer``.
        pages: address of each notebook's own page.
        videos: HTML of the table of all videos.
        provenance: HTML of the last section.
        notes: plain sentences, shown first.
        answer: plain sentences.

    Raises:
        DataError: a notebook is missing or unreadable.
        OSError: the page cannot be written.
    """
    rendered = [render_notebook(path, f"s{number}", run_folder="") for number, path in enumerate(notebooks, start=1)]
    sections = [(each, (pages or {}).get(path)) for path, each in zip(notebooks, rendered, strict=True)]
    body = render(
        "report.html", title=title, headline=headline, sections=sections, provenance=provenance, notes=notes,
        run_facts=_run_facts(headline) if headline else {}, answer=answer, videos=videos,
    )  # fmt: skip
    scripts = (SCRIPT, *([VIDEOS_SCRIPT] if videos else []))
    has_figures = any(each.num_figures for each in rendered)
    if has_figures:
        share_plotly(output.parent)
    write_text(output, page(title, body, scripts, plotly=PLOTLY_FILE if has_figures else ""))


def videos_html(run: RunPaths) -> Markup | str:
    """Return the table of all tested videos (``tables/scores.csv``), or empty where the run has none.

    Of more than ``MOST_VIDEOS`` videos the first are shown.
    """
    stored, pictured = read_tables([("", run.scores)], SCORES), read_tables([("", run.video_frames)], VIDEO_FRAMES)
    notes = (*stored.notes, *pictured.notes)
    if stored.frame.is_empty():
        return Markup("").join(Markup('<p class="under">{}</p>').format(note) for note in notes)
    shown = stored.frame.head(MOST_VIDEOS)
    if shown.height < stored.frame.height:
        first = f"These are the first {shown.height:,} of {stored.frame.height:,} videos"
        notes = (*notes, f"{first}; tables/scores.csv has all of them.")
    strips = dict(pictured.frame.select("video_id", "jpeg_base64").iter_rows())
    frames = {place: strips[each] for place, each in enumerate(shown["video_id"]) if each in strips}
    texts = [pl.col(name).map_elements(wording.clean_text, pl.String) for name in ("path", "group_id")]
    numbers = [pl.col(name).round(4) for name in ("score", "score_std", "threshold")]
    rows = shown.select(texts[0], "label", *numbers, "fold", texts[1], pl.col("is_right").cast(pl.Int8)).rows()
    data = json.dumps({"rows": rows, "frames": frames, "page": PAGE_ROWS}, separators=(",", ":"))
    return render(
        "videos.html", notes=notes, data=Markup(data.replace("<", "\\u003c")), num_frames=len(frames),
        page_rows=PAGE_ROWS, columns=_VIDEO_COLUMNS,
    )  # fmt: skip


def _run_facts(headline: ReportHeadline) -> dict[str, str]:
    facts = {
        "Run": headline.run_id,
        "Experiment": headline.experiment,
        "State": headline.state or wording.NOT_RECORDED,
        "Model": headline.model or wording.NOT_RECORDED,
        "Protocol": headline.protocol,
        "Corpus": headline.corpus or wording.NOT_RECORDED,
        "Started": wording.time_text(headline.started_utc),
        "Duration": wording.duration_text(headline.duration_seconds),
        "Peak memory": wording.bytes_text(headline.peak_rss_bytes),
        **dict(headline.more_facts),
    }
    return {name: value for name, value in facts.items() if value}


def _results_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """Return names and texts of further results of a task without folds (``tables.TASK_RESULTS``)."""
    results = read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS).frame
    known = {(row["source"], row["subject"], row["metric"]): row for row in results.iter_rows(named=True)}
    facts = []
    for (source, subject, metric), row in known.items():
        if source == "model" and metric == "mae":
            mean = known.get(("mean_predictor", subject, "mae"))
            control = f" (mean predictor {wording.number_text(mean['value'], 1)})" if mean else ""
            error = f"{wording.number_text(row['value'], 1)} {row['unit']}".strip()
            facts.append((f"{wording.subject_name(subject)} off by", f"{error}{control}"))
        elif source == "model" and (subject, metric.partition("@")[0]) in _FACTS:
            name = f"{wording.metric_name(metric)}, {wording.subject_name(subject)}"
            facts.append((name, wording.number_text(row["value"])))
    return tuple((wording.clean_text(name), text) for name, text in facts[:_MOST_FACTS])


def _rank(name: str) -> tuple[bool, int, str]:
    position = next((i for i, stage in enumerate(SECTION_ORDER) if name.startswith(stage)), len(SECTION_ORDER))
    return (not name.endswith(f"{PARTIAL}.ipynb"), position, name)


# --- A page of each record


def records_of(run: RunPaths) -> dict[str, Path]:
    """Return the newest record of each task, by the task's key."""
    newest: dict[str, Path] = {}
    for path in sorted(run.notebooks.glob("[!.]*.ipynb"), key=lambda path: path.stat().st_mtime_ns):
        newest[path.stem.removesuffix(PARTIAL)] = path
    return dict(sorted(newest.items()))


def write_record_pages(run: RunPaths) -> dict[str, str]:
    """Write ``notebooks/reports/KEY.html`` for every record that has changed since its page was written.

    Returns:
        Why a record could not be shown, by its task's key.

    Raises:
        OSError: a page cannot be written.
    """
    stages, problems = run_status(run)["stages"], {}
    for key, record in records_of(run).items():
        stage, status = as_mapping(stages.get(key)), record.stat()
        stamp = sha256_of_json(
            [_FORMAT, fvc_lib.__version__, status.st_mtime_ns, status.st_size, repr(sorted(stage.items()))]
        )
        try:
            if stamp_of(run.record_html(key)) != stamp:
                _write_record_page(run, key, record, stage, stamp)
        except DataError as error:
            problems[key] = str(error)
    return problems


def _write_record_page(run: RunPaths, key: str, record: Path, stage: Mapping[str, Any], stamp: str) -> None:
    rendered = render_notebook(record, "r", run_folder=_RUN_FOLDER)
    body = render(
        "record.html", rendered=rendered, run_id=path_to_text(run.run_id), run_folder=_RUN_FOLDER,
        state=wording.clean_text(stage.get("state") or ""), alarm=_alarm(rendered, stage),
        facts=_record_facts(rendered, stage),
    )  # fmt: skip
    if rendered.num_figures:
        share_plotly(run.root)
    plotly = _RUN_FOLDER + PLOTLY_FILE if rendered.num_figures else ""
    title = f"{rendered.title} · {path_to_text(run.run_id)}"
    write_text(run.record_html(key), page(title, body, (SCRIPT,), stamp=stamp, plotly=plotly))


def _alarm(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record that is not whole; empty if the record says so itself, None if it is whole."""
    unfinished = rendered.num_never_ran
    if not unfinished and not rendered.error and stage.get("state") not in ("failed", "interrupted"):
        return None
    cells = f"{wording.count_text(unfinished, 'code cell')} of {rendered.num_code_cells}"
    missing = f" {cells} never ran." if unfinished else ""
    if rendered.tells_its_end:
        return missing
    error = as_mapping(stage.get("error"))
    reason = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
    what = wording.clean_text(rendered.error or reason or "It did not come to its end.").rstrip(".")
    advice = f" {wording.clean_text(stage['advice'])}" if stage.get("advice") else ""
    return f"{what}.{missing}{advice}"


def _record_facts(rendered: NotebookHtml, stage: Mapping[str, Any]) -> str:
    seconds, peak = as_number(stage.get("duration_seconds")), as_number(stage.get("peak_rss_bytes"))
    facts = {
        "started": wording.time_text(str(stage["started_utc"])) if stage.get("started_utc") else None,
        "duration": wording.duration_text(seconds) if seconds is not None else None,
        "peak memory": wording.bytes_text(peak) if peak is not None else None,
        "attempts": stage.get("attempts"),
        "host": stage.get("host"),
        "slurm job": stage.get("job_id"),
        "killed by": stage.get("killed_by"),
    }
    if stage.get("state") != "done":
        facts |= {"last step": stage.get("last_step"), "last metric": stage.get("last_metric")}
    return " · ".join(map(wording.clean_text, [rendered.file_name, *(f"{k} {v}" for k, v in facts.items() if v)]))


# --- The end of a run in the terminal


def summary_lines(run: RunPaths) -> list[str]:
    """Return the run in a few lines of text: the model's number and its controls, peak memory and duration."""
    headline = headlines.run_headline(run)
    state = ", ".join(filter(None, (headline.state or "not recorded", trial_text(run_parameters(run)))))
    lines = ["", f"{headline.run_id}: {state}", *(f"  {note}" for note in headline.notes)]
    if headline.scores:
        name = wording.clean_text(headline.measure.name).replace("ROC AUC", "ROC-AUC")
        lines += ["", f"  {name} with interval{f', {headline.earlier}' if headline.earlier else ''}"]
        for score in headline.scores:
            remark = "  (what a split by row would claim)" if score.source in DISHONEST_CONTROLS else ""
            interval = wording.interval_text(score.value, score.low, score.high)
            lines.append(f"    {wording.source_name(score.source):<40} {interval}{remark}")
        leaks = headline.measure.leaks
        lines += [
            "",
            f"  {headline.verdict.sentence}",
            *([f"  {leaks}"] if leaks not in headline.verdict.sentence else []),
        ]
        lines += [f"  {caution}" for caution in headline.cautions]
    facts = () if headline.earlier else _results_facts(run)
    lines += ["", *(f"  {name:<30} {wording.clean_text(text)}" for name, text in facts), *([""] if facts else [])]
    if headline.num_samples is not None:
        counted = f"{headline.num_samples} in {headline.num_groups} groups{_also_tested(run)}"
        lines += [f"  {headline.measure.one + 's':<13} {counted}", *_not_used(run)]
    lines.append(f"  peak memory   {wording.bytes_text(headline.peak_rss_bytes)}")
    return [*lines, f"  duration      {wording.duration_text(headline.duration_seconds)}"]


def _not_used(run: RunPaths) -> list[str]:
    """Return lines that count the listed files and indexed videos that the number does not cover."""
    lines = []
    rejected = read_tables([("", run.rejected)], REJECTED).frame
    if rejected.height:
        reasons = Counter(rejected["reason"].sort()).most_common()
        kinds = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in reasons)
        files = wording.count_text(rejected.height, "listed file was", "listed files were")
        lines.append(f"  {'not used':<13} {files} left out ({kinds}): tables/rejected.parquet and the report say why")
    protocol = read_tables([("", run.protocol)], PROTOCOL).frame
    used = protocol.filter(pl.col("part") != LEFT_OUT)["video_id"].n_unique()
    if unused := protocol["video_id"].n_unique() - used:
        videos = wording.count_text(unused, "more takes", "more take")
        lines.append(f"  {'':<13} {videos} no part in this protocol; their clips were made as well, for a fork")
    return lines


def _also_tested(run: RunPaths) -> str:
    """Return a remark on images that were tested on numbers only, which the headline does not count."""
    tested = read_tables([("", run.images)], IMAGES).frame.filter(part="test")
    without = tested["class_label"].null_count()
    if without in (0, tested.height):
        return ""
    groups = wording.count_text(tested["group_id"].n_unique(), "group")
    return f" with a class; {without} more have numbers only: {tested.height} images tested in {groups}"
