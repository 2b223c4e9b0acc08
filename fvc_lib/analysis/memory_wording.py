"""What was found about a run's memory, one sentence each: the same in figures, notebook, report and terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import polars as pl

from fvc_lib.analysis.memory_findings import NEAR_LIMIT_PERCENT, PREDICTION_TOLERANCE_PERCENT, PROCESS, MemoryFindings
from fvc_lib.analysis.trend import MIN_EPOCHS
from fvc_lib.analysis.wording import bytes_text, count_text, duration_text

NO_SAMPLES = "No memory samples are recorded"


def megabytes_text(megabytes: float | None) -> str:
    """``629 MB``; the log's megabytes are 1e6 bytes."""
    return bytes_text(None if megabytes is None else megabytes * 1e6)


def where_text(row: Mapping[str, Any]) -> str:
    """``04_fold_training, fold 2`` of any row with a stage and a fold."""
    return str(row["stage"]) if row["fold"] is None else f"{row['stage']}, fold {row['fold']}"


def phase_text(phase: str | None) -> str:
    """``control_train`` as ``training on shuffled labels``, other phases in their own words."""
    if phase is None:
        return "not recorded"
    plain = phase.removeprefix("control_").replace("_", " ")
    return f"{plain} (shuffled labels)" if phase.startswith("control_") else plain


def of_budget_text(budget_mb: float | None, usage_percent: float | None) -> str:
    """`` of 25.28 GB allowed (2.5%)``, or nothing where no budget is known."""
    if budget_mb is None or usage_percent is None:
        return ""
    return f" of {megabytes_text(budget_mb)} allowed ({usage_percent:.1f}%)"


def peak_sentence(found: MemoryFindings) -> str:
    """How high memory went, of what, and where."""
    peak = found.peak
    if peak is None:
        return NO_SAMPLES
    whose = "Memory" if peak["place"] == PROCESS else f"Memory of {peak['place']}"
    told = megabytes_text(peak["used_mb"]) + of_budget_text(peak["budget_mb"], peak["usage_percent"])
    return f"{whose} peaks at {told}, in {where_text(peak)}, {phase_text(peak['phase'])}"


def parts_sentence(found: MemoryFindings) -> str:
    """What of the peak stood before the first step, what the work added, and what child processes hold."""
    peak = found.peak
    if peak is None:
        return NO_SAMPLES
    parts, before = [], found.before_training_mb(peak)
    if before is not None and peak["phase"] != "setup":
        added = _signed(peak["used_mb"] - before)
        parts.append(f"{megabytes_text(before)} stood before the first step, the work itself added {added}")
    if peak["alone_mb"] is not None:
        children = peak["used_mb"] - peak["alone_mb"]
        held = f"{megabytes_text(children)} ({children / peak['used_mb']:.0%})" if children >= 1 else "nothing"
        parts.append(f"child processes held {held}")
    told = f"At the peak: {'; '.join(parts)}" if parts else "Nothing that would divide the peak is logged"
    measuring = found.preflight_peak_mb
    return told if measuring is None else f"{told}. Measuring a step beforehand took {megabytes_text(measuring)}"


def limit_sentence(found: MemoryFindings) -> str:
    """Whether memory came close to its budget, how often and how close."""
    if found.usage["usage_percent"].is_null().all() and found.near_limit.is_empty():
        return "Whether memory came close to a limit is not known: no budget is recorded"
    if found.near_limit.is_empty():
        return f"Memory was never above {NEAR_LIMIT_PERCENT:.0f}% of its budget"
    highest = found.near_limit.sort("usage_percent", descending=True, nulls_last=True).row(0, named=True)
    seconds = float((found.near_limit["until_seconds"] - found.near_limit["seconds"]).sum())
    lasting = f", {duration_text(seconds)} in all" if seconds else ""
    told = "" if highest["usage_percent"] is None else f"; highest {highest['usage_percent']:.1f}%"
    return (
        f"Memory went above {NEAR_LIMIT_PERCENT:.0f}% of its budget {_times(found.near_limit.height)}{lasting}{told}, "
        f"in {where_text(highest)}, {phase_text(highest['phase'])}"
    )


def growth_sentence(found: MemoryFindings) -> str:
    """Whether memory grows from epoch to epoch."""
    leaks = found.leaks
    if leaks.height:
        worst = leaks.row(0, named=True)
        others = f"; so do {leaks.height - 1} more" if leaks.height > 1 else ""
        return (
            f"Memory leaks: {worst['slope_mb']:.1f} MB more with every epoch in {where_text(worst)}, "
            f"{phase_text(worst['phase'])}{others}"
        )
    judged = found.growth.filter(pl.col("verdict") != "too few epochs")
    if judged.is_empty():
        most = max(found.growth["num_epochs"].to_list(), default=0)
        told = f"there are {most}" if most else "none is recorded"
        return f"Growth cannot be judged yet: that needs {MIN_EPOCHS} epochs, and {told}"
    steepest = judged.sort("slope_mb", descending=True).row(0, named=True)
    return f"Memory does not leak: at most {steepest['slope_mb']:+.1f} MB per epoch, in {where_text(steepest)}"


def shortage_sentence(found: MemoryFindings) -> str:
    """How often memory ran out, and what was done."""
    rows = found.shortages
    if rows.is_empty():
        return "Memory never ran out"
    after = rows.filter(pl.col("micro_batch_next") < pl.col("micro_batch"))
    told = ""
    if after.height:
        first, last = max(after["micro_batch"].to_list()), min(after["micro_batch_next"].to_list())
        told = f": the micro-batch went from {first} down to {last}"
    stages = count_text(rows.select("run_id", "stage", "fold").n_unique(), "stage")
    return f"Memory ran out {_times(rows.height)} in {stages}{told}"


def prediction_sentence(found: MemoryFindings) -> str:
    """How far the preflight's prediction is from what was measured."""
    rows = found.predictions.filter(pl.col("error_percent").is_not_null())
    if rows.is_empty():
        tried = "preflight" in found.events["kind"]
        told = "the preflight predicted nothing" if tried else "no preflight is recorded"
        told = "no training has been sampled yet" if found.predictions.height else told
        return f"Prediction and measurement cannot be compared: {told}"
    worst = rows.sort(pl.col("error_percent").abs(), descending=True).row(0, named=True)
    off = rows.filter("is_off").height
    if not off:
        return f"The prediction is within {math.ceil(abs(worst['error_percent']))}% of what was measured"
    how = "above" if worst["error_percent"] > 0 else "below"
    return (
        f"The prediction is off by more than {PREDICTION_TOLERANCE_PERCENT:.0f}% in {off} of "
        f"{count_text(rows.height, 'training')}: {abs(worst['error_percent']):.0f}% {how} what was measured in "
        f"{where_text(worst)}"
    )


def event_counts_sentence(found: MemoryFindings) -> str:
    """Which kinds of events there are, and how many of each."""
    if found.events.is_empty():
        return "No memory event is recorded"
    counts = found.events.group_by("kind", maintain_order=True).len()
    told = [f"{number} × {str(kind).replace('_', ' ')}" for kind, number in counts.iter_rows()]
    return f"Events: {', '.join(told)}"


def memory_facts(found: MemoryFindings) -> tuple[tuple[str, str], ...]:
    """Name and text of what the head of a report says about memory; nothing where nothing is recorded."""
    facts = []
    if found.peak is not None and found.peak["budget_mb"] is not None:
        place = "" if found.peak["place"] == PROCESS else f" on {found.peak['place']}"
        share = f"{found.peak['usage_percent']:.1f}% used at most{place}"
        facts.append(("Memory budget", f"{megabytes_text(found.peak['budget_mb'])}, {share}"))
    if found.preflight_peak_mb is not None:
        facts.append(
            ("Measuring", f"{megabytes_text(found.preflight_peak_mb)} while steps were measured before the training")
        )
    compared = found.predictions.filter(pl.col("error_percent").is_not_null())
    if compared.height:
        worst = compared.sort(pl.col("error_percent").abs(), descending=True).row(0, named=True)
        how = "above" if worst["error_percent"] > 0 else "below"
        told = f"{megabytes_text(worst['predicted_mb'])}, {abs(worst['error_percent']):.0f}% {how} what was measured"
        facts.append(("Predicted peak", told))
    if found.shortages.height:
        facts.append(("Out of memory", shortage_sentence(found).removeprefix("Memory ran out ")))
    if found.leaks.height:
        facts.append(("Leak", growth_sentence(found).removeprefix("Memory leaks: ")))
    return tuple(facts)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _signed(megabytes: float) -> str:
    return megabytes_text(megabytes) if megabytes >= 0 else f"-{megabytes_text(-megabytes)}"
