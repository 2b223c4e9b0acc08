"""Compare runs, detectors, ensembles and seeds on the same videos.

Runs are compared only if they predicted the same videos with the same labels, groups and folds. All are judged on the
same half-samples of the groups, so that only the difference between the models remains. A run that cannot be compared
is refused with a reason. A difference that is not shown is not equality.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.analysis.read import naming
from fvc_lib.analysis.read.cautions import audit_failures, run_cautions
from fvc_lib.analysis.read.headline import ReportHeadline, run_headline
from fvc_lib.analysis.read.naming import ensemble_text, run_parameters, run_task, trial_text
from fvc_lib.analysis.read.protocols import protocol_name, protocol_text
from fvc_lib.analysis.read.queries import memory_peaks, training_summary
from fvc_lib.analysis.read.records import run_status
from fvc_lib.analysis.wording import clean_text, count_text, interval_text, metric_name, number_text
from fvc_lib.metrics.cross_validation import METRICS, measure_over_folds
from fvc_lib.metrics.declaration import direction
from fvc_lib.metrics.intervals import Interval, ReplicateValues, intervals_of, replicate_values
from fvc_lib.metrics.paired_difference import PairedDifference, holm, paired_difference
from fvc_lib.services.atomic_files import AnyPath, as_mapping, path_to_text, read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError, command_text, did_you_mean
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.ensembles import (
    RECORD as ENSEMBLE_RECORD,
    find_run_or_ensemble,
    is_ensemble,
    list_ensembles,
    members_of,
    read_ensemble,
)
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tables import FOLDS, PREDICTIONS, PROTOCOL, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, FOLD_TRAINING, KFOLD

MAIN_METRIC = "roc_auc"

# --- Which runs can be compared: trained to the end, on true labels, without a leak, with whole predictions

_DATA = ("video_id", "group_id", "label", "fold")


@dataclass(frozen=True)
class JudgedRun:
    """A run or an ensemble with its predictions of all folds (``tables.PREDICTIONS``), ordered by ``video_id``."""

    name: str
    run: RunPaths
    predictions: pl.DataFrame

    @property
    def data(self) -> pl.DataFrame:
        """The columns that runs must share to be compared: ``video_id group_id label fold``."""
        return self.predictions.select(_DATA)

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return run_config(self.run)

    @cached_property
    def headline(self) -> ReportHeadline:
        """The run's number and where it stands."""
        return run_headline(self.run)

    @cached_property
    def parts(self) -> tuple[RunConfig, ...]:
        """The configurations of all networks that judge a video: one, or those of an ensemble's members."""
        if not is_ensemble(self.run.root):
            return (self.config,)
        return tuple(run_config(member) for member in members_of(self.run.root, read_ensemble(self.run.root)))

    @cached_property
    def detector(self) -> str:
        """A digest that is equal for runs that differ in their seeds alone.

        The content of a user's files counts as it was at training time, by the training's record.
        """
        if is_ensemble(self.run.root):
            return sha256_of_json({**read_json_object(self.run.root / ENSEMBLE_RECORD), "name": ""})
        record = as_mapping(read_json_object(self.run.stage_checkpoint(FOLD_TRAINING, 0)).get("fingerprint"))
        recorded = as_mapping(record.get("parameters"))
        files = [recorded.get(name, self.config.identity(name)) for name in ("model", "model_weights", "crop")]
        return sha256_of_json([self.config.model_copy(update={"seed": 0, "folds_seed": None}).training_hash, files])


@dataclass(frozen=True)
class Refusal:
    """Runs that are not compared, with the reason and a remedy."""

    runs: tuple[str, ...]
    reason: str


def judged_runs(runs: Sequence[RunPaths], *, finished: bool = False) -> list[JudgedRun | Refusal]:
    """Read different runs for a comparison, each as ``read_judged_run``; a run given twice counts once."""
    different = list({run.root.resolve(): run for run in runs}.values())
    names = [clean_text(path_to_text(name)) for name in naming.run_names(different)]
    return [read_judged_run(run, name, finished=finished) for run, name in zip(different, names, strict=True)]


def read_judged_run(run: RunPaths, name: str, *, finished: bool = False) -> JudgedRun | Refusal:
    """Read one run for a comparison; with ``finished`` it must have ended, with results of these predictions."""
    try:
        _refuse_unfit(run)
        judged = JudgedRun(name, run, _predictions(run))
        if finished:
            _refuse_unfinished(judged)
    except (FvcError, OSError) as error:
        return Refusal((name,), f"{name}: {clean_text(error)}")
    return judged


def _refuse_unfit(run: RunPaths) -> None:
    asked = run_parameters(run)
    if run_task(asked) != DEFAULT_TASK:
        raise DataError(f"its task is {run_task(asked)}, and only runs of task {DEFAULT_TASK} are compared.")
    for key, stage in run_status(run)["stages"].items():
        state = as_mapping(stage).get("state")
        if key.startswith(FOLD_TRAINING) and state == "running":
            raise DataError(f"it is being trained ({key}). Compare it when its training has ended.")
        if key.startswith(FOLD_TRAINING) and state != "done":
            raise DataError(f"its training has not ended ({key}: {state}). {_go_on(run)}")
    if asked.get("shuffle_labels") is True:
        raise DataError("its labels were shuffled on purpose (shuffle_labels). Compare runs on true labels.")
    if leaks := audit_failures(run):
        raise DataError(f"its leakage audit did not pass: {leaks[0]} Mend the cause, and run it again.")


def _predictions(run: RunPaths) -> pl.DataFrame:
    folds = read_table(run.folds, FOLDS)
    numbers = sorted(folds["fold"].unique().to_list())
    if missing := [str(fold) for fold in numbers if not run.predictions(fold).is_file()]:
        raise DataError(f"there are no predictions of fold {', '.join(missing)} of {len(numbers)}. {_go_on(run)}")
    predictions = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in numbers]).sort("video_id")
    strange = predictions.join(folds, on=list(_DATA), how="anti")["video_id"]
    if predictions.is_empty() or strange.len() or predictions["video_id"].is_duplicated().any():
        example = f"; {strange.len()} do not fit, for example {strange.min()!r}" if strange.len() else ""
        raise DataError(f"its predictions are not those of its own folds{example}. Run {FOLD_TRAINING} again.")
    if not protocol_text(run_parameters(run)):
        return predictions
    tested = read_table(run.protocol, PROTOCOL).filter(part="test").select("video_id", "target")
    return predictions.join(tested, on="video_id", how="left", maintain_order="left")


def _refuse_unfinished(judged: JudgedRun) -> None:
    headline, run = judged.headline, judged.run
    score = headline.model_score
    if headline.notes:
        raise DataError(" ".join(headline.notes))
    if headline.earlier:
        raise DataError(f"its numbers are {headline.earlier}. {_go_on(run)}")
    if score is None or score.value is None:
        raise DataError(f"it has no results. {_go_on(run)}")
    if not is_ensemble(run.root) and headline.state not in ("done", "interactive", "running"):
        raise DataError(f"it is not finished ({headline.state}). {_go_on(run)}")
    value = replicates_of([judged], MAIN_METRIC, replicates=1, seed=0).values[0]
    if not math.isclose(value, score.value, abs_tol=1e-9):
        again = command_text("--only", "05", "--resume", run.root)
        raise DataError(f"its results are not those of its predictions. Compute them again: {again}")


def _go_on(run: RunPaths) -> str:
    return f"Go on with it: {command_text('--resume', path_to_text(run.root))}"


def alike(runs: Sequence[JudgedRun]) -> tuple[list[list[JudgedRun]], list[Refusal]]:
    """Return sets of runs judged on the same data, in the order given, and a refusal for every set but the first."""
    sets: list[list[JudgedRun]] = []
    for run in runs:
        fitting = next((together for together in sets if together[0].data.equals(run.data)), None)
        if fitting is None:
            sets.append(fitting := [])
        fitting.append(run)
    refusals = []
    for others in sets[1:]:
        first = sets[0][0]
        names = [", ".join(run.name for run in together) for together in (others, sets[0])]
        fork = command_text("--resume", path_to_text(first.run.root), "--fork", "-p", "NAME", "VALUE")
        reason = (
            f"{names[0]} and {names[1]} were not judged on the same videos and folds: "
            f"{_difference_of_data(first, others[0])}. A fork keeps videos and folds: {clean_text(fork)}"
        )
        refusals.append(Refusal(tuple(run.name for run in (*sets[0], *others)), reason))
    return sets, refusals


def _difference_of_data(first: JudgedRun, second: JudgedRun) -> str:
    """Return how the data differ that two runs were judged on, with counts and examples."""
    differences = []
    for run, other in ((first, second), (second, first)):
        only = run.data.join(other.data, on="video_id", how="anti")["video_id"]
        if only.len():
            counted = f"{only.len():,} of {count_text(run.data.height, 'video')} only in {run.name}"
            differences.append(f"{counted} (for example {clean_text(only.min())!r})")
    both = first.data.join(second.data, on="video_id", suffix="_other")
    for column, what in (("label", "another label"), ("group_id", "another group"), ("fold", "another fold")):
        changed = both.filter(pl.col(column) != pl.col(f"{column}_other"))["video_id"]
        if changed.len():
            counted = f"{count_text(changed.len(), 'video')} with {what}"
            differences.append(f"{counted} (for example {clean_text(changed.min())!r})")
    return "; ".join(differences)


# --- Differences between two, on the same half-samples of the groups


def replicates_of(runs: Sequence[JudgedRun], metric: str, *, replicates: int, seed: int) -> ReplicateValues:
    """Return the metric of each of ``runs``, which share their data, on the same draws."""
    shared = runs[0].predictions
    folds = shared["fold"].to_numpy()
    several = "target" in shared.columns and shared["target"].n_unique() > 1  # then the number is the mean over them
    targets = shared["target"].to_numpy() if several else None
    scored = [(run.predictions["score"].to_numpy(), run.predictions["threshold"].to_numpy()) for run in runs]
    measures = [measure_over_folds(metric, scores, thresholds, folds, targets) for scores, thresholds in scored]
    labels = (shared["label"] == "fake").cast(pl.Int64).to_numpy()
    return replicate_values(labels, measures, shared["group_id"].to_list(), replicates=replicates, seed=seed)


@dataclass(frozen=True)
class PairComparison:
    """The second model's metric minus the first's.

    Attributes:
        first: name of the first.
        second: name of the second.
        difference: with its interval over groups.
        holm_p_value: adjusted for all pairs of the comparison.
        is_shown: whether that is small enough for the confidence.
        finding: one sentence.
    """

    first: str
    second: str
    difference: PairedDifference
    holm_p_value: float
    is_shown: bool
    finding: str


def compared_pairs(
    names: Sequence[str],
    drawn: ReplicateValues,
    pairs: Sequence[tuple[int, int]],
    metric: str,
    confidence: float,
    trials: Sequence[str] = (),
) -> tuple[PairComparison, ...]:
    """Compare ``pairs`` of the measures in ``drawn``, with Holm's adjustment over all of them.

    Args:
        names: of the measures.
        drawn: their values.
        pairs: numbers of two measures each.
        metric: name of the metric.
        confidence: of the intervals, in (0, 1).
        trials: of each measure how small a trial it is from (``naming.trial_text``); no trial claims a difference.
    """
    differences = [paired_difference(drawn, one, other, confidence=confidence) for one, other in pairs]
    adjusted = holm([each.p_value for each in differences]).tolist()
    compared = []
    for (one, other), difference, p_value in zip(pairs, differences, adjusted, strict=True):
        # A share of 1 in 20 is 0.05, not 0.050000000000000044.
        pair = PairComparison(names[one], names[other], difference, p_value, p_value <= round(1 - confidence, 12), "")
        tried = [f"{names[each]} is a {trials[each]}" for each in (one, other) if trials and trials[each]]
        finding = _finding(pair, metric)
        if tried:
            numbers = f"{difference_text(pair)}, Holm p {p_text(p_value)}"
            finding = f"{' and '.join(tried)}: no difference is claimed ({pair.second} minus {pair.first}: {numbers})."
        compared.append(replace(pair, is_shown=pair.is_shown and not tried, finding=finding))
    return tuple(compared)


def _finding(pair: PairComparison, metric: str) -> str:
    name, difference = metric_name(metric), pair.difference
    if math.isnan(difference.value):
        return f"{name} is undefined for {pair.first} or {pair.second}: nothing to compare."
    if math.isnan(pair.holm_p_value):
        few = "fewer than two groups hold one of the classes"
        return f"{pair.second} minus {pair.first}: {difference_text(pair)} {name}; without an interval, since {few}."
    if not pair.is_shown:
        numbers = f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}"
        return f"No difference in {name} is shown between {pair.first} and {pair.second}: {numbers}."
    rises = difference.value > 0
    high, low = (pair.second, pair.first) if rises else (pair.first, pair.second)
    ends = (difference.low, difference.high) if rises else (-difference.high, -difference.low)
    numbers = f"{interval_text(abs(difference.value), *ends)} {name}, Holm p {p_text(pair.holm_p_value)}"
    if direction(metric) == "lower":
        return f"{low} is below {high} by {numbers}; lower is better."
    return f"{high} is above {low} by {numbers}."


def difference_text(pair: PairComparison) -> str:
    """Return ``+0.031 [+0.004, +0.058]``: the second minus the first."""
    ends = pair.difference.value, pair.difference.low, pair.difference.high
    value, low, high = (f"{end:+.3f}" if math.isfinite(end) else "undefined" for end in ends)
    return f"{value} [{low}, {high}]" if math.isfinite(ends[1]) and math.isfinite(ends[2]) else value


def p_text(p_value: float) -> str:
    """Return a p-value with three decimals, "<0.001" below that, or "undefined" if nothing was tested."""
    return "<0.001" if p_value < 0.001 else number_text(p_value)


# --- Runs, pair by pair


@dataclass(frozen=True)
class Comparison:
    """The outcome of ``compare``.

    Attributes:
        metric: that was compared.
        confidence: of the intervals; a difference is shown if its Holm p is at most 1 - confidence.
        replicates: half-samples of the groups.
        values: the metric of each run that another is compared with.
        pairs: all pairs judged on the same data.
        refusals: runs that are not compared.
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
    metric: str = MAIN_METRIC,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare every two of ``runs`` that were judged on the same videos, labels, groups and folds.

    The metric is that of the results over all folds. Intervals and p-values speak of other videos, not of other
    trainings: each run was trained once. Two runs with equal scores hold one training and make no pair.

    Raises:
        UsageError: an unknown metric.
    """
    if metric not in METRICS:
        raise UsageError(f"metric: got {metric!r}.{did_you_mean(metric, METRICS)} Known: {', '.join(METRICS)}.")
    read = judged_runs(runs)
    sets, not_alike = alike([run for run in read if isinstance(run, JudgedRun)])
    refusals = [*(run for run in read if isinstance(run, Refusal)), *not_alike]
    values: dict[str, Interval] = {}
    pairs: list[PairComparison] = []
    for together in (runs_alike for runs_alike in sets if len(runs_alike) > 1):
        names, asked = [run.name for run in together], [run_parameters(run.run) for run in together]
        drawn = replicates_of(together, metric, replicates=replicates, seed=seed)
        values |= dict(zip(names, intervals_of(drawn, confidence), strict=True))
        numbers = []
        for one, other in itertools.combinations(range(len(together)), 2):
            if together[one].predictions["score"].equals(together[other].predictions["score"]):
                reason = f"{names[one]} and {names[other]} gave every video the same score: they hold one training."
                refusals.append(Refusal((names[one], names[other]), f"{reason} Compare it with another detector."))
            else:
                numbers.append((one, other))
        compared = compared_pairs(names, drawn, numbers, metric, confidence, list(map(trial_text, asked)))
        for (one, other), pair in zip(numbers, compared, strict=True):
            first, second = (protocol_text(asked[number]) or KFOLD for number in (one, other))
            differ = "" if first == second else f" They were trained by different protocols: {first}, {second}."
            pairs.append(replace(pair, finding=pair.finding + differ))
    return Comparison(metric, confidence, replicates, values, tuple(pairs), tuple(refusals))


def lines(comparison: Comparison) -> tuple[str, ...]:
    """Return ``comparison`` as plain text: each run's number, findings on the pairs, and refusals."""
    shown = []
    if comparison.values:
        better, width = direction(comparison.metric), max(map(len, comparison.values))
        interval = f"{comparison.confidence:.0%} interval"
        shown.append(f"{metric_name(comparison.metric)} with {interval}; {better} is better")
        for name, value in comparison.values.items():
            counted = f"{count_text(value.num_rows, 'video')} in {count_text(value.num_groups, 'group')}"
            shown.append(f"  {name:<{width}}  {interval_text(value.value, value.low, value.high)}  ({counted})")
    shown += [pair.finding for pair in comparison.pairs]
    shown += [f"Not compared: {refusal.reason}" for refusal in comparison.refusals]
    if comparison.pairs:
        shown.append(f"Intervals and p: {comparison.replicates:,} half-samples of the groups, the same for both.")
        shown.append("This speaks of other videos, not of other trainings: each run was trained once.")
    elif not comparison.refusals:
        shown.append("There is no pair of runs to compare: give two or more.")
    return tuple(shown)


# --- Detectors: runs that differ in their seeds alone, taken together

DETECTOR_METRICS = (MAIN_METRIC, "average_precision", "balanced_accuracy", "f1", "brier_score")
BEST, HIGHEST = "★", "☆"
MARKS = (
    f"{BEST}: the best value, and its difference from every other detector is shown (Holm over all pairs of the "
    f"metric), and all its runs are above their controls. {HIGHEST}: the best value, but one of these does not hold: "
    "call it no winner."
)


COSTS = (
    "num_parameters", "num_trained",
    "milliseconds_per_clip",  # one forward pass of one clip on this machine
    "peak_rss_bytes", "peak_device_bytes",  # of the trainings' processes, the largest
    "training_seconds",  # of all folds of the model, mean over runs
)  # fmt: skip


@dataclass(frozen=True)
class Detector:
    """Runs that differ in their seeds alone, with their mean.

    Attributes:
        name: unique within the comparison.
        runs: ordered by seed.
        intervals: by metric the mean over its runs, with an interval over groups.
        spread: by metric the smallest and the largest value of a run.
        cost: known ones of ``COSTS``.
    """

    name: str
    runs: tuple[JudgedRun, ...]
    intervals: Mapping[str, Interval]
    spread: Mapping[str, tuple[float, float]]
    cost: Mapping[str, float]

    @property
    def is_ensemble(self) -> bool:
        """Whether several networks judge each video."""
        return len(self.runs[0].parts) > 1

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its networks, each once."""
        return tuple(dict.fromkeys(part.model for part in self.runs[0].parts))

    @property
    def trial(self) -> str:
        """``trial on 20 groups``, or empty."""
        return trial_text(vars(self.runs[0].config))

    @property
    def num_above_controls(self) -> int:
        """The number of its runs that are above every control."""
        return sum(run.headline.verdict.standing == "above control" for run in self.runs)

    @property
    def is_above_controls(self) -> bool:
        """Whether every one of its runs is above every control."""
        return self.num_above_controls == len(self.runs)

    def spread_text(self, metric: str = MAIN_METRIC) -> str:
        """Return ``0.81 to 0.86 over 3 seeds``, ``one seed`` or ``an ensemble``."""
        low, high = self.spread[metric]
        if self.is_ensemble:
            return "an ensemble"
        several = f"{number_text(low)} to {number_text(high)} over {len(self.runs)} seeds"
        return "one seed" if len(self.runs) == 1 else several


@dataclass(frozen=True)
class DetectorComparison:
    """The outcome of ``compare_detectors``.

    Attributes:
        detectors: the reference first.
        differences: of every other detector from the reference, by ``MAIN_METRIC``.
        best: by metric the name of the detector with the best value, and whether that is shown (``MARKS``).
        left_out: runs that are not compared.
        cautions: sentences on the whole and on single runs.
        confidence: of the intervals.
        of_runs: sentences that belong next to any table of these runs (``cautions.run_cautions``).
    """

    detectors: tuple[Detector, ...]
    differences: tuple[PairComparison, ...]
    best: Mapping[str, tuple[str, bool]]
    left_out: tuple[Refusal, ...]
    cautions: tuple[str, ...]
    confidence: float
    of_runs: tuple[str, ...] = ()

    def with_costs(self, measure: Callable[[Sequence[RunConfig]], Sequence[Mapping[str, Any]]]) -> "DetectorComparison":
        """Return the same with the costs that ``measure`` finds for networks, summed over a detector's networks."""
        detectors = []
        for detector in self.detectors:
            measured = measure(detector.runs[0].parts)
            summed = {name: sum(each[name] for each in measured) for name in set.intersection(*map(set, measured))}
            detectors.append(replace(detector, cost={**detector.cost, **summed}))
        return replace(self, detectors=tuple(detectors))

    def mark(self, detector: Detector, metric: str) -> str:
        """Return ``BEST``, ``HIGHEST`` or nothing. A detector alone is the best of nothing."""
        name, is_shown = self.best.get(metric, ("", False))
        if len(self.detectors) < 2 or name != detector.name:
            return ""
        return BEST if is_shown else HIGHEST


def runs_to_compare(names: Sequence[str], runs_dir: AnyPath) -> list[RunPaths]:
    """Return the runs and ensembles called ``names``; without names all video runs of the newest run's experiment.

    These come oldest first, followed by the experiment's ensembles.

    Raises:
        UsageError: a name fits no run, or there is none.
    """
    if names:
        return [find_run_or_ensemble(runs_dir, name) for name in names]
    experiment = find_run(runs_dir, "latest").experiment
    runs = [run for run in list_runs(runs_dir, experiment) if run_task(run_parameters(run)) == DEFAULT_TASK]
    return [*runs, *list_ensembles(runs_dir, experiment)]


def compare_detectors(
    runs: Sequence[RunPaths],
    *,
    reference: RunPaths | None = None,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
    metrics: Sequence[str] = DETECTOR_METRICS,
    without_run: Sequence[Sequence[str]] = (),
) -> DetectorComparison:
    """Compare the detectors of ``runs`` with that of ``reference``, by default the first that can be compared.

    Differences are those of the means over a detector's runs; their intervals and p-values speak of other videos. The
    spread over runs speaks of other trainings. ``without_run`` are names of combinations that have no run, each with
    the reason; they are listed as left out.

    Raises:
        DataError: ``reference`` cannot be compared, or nothing is left to compare.
    """
    readings = judged_runs([*([reference] if reference else []), *runs], finished=True)
    first = readings[0] if readings else None
    if reference and isinstance(first, Refusal):
        raise DataError(f"the reference cannot be compared. {first.reason}")
    left_out = [Refusal((name,), why) for name, why in without_run]
    left_out += [reading for reading in readings if isinstance(reading, Refusal)]
    usable = _newest_of_each([reading for reading in readings if isinstance(reading, JudgedRun)], left_out)
    sets, others = alike(usable)
    chosen = sets[0] if sets else []
    names_chosen = {run.name for run in chosen}
    for refusal in others:
        left_out.append(replace(refusal, runs=tuple(name for name in refusal.runs if name not in names_chosen)))
    grouped: dict[str, list[JudgedRun]] = {}
    for run in chosen:
        grouped.setdefault(run.detector, []).append(run)
    if len(grouped) < 2 and (left_out or len(usable) < 2):  # one detector trained several times shows its spread
        reasons = " ".join(refusal.reason for refusal in left_out)
        what = "there is one detector, and nothing to compare it with." if grouped else "no run can be compared."
        raise DataError(f"{what} {reasons}".strip())
    of_detectors = [sorted(each, key=lambda run: run.config.seed) for each in grouped.values()]
    drawn = {metric: _means(of_detectors, metric, replicates, seed) for metric in metrics}
    intervals = {metric: intervals_of(means, confidence) for metric, (means, _) in drawn.items()}
    detectors = tuple(
        Detector(
            name,
            tuple(together),
            {metric: each[number] for metric, each in intervals.items()},
            {metric: (min(values[number]), max(values[number])) for metric, (_, values) in drawn.items()},
            _training_cost([run.run for run in together]),
        )
        for number, (name, together) in enumerate(
            zip(names_of([r[0] for r in of_detectors]), of_detectors, strict=True)
        )
    )
    names, trials = [each.name for each in detectors], [each.trial for each in detectors]
    from_reference = [(0, number) for number in range(1, len(detectors))]
    differences = compared_pairs(names, drawn[metrics[0]][0], from_reference, metrics[0], confidence, trials)
    cautions = _cautions(detectors)
    if isinstance(first, Refusal):
        cautions.insert(0, f"{first.runs[0]}, the first run, is left out: the reference is {names[0]}.")
    return DetectorComparison(
        detectors,
        tuple(_with_controls(pair, detectors) for pair in differences),
        {metric: _best(detectors, metric, means, confidence) for metric, (means, _) in drawn.items()},
        tuple(left_out),
        tuple(dict.fromkeys(cautions)),
        confidence,
        tuple(dict.fromkeys(caution for run in chosen for caution in run_cautions(run.run))),
    )


def _newest_of_each(runs: Sequence[JudgedRun], left_out: list[Refusal]) -> list[JudgedRun]:
    """Return the newest of several runs of one training; counted twice, a training would look certain."""
    newest: dict[tuple[str, int], JudgedRun] = {}
    for run in runs:
        other = newest.setdefault((run.detector, run.config.seed), run)
        if other is not run:
            older, newer = sorted((other, run), key=lambda each: each.run.run_id)
            newest[run.detector, run.config.seed] = newer
            why = f"{older.name}: {newer.name} has the same training parameters and seed and is newer."
            left_out.append(Refusal((older.name,), why))
    return list(newest.values())


def names_of(runs: Sequence[JudgedRun]) -> list[str]:
    """Return a name for each run's detector: its model and the parameters that differ among them, or the ensemble's."""
    singles = [run for run in runs if not ensemble_text(run.run)]
    values = {run.name: run.config.values_of(lambda declared: declared.hashed) for run in singles}
    fields = [name for name in DECLARED if name not in {"seed", "folds_seed", "model"}]
    differing = [name for name in fields if len({str(each.get(name)) for each in values.values()}) > 1]
    names = []
    for run in runs:
        marks = [
            f"{name} {clean_text(values[run.name].get(name)) or 'default'}" for name in differing if run in singles
        ]
        names.append(ensemble_text(run.run) or ", ".join([clean_text(run.config.model), *marks]))
    return [name if names.count(name) == 1 else f"{name} of {run.name}" for name, run in zip(names, runs, strict=True)]


def _means(
    detectors: Sequence[Sequence[JudgedRun]], metric: str, replicates: int, seed: int
) -> tuple[ReplicateValues, list[list[float]]]:
    """Return the mean over each detector's runs on the same draws, and the values of the runs one by one."""
    drawn = replicates_of([run for runs in detectors for run in runs], metric, replicates=replicates, seed=seed)
    ends = np.cumsum([len(runs) for runs in detectors])
    parts = [np.arange(end - len(runs), end) for end, runs in zip(ends, detectors, strict=True)]
    means = replace(
        drawn,
        values=np.array([drawn.values[part].mean() for part in parts]),
        replicates=np.array([drawn.replicates[part].mean(0) for part in parts]),
        bounds=drawn.bounds[: len(parts)],
        is_distance=drawn.is_distance[: len(parts)],
    )
    return means, [drawn.values[part].tolist() for part in parts]


def _training_cost(runs: Sequence[RunPaths]) -> dict[str, float]:
    seconds = training_summary(runs).frame.filter(trained="model")["seconds"].sum() / len(runs)
    peaks = memory_peaks(runs).frame.filter(stage=FOLD_TRAINING)
    highest = {name: peaks[name].max() for name in ("peak_rss_bytes", "peak_device_bytes")}
    return {name: value for name, value in {**highest, "training_seconds": seconds}.items() if value}  # type: ignore[misc]


def _with_controls(pair: PairComparison, detectors: Sequence[Detector]) -> PairComparison:
    """Limit a difference in favour of a detector that is not above its controls."""
    name = pair.second if pair.difference.value > 0 else pair.first
    better = next(each for each in detectors if each.name == name)
    if not pair.is_shown or better.is_above_controls:
        return pair
    number, runs = better.num_above_controls, count_text(len(better.runs), "run")
    limit = f"only {number} of {runs} of {name} {'is' if number == 1 else 'are'} above every control."
    return replace(pair, finding=f"{pair.finding} But {limit}")


def _cautions(detectors: Sequence[Detector]) -> list[str]:
    """Return the cautions of all runs first, then those of single runs."""
    runs = [(each, run) for each in detectors for run in each.runs]
    shared = [
        caution for caution in runs[0][1].headline.cautions
        if all(caution in run.headline.cautions for _, run in runs)
    ]  # fmt: skip
    own = [
        f"{each.name}{'' if each.is_ensemble else f', seed {run.config.seed}'}: {caution}"
        for each, run in runs
        for caution in run.headline.cautions
        if caution not in shared
    ]
    return shared + own


def _best(detectors: Sequence[Detector], metric: str, drawn: ReplicateValues, confidence: float) -> tuple[str, bool]:
    """Return the detector with the best value, and whether it is above its controls and shown to beat each other.

    It was chosen for its value, so the p-values are corrected for all pairs.
    """
    sign = 1.0 if direction(metric) == "higher" else -1.0
    values = [sign * each.intervals[metric].value for each in detectors]
    if not any(map(math.isfinite, values)):
        return "", False
    best, names = int(np.nanargmax(values)), [each.name for each in detectors]
    pairs = list(itertools.combinations(range(len(detectors)), 2))
    compared = zip(pairs, compared_pairs(names, drawn, pairs, metric, confidence), strict=True)
    is_shown = all(pair.is_shown for numbers, pair in compared if best in numbers)
    return names[best], is_shown and detectors[best].is_above_controls


# --- Ensembles: runs that can be one detector together, and whether that is better than the best of them

ENSEMBLE = "the ensemble"


@dataclass(frozen=True)
class Members:
    """Runs that make one ensemble.

    Attributes:
        runs: in the order given.
        detectors: for each run the number of its detector; runs that differ in their seed alone share one.
        names: of the detectors.
    """

    runs: tuple[JudgedRun, ...]
    detectors: tuple[int, ...]
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[JudgedRun, int]]:
        """Yield each run with the number of its detector."""
        return zip(self.runs, self.detectors, strict=True)

    def config(self, replicates: int, confidence: float) -> RunConfig:
        """Return the first run's configuration with these settings of intervals."""
        changed = {"bootstrap_replicates": replicates, "confidence": confidence}
        return self.runs[0].config.model_copy(update=changed)


def read_members(runs: Sequence[RunPaths]) -> Members:
    """Read ``runs`` and check that they can be one ensemble.

    Raises:
        UsageError: fewer than two different runs, an ensemble among them, or the same training twice.
        DataError: a run that is not finished or damaged, or runs on other videos, labels, groups, folds or protocols.
    """
    if inner := next((run for run in runs if is_ensemble(run.root)), None):
        raise UsageError(f"{inner.run_id} is an ensemble itself. Name its runs.")
    readings = judged_runs(runs, finished=True)
    if len(readings) < 2:
        raise UsageError(f"got {count_text(len(readings), 'run')}, and an ensemble is of two or more.")
    if refused := [each.reason for each in readings if isinstance(each, Refusal)]:
        raise DataError(f"no ensemble is made: {' '.join(refused)}")
    members = [each for each in readings if isinstance(each, JudgedRun)]
    places: dict[str, int] = {}
    detectors = tuple(places.setdefault(each.detector, len(places)) for each in members)
    seen: dict[tuple[int, int], str] = {}
    for each, place in zip(members, detectors, strict=True):
        if why := _no_fit(members[0], each):
            raise DataError(f"no ensemble is made of {members[0].name} and {each.name}: {why}")
        before = seen.setdefault((place, each.config.seed), each.name)
        if before != each.name:
            same = f"{before} and {each.name} have the same training parameters and seed"
            raise UsageError(f"{same}: counted twice, one training would have two votes. Name one of them.")
    firsts = [members[detectors.index(place)] for place in range(len(places))]
    return Members(tuple(members), detectors, tuple(names_of(firsts)))


def _no_fit(first: JudgedRun, other: JudgedRun) -> str:
    """Return the first difference in what two runs were trained and judged on; empty where there is none."""
    if not first.data.equals(other.data):
        return f"they were not judged on the same videos and folds: {_difference_of_data(first, other)}."
    protocols = [protocol_name(run_parameters(each.run)) for each in (first, other)]
    if protocols[0] != protocols[1]:
        return f"their protocols differ, {' and '.join(protocols)}, so they were not trained on the same videos."
    points = [each.config.operating_point for each in (first, other)]
    if points[0] != points[1]:
        return f"their thresholds are of other operating points, {' and '.join(points)}. Fork one to the other's."
    return ""


def against_members(
    folder: RunPaths,
    members: Members,
    headline: ReportHeadline,
    *,
    metric: str = MAIN_METRIC,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare the ensemble in ``folder`` with each member, the best first, on the same draws.

    The best member is chosen on these very videos, which favours it. An ensemble that is not above its own controls
    claims nothing.

    Raises:
        DataError: the folder's tables are missing or damaged.
    """
    judged = read_judged_run(folder, ENSEMBLE)
    if isinstance(judged, Refusal):
        raise DataError(judged.reason)
    runs = [judged, *members.runs]
    names, trials = [run.name for run in runs], [trial_text(run_parameters(run.run)) for run in runs]
    drawn = replicates_of(runs, metric, replicates=replicates, seed=seed)
    intervals = intervals_of(drawn, confidence)
    order = sorted(range(1, len(runs)), key=lambda number: -intervals[number].value)
    pairs = compared_pairs(names, drawn, [(number, 0) for number in order], metric, confidence, trials)
    if headline.verdict.standing != "above control":
        limit = f"That claims nothing of fakes: {headline.verdict.sentence}"
        pairs = tuple(
            replace(pair, is_shown=False, finding=f"{pair.finding} {limit}") if pair.is_shown else pair
            for pair in pairs
        )
    return Comparison(metric, confidence, replicates, {names[each]: intervals[each] for each in (0, *order)}, pairs)


def answer(comparison: Comparison, headline: ReportHeadline) -> list[str]:
    """Return sentences: the ensemble's number, whether it beats its best member, and where it stands."""
    best, value = comparison.pairs[0], comparison.values[ENSEMBLE]
    member = comparison.values[best.first]
    number = interval_text(value.value, value.low, value.high)
    own = interval_text(member.value, member.low, member.high)
    return [f"ROC AUC {number}; its best member, {best.first}, has {own}.", best.finding, *headline.sentences]
