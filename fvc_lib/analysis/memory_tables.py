"""What was found about memory as tables for people: one row per thing, with units in the headings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from fvc_lib.analysis.memory_findings import PROCESS, MemoryFindings
from fvc_lib.analysis.memory_wording import megabytes_text, phase_text, where_text
from fvc_lib.analysis.wording import duration_text
from fvc_lib.services.run_paths import stage_key

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
            "used": megabytes_text(row["used_mb"]),
            "budget": megabytes_text(row["budget_mb"]),
            "told_by": _sources(row),
        }
        for row in found.near_limit.iter_rows(named=True)
    ]
    numbers = {"at_seconds": pl.Float64, "lasting": pl.String, "highest_percent": pl.Float64}
    texts = {"used": pl.String, "budget": pl.String, "told_by": pl.String}
    return pl.DataFrame(rows, {**_WHERE, **numbers, **texts})


def shortages_table(found: MemoryFindings) -> pl.DataFrame:
    """Every out-of-memory: ``stage phase epoch step happened_in asked_for what_was_done context_file``."""
    rows = [
        {
            **_where(row),
            "epoch": _number(row["epoch"]),
            "step": _number(row["global_step"]),
            "happened_in": (row["happened_in"] or NONE).replace("_", " "),
            "asked_for": NONE if row["asked_mb"] is None else megabytes_text(row["asked_mb"]),
            "what_was_done": row["done"],
            "context_file": _context_path(row),
        }
        for row in found.shortages.iter_rows(named=True)
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
            "stage": where_text(row),
            "attempt": row["attempt"],
            "predicted": megabytes_text(row["predicted_mb"]),
            "measured": NONE if row["measured_mb"] is None else megabytes_text(row["measured_mb"]),
            "error": NONE if row["error_percent"] is None else f"{row['error_percent']:+.0f}%{_flag(row)}",
            "micro_batch": _number(row["micro_batch"]),
        }
        for row in found.predictions.iter_rows(named=True)
    ]
    texts = dict.fromkeys(("predicted", "measured", "error", "micro_batch"), pl.String)
    return pl.DataFrame(rows, {"stage": pl.String, "attempt": pl.Int64, **texts})


_WHERE = {"stage": pl.String, "phase": pl.String}


def _where(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"stage": where_text(row), "phase": phase_text(row["phase"])}


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
