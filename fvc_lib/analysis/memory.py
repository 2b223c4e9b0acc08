"""The memory of a run: its peak, its growth over epochs, every out-of-memory, and the error of the prediction.

Megabytes are 1e6 bytes. A place is the process or an accelerator such as ``cuda:0``. Terms:

- Memory in use is the resident memory of a stage's process with its children, or what tensors hold on an accelerator.
- The peak is the highest memory in use over all phases, including high-water marks between two samples.
- The budget is the smallest of ``mem_gb``, the job's limit and the machine's memory.
- The predicted peak comes from the preflight, a check before training. It is compared with the peak of the phases
  training and validation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from scipy import stats

from fvc_lib.analysis.read.queries import ask
from fvc_lib.analysis.read.runs import Answer
from fvc_lib.analysis.wording import count_text, megabytes_text
from fvc_lib.services.tasks import CONTROL_TRAININGS

PROCESS = "process"  # name of the place for main memory

# The first epoch is left out as warm-up. Fewer than four others would rise by chance more often than 1 time in 20.
MIN_EPOCHS = 5
MIN_MB_PER_EPOCH = 2.0
MIN_GROWN_SHARE = 0.05
SIGNIFICANCE = 0.05
LEAK_RULE = (
    f"a leak is a slope (Theil-Sen, without the first epoch) of more than {MIN_MB_PER_EPOCH:g} MB per epoch that adds "
    f"more than {MIN_GROWN_SHARE:.0%} of the peak over all epochs, in the first and the second half as well, with a p "
    f"value under {SIGNIFICANCE:g} (Kendall's tau)"
)


@dataclass(frozen=True)
class MemoryFindings:
    """The memory of a run's stages. A frame without rows means that nothing was recorded.

    Attributes:
        usage: one row per sample and place, as ``memory_usage`` returns it.
        events: memory events, as ``queries.memory_events`` returns them.
        peaks: the highest memory of each stage, phase and place.
        growth: the growth over the epochs of each training, judged by ``LEAK_RULE``.
        predictions: predicted and measured peak of each training.
        notes: sentences on lines that could not be read.
    """

    usage: pl.DataFrame
    events: pl.DataFrame
    peaks: pl.DataFrame
    growth: pl.DataFrame
    predictions: pl.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> dict[str, Any] | None:
        """The row of ``peaks`` with the highest memory of the place that came nearest to its budget.

        None if ``peaks`` is empty.
        """
        of_place = pl.col("usage_percent").max().over("place").fill_null(-1)
        highest = self.peaks.sort(of_place, "used_mb", descending=True).head(1)
        return next(highest.iter_rows(named=True), None)

    @property
    def out_of_memory(self) -> pl.DataFrame:
        """One row per out-of-memory event.

        ``micro_batch`` is the number of samples per forward pass when memory ran out, ``micro_batch_next`` the number
        that was tried next.
        """
        rows = self.events.filter(kind="out_of_memory")
        columns = "stage fold phase epoch global_step happened_in micro_batch micro_batch_next"
        return rows.select(columns.split())


def run_memory(
    samples: Answer, events: Answer, *, leave_out: Collection[str] = (), folds: Collection[int] = ()
) -> MemoryFindings:
    """Return the memory findings of a run.

    Args:
        samples: outcome of ``queries.memory_samples``.
        events: outcome of ``queries.memory_events``.
        leave_out: names of stages to leave out.
        folds: outer folds to include. Empty: all folds, and the stages without folds.
    """
    chosen = ~pl.col("stage").is_in(list(leave_out))
    chosen = chosen & pl.col("fold").is_in(list(folds)) if folds else chosen
    usage, happened = memory_usage(samples.frame.filter(chosen)), events.frame.filter(chosen)
    notes = tuple(dict.fromkeys((*samples.notes, *events.notes)))
    return MemoryFindings(usage, happened, phase_peaks(usage), epoch_growth(usage), predictions(usage, happened), notes)


def memory_usage(samples: pl.DataFrame) -> pl.DataFrame:
    """Return one row per sample and place: ``run_id stage fold attempt line seconds phase epoch batch_idx global_step
    place used_mb budget_mb usage_percent between``.

    The high-water mark is the largest memory so far, also between samples. If it rises above the sampled memory, an
    additional row with ``between`` true holds it. That row has the phase and the epoch of the preceding sample.
    """
    query = """
        WITH known AS (
            SELECT *, coalesce(device, 'cpu') LIKE 'cpu%' AS on_cpu FROM samples
        ), placed AS (
            SELECT *, CASE WHEN on_cpu THEN 'process' ELSE device END AS place,
                   coalesce(allocated_mb, rss_mb) AS used_mb
            FROM known
        ), followed AS (
            SELECT *, lag(max_allocated_mb) OVER ordered AS highest_before, lag(phase) OVER ordered AS phase_before,
                   lag(epoch) OVER ordered AS epoch_before
            FROM placed WHERE used_mb IS NOT NULL
            WINDOW ordered AS (PARTITION BY run_id, stage, fold, attempt, place ORDER BY line)
        ), spread AS (
            SELECT *, false AS between FROM followed
            UNION ALL BY NAME
            SELECT * REPLACE (
                max_allocated_mb AS used_mb, NULL AS usage_percent, coalesce(phase_before, phase) AS phase,
                CASE WHEN phase_before IS NULL THEN epoch ELSE epoch_before END AS epoch
            ), true AS between
            FROM followed WHERE max_allocated_mb > used_mb AND max_allocated_mb > coalesce(highest_before, 0)
        )
        SELECT run_id, stage, fold, attempt, line, seconds, coalesce(phase, 'not recorded') AS phase, epoch, batch_idx,
               global_step, place, used_mb, total_memory_mb AS budget_mb,
               coalesce(usage_percent, 100 * used_mb / nullif(total_memory_mb, 0)) AS usage_percent, between
        FROM spread ORDER BY run_id, stage, fold, place, attempt, line, between DESC
    """
    usage = ask(query, {"samples": samples})
    phaseless = (pl.col("phase") == "setup").all().over("run_id", "stage", "fold") & pl.col("fold").is_null()
    return usage.with_columns(phase=pl.when(phaseless).then(pl.lit("whole_stage")).otherwise("phase"))


def phase_peaks(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the highest memory of each phase, in the order of the phases: ``run_id stage fold phase place num_samples
    used_mb budget_mb usage_percent seconds epoch``.

    ``num_samples`` counts the samples of the phase. The last four columns come from the row of ``usage`` with the
    highest memory.
    """
    query = """
        SELECT run_id, stage, fold, phase, place, count(*) FILTER (NOT between) AS num_samples, max(used_mb) AS used_mb,
               arg_max_null(budget_mb, used_mb) AS budget_mb, arg_max_null(usage_percent, used_mb) AS usage_percent,
               arg_max_null(seconds, used_mb) AS seconds, arg_max_null(epoch, used_mb) AS epoch
        FROM usage GROUP BY run_id, stage, fold, phase, place
        ORDER BY run_id, stage, fold, min(seconds), min(line), place
    """
    return ask(query, {"usage": usage})


def epoch_medians(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the median memory of each training epoch: ``run_id stage fold attempt place phase epoch used_mb``."""
    query = """
        SELECT run_id, stage, fold, attempt, place, phase, epoch, median(used_mb) AS used_mb
        FROM usage WHERE regexp_full_match(phase, '([a-z]+_)?train') AND epoch IS NOT NULL AND NOT between
        GROUP BY run_id, stage, fold, attempt, place, phase, epoch ORDER BY ALL NULLS FIRST
    """
    return ask(query, {"usage": usage})


def epoch_growth(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the growth of memory in each training: ``run_id stage fold attempt place phase num_epochs slope_mb
    level_mb verdict``.

    The last four columns are the outcome of ``judged_growth``. ``slope_mb`` is in MB per epoch, and ``level_mb`` is the
    value of the fitted line at epoch 0.
    """
    schema = {
        "run_id": pl.String, "stage": pl.String, "fold": pl.Int64, "attempt": pl.Int64, "place": pl.String,
        "phase": pl.String, "num_epochs": pl.Int64, "slope_mb": pl.Float64, "level_mb": pl.Float64,
        "verdict": pl.String,
    }  # fmt: skip
    rows = []
    for key, points in epoch_medians(usage).group_by(list(schema)[:6], maintain_order=True):
        epochs = points["epoch"].cast(pl.Float64).to_numpy()
        rows.append((*key, *judged_growth(epochs, points["used_mb"].to_numpy())))
    return pl.DataFrame(rows, schema, orient="row")


Numbers = np.ndarray[Any, np.dtype[np.float64]]


def judged_growth(epochs: Numbers, used_mb: Numbers) -> tuple[int, float | None, float | None, str]:
    """Fit a line to ``used_mb`` (n,) over ascending ``epochs`` (n,), and judge its slope by ``LEAK_RULE``.

    Returns:
        ``(num_epochs, slope, level, verdict)``. The slope is in MB per epoch, and the level is the value of the line at
        epoch 0, in MB. Both are None if there are too few epochs. The verdict is "leak", "no leak" or "too few epochs".
    """
    if epochs.size < MIN_EPOCHS:
        return epochs.size, None, None, "too few epochs"
    x, y = epochs[1:], used_mb[1:]
    slope = float(stats.theilslopes(y, x).slope)
    enough = max(MIN_MB_PER_EPOCH, MIN_GROWN_SHARE * float(np.max(used_mb)) / float(epochs[-1] - epochs[0]))
    # Both halves must grow: after a single jump, the line over all epochs rises, but one half is flat.
    middle = x.size // 2
    halves = (slice(0, x.size - middle), slice(middle, None))
    steady = slope > enough and all(stats.theilslopes(y[half], x[half]).slope > enough for half in halves)
    leaks = steady and stats.kendalltau(x, y, alternative="greater").pvalue < SIGNIFICANCE
    return epochs.size, slope, float(np.median(y - slope * x)), "leak" if leaks else "no leak"


def predictions(usage: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Return predicted and measured peak of each training: ``run_id stage fold attempt place predicted_mb measured_mb
    error_percent``.

    For a training on an accelerator, both numbers are the accelerator's memory. ``measured_mb`` is null until training
    begins.
    ``error_percent`` is positive if the prediction was too high.
    """
    query = """
        WITH predicted AS (
            SELECT run_id, stage, fold, attempt, arg_max(predicted_peak_mb, line) AS predicted_mb
            FROM events WHERE kind = 'preflight' AND predicted_peak_mb IS NOT NULL GROUP BY run_id, stage, fold, attempt
        ), measured AS (
            SELECT run_id, stage, fold, attempt, place, max(used_mb) AS measured_mb
            FROM usage WHERE regexp_full_match(phase, '([a-z]+_)?(train|validation)')
            GROUP BY run_id, stage, fold, attempt, place
            -- If an accelerator was sampled, the prediction is about it.
            QUALIFY row_number() OVER (
                PARTITION BY run_id, stage, fold, attempt ORDER BY place = 'process', place
            ) = 1
        )
        SELECT predicted.run_id, predicted.stage, predicted.fold, predicted.attempt, place, predicted_mb, measured_mb,
               100 * (predicted_mb - measured_mb) / measured_mb AS error_percent
        FROM predicted LEFT JOIN measured
            ON predicted.run_id = measured.run_id AND predicted.stage = measured.stage
            AND predicted.fold IS NOT DISTINCT FROM measured.fold AND predicted.attempt = measured.attempt
        ORDER BY ALL NULLS FIRST
    """
    return ask(query, {"usage": usage, "events": events})


# --- Sentences of figures, notebook, report and dashboard


def where_text(row: Mapping[str, Any]) -> str:
    """Return text for the stage and fold of ``row``, such as ``04_fold_training, fold 2``."""
    return str(row["stage"]) if row["fold"] is None else f"{row['stage']}, fold {row['fold']}"


def phase_text(phase: str | None) -> str:
    """Return the readable name of a phase, such as ``train (shuffled labels)`` for ``control_train``.

    In the name of any other phase, the last ``_`` becomes a space. None gives "not recorded".
    """
    name, _, part = (phase or "not recorded").rpartition("_")
    return f"{part} ({CONTROL_TRAININGS[name]})" if name in CONTROL_TRAININGS else f"{name} {part}".strip()


def peak_sentence(findings: MemoryFindings) -> str:
    """Return a sentence on the peak memory, its share of the budget, and the stage and phase where it occurred."""
    peak = findings.peak
    if peak is None:
        return "No memory samples are recorded"
    whose = "Memory" if peak["place"] == PROCESS else f"Memory of {peak['place']}"
    budget = ""
    if peak["usage_percent"] is not None:
        budget = f" of {megabytes_text(peak['budget_mb'])} allowed ({peak['usage_percent']:.1f}%)"
    where = f"in {where_text(peak)}, {phase_text(peak['phase'])}"
    return f"{whose} peaks at {megabytes_text(peak['used_mb'])}{budget}, {where}"


def growth_sentence(findings: MemoryFindings) -> str:
    """Return a sentence on whether memory leaks. It names the training with the steepest growth over epochs."""
    judged = findings.growth.drop_nulls("slope_mb").sort(pl.col("verdict") == "leak", "slope_mb", descending=True)
    if judged.is_empty():
        return f"Growth cannot be judged yet: that needs {MIN_EPOCHS} epochs"
    steepest = judged.row(0, named=True)
    where = f"{where_text(steepest)}, {phase_text(steepest['phase'])}"
    if steepest["verdict"] == "leak":
        return f"Memory leaks: {steepest['slope_mb']:.1f} MB more with every epoch in {where}"
    return f"Memory does not leak: at most {steepest['slope_mb']:+.1f} MB per epoch, in {where}"


def out_of_memory_sentence(findings: MemoryFindings) -> str:
    """Return a sentence on how often memory ran out, and how far the micro-batch was reduced."""
    rows = findings.out_of_memory
    if rows.is_empty():
        return "Memory never ran out"
    text = f"Memory ran out {count_text(rows.height, 'time')}"
    sizes = rows["micro_batch_next"].drop_nulls()
    return text if sizes.is_empty() else f"{text}: the micro-batch went down to {min(sizes)}"


def prediction_sentence(findings: MemoryFindings) -> str:
    """Return a sentence on the largest error of a predicted peak, in percent of the measured peak."""
    rows = findings.predictions.drop_nulls("error_percent").sort(pl.col("error_percent").abs(), descending=True)
    if rows.is_empty():
        return "Prediction and measurement cannot be compared: no training was predicted and sampled"
    worst = rows.row(0, named=True)
    side = "above" if worst["error_percent"] > 0 else "below"
    return (
        f"The prediction is at most {abs(worst['error_percent']):.0f}% {side} the measured peak, in {where_text(worst)}"
    )


def memory_facts(findings: MemoryFindings) -> tuple[tuple[str, str], ...]:
    """Return facts about memory for the head of a report, as pairs ``(name, text)``.

    A fact is left out if there is nothing to report, such as no out-of-memory.
    """
    facts = {
        "Memory": peak_sentence(findings) if findings.peak is not None else "",
        "Out of memory": out_of_memory_sentence(findings) if findings.out_of_memory.height else "",
        "Leak": growth_sentence(findings) if "leak" in findings.growth["verdict"] else "",
    }
    return tuple((name, text) for name, text in facts.items() if text)
