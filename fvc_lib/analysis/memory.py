"""The memory of a run: its peak, its growth over epochs, out-of-memory events, and the error of the predicted peak.

Megabytes are 1e6 bytes. Terms:

- A place is where memory is used: ``process`` for main memory, or an accelerator such as ``cuda:0``.
- An attempt is one start of a stage. A resumed stage has several.
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
        usage: memory in use, one row per sample and place (main memory or an accelerator), from ``memory_usage``.
        events: memory events such as an out-of-memory, from ``queries.memory_events``.
        peaks: the highest memory of each stage, phase and place, from ``phase_peaks``.
        growth: the growth over the epochs of each training, judged by ``LEAK_RULE``, from ``epoch_growth``.
        predictions: predicted and measured peak of each training, from ``predictions``.
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
        """The row of ``peaks`` with the highest memory, as a dict. None if ``peaks`` is empty.

        If several places (main memory or accelerators) were sampled, the row is of the place that used the largest
        percentage of its budget.
        """
        of_place = pl.col("usage_percent").max().over("place").fill_null(-1)
        highest = self.peaks.sort(of_place, "used_mb", descending=True).head(1)
        return next(highest.iter_rows(named=True), None)

    @property
    def out_of_memory(self) -> pl.DataFrame:
        """The out-of-memory events, one row each.

        Columns are ``stage fold phase epoch global_step happened_in micro_batch micro_batch_next``. ``micro_batch`` is
        the number of samples per forward pass when memory ran out, ``micro_batch_next`` the number that was tried next.
        """
        rows = self.events.filter(kind="out_of_memory")
        columns = "stage fold phase epoch global_step happened_in micro_batch micro_batch_next"
        return rows.select(columns.split())


def run_memory(
    samples: Answer, events: Answer, *, leave_out: Collection[str] = (), folds: Collection[int] = ()
) -> MemoryFindings:
    """Return peaks, growth, events and predictions of the memory of a run.

    Args:
        samples: outcome of ``queries.memory_samples``.
        events: outcome of ``queries.memory_events``.
        leave_out: names of stages to leave out.
        folds: outer folds to include. Empty: all folds, and the stages without folds.
    """
    chosen = ~pl.col("stage").is_in(list(leave_out))
    chosen = chosen & pl.col("fold").is_in(list(folds)) if folds else chosen
    usage = memory_usage(samples.frame.filter(chosen))
    happened = events.frame.filter(chosen)
    notes = tuple(dict.fromkeys((*samples.notes, *events.notes)))
    return MemoryFindings(usage, happened, phase_peaks(usage), epoch_growth(usage), predictions(usage, happened), notes)


def memory_usage(samples: pl.DataFrame) -> pl.DataFrame:
    """Return the memory in use in MB, one row per sample and place (main memory or an accelerator).

    Columns are ``run_id stage fold attempt line seconds phase epoch batch_idx global_step place used_mb budget_mb
    usage_percent between``.

    ``line`` is the line of the sample in the log, and ``seconds`` the working time since the first start of the stage.

    Memory may peak between two samples. The high-water mark in the log (largest memory so far) shows such a peak. The
    result then has an additional row for the peak, with the phase and the epoch of the sample before it. ``between`` is
    true in such rows only.

    ``samples`` are rows of ``queries.memory_samples``.
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
    only_setup = (pl.col("phase") == "setup").all().over("run_id", "stage", "fold")
    phaseless = only_setup & pl.col("fold").is_null()
    phase = pl.when(phaseless).then(pl.lit("whole_stage")).otherwise("phase")
    return usage.with_columns(phase=phase)


def phase_peaks(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the highest memory in MB of each phase and place, in the order in which the phases began.

    A phase is a part of a stage, such as training. A place is main memory or an accelerator.

    Columns are ``run_id stage fold phase place num_samples used_mb budget_mb usage_percent seconds epoch``.
    ``num_samples`` counts the samples of the phase. The last four columns come from the row with the highest memory.
    ``usage`` is the outcome of ``memory_usage``.
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
    """Return the median memory in MB of each training epoch, one row per epoch and place.

    A place is main memory or an accelerator. Columns are ``run_id stage fold attempt place phase epoch used_mb``.
    ``usage`` is the outcome of ``memory_usage``.
    """
    query = """
        SELECT run_id, stage, fold, attempt, place, phase, epoch, median(used_mb) AS used_mb
        FROM usage WHERE regexp_full_match(phase, '([a-z]+_)?train') AND epoch IS NOT NULL AND NOT between
        GROUP BY run_id, stage, fold, attempt, place, phase, epoch ORDER BY ALL NULLS FIRST
    """
    return ask(query, {"usage": usage})


def epoch_growth(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the growth of memory over the epochs of each training, one row per training and place.

    A place is main memory or an accelerator. The growth is the slope of a line that is fitted to the median memory of
    the epochs.

    Columns are ``run_id stage fold attempt place phase num_epochs slope_mb level_mb verdict``. ``slope_mb`` is in MB
    per epoch, and ``level_mb`` is the value of the fitted line at epoch 0. ``verdict`` is "leak", "no leak" or "too few
    epochs". ``usage`` is the outcome of ``memory_usage``.
    """
    schema = {
        "run_id": pl.String, "stage": pl.String, "fold": pl.Int64, "attempt": pl.Int64, "place": pl.String,
        "phase": pl.String, "num_epochs": pl.Int64, "slope_mb": pl.Float64, "level_mb": pl.Float64,
        "verdict": pl.String,
    }  # fmt: skip
    rows = []
    for key, points in epoch_medians(usage).group_by(list(schema)[:6], maintain_order=True):
        epochs = points["epoch"].cast(pl.Float64).to_numpy()
        judged = judged_growth(epochs, points["used_mb"].to_numpy())
        rows.append((*key, *judged))
    return pl.DataFrame(rows, schema, orient="row")


Numbers = np.ndarray[Any, np.dtype[np.float64]]


def judged_growth(epochs: Numbers, used_mb: Numbers) -> tuple[int, float | None, float | None, str]:
    """Fit a line to memory over epochs, and decide whether memory leaks.

    It leaks if the slope is large, steady and significant. ``LEAK_RULE`` states the exact rule.

    Args:
        epochs: float64 (n,), ascending numbers of epochs.
        used_mb: float64 (n,), median memory of each epoch in MB.

    Returns:
        ``(num_epochs, slope, level, verdict)``. The slope is in MB per epoch, and the level is the value of the line at
        epoch 0, in MB. Both are None if there are too few epochs. The verdict is "leak", "no leak" or "too few epochs".
    """
    if epochs.size < MIN_EPOCHS:
        return epochs.size, None, None, "too few epochs"
    x, y = epochs[1:], used_mb[1:]
    from scipy import stats  # two thirds of a second to load, in every notebook with figures

    slope = float(stats.theilslopes(y, x).slope)
    grown_mb = MIN_GROWN_SHARE * float(np.max(used_mb))
    epochs_passed = float(epochs[-1] - epochs[0])
    enough = max(MIN_MB_PER_EPOCH, grown_mb / epochs_passed)
    # Both halves must grow: after a single jump, the line over all epochs rises, but one half is flat.
    middle = x.size // 2
    halves = (slice(0, x.size - middle), slice(middle, None))
    steady = slope > enough and all(stats.theilslopes(y[half], x[half]).slope > enough for half in halves)
    leaks = steady and stats.kendalltau(x, y, alternative="greater").pvalue < SIGNIFICANCE
    level = float(np.median(y - slope * x))
    return epochs.size, slope, level, "leak" if leaks else "no leak"


def predictions(usage: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Return predicted and measured peak memory of each training, one row per attempt (start of a stage).

    Columns are ``run_id stage fold attempt place predicted_mb measured_mb error_percent``. For a training on an
    accelerator, both numbers are the accelerator's memory. ``measured_mb`` is null until training begins.
    ``error_percent`` is in percent of the measured peak, and positive if the prediction was too high.

    Args:
        usage: outcome of ``memory_usage``.
        events: rows of ``queries.memory_events``.
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
    """Return text such as ``04_fold_training, fold 2`` for a row with the columns ``stage`` and ``fold``.

    If ``fold`` is None, the text is the name of the stage.
    """
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
    leaks = pl.col("verdict") == "leak"
    judged = findings.growth.drop_nulls("slope_mb").sort(leaks, "slope_mb", descending=True)
    if judged.is_empty():
        return f"Growth cannot be judged yet: that needs {MIN_EPOCHS} epochs"
    steepest = judged.row(0, named=True)
    where = f"{where_text(steepest)}, {phase_text(steepest['phase'])}"
    if steepest["verdict"] == "leak":
        return f"Memory leaks: {steepest['slope_mb']:.1f} MB more with every epoch in {where}"
    return f"Memory does not leak: at most {steepest['slope_mb']:+.1f} MB per epoch, in {where}"


def out_of_memory_sentence(findings: MemoryFindings) -> str:
    """Return a sentence on how often memory ran out, and how far the micro-batch was reduced.

    The micro-batch is the number of samples per forward pass.
    """
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
