"""Where a run's memory went: peaks, growth, every out-of-memory, what had been predicted, and a sentence on each."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import polars as pl

from fvc_lib.analysis.read.logs import read_events
from fvc_lib.analysis.read.queries import memory_samples
from fvc_lib.analysis.read.records import Answer, log_files
from fvc_lib.analysis.read.sql import ask
from fvc_lib.analysis.wording import count_text, duration_text, megabytes_text
from fvc_lib.services.memory.policy import MEASURING
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import CONTROL_TRAININGS

# --- Whether a short, noisy series keeps growing: Theil and Sen's slope with Mann and Kendall's test

# One warm-up epoch is left out, and below four points no order is rarer by chance than one in twenty.
MIN_EPOCHS = 5
MIN_MB_PER_EPOCH = 2.0
MIN_GROWN_SHARE = 0.05
SIGNIFICANCE = 0.05
RULE = (
    "a leak is a slope (Theil-Sen, the first epoch left out as warm-up) of more than "
    f"{MIN_MB_PER_EPOCH:g} MB per epoch that over all epochs adds more than {MIN_GROWN_SHARE:.0%} of the peak, that "
    f"the first and the second half show as well, and that chance explains in under {SIGNIFICANCE:.0%} (Mann-Kendall)"
)
_MOST_POINTS = 1000  # all pairs of a thousand points are half a million slopes
_EXACT_UP_TO = 40

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Growth:
    """How a series of one value per epoch, the warm-up included, grows, with a verdict by ``RULE``.

    ``slope_mb`` is per epoch, ``level_mb`` the fitted line at epoch 0, ``p_value`` the one-sided probability of so much
    order by chance; all None with fewer than two epochs after the first.
    """

    num_epochs: int
    slope_mb: float | None
    level_mb: float | None
    p_value: float | None
    verdict: str  # "leak", "no leak" or "too few epochs"


def growth(epochs: Numbers, used_mb: Numbers) -> Growth:
    """Judge memory, (n,) finite, over ``epochs``, (n,) ascending with no two alike, by ``RULE``."""
    if epochs.size < 3:
        return Growth(epochs.size, None, None, None, "too few epochs")
    chosen = np.unique(np.linspace(1, epochs.size - 1, _MOST_POINTS).round().astype(int))
    x, y = epochs[chosen], used_mb[chosen]
    slope, p_value = theil_sen_slope(x, y), mann_kendall_p(y)
    level = float(np.median(y - slope * x))
    if epochs.size < MIN_EPOCHS:
        return Growth(epochs.size, slope, level, p_value, "too few epochs")
    enough = max(MIN_MB_PER_EPOCH, MIN_GROWN_SHARE * float(np.max(used_mb)) / float(epochs[-1] - epochs[0]))
    middle = x.size // 2
    # A single step would pass the first test, but one of the halves beside it is flat.
    halves = ((x[: x.size - middle], y[: x.size - middle]), (x[middle:], y[middle:]))
    steady = all(theil_sen_slope(*half) > enough for half in ((x, y), *halves))
    return Growth(epochs.size, slope, level, p_value, "leak" if steady and p_value < SIGNIFICANCE else "no leak")


def theil_sen_slope(x: Numbers, y: Numbers) -> float:
    """The median slope over all pairs of points (H. Theil 1950, P. K. Sen 1968); ``x`` (n,) ascending, n >= 2."""
    first, second = np.triu_indices(x.size, k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def mann_kendall_p(y: Numbers) -> float:
    """Probability that values in random order would rise in as many pairs as ``y`` (n,) does, or more (Mann 1945).

    Exact up to 40 points, normal beyond. Ties count as neither rise nor fall, and the test is then on the safe side.
    """
    first, second = np.triu_indices(y.size, k=1)
    score = int(np.sum(np.sign(y[second] - y[first])))
    if y.size > _EXACT_UP_TO:
        deviation = math.sqrt(y.size * (y.size - 1) * (2 * y.size + 5) / 18)
        return 0.5 * math.erfc((score - 1) / deviation / math.sqrt(2))
    # P(number of falling pairs): the i-th value falls below 0 to i-1 of those before it, each as likely.
    falling = np.ones(1)
    for count in range(2, y.size + 1):
        falling = np.convolve(falling, np.full(count, 1 / count))
    most_falling = (y.size * (y.size - 1) // 2 - score) // 2
    return float(min(1.0, falling[: most_falling + 1].sum()))


WHOLE_STAGE = "whole_stage"  # the phase of a stage that tells no phases of its own
PROCESS = "process"  # where memory is: the process with its children, or an accelerator by its name
NEAR_LIMIT_PERCENT = 90.0
PREDICTION_TOLERANCE_PERCENT = 25.0
_KEYS = ("run_id", "stage", "fold")


@dataclass(frozen=True)
class MemoryFindings:
    """Everything known about the memory of some stages; frames may be empty, also while a run goes on.

    ``events`` are ``queries.memory_events``, other frames what the functions below of the same or a longer name return;
    ``notes`` say what could not be read.
    """

    usage: pl.DataFrame
    events: pl.DataFrame
    peaks: pl.DataFrame
    near_limit: pl.DataFrame
    growth: pl.DataFrame
    out_of_memory: pl.DataFrame
    predictions: pl.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> dict[str, Any] | None:
        """The row of ``peaks`` nearest to its budget, or the highest where no budget is known; of any phase."""
        by_usage = pl.col("usage_percent").fill_null(-1)
        rows = self.peaks.sort(by_usage, "used_mb", descending=True, maintain_order=True)
        return rows.row(0, named=True) if rows.height else None

    def of_the_work(self) -> Self:
        """The same without the peaks and spells of the preflight."""
        return replace(self, peaks=self.peaks.filter(_IS_WORK), near_limit=self.near_limit.filter(_IS_WORK))

    @property
    def leaks(self) -> pl.DataFrame:
        """The rows of ``growth`` that are leaks, steepest first."""
        return self.growth.filter(pl.col("verdict") == "leak").sort("slope_mb", descending=True)

    def before_training_mb(self, row: Mapping[str, Any]) -> float | None:
        """What stood in the place of ``row`` (of ``peaks``) when its stage left set-up; None where it is not logged."""
        same = [pl.col(key).eq_missing(pl.lit(row[key])) for key in (*_KEYS, "place")]
        setup = self.usage.filter(*same, pl.col("phase") == "setup", ~pl.col("between"))
        return setup["used_mb"][-1] if setup.height else None


def run_memory(run: RunPaths, *, leave_out: Collection[str] = (), folds: Collection[int] = ()) -> MemoryFindings:
    """The findings of one run, also while it goes on, without stages to ``leave_out``; of ``folds`` alone if given."""
    samples = memory_samples([run])
    events = read_events(log_files(run, "memory/events"), samples.frame)
    chosen = ~pl.col("stage").is_in(list(leave_out))
    chosen = chosen & pl.col("fold").is_in(list(folds)) if folds else chosen
    return find(Answer(samples.frame.filter(chosen), samples.notes), Answer(events.frame.filter(chosen), events.notes))


def find(samples: Answer, events: Answer) -> MemoryFindings:
    """The findings of ``logs.read_samples`` and ``logs.read_events``."""
    usage = memory_usage(samples.frame)
    relabelled = _in_whole_stages(events.frame, usage)
    found = (phase_peaks(usage), near_limit(usage, relabelled), epoch_growth(usage), out_of_memory(relabelled))
    notes = tuple(dict.fromkeys((*samples.notes, *events.notes)))
    return MemoryFindings(usage, relabelled, *found, predictions(usage, relabelled), notes)


def memory_usage(samples: pl.DataFrame) -> pl.DataFrame:
    """One row per sample and place: ``run_id stage fold attempt line seconds phase epoch batch_idx global_step place
    used_mb alone_mb reserved_mb budget_mb usage_percent between``.

    ``place`` is ``process`` or an accelerator. ``used_mb`` is resident memory with all children (``alone_mb`` without
    them), or what tensors hold on the accelerator (``reserved_mb``: with the allocator's cache). Where the high-water
    mark rose above what was sampled, a row with ``between`` true has it, in the phase that had lasted until then. A
    stage without folds that is always in set-up tells no phases: all of it is ``whole_stage``.
    """
    query = """
        WITH known AS (
            SELECT *, coalesce(device, 'cpu') LIKE 'cpu%' AS on_cpu,
                   bool_or(coalesce(device, 'cpu') LIKE 'cpu%') OVER (PARTITION BY run_id, stage, fold) AS has_cpu
            FROM samples
        ), placed AS (
            SELECT *, 'process' AS place, greatest(rss_mb, CASE WHEN on_cpu THEN allocated_mb END) AS used_mb,
                   rss_mb AS alone_mb, CASE WHEN on_cpu THEN max_allocated_mb END AS highest_mb,
                   CASE WHEN on_cpu THEN total_memory_mb END AS budget_mb,
                   CASE WHEN on_cpu THEN usage_percent END AS percent
            FROM known WHERE on_cpu OR NOT has_cpu
            UNION ALL BY NAME
            SELECT *, device AS place, allocated_mb AS used_mb, CAST(NULL AS DOUBLE) AS alone_mb,
                   max_allocated_mb AS highest_mb, total_memory_mb AS budget_mb, usage_percent AS percent
            FROM known WHERE NOT on_cpu
        ), followed AS (
            SELECT *, lag(highest_mb) OVER ordered AS highest_before, lag(phase) OVER ordered AS phase_before,
                   lag(epoch) OVER ordered AS epoch_before
            FROM placed WHERE used_mb IS NOT NULL
            WINDOW ordered AS (PARTITION BY run_id, stage, fold, attempt, place ORDER BY line)
        ), spread AS (
            SELECT *, false AS between FROM followed
            UNION ALL BY NAME
            SELECT * REPLACE (
                highest_mb AS used_mb, NULL AS alone_mb, NULL AS percent, coalesce(phase_before, phase) AS phase,
                CASE WHEN phase_before IS NULL THEN epoch ELSE epoch_before END AS epoch
            ), true AS between
            FROM followed WHERE highest_mb > used_mb AND highest_mb > coalesce(highest_before, 0)
        )
        SELECT run_id, stage, fold, attempt, line, seconds, coalesce(phase, 'not recorded') AS phase, epoch, batch_idx,
               global_step, place, used_mb, alone_mb, reserved_mb, budget_mb,
               coalesce(percent, 100 * used_mb / nullif(budget_mb, 0)) AS usage_percent, between
        FROM spread ORDER BY run_id, stage, fold, place, attempt, line, between DESC
    """
    usage = ask(query, {"samples": samples})
    phaseless = (pl.col("phase") == "setup").all().over(_KEYS) & pl.col("fold").is_null()
    return usage.with_columns(phase=pl.when(phaseless).then(pl.lit(WHOLE_STAGE)).otherwise("phase"))


def phase_peaks(usage: pl.DataFrame) -> pl.DataFrame:
    """The highest memory of each phase: ``run_id stage fold phase place num_samples used_mb alone_mb reserved_mb
    budget_mb usage_percent seconds epoch global_step``, phases in the order they came.
    """
    at_peak = ("alone_mb", "reserved_mb", "budget_mb", "usage_percent", "seconds", "epoch", "global_step")
    query = f"""
        SELECT {", ".join(_KEYS)}, phase, place, count(*) FILTER (NOT between) AS num_samples, max(used_mb) AS used_mb,
               {", ".join(f"arg_max_null({name}, used_mb) AS {name}" for name in at_peak)}
        FROM usage GROUP BY run_id, stage, fold, phase, place
        ORDER BY run_id, stage, fold, min(seconds), min(line), place
    """
    return ask(query, {"usage": usage})


def near_limit(usage: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Every spell above 90% of the budget, sampled or told by an event: ``run_id stage fold place seconds
    until_seconds phase epoch used_mb budget_mb usage_percent num_samples num_events``; phase and numbers at its peak.
    """
    query = """
        WITH fullest AS (
            SELECT run_id, stage, fold, arg_max(place, usage_percent) AS place FROM usage GROUP BY run_id, stage, fold
        ), warnings AS (
            SELECT events.*, CASE WHEN events.device LIKE 'cpu%' THEN 'process'
                                  ELSE coalesce(events.device, fullest.place, 'process') END AS place
            FROM events LEFT JOIN fullest ON events.run_id = fullest.run_id AND events.stage = fullest.stage
                                          AND events.fold IS NOT DISTINCT FROM fullest.fold
            WHERE kind = 'near_limit'
        ), moments AS (
            SELECT run_id, stage, fold, place, seconds, phase, epoch, used_mb, budget_mb, usage_percent,
                   usage_percent > $limit AS is_over, 0 AS event
            FROM usage WHERE usage_percent IS NOT NULL
            UNION ALL
            SELECT run_id, stage, fold, place, seconds, coalesce(phase, 'not recorded'), epoch, used_mb, budget_mb,
                   coalesce(usage_percent, 100 * used_mb / nullif(budget_mb, 0)), true, 1
            FROM warnings
        ), spells AS (
            SELECT *, sum(CASE WHEN is_over THEN 0 ELSE 1 END) OVER (
                PARTITION BY run_id, stage, fold, place ORDER BY seconds, event ROWS UNBOUNDED PRECEDING
            ) AS spell
            FROM moments
        )
        SELECT run_id, stage, fold, place, min(seconds) AS seconds, max(seconds) AS until_seconds,
               arg_max(phase, usage_percent) AS phase, arg_max_null(epoch, usage_percent) AS epoch,
               arg_max_null(used_mb, usage_percent) AS used_mb, arg_max_null(budget_mb, usage_percent) AS budget_mb,
               max(usage_percent) AS usage_percent, count(*) FILTER (event = 0) AS num_samples,
               CAST(sum(event) AS BIGINT) AS num_events
        FROM spells WHERE is_over GROUP BY run_id, stage, fold, place, spell
        ORDER BY run_id, stage, fold, seconds, place
    """
    return ask(query, {"usage": usage, "events": events}, {"limit": NEAR_LIMIT_PERCENT})


def epoch_medians(usage: pl.DataFrame) -> pl.DataFrame:
    """The memory of each training epoch: ``run_id stage fold attempt place phase epoch used_mb`` (median)."""
    training = (
        pl.col("phase").is_in(["train", *(f"{name}_train" for name in CONTROL_TRAININGS)])
        & pl.col("epoch").is_not_null()
        & ~pl.col("between")
    )
    keys = [*_KEYS, "attempt", "place", "phase", "epoch"]
    return usage.filter(training).group_by(keys, maintain_order=True).agg(pl.col("used_mb").median()).sort(keys)


def epoch_growth(usage: pl.DataFrame) -> pl.DataFrame:
    """How memory grew over the epochs of each training, judged by ``RULE``: ``run_id stage fold attempt place
    phase num_epochs slope_mb level_mb p_value verdict last_mb``; ``slope_mb`` is per epoch.
    """
    keys = [*_KEYS, "attempt", "place", "phase"]
    rows = []
    for key, points in epoch_medians(usage).group_by(keys, maintain_order=True):
        found = growth(points["epoch"].cast(pl.Float64).to_numpy(), points["used_mb"].to_numpy())
        rows.append({**dict(zip(keys, key, strict=True)), **vars(found), "last_mb": points["used_mb"][-1]})
    return pl.DataFrame(rows, schema=_GROWTH_SCHEMA)


def out_of_memory(events: pl.DataFrame) -> pl.DataFrame:
    """Every out-of-memory and what was done: ``run_id stage fold seconds phase epoch global_step happened_in asked_mb
    micro_batch micro_batch_next done context_file``.
    """
    rows = []
    for row in events.filter(pl.col("kind") == "out_of_memory").iter_rows(named=True):
        later = events.filter(
            *(pl.col(key).eq_missing(pl.lit(row[key])) for key in (*_KEYS, "attempt")), pl.col("line") > row["line"]
        )
        kinds = later["kind"].to_list()
        until_next = later.head(kinds.index("out_of_memory") if "out_of_memory" in kinds else len(kinds))
        rows.append({name: row.get(name) for name in _OUT_OF_MEMORY_SCHEMA} | {"done": _what_was_done(row, until_next)})
    return pl.DataFrame(rows, schema=_OUT_OF_MEMORY_SCHEMA)


def predictions(usage: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Each preflight's prediction beside the highest memory of training and validation in the same attempt:
    ``run_id stage fold attempt place predicted_mb measured_mb error_percent is_off budget_mb micro_batch
    micro_batch_planned``. Measured is null until training has begun.
    """
    query = """
        WITH trained AS (
            SELECT run_id, stage, fold, attempt, place, max(used_mb) AS measured_mb FROM usage
            WHERE regexp_full_match(phase, '([a-z]+_)?(train|validation)') GROUP BY ALL
        ), predicted AS (SELECT * FROM events WHERE kind = 'preflight' AND predicted_peak_mb IS NOT NULL), beside AS (
            SELECT predicted.*, trained.place, trained.measured_mb
            FROM predicted LEFT JOIN trained ON predicted.run_id = trained.run_id AND predicted.stage = trained.stage
                AND predicted.fold IS NOT DISTINCT FROM trained.fold AND predicted.attempt = trained.attempt
                AND (predicted.device IS NULL OR (predicted.device LIKE 'cpu%') = (trained.place = 'process'))
            -- Without a word on the device, an accelerator that was sampled is the one that was meant.
            QUALIFY row_number() OVER (PARTITION BY predicted.run_id, predicted.stage, predicted.fold, predicted.attempt
                                       ORDER BY predicted.line DESC, trained.place = 'process', trained.place) = 1
        ), compared AS (
            SELECT *, 100 * (predicted_peak_mb - measured_mb) / nullif(measured_mb, 0) AS error_percent FROM beside
        )
        SELECT run_id, stage, fold, attempt, place, predicted_peak_mb AS predicted_mb, measured_mb, error_percent,
               abs(error_percent) > $tolerance AS is_off, budget_mb, micro_batch, micro_batch_planned
        FROM compared ORDER BY run_id, stage, fold, attempt
    """
    return ask(query, {"usage": usage, "events": events}, {"tolerance": PREDICTION_TOLERANCE_PERCENT})


_PLACE_SCHEMA = {"run_id": pl.String, "stage": pl.String, "fold": pl.Int64}
_GROWTH_SCHEMA = {
    **_PLACE_SCHEMA, "attempt": pl.Int64, "place": pl.String, "phase": pl.String, "num_epochs": pl.Int64,
    "slope_mb": pl.Float64, "level_mb": pl.Float64, "p_value": pl.Float64, "verdict": pl.String, "last_mb": pl.Float64,
}  # fmt: skip
_OUT_OF_MEMORY_SCHEMA = {
    **_PLACE_SCHEMA, "seconds": pl.Float64, "phase": pl.String, "epoch": pl.Int64, "global_step": pl.Int64,
    "happened_in": pl.String, "asked_mb": pl.Float64, "micro_batch": pl.Int64, "micro_batch_next": pl.Int64,
    "done": pl.String, "context_file": pl.String,
}  # fmt: skip


_IS_WORK = ~pl.col("phase").is_in(MEASURING)


def _in_whole_stages(events: pl.DataFrame, usage: pl.DataFrame) -> pl.DataFrame:
    """``events`` under the names that ``memory_usage`` gives to phases."""
    stages = usage.filter(pl.col("phase") == WHOLE_STAGE).select("run_id", "stage").unique().rows()
    inside = pl.concat_list("run_id", "stage").is_in([list(stage) for stage in stages]) & (pl.col("phase") == "setup")
    return events.with_columns(phase=pl.when(inside).then(pl.lit(WHOLE_STAGE)).otherwise("phase")) if stages else events


def _what_was_done(event: dict[str, Any], until_next: pl.DataFrame) -> str:
    before, after = event["micro_batch"], event["micro_batch_next"]
    restored = until_next.filter(pl.col("kind") == "step_restored")
    if restored.height:
        step, lost = restored.select("to_step", "lost_steps").row(0)
        done = "restored the last checkpoint" if step is None else f"restored step {step}"
        return done if lost is None else f"{done}, {lost} to be done again"
    if after is not None and after != before:
        return f"redone with micro-batch {after} instead of {before}"
    if before == 1:
        return "stopped: one sample is the least there is"
    return "no remedy recorded"


# --- What was found, one sentence each: the same in figures, notebook, report and terminal

NO_SAMPLES = "No memory samples are recorded"


def where_text(row: Mapping[str, Any]) -> str:
    """``04_fold_training, fold 2`` of any row with a stage and a fold."""
    return str(row["stage"]) if row["fold"] is None else f"{row['stage']}, fold {row['fold']}"


def phase_text(phase: str | None) -> str:
    """``control_train`` as ``training on shuffled labels``, other phases in their own words."""
    if phase is None:
        return "not recorded"
    name, _, part = phase.rpartition("_")
    return f"{part} ({CONTROL_TRAININGS[name]})" if name in CONTROL_TRAININGS else phase.replace("_", " ")


def peak_sentence(found: MemoryFindings) -> str:
    """How high memory went, of what, and where."""
    peak = found.peak
    if peak is None:
        return NO_SAMPLES
    whose = "Memory" if peak["place"] == PROCESS else f"Memory of {peak['place']}"
    text = megabytes_text(peak["used_mb"])
    if peak["budget_mb"] is not None and peak["usage_percent"] is not None:
        text += f" of {megabytes_text(peak['budget_mb'])} allowed ({peak['usage_percent']:.1f}%)"
    highest = found.peaks.filter(pl.col("place") == peak["place"])["used_mb"].max()
    how = "peaks at" if peak["used_mb"] == highest else "is nearest to its budget at"
    return f"{whose} {how} {text}, in {where_text(peak)}, {phase_text(peak['phase'])}"


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
    return f"At the peak: {'; '.join(parts)}" if parts else "Nothing that would divide the peak is logged"


def limit_sentence(found: MemoryFindings) -> str:
    """Whether memory came close to its budget, how often and how close."""
    if found.usage["usage_percent"].is_null().all() and found.near_limit.is_empty():
        return "Whether memory came close to a limit is not known: no budget is recorded"
    if found.near_limit.is_empty():
        return f"Memory was never above {NEAR_LIMIT_PERCENT:.0f}% of its budget"
    highest = found.near_limit.sort("usage_percent", descending=True, nulls_last=True).row(0, named=True)
    seconds = float((found.near_limit["until_seconds"] - found.near_limit["seconds"]).sum())
    lasting = f", {duration_text(seconds)} in all" if seconds else ""
    text = "" if highest["usage_percent"] is None else f"; highest {highest['usage_percent']:.1f}%"
    return (
        f"Memory went above {NEAR_LIMIT_PERCENT:.0f}% of its budget {_times(found.near_limit.height)}{lasting}"
        f"{text}, in {where_text(highest)}, {phase_text(highest['phase'])}"
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
        text = f"there are {most}" if most else "none is recorded"
        return f"Growth cannot be judged yet: that needs {MIN_EPOCHS} epochs, and {text}"
    steepest = judged.sort("slope_mb", descending=True).row(0, named=True)
    return f"Memory does not leak: at most {steepest['slope_mb']:+.1f} MB per epoch, in {where_text(steepest)}"


def out_of_memory_sentence(found: MemoryFindings) -> str:
    """How often memory ran out, and what was done."""
    rows = found.out_of_memory
    if rows.is_empty():
        return "Memory never ran out"
    after = rows.filter(pl.col("micro_batch_next") < pl.col("micro_batch"))
    text = ""
    if after.height:
        first, last = max(after["micro_batch"].to_list()), min(after["micro_batch_next"].to_list())
        text = f": the micro-batch went from {first} down to {last}"
    stages = count_text(rows.select("run_id", "stage", "fold").n_unique(), "stage")
    return f"Memory ran out {_times(rows.height)} in {stages}{text}"


def prediction_sentence(found: MemoryFindings) -> str:
    """How far the preflight's prediction is from what was measured."""
    worst = _worst_prediction(found)
    if worst is None:
        tried = "preflight" in found.events["kind"]
        text = "the preflight predicted nothing" if tried else "no preflight is recorded"
        text = "no training has been sampled yet" if found.predictions.height else text
        return f"Prediction and measurement cannot be compared: {text}"
    off = found.predictions.filter("is_off").height
    if not off:
        return f"The prediction is within {math.ceil(abs(worst['error_percent']))}% of what was measured"
    compared = count_text(found.predictions["error_percent"].count(), "training")
    much = f"off by more than {PREDICTION_TOLERANCE_PERCENT:.0f}% in {off} of {compared}"
    return f"The prediction is {much}: {_off_text(worst)} in {where_text(worst)}"


def _worst_prediction(found: MemoryFindings) -> dict[str, Any] | None:
    rows = found.predictions.drop_nulls("error_percent").sort(pl.col("error_percent").abs(), descending=True)
    return rows.row(0, named=True) if rows.height else None


def _off_text(prediction: Mapping[str, Any]) -> str:
    error = prediction["error_percent"]
    return f"{abs(error):.0f}% {'above' if error > 0 else 'below'} what was measured"


def event_counts_sentence(found: MemoryFindings) -> str:
    """Which kinds of events there are, and how many of each."""
    if found.events.is_empty():
        return "No memory event is recorded"
    counts = found.events.group_by("kind", maintain_order=True).len()
    parts = [f"{number} × {str(kind).replace('_', ' ')}" for kind, number in counts.iter_rows()]
    return f"Events: {', '.join(parts)}"


def memory_facts(found: MemoryFindings) -> tuple[tuple[str, str], ...]:
    """Name and text of what the head of a report says about memory; nothing where nothing is recorded."""
    facts, peak = [], found.peak
    if peak is not None and peak["budget_mb"] is not None:
        place = "" if peak["place"] == PROCESS else f" on {peak['place']}"
        used = f"{peak['usage_percent']:.1f}% used at most{place}"
        facts.append(("Memory budget", f"{megabytes_text(peak['budget_mb'])}, {used}"))
    if worst := _worst_prediction(found):
        facts.append(("Predicted peak", f"{megabytes_text(worst['predicted_mb'])}, {_off_text(worst)}"))
    if found.out_of_memory.height:
        facts.append(("Out of memory", out_of_memory_sentence(found).removeprefix("Memory ran out ")))
    if found.leaks.height:
        facts.append(("Leak", growth_sentence(found).removeprefix("Memory leaks: ")))
    return tuple(facts)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _signed(megabytes: float) -> str:
    return megabytes_text(megabytes) if megabytes >= 0 else f"-{megabytes_text(-megabytes)}"
