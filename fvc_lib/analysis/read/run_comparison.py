"""Runs beside each other, pair by pair: is one better, by how much, and how sure is that?

Only runs that predicted the same videos, with the same labels, groups and folds, are compared: both are judged on the
same drawn groups, so what remains is the difference between the models. Everything else is refused in words. A
difference that is not shown is never called equality.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from fvc_lib.analysis.read import naming
from fvc_lib.analysis.read.cautions import audit_failures
from fvc_lib.analysis.read.naming import run_parameters, run_task, trial_text
from fvc_lib.analysis.read.protocols import protocol_text
from fvc_lib.analysis.read.records import run_status
from fvc_lib.analysis.wording import clean_text, count_text, interval_text, metric_name, number_text
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.cross_validation import METRICS, fold_values, measure_over_folds
from fvc_lib.metrics.declaration import direction
from fvc_lib.metrics.intervals import Interval, ReplicateValues, intervals_of, replicate_values
from fvc_lib.metrics.paired_difference import (
    CorrectedT,
    PairedDifference,
    corrected_resampled_t,
    holm,
    paired_difference,
)
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.config import NOT_HASHED
from fvc_lib.services.config_fields import RETIRED
from fvc_lib.services.errors import DataError, UsageError, command_text, did_you_mean
from fvc_lib.services.parameters import values_unsaid
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, PREDICTIONS, PROTOCOL, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, FOLD_TRAINING, KFOLD

# --- Which runs may be compared: trained to the end, on true labels, without a leak, judged on the very same videos

_DATA = ("video_id", "group_id", "label", "fold")
_ASPECTS = (("label", "another label"), ("group_id", "another group"), ("fold", "another fold"))


@dataclass(frozen=True)
class JudgedRun:
    """A run with all it predicted: ``tables.PREDICTIONS`` of all folds, ordered by ``video_id``."""

    name: str
    predictions: pl.DataFrame
    run: RunPaths

    @property
    def data(self) -> pl.DataFrame:
        """What it was judged on: ``video_id group_id label fold``."""
        return self.predictions.select(_DATA)


@dataclass(frozen=True)
class Refusal:
    """Runs that are not compared, and why and what to do, in words."""

    runs: tuple[str, ...]
    reason: str


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """How each run is called in a comparison, on one line; of like ids with what tells them apart."""
    return [clean_text(path_to_text(name)) for name in naming.run_names(runs)]


def read_judged_run(run: RunPaths, name: str) -> JudgedRun | Refusal:
    """What ``run`` predicted in all folds, or why that may not be compared. Reads only, and never raises."""
    try:
        why = _why_not(run) or _predictions(run)
    except DataError as error:
        why = clean_text(error)
    return Refusal((name,), f"{name}: {why}") if isinstance(why, str) else JudgedRun(name, why, run)


def _why_not(run: RunPaths) -> str:
    """Why ``run`` may not be compared whatever it predicted; empty where it may."""
    asked = run_parameters(run)
    if run_task(asked) != "video":
        return (
            f"its task is {run_task(asked)}, and runs are compared pair by pair on the outer folds of task video "
            "alone. Its own number and its controls stand in its report and in the list of all runs."
        )
    stages = run_status(run)["stages"]
    states = {key: stage.get("state") for key, stage in stages.items() if isinstance(stage, dict)}
    unfinished = {key: state for key, state in states.items() if key.startswith(FOLD_TRAINING) and state != "done"}
    for key, state in unfinished.items():
        if state == "running":
            return f"it is being trained ({clean_text(key)}). Compare it when its training has ended."
    for key, state in unfinished.items():
        return f"its training has not ended ({clean_text(key)}: {clean_text(state)}). {_go_on(run)}"
    if asked.get("shuffle_labels") is True:
        reason = "its labels were shuffled on purpose (shuffle_labels), so its numbers are of no task"
        return f"{reason}. Compare runs on true labels."
    if leaks := audit_failures(run):
        reason = f"its leakage audit did not pass, so its numbers show nothing: {clean_text(leaks[0])}"
        return f"{reason} Mend what it names, and run it again."
    return ""


def _predictions(run: RunPaths) -> pl.DataFrame | str:
    """All predictions of ``run``, or what is wrong with them."""
    folds = read_table(run.folds, FOLDS)
    numbers = sorted(folds["fold"].unique().to_list())
    missing = [str(fold) for fold in numbers if not run.predictions(fold).is_file()]
    if missing:
        which = f"fold{'s' * (len(missing) > 1)} {', '.join(missing)} of {len(numbers)}"
        return f"there are no predictions of {which}. {_go_on(run)}"
    parts = [read_table(run.predictions(fold), PREDICTIONS) for fold in numbers]
    if not any(part.height for part in parts):
        return f"its tables of predictions are empty. {_go_on(run)}"
    predictions = pl.concat(parts).sort("video_id")
    strange = predictions.join(folds, on=list(_DATA), how="anti")["video_id"]
    if strange.len():
        example = _example(strange)
        return f"{strange.len()} of its predictions do not fit its own folds{example}. Run {FOLD_TRAINING} again."
    if predictions["video_id"].is_duplicated().any():
        return f"videos are predicted more than once. Run {FOLD_TRAINING} again."
    if not protocol_text(run_parameters(run)):
        return predictions
    tested = read_table(run.protocol, PROTOCOL).filter(part="test").select("video_id", "target")
    return predictions.join(tested, on="video_id", how="left", maintain_order="left")


def difference_of_data(first: JudgedRun, second: JudgedRun) -> str:
    """In words what the two runs were judged on that is not the same, with counts and examples."""
    one, other = first.data, second.data
    found = []
    for run, own, others in ((first, one, other), (second, other, one)):
        only = own.join(others, on="video_id", how="anti")["video_id"]
        if only.len():
            found.append(f"{only.len():,} of {count_text(own.height, 'video')} only in {run.name}{_example(only)}")
    both = one.join(other, on="video_id", suffix="_other")
    for column, what in _ASPECTS:
        changed = both.filter(pl.col(column) != pl.col(f"{column}_other"))["video_id"]
        if changed.len():
            found.append(f"{count_text(changed.len(), 'video')} with {what}{_example(changed)}")
    return "; ".join(found)


def alike(runs: Sequence[JudgedRun]) -> tuple[list[list[JudgedRun]], list[Refusal]]:
    """Runs judged on the same data together, in the order given, and for each further set of data a refusal."""
    sets: list[list[JudgedRun]] = []
    for run in runs:
        fitting = next((together for together in sets if together[0].data.equals(run.data)), None)
        if fitting is None:
            sets.append(fitting := [])
        fitting.append(run)
    return sets, [_refusal_between(sets[0], other) for other in sets[1:]]


def _refusal_between(ones: Sequence[JudgedRun], others: Sequence[JudgedRun]) -> Refusal:
    first, second = ones[0], others[0]
    names = [", ".join(run.name for run in together) for together in (ones, others)]
    reason = (
        f"{names[1]} and {names[0]} were not judged on the same videos and folds: {difference_of_data(first, second)}. "
        "A difference between them would say nothing about the models. A fork keeps videos and folds and changes "
        f"what is asked: {_resume(first.run)} --fork -p NAME VALUE"
    )
    return Refusal(tuple(run.name for run in (*ones, *others)), reason)


def _one_training(first: str, second: str) -> Refusal:
    reason = (
        f"{first} and {second} gave every video the same score: they hold the same trainings, as a fork does that "
        "changes no training parameter. Compare one of them with another detector."
    )
    return Refusal((first, second), reason)


def _go_on(run: RunPaths) -> str:
    return f"Go on with it: {_resume(run)}"


def _resume(run: RunPaths) -> str:
    return clean_text(command_text("--resume", path_to_text(run.root)))


def _example(video_ids: pl.Series) -> str:
    return f" (for example {clean_text(video_ids.min())!r})" if video_ids.len() else ""


@dataclass(frozen=True)
class PairComparison:
    """Two runs, the second minus the first: the difference over drawn groups, and a corrected t-test over folds.

    ``holm_p_value`` is the difference's p-value, adjusted for all pairs compared; ``is_shown`` where that is small
    enough for the confidence asked for; ``finding`` is one sentence.
    """

    first: str
    second: str
    difference: PairedDifference
    over_folds: CorrectedT
    holm_p_value: float
    is_shown: bool
    finding: str


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; a difference is shown where its Holm p is at most 1 minus ``confidence``.

    ``values`` has the own number of each run that has another to be compared with; ``pairs`` all pairs judged on the
    same data; ``refusals`` what was not compared, and why.
    """

    metric: str
    confidence: float
    replicates: int
    values: dict[str, Interval] = field(default_factory=dict)
    pairs: tuple[PairComparison, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def compare(
    runs: Sequence[RunPaths],
    *,
    metric: str = "roc_auc",
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare every two of ``runs`` that were judged on the same videos, labels, groups and folds; reads only.

    The difference is that of the number in the results (scope "all"), with an interval over groups and
    a p-value from the same draws for all runs (``metrics.paired_difference``), Holm's adjustment over all pairs, and
    Nadeau and Bengio's corrected t over the folds. The intervals speak of other videos, not of other trainings: each
    run was trained once. A run given twice counts once. Two runs with equal scores hold one training: no pair.

    Raises:
        UsageError: an unknown metric, fewer than one replicate, or a confidence outside (0, 1).
    """
    if metric not in METRICS:
        known = ", ".join(METRICS)
        raise UsageError(f"metric: got {metric!r}.{did_you_mean(metric, METRICS)} Known: {known}.")
    if replicates < 1 or not 0 < confidence < 1:
        raise UsageError(f"got {replicates} replicates at {confidence}, wanted >= 1 and a confidence in (0, 1).")
    different = list({run.root.resolve(): run for run in runs}.values())
    read = [read_judged_run(run, name) for run, name in zip(different, run_names(different), strict=True)]
    sets, not_alike = alike([run for run in read if isinstance(run, JudgedRun)])
    values: dict[str, Interval] = {}
    pairs: list[PairComparison] = []
    for together in (runs_alike for runs_alike in sets if len(runs_alike) > 1):
        drawn = replicates_of(together, metric, replicates=replicates, seed=seed)
        intervals = intervals_of(drawn, confidence)
        values |= {run.name: interval for run, interval in zip(together, intervals, strict=True)}
        for one, other in itertools.combinations(range(len(together)), 2):
            if together[one].predictions["score"].equals(together[other].predictions["score"]):
                not_alike.append(_one_training(together[one].name, together[other].name))
            else:
                pairs.append(pair_of(together, drawn, one, other, metric, confidence))
    refusals = (*(run for run in read if isinstance(run, Refusal)), *not_alike)
    asked = {run.name: run_parameters(run.run) for run in read if isinstance(run, JudgedRun)}
    trials = {name: trial_text(each) for name, each in asked.items()}
    found = [of_trials(pair, trials) for pair in adjusted(pairs, metric, confidence)]
    told = tuple(_with_protocols(_with_container(pair, asked, metric), asked) for pair in found)
    return Comparison(metric, confidence, replicates, values, told, refusals)


def _with_container(pair: PairComparison, asked: Mapping[str, Mapping[str, object]], metric: str) -> PairComparison:
    """With a sentence where one of the two runs wrote its videos anew, and nothing else that can count differs."""
    one, other = ({**values_unsaid(DEFAULT_TASK), **asked[name]} for name in (pair.first, pair.second))
    names = {
        name for name in {*one, *other} - NOT_HASHED - RETIRED.keys() if str(one.get(name)) != str(other.get(name))
    }
    is_anew = [bool(each.get("canonical") or each.get("rescale")) for each in (one, other)]
    if math.isnan(pair.difference.value):
        return pair
    if not names <= {"canonical", "rescale", "rescale_rate"} or is_anew[0] == is_anew[1]:
        return pair
    plain, encoded = (pair.first, pair.second) if is_anew[1] else (pair.second, pair.first)
    done = ("re-encod", "rescal")["rescale" in names]
    told = f"{pair.finding} {encoded} is {plain} on {done}ed videos"
    rises = (pair.difference.value > 0) == is_anew[1]
    if not pair.difference.value or rises == (direction(metric) == "higher"):
        return replace(pair, finding=f"{told}: by the values alone it does not lose.")
    be = "is" if pair.is_shown else "would be"
    gave = "size, rate and container" if "rescale" in names else "the container"
    return replace(pair, finding=f"{told}: the difference {be} what {gave} gave away and what {done}ing took.")


def of_trials(pair: PairComparison, trials: Mapping[str, str]) -> PairComparison:
    """Shown of no pair with a trial, which claims nothing; ``trials`` by name (``naming.trial_text``)."""
    told = [f"{name} is a {trials[name]}" for name in (pair.first, pair.second) if trials.get(name)]
    if not told:
        return pair
    by = f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}"
    finding = f"{' and '.join(told)}, so nothing is claimed of {pair.second} minus {pair.first}: {by}."
    return replace(pair, is_shown=False, finding=finding)


def _with_protocols(pair: PairComparison, asked: Mapping[str, Mapping[str, object]]) -> PairComparison:
    """With a sentence where the two were tested alike and trained by different protocols."""
    first, second = (protocol_text(asked[name]) or KFOLD for name in (pair.first, pair.second))
    if first == second:
        return pair
    return replace(pair, finding=f"{pair.finding} They were trained by different protocols: {first}, {second}.")


def lines(comparison: Comparison) -> tuple[str, ...]:
    """``comparison`` as plain text for a terminal: each run's number, a table of pairs, findings, refusals, remarks."""
    shown = [*_value_lines(comparison), *_pair_lines(comparison)]
    shown += [pair.finding for pair in comparison.pairs]
    shown += [""] if comparison.pairs and comparison.refusals else []
    shown += [f"Not compared: {refusal.reason}" for refusal in comparison.refusals]
    if not comparison.pairs and not comparison.refusals:
        shown.append("There is no pair of runs to compare: give two or more.")
    return (*shown, *_remarks(comparison))


def difference_text(pair: PairComparison) -> str:
    """``+0.031 [+0.004, +0.058]``: the second run minus the first."""
    ends = pair.difference.value, pair.difference.low, pair.difference.high
    value, low, high = (f"{end:+.3f}" if math.isfinite(end) else "undefined" for end in ends)
    return f"{value} [{low}, {high}]" if math.isfinite(ends[1]) and math.isfinite(ends[2]) else value


def p_text(p_value: float) -> str:
    """A p-value with three decimals; "<0.001" below that, "undefined" where nothing was tested."""
    return "<0.001" if p_value < 0.001 else number_text(p_value)


def replicates_of(runs: Sequence[JudgedRun], metric: str, *, replicates: int, seed: int) -> ReplicateValues:
    """All runs on the same draws; they share labels, groups and folds (``alike``)."""
    shared = runs[0].predictions
    folds = shared["fold"].to_numpy()
    several = "target" in shared.columns and shared["target"].n_unique() > 1  # then the number is the mean over them
    targets = shared["target"].to_numpy() if several else None
    scored = [(run.predictions["score"].to_numpy(), run.predictions["threshold"].to_numpy()) for run in runs]
    measures = [measure_over_folds(metric, scores, thresholds, folds, targets) for scores, thresholds in scored]
    groups = shared["group_id"].to_list()
    return replicate_values(_fakes(shared), measures, groups, replicates=replicates, seed=seed)


def pair_of(
    runs: Sequence[JudgedRun], drawn: ReplicateValues, one: int, other: int, metric: str, confidence: float
) -> PairComparison:
    """Run number ``other`` minus number ``one``, of which ``drawn`` has the values; before ``adjusted``."""
    by_fold = [_fold_values(runs[number], metric) for number in (one, other)]
    # Groups, not videos, are what is independent, and folds hold whole ones.
    num_folds = runs[one].predictions["fold"].n_unique()
    num_test = drawn.num_groups / num_folds
    over_folds = CorrectedT(np.nan, np.nan, 0, np.nan)
    if num_folds > 1:
        over_folds = corrected_resampled_t(
            by_fold[1] - by_fold[0], num_train=drawn.num_groups - num_test, num_test=num_test
        )
    difference = paired_difference(drawn, one, other, confidence=confidence)
    return PairComparison(runs[one].name, runs[other].name, difference, over_folds, np.nan, False, "")


def _fold_values(run: JudgedRun, metric: str) -> FloatArray:
    predictions = run.predictions
    scores, thresholds, folds = (predictions[name].to_numpy() for name in ("score", "threshold", "fold"))
    return fold_values(metric, _fakes(predictions), scores, thresholds, folds)


def adjusted(pairs: Sequence[PairComparison], metric: str, confidence: float) -> tuple[PairComparison, ...]:
    """``pairs``, which all were looked at, with Holm's p-values, whether each is shown, and a sentence on it."""
    p_values = holm([pair.difference.p_value for pair in pairs]).tolist()
    done = []
    for pair, p_value in zip(pairs, p_values, strict=True):
        # A share of 1 in 20 is 0.05, not 0.050000000000000044.
        told = replace(pair, holm_p_value=p_value, is_shown=p_value <= round(1 - confidence, 12))
        done.append(replace(told, finding=_finding(told, metric)))
    return tuple(done)


def _finding(pair: PairComparison, metric: str) -> str:
    name, difference = metric_name(metric), pair.difference
    if math.isnan(difference.value):
        return f"{name} is undefined for {pair.first} or {pair.second}: nothing to compare."
    if math.isnan(pair.holm_p_value):
        few = "fewer than two groups hold one of the classes"
        return f"{pair.second} minus {pair.first}: {difference_text(pair)} {name}; without an interval, since {few}."
    if not pair.is_shown:
        shown = f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}"
        return f"No difference in {name} is shown between {pair.first} and {pair.second}: {shown}."
    rises = difference.value > 0
    high, low = (pair.second, pair.first) if rises else (pair.first, pair.second)
    ends = (difference.low, difference.high) if rises else (-difference.high, -difference.low)
    by = f"{interval_text(abs(difference.value), *ends)} {name}, Holm p {p_text(pair.holm_p_value)}"
    if direction(metric) == "lower":
        return f"{low} is below {high} by {by}; lower is better."
    return f"{high} is above {low} by {by}."


def _value_lines(comparison: Comparison) -> list[str]:
    if not comparison.values:
        return []
    better = direction(comparison.metric)
    width = max(map(len, comparison.values))
    heading = f"{metric_name(comparison.metric)} with {comparison.confidence:.0%} interval; {better} is better"
    rows = [
        f"  {name:<{width}}  {interval_text(value.value, value.low, value.high)}  "
        f"({count_text(value.num_rows, 'video')} in {count_text(value.num_groups, 'group')})"
        for name, value in comparison.values.items()
    ]
    return [heading, *rows, ""]


def _pair_lines(comparison: Comparison) -> list[str]:
    if not comparison.pairs:
        return []
    rows = [("second minus first", "difference", "p", "Holm p", "t over folds", "its p")]
    for pair in comparison.pairs:
        p_values = p_text(pair.difference.p_value), p_text(pair.holm_p_value)
        over_folds = number_text(pair.over_folds.statistic, 2), p_text(pair.over_folds.p_value)
        rows.append((f"{pair.second} - {pair.first}", difference_text(pair), *p_values, *over_folds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
    ]


def _remarks(comparison: Comparison) -> list[str]:
    if not comparison.pairs:
        return []
    return [
        "",
        f"Intervals and p: {comparison.replicates:,} half-samples of the groups, the same for both.",
        "t: corrected for overlapping training parts (Nadeau and Bengio).",
        "This speaks of other videos, not of other trainings: each run was trained once.",
    ]


def _fakes(predictions: pl.DataFrame) -> IntArray:
    return (predictions["label"] == "fake").cast(pl.Int64).to_numpy()
