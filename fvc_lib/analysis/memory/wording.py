"""What was found about a run's memory, one sentence each: the same in figures, notebook, report and terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.memory import findings
from fvc_lib.analysis.memory.findings import MemoryFindings
from fvc_lib.analysis.read.records import read_json_object
from fvc_lib.analysis.wording import bytes_text, count_text, duration_text
from fvc_lib.services.memory_policy import MEASURING, PREFLIGHT, next_settings
from fvc_lib.services.run_paths import RunPaths

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
    whose = "Memory" if peak["place"] == findings.PROCESS else f"Memory of {peak['place']}"
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
        return f"Memory was never above {findings.NEAR_LIMIT_PERCENT:.0f}% of its budget"
    highest = found.near_limit.sort("usage_percent", descending=True, nulls_last=True).row(0, named=True)
    seconds = float((found.near_limit["until_seconds"] - found.near_limit["seconds"]).sum())
    lasting = f", {duration_text(seconds)} in all" if seconds else ""
    told = "" if highest["usage_percent"] is None else f"; highest {highest['usage_percent']:.1f}%"
    return (
        f"Memory went above {findings.NEAR_LIMIT_PERCENT:.0f}% of its budget {_times(found.near_limit.height)}{lasting}"
        f"{told}, in {where_text(highest)}, {phase_text(highest['phase'])}"
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
        return f"Growth cannot be judged yet: that needs {findings.MIN_EPOCHS} epochs, and {told}"
    steepest = judged.sort("slope_mb", descending=True).row(0, named=True)
    return f"Memory does not leak: at most {steepest['slope_mb']:+.1f} MB per epoch, in {where_text(steepest)}"


def out_of_memory_sentence(found: MemoryFindings) -> str:
    """How often memory ran out, and what was done."""
    rows = found.out_of_memory
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
        f"The prediction is off by more than {findings.PREDICTION_TOLERANCE_PERCENT:.0f}% in {off} of "
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
        place = "" if found.peak["place"] == findings.PROCESS else f" on {found.peak['place']}"
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
    if found.out_of_memory.height:
        facts.append(("Out of memory", out_of_memory_sentence(found).removeprefix("Memory ran out ")))
    if found.leaks.height:
        facts.append(("Leak", growth_sentence(found).removeprefix("Memory leaks: ")))
    return tuple(facts)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _signed(megabytes: float) -> str:
    return megabytes_text(megabytes) if megabytes >= 0 else f"-{megabytes_text(-megabytes)}"


# --- What held memory when it ran out, from the context files that an out-of-memory leaves


_SCHEMA = {"stage": pl.String, "shape": pl.String, "dtype": pl.String, "num_tensors": pl.Int64, "total_bytes": pl.Int64}
_MOST_ROWS = 8


def largest_tensors(run: RunPaths, found: MemoryFindings) -> pl.DataFrame:
    """The tensors that held most when memory ran out: ``stage shape dtype num_tensors total_bytes``, largest first.

    Of each stage, shape and type the out-of-memory where they held most. Context files that are missing or unreadable
    add no row.
    """
    rows = [row for event in found.out_of_memory.iter_rows(named=True) for row in _tensors(run, event)]
    frame = pl.DataFrame(rows, schema=_SCHEMA).sort("total_bytes", "stage", "shape", descending=[True, False, False])
    return frame.unique(["stage", "shape", "dtype"], keep="first", maintain_order=True).head(_MOST_ROWS)


def _tensors(run: RunPaths, event: dict[str, Any]) -> Iterator[dict[str, object]]:
    name = event["context_file"]
    if name is None or name != Path(name).name:  # a name from a log shall not lead out of its folder
        return
    state = read_json_object(run.oom_contexts(event["stage"], event["fold"]) / name).get("state")
    tensors = state.get("largest_tensors") if isinstance(state, dict) else None
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, dict) and isinstance(tensor.get("total_bytes"), int):
            shape, count = tensor.get("shape"), tensor.get("count")
            yield {
                "stage": where_text(event),
                "shape": " × ".join(map(str, shape)) if isinstance(shape, list) else "not recorded",
                "dtype": str(tensor.get("dtype")).removeprefix("torch."),
                "num_tensors": count if isinstance(count, int) else None,
                "total_bytes": tensor["total_bytes"],
            }


# --- What to change after a look at a run's memory: advice with the numbers it rests on, most urgent first


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


def run_advice(found: MemoryFindings, asked: Mapping[str, object]) -> tuple[Advice, ...]:
    """What to change, most urgent first; when nothing has to be, one entry says so.

    Args:
        found: of one run or stage.
        asked: its parameters by name, empty where they are not known.
    """
    if found.usage.is_empty():
        return (Advice("No memory samples are recorded.", "Nothing can be said before a stage has run."),)
    measuring, found = found.near_limit.filter(pl.col("phase").is_in(MEASURING)), found.of_the_work()
    urgent = [
        *_after_out_of_memory(found),
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


def _after_out_of_memory(found: MemoryFindings) -> list[Advice]:
    rows = found.out_of_memory
    if rows.is_empty():
        return []
    seen = out_of_memory_sentence(found) + "."
    at_one = rows.filter((pl.col("micro_batch") == 1) & pl.col("done").str.starts_with("stopped"))
    backed_off = rows.filter(pl.col("micro_batch_next") < pl.col("micro_batch"))["micro_batch_next"].min()
    if at_one.height:
        settings = "; else ".join(next_settings("sample"))
        return [Advice(seen, f"One sample alone was too much: {settings}.")]
    if isinstance(backed_off, int):
        return [Advice(seen, f"Begin where it ended: -p batch_size {backed_off} saves the retries and leaves the "
                             "result the same.")]  # fmt: skip
    settings = "; else ".join(next_settings("elsewhere"))
    return [Advice(seen, f"It was not the batch that was too large: {settings}.")]


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
    if found.near_limit.is_empty() or found.out_of_memory.height or peak is None or _was_lowered(found):
        return []
    enough = _enough_text(peak)
    if not _trained(peak["phase"]):
        return [Advice(limit_sentence(found) + ".", f"Give it more memory: {enough} would leave room.")]
    batch = micro_batch(found, asked)
    smaller = next_settings("batch", batch_size=batch or 1)[0]
    return [Advice(limit_sentence(found) + ".", f"Before it runs out: {smaller}, or {enough}.")]


def _after_measuring(spells: pl.DataFrame) -> list[Advice]:
    if spells.is_empty():
        return []
    highest = spells.sort("usage_percent").row(-1, named=True)
    usage = f"took up to {highest['usage_percent']:.0f}% of the budget."
    if highest["phase"] == PREFLIGHT:
        change = f"{next_settings('preflight')[0]} spares it."
        return [Advice(f"Measuring a step before the training {usage}", change)]
    return [Advice(f"The batch-size sweep {usage}", f"{next_settings('batch_size_sweep')[0]} spares it.")]


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
    rows = found.peaks.filter((pl.col("place") == findings.PROCESS) & pl.col("budget_mb").is_not_null())
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
