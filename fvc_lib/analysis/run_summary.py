"""What a run leaves for people: its report, the list of all runs, and a short table for the terminal."""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import quote

import polars as pl

from fvc_lib.analysis.headline import DISHONEST_CONTROLS, ReportHeadline, Score, run_headline
from fvc_lib.analysis.headline_measure import task_facts
from fvc_lib.analysis.leakage_figures import audit_facts
from fvc_lib.analysis.memory_findings import run_memory
from fvc_lib.analysis.memory_wording import megabytes_text, memory_facts
from fvc_lib.analysis.provenance import provenance_html
from fvc_lib.analysis.record_pages import records_of, write_record_pages
from fvc_lib.analysis.records import read_tables
from fvc_lib.analysis.report import write_report
from fvc_lib.analysis.runs_index import write_runs_index
from fvc_lib.analysis.wording import bytes_text, clean_text, count_text, duration_text, interval_text, source_name
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.task_tables import IMAGES, TASK_RESULTS

# The answer first, then how it came about.
SECTION_ORDER = (
    "10_image_recognition", "20_video_text", "05_kfold_results", "06_analysis_dashboard", "07_memory_report",
    "04_fold_training", "01_data_index", "02_folds", "03_augmentation",
)  # fmt: skip


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
    lines += ["", *told, *([""] if told else []), *_facts(run, headline)]
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


def _facts(run: RunPaths, headline: ReportHeadline) -> list[str]:
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
