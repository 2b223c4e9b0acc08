"""What to change after a look at a run's memory: advice with the numbers it rests on, most urgent first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from fvc_lib.analysis.memory_findings import PROCESS, MemoryFindings
from fvc_lib.analysis.memory_wording import (
    growth_sentence,
    limit_sentence,
    megabytes_text,
    prediction_sentence,
    shortage_sentence,
    where_text,
)
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.memory_observer import MEASURING, PREFLIGHT

COMFORTABLE_PERCENT = 50.0  # below it there is room for more
FULL_SHARE = 0.8  # a plan that fills more of the budget has no room for what was not foreseen
SPARE_FACTOR = 1.25  # a limit so much above the peak is safe to ask for
LARGE_CHILD_SHARE = 0.3
_LOWERED = (pl.col("kind") == "preflight") & (pl.col("micro_batch") < pl.col("micro_batch_planned"))
_TRAINED = "^(control_)?(train|validation|test)$"


@dataclass(frozen=True)
class Advice:
    """One thing that was seen, and what to change because of it; both plain text."""

    seen: str
    change: str


def memory_advice(found: MemoryFindings, asked: Mapping[str, object]) -> tuple[Advice, ...]:
    """What to change, most urgent first; when nothing has to be, one entry says so.

    Args:
        found: of one run or stage.
        asked: its parameters by name, empty where they are not known.
    """
    if found.usage.is_empty():
        return (Advice("No memory samples are recorded.", "Nothing can be said before a stage has run."),)
    measuring, found = found.near_limit.filter(pl.col("phase").is_in(MEASURING)), found.of_the_work()
    urgent = [
        *_after_shortages(found),
        *_after_preflight(found),
        *_after_leaks(found),
        *_after_near_limit(found, asked),
        *_after_measuring(measuring),
    ]
    roomy = [] if urgent else [*_larger_batch(found, asked), *_smaller_request(found)]
    advice = [*urgent, *_off_prediction(found), *_child_processes(found, asked), *roomy]
    return tuple(advice) or (Advice("Nothing stands out.", "Leave it as it is."),)


def advice_table(advice: Sequence[Advice]) -> pl.DataFrame:
    """Columns ``seen`` and ``change``."""
    return pl.DataFrame([vars(each) for each in advice], schema={"seen": pl.String, "change": pl.String})


def _after_shortages(found: MemoryFindings) -> list[Advice]:
    rows = found.shortages
    if rows.is_empty():
        return []
    seen = shortage_sentence(found) + "."
    at_one = rows.filter((pl.col("micro_batch") == 1) & pl.col("done").str.starts_with("stopped"))
    backed_off = rows.filter(pl.col("micro_batch_next") < pl.col("micro_batch"))["micro_batch_next"].min()
    if at_one.height:
        return [Advice(seen, "One clip alone was too much: resume with -p gradient_checkpointing true or with more "
                             "memory; else a new run with a smaller num_frames or fixed_size.")]  # fmt: skip
    if isinstance(backed_off, int):
        return [Advice(seen, f"Begin where it ended: -p batch_size {backed_off} saves the retries and leaves the "
                             "result the same.")]  # fmt: skip
    return [Advice(seen, "It was not the batch that was too large: give it more memory, or -p gradient_checkpointing "
                         "true.")]  # fmt: skip


def _after_preflight(found: MemoryFindings) -> list[Advice]:
    if not _was_lowered(found):
        return []
    row = found.events.filter(_LOWERED).sort("micro_batch").row(0, named=True)
    seen = f"The preflight lowered the micro-batch from {row['micro_batch_planned']} to {row['micro_batch']} to fit"
    change = f"Fine as it is; for larger batches give more than {megabytes_text(row['budget_mb'])}."
    if found.near_limit.height and found.peak is not None:
        change = f"The result stays the same; {_enough_text(found.peak)} would leave room."
    return [Advice(f"{seen} {megabytes_text(row['budget_mb'])}.", change)]


def _after_leaks(found: MemoryFindings) -> list[Advice]:
    if found.leaks.is_empty():
        return []
    worst = found.leaks.row(0, named=True)
    budget = found.usage.filter(pl.col("place") == worst["place"])["budget_mb"].min()
    left = ""
    if isinstance(budget, float) and worst["slope_mb"] > 0 and budget > worst["last_mb"]:
        epochs = math.floor((budget - worst["last_mb"]) / worst["slope_mb"])
        left = f" At this rate its budget of {megabytes_text(budget)} lasts {count_text(epochs, 'more epoch')}."
    change = "Find what is kept: -p profile_memory true records who allocates it. A resume frees it for a while."
    return [Advice(f"{growth_sentence(found)}.{left}", change)]


def _after_near_limit(found: MemoryFindings, asked: Mapping[str, object]) -> list[Advice]:
    peak = found.peak
    if found.near_limit.is_empty() or found.shortages.height or peak is None or _was_lowered(found):
        return []
    enough = _enough_text(peak)
    if not _trained(peak["phase"]):
        return [Advice(limit_sentence(found) + ".", f"Give it more memory: {enough} would leave room.")]
    batch = micro_batch(found, asked)
    smaller = f"-p batch_size {batch // 2}" if batch and batch > 1 else "-p gradient_checkpointing true"
    return [Advice(limit_sentence(found) + ".", f"Before it runs out: {smaller}, or {enough}.")]


def _after_measuring(spells: pl.DataFrame) -> list[Advice]:
    if spells.is_empty():
        return []
    highest = spells.sort("usage_percent").row(-1, named=True)
    usage = f"took up to {highest['usage_percent']:.0f}% of the budget."
    if highest["phase"] == PREFLIGHT:
        change = "-p memory_preflight false spares it, once a batch_size is known to fit."
        return [Advice(f"Measuring a step before the training {usage}", change)]
    return [Advice(f"Measuring what fits {usage}", "-p measure_fits false spares it, once that is known.")]


def _larger_batch(found: MemoryFindings, asked: Mapping[str, object]) -> list[Advice]:
    """Doubling the micro-batch at most doubles what the steps add to what stood before."""
    trained = found.peaks.filter(pl.col("phase").str.contains(_TRAINED), pl.col("budget_mb").is_not_null())
    if trained.is_empty():
        return []
    row = trained.sort("usage_percent", descending=True).row(0, named=True)
    before = found.before_training_mb(row)
    batch, effective = micro_batch(found, asked), asked.get("effective_batch_size")
    if before is None or row["usage_percent"] >= COMFORTABLE_PERCENT:
        return []
    if batch and isinstance(effective, int) and 2 * batch > effective:
        return []
    doubled = before + 2 * max(row["used_mb"] - before, 0.0)
    if doubled > FULL_SHARE * row["budget_mb"]:
        return []
    seen = (
        f"Training peaks at {row['usage_percent']:.1f}% of its budget ({where_text(row)}), of which its steps add "
        f"{megabytes_text(max(row['used_mb'] - before, 0.0))}."
    )
    how = f"-p batch_size {2 * batch}" if batch else "a batch_size of twice the model's default"
    change = f"If training is slow: {how} would need about {megabytes_text(doubled)}; the result stays the same."
    return [Advice(seen, change)]


def _smaller_request(found: MemoryFindings) -> list[Advice]:
    rows = found.peaks.filter((pl.col("place") == PROCESS) & pl.col("budget_mb").is_not_null())
    if rows.is_empty():
        return []
    row = rows.sort("used_mb", descending=True).row(0, named=True)
    if row["usage_percent"] >= COMFORTABLE_PERCENT:
        return []
    seen = f"{megabytes_text(row['used_mb'])} of {megabytes_text(row['budget_mb'])} allowed were used."
    share = f"{SPARE_FACTOR - 1:.0%} to spare"
    request = _request_text(row["used_mb"] * SPARE_FACTOR)
    return [Advice(seen, f"Ask for less: {request} would have been enough, with {share}.")]


def _off_prediction(found: MemoryFindings) -> list[Advice]:
    if found.predictions.filter("is_off").is_empty():
        return []
    change = "Do not plan by the preflight here: plan by the measured peak."
    return [Advice(prediction_sentence(found) + ".", change)]


def _child_processes(found: MemoryFindings, asked: Mapping[str, object]) -> list[Advice]:
    peak = found.peak
    if peak is None or peak["alone_mb"] is None or (peak["usage_percent"] or 0) < COMFORTABLE_PERCENT:
        return []
    children = peak["used_mb"] - peak["alone_mb"]
    if children < LARGE_CHILD_SHARE * peak["used_mb"] or peak["phase"] == "report":  # there they are memray's
        return []
    share = f"{children / peak['used_mb']:.0%} of the peak"
    name = "num_workers" if _trained(peak["phase"]) else "probe_workers"
    workers = asked.get(name)
    each = f", about {megabytes_text(children / workers)} each" if isinstance(workers, int) and workers else ""
    seen = f"Worker processes hold {share} ({megabytes_text(children)}{each})."
    return [Advice(seen, f"Fewer of them (-p {name}) is the cheapest way to less memory; the result stays the same.")]


def micro_batch(found: MemoryFindings, asked: Mapping[str, object]) -> int | None:
    """The micro-batch last worked with: what events say, else what was asked for; None where neither is known."""
    told = found.events.filter(pl.col("kind").is_in(["preflight", "micro_batch"]) & pl.col("micro_batch").is_not_null())
    if told.height:
        return int(told["micro_batch"][-1])
    batch = asked.get("batch_size")
    return batch if isinstance(batch, int) and batch > 0 else None


def _was_lowered(found: MemoryFindings) -> bool:
    return found.events.filter(_LOWERED).height > 0


def _enough_text(peak: Mapping[str, Any]) -> str:
    return f"a limit of {_request_text(peak['used_mb'] / FULL_SHARE)}"


def _trained(phase: Any) -> bool:
    return re.search(_TRAINED, str(phase)) is not None


def _request_text(megabytes: float) -> str:
    gigabytes = math.ceil(megabytes / 100) / 10
    mebibytes = math.ceil(gigabytes * 1e9 / 2**20 / 100) * 100  # what SLURM calls M
    return f"FVC_MEM_GB={gigabytes:g} (or --mem={mebibytes}M)"
