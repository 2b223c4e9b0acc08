"""The memory report as plain text: sentences, aligned tables and a timeline of block characters."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from fvc_lib.analysis.html_table import HtmlTable
from fvc_lib.analysis.memory_advice import Advice, memory_advice
from fvc_lib.analysis.memory_findings import PROCESS, MemoryFindings
from fvc_lib.analysis.memory_tables import (
    growth_table,
    near_limit_table,
    peaks_table,
    predictions_table,
    shortages_table,
)
from fvc_lib.analysis.memory_wording import (
    event_counts_sentence,
    growth_sentence,
    limit_sentence,
    megabytes_text,
    parts_sentence,
    peak_sentence,
    prediction_sentence,
    shortage_sentence,
    where_text,
)
from fvc_lib.analysis.trend import RULE
from fvc_lib.analysis.wording import clean_text, duration_text

BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = " .:-=+*#@"
_SENTENCE_WIDTH = 100
_MARKS = {"out_of_memory": "x", "near_limit": "!", "micro_batch": "m", "step_restored": "r", "nonfinite": "n"}


def report_lines(
    found: MemoryFindings,
    asked: Mapping[str, object],
    tensors: pl.DataFrame,
    *,
    title: str,
    width: int = 60,
    blocks: str = BLOCKS,
) -> list[str]:
    """The whole report.

    Args:
        found: of one stage or run.
        asked: the run's parameters, empty where they are not known.
        tensors: ``memory_contexts.largest_tensors`` of it.
        title: the first line.
        width: characters of the timeline.
        blocks: nine characters from empty to full.
    """
    unread = [*([""] if found.notes else []), *(f"could not be read: {note}" for note in found.notes)]
    if found.usage.is_empty() and found.events.is_empty():
        return [clean_text(title), "", peak_sentence(found) + ".", *unread]
    lines = [clean_text(title), "", peak_sentence(found) + ".", parts_sentence(found) + "."]
    lines += _section("Peak per phase", [], peaks_table(found))
    told = event_counts_sentence(found) + "."
    lines += ["", "Timeline", *_indented([*timeline_lines(found, width, blocks), told])]
    lines += _section("Close to the limit", [limit_sentence(found) + "."], near_limit_table(found))
    lines += _section("Growth per epoch", [growth_sentence(found) + "."], growth_table(found))
    if found.growth.height:
        lines += _indented(textwrap.wrap(f"({RULE})", _SENTENCE_WIDTH))
    lines += _section("Out of memory", [shortage_sentence(found) + "."], shortages_table(found))
    if tensors.height:
        lines += _section("What tensors held when memory ended", [], tensors)
    lines += _section("Prediction and measurement", [prediction_sentence(found) + "."], predictions_table(found))
    lines += ["", "What to change", *_indented(_advice_lines(memory_advice(found, asked)))]
    return [*lines, *unread]


def timeline_lines(found: MemoryFindings, width: int = 60, blocks: str = BLOCKS) -> list[str]:
    """For each stage and place one line of blocks, its time from left to right and the highest memory of each moment,
    full at that place's overall peak; below it marks where something happened.
    """
    rows = found.usage.filter(pl.col("seconds").is_not_null() & ~pl.col("between"))
    series = rows.select("run_id", "stage", "fold", "place").unique(maintain_order=True)
    named = [(row, _series_text(row)) for row in series.iter_rows(named=True)]
    indent = max((len(name) for _, name in named), default=0)
    lines = []
    for row, name in named:
        own = rows.filter(pl.col(key).eq_missing(pl.lit(value)) for key, value in row.items())
        full = float(rows.filter(pl.col("place") == row["place"])["used_mb"].max() or 1)  # type: ignore[arg-type]  # MB
        end = float(own["seconds"].max() or 0)  # type: ignore[arg-type]  # seconds
        line = spark_line(own["seconds"].to_numpy(), own["used_mb"].to_numpy() / full, width, blocks)
        told = f"{megabytes_text(own['used_mb'].max())}, {duration_text(end)}"  # type: ignore[arg-type]  # MB
        lines.append(f"{name:<{indent}}  {line}  {told}")
        keys = ("run_id", "stage", "fold")
        events = found.events.filter(pl.col(key).eq_missing(pl.lit(row[key])) for key in keys)
        marks = _mark_line(events, end, width)
        if marks and row["place"] == own["place"][0]:
            lines.append(f"{'':<{indent}}  {marks}")
    if any(line.strip(" xm!rn") == "" for line in lines):
        lines.append("(x out of memory, ! close to the limit, m micro-batch, r restored, n not finite)")
    return lines


def spark_line(
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]],
    shares: np.ndarray[tuple[int], np.dtype[np.float64]],
    width: int,
    blocks: str = BLOCKS,
) -> str:
    """``width`` characters: the highest share of each slice of time; a slice without a sample repeats the one before.

    Args:
        seconds: (n,) from 0, ascending, n of at least 1.
        shares: (n,) in [0, 1]; 1 is the full block.
        width: of the line.
        blocks: from empty to full.
    """
    end = float(seconds[-1]) or 1.0
    slots = np.minimum((seconds / end * width).astype(int), width - 1)
    highest = np.full(width, np.nan)
    np.fmax.at(highest, slots, shares)
    line, last = "", shares[0]
    for value in highest:
        last = value if np.isfinite(value) else last
        line += blocks[min(int(np.ceil(last * (len(blocks) - 1))), len(blocks) - 1)]
    return line


def _mark_line(events: pl.DataFrame, end: float, width: int) -> str:
    """The marks of ``events`` at their time, out of memory over all others; empty when there are none."""
    marks = [" "] * width
    for kind in reversed(_MARKS):
        for seconds in events.filter(pl.col("kind") == kind)["seconds"]:
            marks[min(int(seconds / (end or 1.0) * width), width - 1)] = _MARKS[kind]
    return "".join(marks).rstrip()


def _section(heading: str, sentences: Sequence[str], table: pl.DataFrame) -> list[str]:
    rows = repr(HtmlTable(table)).splitlines() if table.height else []
    return ["", heading, *_indented([*sentences, *rows])]


def _advice_lines(advice: Sequence[Advice]) -> list[str]:
    return [line for each in advice for line in (f"- {each.seen}", f"  {each.change}")]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def _series_text(row: Mapping[str, object]) -> str:
    return where_text(row) if row["place"] == PROCESS else f"{where_text(row)}, {row['place']}"
