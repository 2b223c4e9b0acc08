"""The offline report of a run, and ``runs/index.html``, the list of all runs.

A record is the executed notebook of a stage. A report shows the answer, all records, all videos and the provenance
(code, versions, machine and commands).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
from markupsafe import Markup

from fvc_lib.analysis import wording
from fvc_lib.analysis.memory import memory_facts, run_memory
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.pages.page import TEMPLATES, render, write_page
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline, audit_facts
from fvc_lib.analysis.read.runs import (
    as_list,
    as_number,
    read_tables,
    run_marks,
    run_parameters,
    run_status,
    trial_text,
)
from fvc_lib.analysis.wording import NOT_RECORDED, bytes_text, clean_text, count_text, time_text
from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import LEFT_OUT, PROTOCOL, REJECTED, SCORES, VIDEO_FRAMES
from fvc_lib.services.tasks import STAGES

MOST_VIDEOS = 50_000  # in the report's table; a row takes some 150 bytes
PAGE_ROWS = 50  # shown at once
# Of the table of all videos: name in the script, heading, class
_VIDEO_COLUMNS = (
    ("path", "Video", "path"), ("label", "Label", "label"), ("right", "Decided", "right-or-wrong"),
    ("score", "Score", "number score"), ("spread", "Spread", "number spread"),
    ("threshold", "Threshold", "number threshold"), ("fold", "Fold", "number fold"), ("group", "Group", "group"),
)  # fmt: skip
_PARTIAL = ".partial"
# The answer first, then the way to it.
_SECTION_ORDER = tuple(stage.name for stage in sorted(STAGES, key=lambda stage: (stage.report_rank, stage.name)))
_HEADS = ("Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory")


@dataclass(frozen=True)
class Section:
    """One record in a report.

    ``key`` names the stage and fold; ``stage`` is its entry in the run's status, empty if there is none.
    """

    key: str
    notebook: NotebookHtml
    stage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alarm(self) -> str:
        """Sentences on the error and the cells that never ran; empty if the record is complete."""
        notebook, stage = self.notebook, self.stage
        if not notebook.num_never_ran and not notebook.error and stage.get("state") not in ("failed", "interrupted"):
            return ""
        error = as_mapping(stage.get("error"))
        recorded = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
        reason = "" if notebook.tells_its_end else str(notebook.error or recorded or "It did not come to its end")
        cells = f"{count_text(notebook.num_never_ran, 'code cell')} of {notebook.num_code_cells} never ran"
        parts = [reason, cells * bool(notebook.num_never_ran), str(stage.get("advice") or "")]
        return clean_text(" ".join(f"{part.rstrip('.')}." for part in parts if part))

    @property
    def facts(self) -> str:
        """File name, start, duration, peak memory and further facts, as one line of text."""
        stage = self.stage
        seconds, peak = as_number(stage.get("duration_seconds")), as_number(stage.get("peak_rss_bytes"))
        known = {
            "started": time_text(str(stage.get("started_utc") or "")),
            "duration": wording.duration_text(seconds),
            "peak memory": bytes_text(peak),
            **{name.replace("_", " "): stage.get(name) for name in ("attempts", "host", "job_id", "killed_by")},
        }
        facts = [f"{name} {value}" for name, value in known.items() if value and value != NOT_RECORDED]
        return clean_text(" · ".join([self.notebook.file_name, *facts]))


def records_of(run: RunPaths) -> dict[str, Path]:
    """Return the path of the newest record of each stage and fold, by its key, such as ``04_fold_training_fold_0``."""
    paths = sorted(run.notebooks.glob("[!.]*.ipynb"), key=lambda path: path.stat().st_mtime_ns)
    return dict(sorted({path.stem.removesuffix(_PARTIAL): path for path in paths}.items()))


def write_run_report(run: RunPaths) -> None:
    """Write ``report.html`` of a run from its present records; without a record no file is written.

    Raises:
        OSError: the file cannot be written.
    """
    records = records_of(run)
    if not records:
        return
    headline = headlines.run_headline(run)
    stages, notes = run_status(run)["stages"], list(headline.notes)
    sections: list[Section] = []
    for key in sorted(records, key=lambda key: _rank(records[key].name)):
        try:
            notebook = render_notebook(records[key], f"s{len(sections) + 1}")
        except DataError as error:
            notes.append(f"A record cannot be shown. {error}")
            continue
        sections.append(Section(path_to_text(key), notebook, as_mapping(stages.get(key))))
    facts = () if headline.earlier else audit_facts(run)
    headline = replace(headline, more_facts=(*facts, *memory_facts(run_memory(run))))
    _write(
        run.report_html, f"FVC {run.run_id}", sections, headline=headline, notes=notes,
        videos="" if headline.earlier else videos_html(run), provenance=provenance_html(run),
        run_facts=_run_facts(headline),
    )  # fmt: skip


def write_report(
    notebooks: Sequence[Path], output: Path, *, title: str, answer: Sequence[str] = (), videos: Markup | str = ""
) -> None:
    """Write an offline page with one section per executed notebook; the first section is open.

    Args:
        notebooks: paths of executed notebooks.
        output: path of the page; plotly.js is written next to it if there are figures.
        title: title of the page, plain text.
        answer: sentences at the top, plain text.
        videos: HTML of the table of all videos.

    Raises:
        DataError: a notebook is missing or unreadable.
        OSError: the page cannot be written.
    """
    sections = [Section(path.stem, render_notebook(path, f"s{number}")) for number, path in enumerate(notebooks, 1)]
    _write(output, title, sections, answer=answer, videos=videos)


def _write(output: Path, title: str, sections: Sequence[Section], **parts: Any) -> None:
    empty = dict.fromkeys(("headline", "notes", "answer", "videos", "provenance", "run_facts"), ())
    body = render("report.html", title=title, sections=sections, **empty | parts)
    names = ["page.js", *["videos.js"] * bool(parts.get("videos"))]
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in names]
    write_page(output, title, body, scripts, has_figures=any(section.notebook.num_figures for section in sections))


def _rank(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a record's file name: partial records first, then the order of ``_SECTION_ORDER``."""
    position = next((i for i, stage in enumerate(_SECTION_ORDER) if name.startswith(stage)), len(_SECTION_ORDER))
    return (not name.endswith(f"{_PARTIAL}.ipynb"), position, name)


def videos_html(run: RunPaths) -> Markup | str:
    """Return the HTML table of all tested videos; if the run has none, only notes on unreadable tables.

    At most the first ``MOST_VIDEOS`` videos are shown; a note says so.
    """
    stored, pictured = read_tables([("", run.scores)], SCORES), read_tables([("", run.video_frames)], VIDEO_FRAMES)
    notes = [*stored.notes, *pictured.notes]
    if stored.frame.is_empty():
        return Markup("").join(Markup('<p class="under">{}</p>').format(note) for note in notes)
    shown = stored.frame.head(MOST_VIDEOS)
    if shown.height < stored.frame.height:
        first = f"These are the first {shown.height:,} of {stored.frame.height:,} videos"
        notes.append(f"{first}; tables/scores.csv has all of them.")
    strips = dict(pictured.frame.select("video_id", "jpeg_base64").iter_rows())
    frames = {place: strips[video] for place, video in enumerate(shown["video_id"]) if video in strips}
    path, group = (pl.col(name).map_elements(clean_text, pl.String) for name in ("path", "group_id"))
    numbers = pl.col("score", "score_std", "threshold").round(4)
    rows = shown.select(path, "label", numbers, "fold", group, pl.col("is_right").cast(pl.Int8)).rows()
    data = json.dumps({"rows": rows, "frames": frames, "page": PAGE_ROWS}, separators=(",", ":"))
    return render(
        "videos.html", notes=notes, data=Markup(data.replace("<", "\\u003c")), num_frames=len(frames),
        page_rows=PAGE_ROWS, columns=_VIDEO_COLUMNS,
    )  # fmt: skip


def _run_facts(headline: ReportHeadline) -> dict[str, str]:
    facts = {
        "Run": headline.run_id,
        "Experiment": headline.experiment,
        "State": headline.state or NOT_RECORDED,
        "Model": headline.model or NOT_RECORDED,
        "Protocol": headline.protocol,
        "Corpus": headline.corpus or NOT_RECORDED,
        "Started": time_text(headline.started_utc),
        "Duration": wording.duration_text(headline.duration_seconds),
        "Peak memory": bytes_text(headline.peak_rss_bytes),
        **dict(headline.more_facts),
    }
    return {name: value for name, value in facts.items() if value}


# --- Provenance


def provenance_html(run: RunPaths) -> Markup:
    """Return HTML with code, versions, machine, attempts and the commands that repeat the run.

    Its links are relative to the run's folder.
    """
    record = read_json_object(run.run_json)
    attempts = [as_mapping(each) for each in as_list(record.get("attempts"))]
    first = attempts[0] if attempts else {}
    worked = next((each for each in attempts if not each.get("submits")), first)  # a login node computed nothing
    rows = []
    for number, attempt in enumerate(attempts, start=1):
        changed = as_mapping(attempt.get("differs")) | as_mapping(attempt.get("code_differs"))
        pairs = [f"{name}: {' → '.join(str(value)[:12] for value in as_list(of))}" for name, of in changed.items()]
        host, job = as_mapping(attempt.get("hardware")).get("host"), as_mapping(attempt.get("slurm")).get("job_id")
        columns = [attempt.get("started_utc"), host, job, attempt.get("command")]
        difference = "; ".join(pairs) or "nothing that counts" * (number > 1)
        rows.append((number, *(value or "" for value in columns), difference))
    contents = as_mapping(record.get("contents"))
    code = {"command": first.get("command") or NOT_RECORDED, "commit": NOT_RECORDED, **as_mapping(first.get("code"))}
    facts = _facts(code | {f"SHA-256 of {k}": str(v).replace("@", ": ") for k, v in contents.items()})
    if run.code_patch.is_file():
        facts["Patch"] = Markup('<a href="{0}">{0}</a>').format(run.code_patch.name)
    elif code.get("changed_since_commit"):
        facts["Patch"] = Markup('<span class="warning">none was kept</span>')
    return render(
        "provenance.html",
        commands=[line for line in as_list(record.get("repeat")) if isinstance(line, str)],
        code=facts,
        machine=_facts(as_mapping(worked.get("hardware")) | as_mapping(worked.get("slurm"))),
        attempts=rows,
        versions={name: version or "not installed" for name, version in as_mapping(worked.get("versions")).items()},
    )


def _facts(recorded: Mapping[str, Any]) -> dict[str, object]:
    """Return recorded values as readable values by readable name; empty values are left out."""
    facts: dict[str, object] = {}
    for name, value in recorded.items():
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        if name.endswith("_bytes"):
            shown = bytes_text(as_number(value))
        if shown not in (None, "", [], {}):
            words = name.removesuffix("_bytes").replace("_", " ")
            facts[words[:1].upper() + words[1:]] = ", ".join(map(str, shown)) if isinstance(shown, list) else shown
    return facts


# --- The list of all runs


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html``, the list of all runs in ``runs_dir``, newest first, and return its path.

    Comparisons and ensembles are linked above the list.

    Raises:
        DataError: there is another file of this name; it is not overwritten.
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
        return render(
            "index_row.html", trouble="", headline=headline, report=report, title=" · ".join(filter(None, mark)),
            about=" · ".join(filter(None, (headline.experiment, time_text(headline.started_utc)))),
            damaged=[path.name for path in (run.run_json, run.status_json) if not read_json_object(path)],
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
        lines += ["", f"  {name} with interval{f', {headline.earlier}' if headline.earlier else ''}"]
        for score in headline.scores:
            remark = "  (what a split by row would claim)" if score.source in DISHONEST_CONTROLS else ""
            interval = wording.interval_text(score.value, score.low, score.high)
            lines.append(f"    {wording.source_name(score.source):<40} {interval}{remark}")
        sentence, leaks = headline.verdict.sentence, headline.measure.leaks
        sentences = (sentence, *[leaks] * (leaks not in sentence), *headline.cautions)
        lines += ["", *(f"  {each}" for each in sentences)]
    lines.append("")
    if headline.num_samples is not None:
        counted = f"{headline.num_samples} in {headline.num_groups} groups"
        lines += [f"  {headline.measure.one + 's':<13} {counted}", *_not_used(run)]
    lines.append(f"  peak memory   {bytes_text(headline.peak_rss_bytes)}")
    return [*lines, f"  duration      {wording.duration_text(headline.duration_seconds)}"]


def _not_used(run: RunPaths) -> list[str]:
    """Return lines that count the files that were rejected and the videos that the protocol leaves out."""
    lines = []
    rejected = read_tables([("", run.rejected)], REJECTED).frame
    if rejected.height:
        reasons = rejected["reason"].value_counts().sort("count", "reason", descending=[True, False])
        kinds = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in reasons.iter_rows())
        files = count_text(rejected.height, "listed file was", "listed files were")
        lines.append(f"  {'not used':<13} {files} left out ({kinds}): tables/rejected.parquet and the report say why")
    protocol = read_tables([("", run.protocol)], PROTOCOL).frame
    used = protocol.filter(pl.col("part") != LEFT_OUT)["video_id"].n_unique()
    if unused := protocol["video_id"].n_unique() - used:
        videos = count_text(unused, "more takes", "more take")
        lines.append(f"  {'':<13} {videos} no part in this protocol; their clips were made as well, for a fork")
    return lines
