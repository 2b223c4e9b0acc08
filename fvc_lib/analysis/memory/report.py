"""A run's memory, explained in a terminal: ``python -m fvc_lib.analysis.memory.report FILE|RUN``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import polars as pl

from fvc_lib.analysis.memory import wording
from fvc_lib.analysis.memory.findings import PROCESS, RULE, MemoryFindings, find, run_memory
from fvc_lib.analysis.memory.wording import Advice
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.headline import run_parameters
from fvc_lib.analysis.read.logs import read_events, read_samples
from fvc_lib.analysis.read.records import LogFile
from fvc_lib.analysis.wording import clean_text, duration_text
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, stage_key

# --- Tables for people: one row per thing, with units in the headings


NONE = "-"
_MOST_ROWS = 24


def peaks_table(found: MemoryFindings) -> pl.DataFrame:
    """The highest memory of each phase: ``stage phase of peak_mb usage_percent at_seconds epoch num_samples``.

    With more rows than can be read, folds of a stage are one row: that of its highest fold.
    """
    peaks = found.peaks
    if peaks.height > _MOST_ROWS:
        highest = pl.col("used_mb") == pl.col("used_mb").max().over("stage", "phase", "place")
        peaks = peaks.filter(highest).unique(["stage", "phase", "place"], keep="first", maintain_order=True)
    rows = [
        {
            **_where(row),
            "of": "process" if row["place"] == PROCESS else row["place"],
            "peak_mb": row["used_mb"],
            "usage_percent": row["usage_percent"],
            "at_seconds": row["seconds"],
            "epoch": _number(row["epoch"]),
            "num_samples": row["num_samples"],
        }
        for row in peaks.iter_rows(named=True)
    ]
    numbers = {"peak_mb": pl.Float64, "usage_percent": pl.Float64, "at_seconds": pl.Float64}
    return pl.DataFrame(rows, {**_WHERE, "of": pl.String, **numbers, "epoch": pl.String, "num_samples": pl.Int64})


def near_limit_table(found: MemoryFindings) -> pl.DataFrame:
    """Spells above 90%: ``stage phase at_seconds lasting highest_percent used budget told_by``."""
    rows = [
        {
            **_where(row),
            "at_seconds": row["seconds"],
            "lasting": duration_text(row["until_seconds"] - row["seconds"]),
            "highest_percent": row["usage_percent"],
            "used": wording.megabytes_text(row["used_mb"]),
            "budget": wording.megabytes_text(row["budget_mb"]),
            "told_by": _sources(row),
        }
        for row in found.near_limit.iter_rows(named=True)
    ]
    numbers = {"at_seconds": pl.Float64, "lasting": pl.String, "highest_percent": pl.Float64}
    texts = {"used": pl.String, "budget": pl.String, "told_by": pl.String}
    return pl.DataFrame(rows, {**_WHERE, **numbers, **texts})


def out_of_memory_table(found: MemoryFindings) -> pl.DataFrame:
    """Every out-of-memory: ``stage phase epoch step happened_in asked_for what_was_done context_file``."""
    rows = [
        {
            **_where(row),
            "epoch": _number(row["epoch"]),
            "step": _number(row["global_step"]),
            "happened_in": (row["happened_in"] or NONE).replace("_", " "),
            "asked_for": NONE if row["asked_mb"] is None else wording.megabytes_text(row["asked_mb"]),
            "what_was_done": row["done"],
            "context_file": _context_path(row),
        }
        for row in found.out_of_memory.iter_rows(named=True)
    ]
    texts = ("epoch", "step", "happened_in", "asked_for", "what_was_done", "context_file")
    return pl.DataFrame(rows, {**_WHERE, **dict.fromkeys(texts, pl.String)})


def growth_table(found: MemoryFindings) -> pl.DataFrame:
    """Growth of each training: ``stage phase of attempt num_epochs slope_mb chance verdict``."""
    rows = [
        {
            **_where(row),
            "of": row["place"],
            "attempt": row["attempt"],
            "num_epochs": row["num_epochs"],
            "slope": NONE if row["slope_mb"] is None else f"{row['slope_mb']:+.1f} MB",
            "chance": NONE if row["p_value"] is None else f"{row['p_value']:.3f}",
            "verdict": row["verdict"],
        }
        for row in found.growth.sort(pl.col("verdict") != "leak", maintain_order=True).iter_rows(named=True)
    ]
    counts = {"of": pl.String, "attempt": pl.Int64, "num_epochs": pl.Int64}
    return pl.DataFrame(rows, {**_WHERE, **counts, "slope": pl.String, "chance": pl.String, "verdict": pl.String})


def predictions_table(found: MemoryFindings) -> pl.DataFrame:
    """Prediction beside measurement: ``stage attempt predicted measured error micro_batch``."""
    rows = [
        {
            "stage": wording.where_text(row),
            "attempt": row["attempt"],
            "predicted": wording.megabytes_text(row["predicted_mb"]),
            "measured": NONE if row["measured_mb"] is None else wording.megabytes_text(row["measured_mb"]),
            "error": NONE if row["error_percent"] is None else f"{row['error_percent']:+.0f}%{_flag(row)}",
            "micro_batch": _number(row["micro_batch"]),
        }
        for row in found.predictions.iter_rows(named=True)
    ]
    texts = dict.fromkeys(("predicted", "measured", "error", "micro_batch"), pl.String)
    return pl.DataFrame(rows, {"stage": pl.String, "attempt": pl.Int64, **texts})


_WHERE = {"stage": pl.String, "phase": pl.String}


def _where(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"stage": wording.where_text(row), "phase": wording.phase_text(row["phase"])}


def _context_path(row: Mapping[str, Any]) -> str:
    if row["context_file"] is None:
        return NONE
    return f"memory/oom/{stage_key(row['stage'], row['fold'])}/{row['context_file']}"


def _number(value: int | None) -> str:
    """An epoch, step or size that not every row has."""
    return NONE if value is None else str(value)


def _sources(row: Mapping[str, Any]) -> str:
    counts = ((row["num_samples"], "sample"), (row["num_events"], "event"))
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)


def _flag(row: Mapping[str, Any]) -> str:
    return " (off)" if row["is_off"] else ""


# --- Plain text: sentences, aligned tables and a timeline of block characters


_SENTENCE_WIDTH = 100


def report_lines(found: MemoryFindings, asked: Mapping[str, object], tensors: pl.DataFrame, *, title: str) -> list[str]:
    """The whole report.

    Args:
        found: of one stage or run.
        asked: the run's parameters, empty where they are not known.
        tensors: ``largest_tensors`` of it.
        title: the first line.
    """
    unread = [*([""] if found.notes else []), *(f"could not be read: {note}" for note in found.notes)]
    if found.usage.is_empty() and found.events.is_empty():
        return [clean_text(title), "", wording.peak_sentence(found) + ".", *unread]
    lines = [clean_text(title), "", wording.peak_sentence(found) + ".", wording.parts_sentence(found) + "."]
    lines += _section("Peak per phase", [], peaks_table(found))
    lines += ["", *_indented([wording.event_counts_sentence(found) + "."])]
    lines += _section("Close to the limit", [wording.limit_sentence(found) + "."], near_limit_table(found))
    lines += _section("Growth per epoch", [wording.growth_sentence(found) + "."], growth_table(found))
    if found.growth.height:
        lines += _indented(textwrap.wrap(f"({RULE})", _SENTENCE_WIDTH))
    lines += _section("Out of memory", [wording.out_of_memory_sentence(found) + "."], out_of_memory_table(found))
    if tensors.height:
        lines += _section("What tensors held when memory ran out", [], tensors)
    lines += _section(
        "Prediction and measurement", [wording.prediction_sentence(found) + "."], predictions_table(found)
    )
    lines += ["", "What to change", *_indented(_advice_lines(wording.run_advice(found, asked)))]
    return [*lines, *unread]


def _section(heading: str, sentences: Sequence[str], table: pl.DataFrame) -> list[str]:
    rows = repr(HtmlTable(table)).splitlines() if table.height else []
    return ["", heading, *_indented([*sentences, *rows])]


def _advice_lines(advice: Sequence[Advice]) -> list[str]:
    return [line for each in advice for line in (f"- {each.seen}", f"  {each.change}")]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


@dataclass(frozen=True)
class Subject:
    """What is reported on: findings, the run they belong to (which may hold nothing else), and a title."""

    found: MemoryFindings
    run: RunPaths
    title: str


def open_subject(path: Path) -> Subject:
    """The findings for a memory log (``memory/<stage>.jsonl``), its event log, or a whole run folder.

    Raises:
        UsageError: there is no such file or folder, or it is neither a memory log nor a run.
    """
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        raise UsageError(f"{_shown(path)}: no such file or folder. {_WANTED}")
    # The events of a stage lie in a folder of their own, below its samples and under the same name.
    samples_path = path.parent.parent / path.name if path.parent.name == "events" else path
    events_path = samples_path.parent / "events" / samples_path.name
    run = RunPaths(samples_path.absolute().parents[1])
    samples = read_samples([LogFile.named(samples_path, run.run_id)])
    events = read_events([LogFile.named(events_path, run.run_id)] if events_path.is_file() else [], samples.frame)
    if samples.frame.is_empty() and samples_path.is_file() and samples_path.stat().st_size:
        counted = " ".join(samples.notes) or "It holds nothing but blank lines."
        raise UsageError(
            f"{_shown(samples_path)} is no memory log: no line of it is a memory sample. {counted} {_WANTED}"
        )
    return Subject(find(samples, events), run, f"Memory of {_shown(path)}")


_WANTED = "Give one of a run's memory/*.jsonl files, or the run folder."


def _of_run(folder: Path) -> Subject:
    root = folder.parent if folder.name == "memory" else folder
    run = RunPaths(root.absolute())
    if not (root / "memory").is_dir() and not run.run_json.is_file():
        raise UsageError(f"{_shown(folder)} is no run folder: it has neither memory/ nor run.json. {_WANTED}")
    return Subject(run_memory(run), run, f"Memory of {path_to_text(run.run_id)}")


def _shown(path: Path) -> str:
    return repr(message_text(str(path)))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("log", metavar="FILE|RUN", type=click.Path(path_type=Path))
def main(log: Path) -> None:
    """Explain the memory of one stage (a memory/*.jsonl file) or of a whole run (its folder).

    Says where memory peaked and what it consisted of, lists every moment above 90% of the budget,
    judges growth from epoch to epoch, tells each out-of-memory and what was done, compares the prediction with what
    was measured, and ends with what to change. Works while the run goes on, and on logs that a crash has torn: lines
    that cannot be read are counted.

    \b
    python -m fvc_lib.analysis.memory.report runs/demo/run_20250304_101500_abcdef01
    python -m fvc_lib.analysis.memory.report runs/demo/run_*/memory/04_fold_training_fold_0.jsonl

    Megabytes are 1e6 bytes. Resident memory counts the process with its children, as a job's limit does. Exit codes:
    0 reported, 2 the file is no memory log.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    try:
        subject = open_subject(log)
    except FvcError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {_shown(log)}: {error.strerror}. {_WANTED}", err=True)
        sys.exit(2)
    encoding = sys.stdout.encoding or "ascii"
    asked, tensors = run_parameters(subject.run), wording.largest_tensors(subject.run, subject.found)
    for line in report_lines(subject.found, asked, tensors, title=subject.title):
        click.echo(line.encode(encoding, "replace").decode(encoding))


if __name__ == "__main__":
    main()
