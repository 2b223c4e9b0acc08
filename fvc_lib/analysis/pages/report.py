"""The offline report of a run: the answer, a section for each record, all videos, and provenance."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
from markupsafe import Markup

from fvc_lib.analysis import wording
from fvc_lib.analysis.memory import memory_facts, run_memory
from fvc_lib.analysis.pages.notebook_html import NotebookHtml, render_notebook
from fvc_lib.analysis.pages.page import TEMPLATES, render, write_page
from fvc_lib.analysis.pages.provenance import provenance_html
from fvc_lib.analysis.read import headline as headlines
from fvc_lib.analysis.read.cautions import audit_facts
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, ReportHeadline
from fvc_lib.analysis.read.naming import run_parameters, trial_text
from fvc_lib.analysis.read.records import as_number, read_tables, run_status
from fvc_lib.services.atomic_files import as_mapping, path_to_text
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


@dataclass(frozen=True)
class Section:
    """One record in a report; ``stage`` is what the run's status says of it."""

    key: str
    notebook: NotebookHtml
    stage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> Markup:
        """The cells, for a page in the run's folder."""
        return self.notebook.seen_from("")

    @property
    def alarm(self) -> str:
        """What is wrong with a record that is not whole; empty: it is whole."""
        notebook, stage = self.notebook, self.stage
        if not notebook.num_never_ran and not notebook.error and stage.get("state") not in ("failed", "interrupted"):
            return ""
        parts = []
        if not notebook.tells_its_end:
            error = as_mapping(stage.get("error"))
            reason = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
            parts.append(f"{str(notebook.error or reason or 'It did not come to its end').rstrip('.')}.")
        if notebook.num_never_ran:
            cells = wording.count_text(notebook.num_never_ran, "code cell")
            parts.append(f"{cells} of {notebook.num_code_cells} never ran.")
        parts.append(str(stage.get("advice") or ""))
        return wording.clean_text(" ".join(parts))

    @property
    def facts(self) -> str:
        """Start, duration, peak memory and the like, in one line."""
        stage = self.stage
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
        known = [f"{name} {value}" for name, value in facts.items() if value]
        return wording.clean_text(" · ".join([self.notebook.file_name, *known]))


def records_of(run: RunPaths) -> dict[str, Path]:
    """Return the newest record of each task, by the task's key."""
    newest: dict[str, Path] = {}
    for path in sorted(run.notebooks.glob("[!.]*.ipynb"), key=lambda path: path.stat().st_mtime_ns):
        newest[path.stem.removesuffix(PARTIAL)] = path
    return dict(sorted(newest.items()))


def write_run_report(run: RunPaths) -> None:
    """Write ``report.html`` over the records so far; none without a record.

    Raises:
        OSError: it cannot be written.
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
    is_whole = not headline.earlier
    facts = (*_results_facts(run), *audit_facts(run)) if is_whole else ()
    headline = replace(headline, more_facts=(*facts, *memory_facts(run_memory(run))))
    videos = videos_html(run) if is_whole else ""
    _write(
        run.report_html, f"FVC {run.run_id}", sections, headline=headline, videos=videos, notes=notes,
        provenance=provenance_html(run), run_facts=_run_facts(headline),
    )  # fmt: skip


def write_report(
    notebooks: Sequence[Path], output: Path, *, title: str, answer: Sequence[str] = (), videos: Markup | str = ""
) -> None:
    """Write an offline page over executed notebooks, a section each, the first one open.

    Args:
        notebooks: executed.
        output: the page; plotly.js goes next to it.
        title: plain text.
        answer: plain sentences at the head.
        videos: HTML of the table of all videos.

    Raises:
        DataError: a notebook is missing or unreadable.
        OSError: the page cannot be written.
    """
    sections = [Section(path.stem, render_notebook(path, f"s{number}")) for number, path in enumerate(notebooks, 1)]
    _write(output, title, sections, answer=answer, videos=videos)


def _write(output: Path, title: str, sections: Sequence[Section], **parts: Any) -> None:
    empty: dict[str, Any] = {
        "headline": None,
        "notes": (),
        "answer": (),
        "videos": "",
        "provenance": "",
        "run_facts": {},
    }
    values = {**empty, **parts}
    body = render("report.html", title=title, sections=sections, **values)
    scripts = (SCRIPT, VIDEOS_SCRIPT) if values["videos"] else (SCRIPT,)
    write_page(output, title, body, scripts, has_figures=any(section.notebook.num_figures for section in sections))


def _rank(name: str) -> tuple[bool, int, str]:
    """Sort partial records first, then by ``SECTION_ORDER``."""
    position = next((i for i, stage in enumerate(SECTION_ORDER) if name.startswith(stage)), len(SECTION_ORDER))
    return (not name.endswith(f"{PARTIAL}.ipynb"), position, name)


def videos_html(run: RunPaths) -> Markup | str:
    """Return the table of all tested videos (``tables/scores.csv``), or empty where the run has none.

    Of more than ``MOST_VIDEOS`` videos the first are shown.
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
    path, group = (pl.col(name).map_elements(wording.clean_text, pl.String) for name in ("path", "group_id"))
    numbers = [pl.col(name).round(4) for name in ("score", "score_std", "threshold")]
    rows = shown.select(path, "label", *numbers, "fold", group, pl.col("is_right").cast(pl.Int8)).rows()
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
