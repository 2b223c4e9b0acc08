"""Compare runs on the same videos, pair by pair, and an ensemble with its members.

Runs are compared only if they predicted the same videos with the same labels, groups and folds. Intervals and p-values
come from half-samples (random halves of the groups), which all compared runs share. A run that cannot be compared is
refused with a reason. ``detector_comparison`` compares detectors: sets of runs that differ in their seeds alone.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import polars as pl

from fvc_lib.analysis.read.headline import (
    HEADLINE_METRIC as MAIN_METRIC,
    ReportHeadline,
    audit_failures,
    run_headline,
)
from fvc_lib.analysis.read.runs import (
    differing_parameters,
    ensemble_text,
    protocol_name,
    protocol_text,
    run_names,
    run_parameters,
    run_status,
    run_task,
    trial_text,
)
from fvc_lib.analysis.wording import better_direction, clean_text, count_text, interval_text, metric_name, number_text
from fvc_lib.metrics.cross_validation import METRICS, measure_over_folds
from fvc_lib.metrics.intervals import (
    Interval,
    PairedDifference,
    ReplicateValues,
    intervals_of,
    paired_differences,
    replicate_values,
)
from fvc_lib.services.atomic_files import AnyPath, as_mapping, path_to_text, read_json_object, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError, command_text, did_you_mean
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.ensembles import (
    members_of,
    read_ensemble,
)
from fvc_lib.services.run_paths import (
    ENSEMBLE_RECORD,
    RunPaths,
    find_run,
    find_run_or_ensemble,
    is_ensemble,
    list_ensembles,
    list_runs,
)
from fvc_lib.services.tables import FOLDS, PREDICTIONS, PROTOCOL, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, FOLD_TRAINING

ENSEMBLE = "the ensemble"
_DATA = ("video_id", "group_id", "label", "fold")  # columns of predictions that must be equal in all compared runs
Refusal = tuple[str, str]  # (name of a run that is not compared, reason with a remedy)

# --- Which runs can be compared: fully trained, on true labels, without a leak, and with predictions for all folds


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """A run or ensemble whose predictions can be compared with those of other runs.

    Attributes:
        name: the run's id, or its path if another run has the same id.
        run: the run's folder.
        predictions: rows of PREDICTIONS of all folds, ordered by ``video_id``.
    """

    name: str
    run: RunPaths
    predictions: pl.DataFrame

    @cached_property
    def config(self) -> RunConfig:
        """The run's parameters, read from its ``params.yaml``."""
        return run_config(self.run.params_yaml)

    @cached_property
    def headline(self) -> ReportHeadline:
        """The run's ROC AUC and its verdict against the controls (simple predictors that a detector must beat)."""
        return run_headline(self.run)

    @cached_property
    def parts(self) -> tuple[RunConfig, ...]:
        """The configurations of the networks: one for a single run, one for each member of an ensemble."""
        if not is_ensemble(self.run.root):
            return (self.config,)
        members = members_of(self.run.root, read_ensemble(self.run.root))
        return tuple(run_config(RunPaths(member).params_yaml) for member in members)

    @cached_property
    def detector(self) -> str:
        """A SHA-256 digest that identifies the detector. It is equal for runs that differ in their seeds alone.

        The code of the model, its weights and its crop may be files of the user. The digest covers the content that
        these files had when the run was trained, because they may have changed since.
        """
        if is_ensemble(self.run.root):
            return sha256_of_json({**read_json_object(self.run.root / ENSEMBLE_RECORD), "name": ""})
        checkpoint = read_json_object(self.run.stage_checkpoint(FOLD_TRAINING, 0))
        recorded = as_mapping(as_mapping(checkpoint.get("fingerprint")).get("parameters"))
        files = [recorded.get(name, self.config.identity(name)) for name in ("model", "model_weights", "crop")]
        return sha256_of_json([self.config.model_copy(update={"seed": 0, "folds_seed": None}).training_hash, files])


def judged_runs(runs: Sequence[RunPaths], *, finished: bool = False) -> tuple[list[JudgedRun], list[Refusal]]:
    """Read ``runs``. Return ``(judged, refusals)``: the runs that can be compared, and the others with reasons.

    Args:
        runs: the runs. A run that occurs twice is read once.
        finished: whether a run must also have ended, with results. If False, it only needs predictions for all folds.
    """
    different = list({run.root.resolve(): run for run in runs}.values())
    judged, refusals = [], []
    for run, given in zip(different, run_names(different), strict=True):
        name = clean_text(path_to_text(given))
        try:
            _refuse_unfit(run)
            judgement = JudgedRun(name, run, _predictions(run))
            if finished:
                _refuse_unfinished(judgement)
            judged.append(judgement)
        except (FvcError, OSError) as error:
            refusals.append((name, f"{name}: {clean_text(error)}"))
    return judged, refusals


def _refuse_unfit(run: RunPaths) -> None:
    parameters = run_parameters(run)
    if run_task(parameters) != DEFAULT_TASK:
        raise DataError(f"its task is {run_task(parameters)}, and only runs of task {DEFAULT_TASK} are compared.")
    for key, stage in run_status(run)["stages"].items():
        if key.startswith(FOLD_TRAINING) and stage.get("state") != "done":
            raise DataError(f"its training has not ended ({key}: {stage.get('state')}). {_resume(run)}")
    if parameters.get("shuffle_labels") is True:
        raise DataError("its labels were shuffled on purpose (shuffle_labels). Compare runs on true labels.")
    if leaks := audit_failures(run):
        raise DataError(f"its leakage audit did not pass: {leaks[0]} Remove the cause, and run it again.")


def _predictions(run: RunPaths) -> pl.DataFrame:
    folds = read_table(run.folds, FOLDS)
    files = [run.predictions(fold) for fold in folds["fold"].unique().sort()]
    predictions = pl.concat([read_table(path, PREDICTIONS) for path in files]).sort("video_id")
    strange = predictions.join(folds, on=_DATA, how="anti").height
    if predictions.is_empty() or strange or predictions["video_id"].is_duplicated().any():
        raise DataError(f"its predictions are not those of its folds ({strange} differ). Run {FOLD_TRAINING} again.")
    if not protocol_text(run_parameters(run)):
        return predictions
    tested = read_table(run.protocol, PROTOCOL).filter(part="test").select("video_id", "target")
    return predictions.join(tested, on="video_id", how="left", maintain_order="left")


def _refuse_unfinished(judged: JudgedRun) -> None:
    headline, score = judged.headline, judged.headline.model_score
    if headline.notes:
        raise DataError(" ".join(headline.notes))
    if score is None or headline.earlier:
        raise DataError(f"its numbers are {headline.earlier or 'missing'}. {_resume(judged.run)}")
    if not is_ensemble(judged.run.root) and headline.state not in ("done", "interactive", "running"):
        raise DataError(f"it is not finished ({headline.state}). {_resume(judged.run)}")


def _resume(run: RunPaths) -> str:
    return f"Resume it: {command_text('--resume', path_to_text(run.root))}"


def with_data_of_first(runs: Sequence[JudgedRun]) -> tuple[list[JudgedRun], list[Refusal]]:
    """Return ``(alike, refusals)``: the runs that were tested on the same data as the first, and the other runs.

    Data are the same if videos, labels, groups and folds are equal. A refusal is a pair of a name and a reason.
    """
    alike, refusals = [], []
    for run in runs:
        both = pl.concat([judged.predictions.select(_DATA) for judged in (runs[0], run)])
        videos = both.unique(keep="none")["video_id"].unique().sort()
        if videos.is_empty():
            alike.append(run)
        else:
            fork = command_text("--resume", path_to_text(runs[0].run.root), "--fork", "-p", "NAME", "VALUE")
            reason = (
                f"{run.name} and {runs[0].name} were not judged on the same videos, labels, groups and folds: "
                f"{count_text(videos.len(), 'video')} differ (for example {clean_text(videos[0])!r}). "
                f"A fork keeps videos and folds: {clean_text(fork)}"
            )
            refusals.append((run.name, reason))
    return alike, refusals


def runs_to_compare(names: Sequence[str], runs_dir: AnyPath) -> list[RunPaths]:
    """Return the runs and ensembles in ``runs_dir`` that are called ``names``.

    If ``names`` is empty, return all video runs of the newest run's experiment, oldest first, and then its ensembles.

    Raises:
        UsageError: a name fits no run.
    """
    if names:
        return [find_run_or_ensemble(runs_dir, name) for name in names]
    experiment = find_run(runs_dir, "latest").experiment
    runs = [run for run in list_runs(runs_dir, experiment) if run_task(run_parameters(run)) == DEFAULT_TASK]
    return [*runs, *list_ensembles(runs_dir, experiment)]


def comparable_runs(
    runs: Sequence[RunPaths], reference: RunPaths | None = None
) -> tuple[list[JudgedRun], list[Refusal]]:
    """Return ``(chosen, refusals)``: the runs that can be compared, the reference first, and the others with reasons.

    If several runs have the same parameters and seed, only the newest is used. Copies would hide the variation between
    trainings.

    Args:
        runs: finished runs and ensembles.
        reference: the run to return first. None: the first of ``runs`` that can be compared.

    Raises:
        DataError: ``reference`` cannot be compared.
    """
    judged, refusals = judged_runs([reference, *runs] if reference else runs, finished=True)
    if reference and (not judged or judged[0].run.root.resolve() != reference.root.resolve()):
        raise DataError(f"the reference cannot be compared. {refusals[0][1]}")
    training = {run.name: (run.detector, run.config.seed) for run in judged}
    newest = {training[run.name]: run for run in sorted(judged, key=lambda run: run.run.run_id)}
    chosen, of_other_data = with_data_of_first([newest[key] for key in dict.fromkeys(training.values())])
    doubles = [run.name for run in judged if run not in newest.values()]
    refusals += [*of_other_data, *((name, f"{name}: a newer run has its parameters and seed.") for name in doubles)]
    return chosen, refusals


def names_of(runs: Sequence[JudgedRun]) -> list[str]:
    """Return a name for the detector of each run: its model and the parameters that differ from those of the first run.

    An ensemble is named after its members. If two names are equal, the name of the run is appended.
    """
    names, first = [], runs[0].config.relevant()
    for run in runs:
        parameters = {**run.config.relevant(), "seed": first.get("seed"), "folds_seed": first.get("folds_seed")}
        marks = [clean_text(run.config.model), *differing_parameters(parameters, first)]
        names.append(ensemble_text(run.run) or ", ".join(marks))
    return [name if names.count(name) == 1 else f"{name} of {run.name}" for name, run in zip(names, runs, strict=True)]


# --- Differences between two, on the same half-samples of the groups


def replicates_of(runs: Sequence[JudgedRun], metric: str, *, replicates: int, seed: int) -> ReplicateValues:
    """Return ``metric`` of each run on all videos and in each half-sample, a random half of the groups.

    Args:
        runs: runs with the same videos, labels, groups and folds (``with_data_of_first``).
        metric: a key of ``METRICS``.
        replicates: number of half-samples, which are the same for all runs.
        seed: seed of the half-samples.
    """
    scored = [(metric, run.predictions["score"], run.predictions["threshold"]) for run in runs]
    return replicates_over_folds(runs[0].predictions, scored, replicates=replicates, seed=seed)


def replicates_over_folds(
    videos: pl.DataFrame, scored: Sequence[tuple[str, pl.Series, pl.Series]], *, replicates: int, seed: int
) -> ReplicateValues:
    """Return several metrics on all N videos and in each half-sample, a random half of the groups.

    Args:
        videos: N rows with ``label group_id fold``. If there is a column ``target`` (corpus or generator) with several
            values, each metric is computed on every target, and the mean is returned.
        scored: one tuple ``(metric, scores, thresholds)`` for each metric to compute. ``metric`` is a key of
            ``METRICS``. Scores and decision thresholds have N values, in the order of ``videos``.
        replicates: number of half-samples, which are the same for all metrics.
        seed: seed of the half-samples.
    """
    folds, targets = videos["fold"].to_numpy(), None
    if "target" in videos.columns and videos["target"].n_unique() > 1:
        targets = videos["target"].to_numpy()
    measures = [
        measure_over_folds(metric, scores.to_numpy(), thresholds.to_numpy(), folds, targets)
        for metric, scores, thresholds in scored
    ]
    labels = (videos["label"] == "fake").cast(pl.Int64).to_numpy()
    return replicate_values(labels, measures, videos["group_id"].to_list(), replicates=replicates, seed=seed)


@dataclass(frozen=True)
class PairComparison:
    """The difference of two detectors in one metric: the value of the second minus the value of the first.

    Attributes:
        first: name of the first detector or run.
        second: name of the second detector or run.
        difference: the difference with its interval over groups.
        holm_p_value: p-value, adjusted for all pairs of the comparison by Holm's method.
        is_shown: whether the difference counts as shown (statistically significant). For this, ``holm_p_value`` must be
            at most 1 - confidence. It is always False if a run is a trial (on part of its corpus), or if the better
            detector has a known flaw, such as not being above its controls (simple predictors).
        finding: the result as a sentence.
    """

    first: str
    second: str
    difference: PairedDifference
    holm_p_value: float
    is_shown: bool
    finding: str


def difference_text(value: float | None, low: float | None, high: float | None) -> str:
    """Return a difference with its interval as text, such as ``+0.031 [+0.004, +0.058]``.

    If a number is None or NaN, the interval is left out. An undefined difference gives "undefined".
    """
    texts = ["undefined" if end is None or math.isnan(end) else f"{end:+z.3f}" for end in (value, low, high)]
    return texts[0] if "undefined" in texts else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def p_text(p_value: float) -> str:
    """Return a p-value as text with three decimals, or "<0.001". NaN (not tested) gives "undefined"."""
    return "<0.001" if p_value < 0.001 else number_text(p_value)


@dataclass(frozen=True)
class Comparison:
    """Differences in one metric between runs or detectors.

    Attributes:
        metric: name of the metric that was compared.
        confidence: coverage of the intervals. For a difference to count as shown, its p-value, adjusted by Holm's
            method, must be at most 1 - confidence.
        values: maps the name of a run or detector to the metric with its interval.
        pairs: the compared pairs of names, with their differences.
        spread: maps a name to the smallest and the largest value of its single runs.
        refusals: names of runs that are not compared, with reasons.
    """

    metric: str
    confidence: float
    values: Mapping[str, Interval] = field(default_factory=dict)
    pairs: tuple[PairComparison, ...] = ()
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


def compare_named(
    named: Mapping[str, Sequence[JudgedRun]],
    pairs: Sequence[tuple[str, str]],
    metric: str,
    limits: Mapping[str, str],
    *,
    replicates: int,
    seed: int,
    confidence: float,
) -> Comparison:
    """Compare pairs of detectors by the mean of a metric over their runs.

    Holm's method adjusts the p-values for all ``pairs``. If a run is a trial (on part of its corpus), no difference
    counts as shown.

    Args:
        named: maps the name of a detector to its runs.
        pairs: the pairs of names to compare. A difference is the second minus the first.
        metric: a key of ``METRICS``.
        limits: maps the name of a detector to the reason why no difference in its favour may count as shown.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of the half-samples.
        confidence: coverage of the intervals.
    """
    names, runs = list(named), [run for several in named.values() for run in several]
    drawn = replicates_of(runs, metric, replicates=replicates, seed=seed)
    ends = np.cumsum([len(several) for several in named.values()])
    values = np.split(drawn.values, ends[:-1])
    samples = np.split(drawn.replicates, ends[:-1])
    means = replace(
        drawn,
        values=np.array([part.mean() for part in values]),
        replicates=np.array([part.mean(0) for part in samples]),
        bounds=drawn.bounds[: len(names)],
        is_distance=drawn.is_distance[: len(names)],
    )
    places = [(names.index(first), names.index(second)) for first, second in pairs]
    differences = paired_differences(means, places, confidence)
    trial = next(filter(None, (trial_text(run_parameters(run.run)) for run in runs)), "")
    compared = []
    for pair, (difference, p_value, is_shown) in zip(pairs, differences, strict=True):
        finding = _finding(PairComparison(*pair, difference, p_value, is_shown, ""), metric)
        limit = limits.get(pair[difference.value > 0], "") if is_shown else ""
        if trial:
            limit = f"This is a {trial}: no difference is claimed."
        finding = f"{finding} {limit}".strip()
        compared.append(PairComparison(*pair, difference, p_value, is_shown and not limit, finding))
    intervals = dict(zip(names, intervals_of(means, confidence), strict=True))
    spread = {name: (float(part.min()), float(part.max())) for name, part in zip(names, values, strict=True)}
    return Comparison(metric, confidence, intervals, tuple(compared), spread)


def _finding(pair: PairComparison, metric: str) -> str:
    ends, name = (pair.difference.value, pair.difference.low, pair.difference.high), metric_name(metric)
    numbers = f"{difference_text(*ends)}, Holm p {p_text(pair.holm_p_value)}"
    if not pair.is_shown:
        return f"No difference in {name} is shown between {pair.first} and {pair.second}: {numbers}."
    side = "above" if pair.difference.value > 0 else "below"
    return f"{pair.second} is {side} {pair.first} in {name}: {numbers}; {better_direction(metric)} is better."


# --- Runs, pair by pair


def compare(
    runs: Sequence[RunPaths],
    *,
    metric: str = MAIN_METRIC,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare every pair of ``runs`` in one metric.

    Runs with other videos, labels, groups or folds than the first run are refused. Intervals and p-values describe how
    the differences may vary with the choice of videos. They do not cover the variation between trainings.

    Args:
        runs: two or more runs or ensembles.
        metric: a key of ``METRICS``, such as ``roc_auc``.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of the half-samples.
        confidence: coverage of the intervals.

    Raises:
        UsageError: the metric is unknown.
    """
    if metric not in METRICS:
        raise UsageError(f"metric: got {metric!r}.{did_you_mean(metric, METRICS)} Known: {', '.join(METRICS)}.")
    judged, refusals = judged_runs(runs)
    alike, of_other_data = with_data_of_first(judged)
    refused = (*refusals, *of_other_data)
    if len(alike) < 2:
        return Comparison(metric, confidence, refusals=refused)
    named = {run.name: [run] for run in alike}
    pairs = list(itertools.combinations(named, 2))
    compared = compare_named(named, pairs, metric, {}, replicates=replicates, seed=seed, confidence=confidence)
    return replace(compared, refusals=refused)


def lines(comparison: Comparison) -> tuple[str, ...]:
    """Return ``comparison`` as lines of plain text.

    The lines state the value of each run, the difference of each pair of runs, and why some runs are not compared.
    """
    shown = [f"{metric_name(comparison.metric)} with {comparison.confidence:.0%} interval"]
    for name, value in comparison.values.items():
        number = interval_text(*value.row()[:3])
        shown.append(f"  {name}  {number}  ({value.num_rows:,} videos in {value.num_groups:,} groups)")
    shown += [pair.finding for pair in comparison.pairs]
    shown += [f"Not compared: {reason}" for _, reason in comparison.refusals]
    return (*shown, "Intervals and p speak of other videos, not of other trainings: each run was trained once.")


# --- Ensembles: runs that can be one detector together, and whether that is better than the best of them


@dataclass(frozen=True)
class Members:
    """The runs that an ensemble combines, with their detectors.

    Attributes:
        runs: the runs, in the order in which the user named them.
        detectors: the position of each run's detector in ``names``. Runs that differ in their seed alone have the same
            detector.
        names: names of the detectors, without repetition.
    """

    runs: tuple[JudgedRun, ...]
    detectors: tuple[int, ...]
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[JudgedRun, int]]:
        """Yield pairs of a run and the position of its detector in ``names``."""
        return zip(self.runs, self.detectors, strict=True)


def read_members(runs: Sequence[RunPaths]) -> Members:
    """Read ``runs`` and check that they can be one ensemble.

    Raises:
        UsageError: there are fewer than two different runs, or a run is an ensemble.
        DataError: a run is damaged or not finished, two runs have the same training parameters and seed, or runs differ
            in videos, labels, groups, folds, protocols or operating points (rules that choose the threshold).
    """
    if inner := [run.run_id for run in runs if is_ensemble(run.root)]:
        raise UsageError(f"{inner[0]} is an ensemble itself. Name its runs.")
    members, refusals = comparable_runs(runs)
    if refusals:
        raise DataError(f"no ensemble is made: {' '.join(reason for _, reason in refusals)}")
    if len(members) < 2:
        raise UsageError(f"got {count_text(len(members), 'run')}, and an ensemble is of two or more.")
    rules = {f"{protocol_name(run_parameters(run.run))} {run.config.operating_point}" for run in members}
    if len(rules) > 1:
        raise DataError(f"no ensemble is made of different protocols or operating points: {', '.join(sorted(rules))}.")
    firsts = {run.detector: run for run in members[::-1]}
    distinct = list(dict.fromkeys(run.detector for run in members))
    places = tuple(distinct.index(run.detector) for run in members)
    return Members(tuple(members), places, tuple(names_of([firsts[detector] for detector in distinct])))


def against_members(
    folder: RunPaths,
    members: Members,
    headline: ReportHeadline,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare the ROC AUC of an ensemble with that of each member. The member with the highest ROC AUC comes first.

    The best member is chosen on the same videos that the comparison uses, which favours this member. If the ensemble is
    not above its controls, no difference counts as shown in the ensemble's favour.

    Args:
        folder: folder of the ensemble.
        members: its members.
        headline: the headline of the ensemble, with its verdict against the controls (simple predictors).
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of the half-samples.
        confidence: coverage of the intervals.

    Raises:
        DataError: the folder's tables are missing or damaged.
    """
    values = replicates_of(members.runs, MAIN_METRIC, replicates=1, seed=seed).values
    ranked = [members.runs[place] for place in np.argsort(-values, kind="stable")]
    pairs = [(run.name, ENSEMBLE) for run in ranked]
    named = {run.name: [run] for run in (JudgedRun(ENSEMBLE, folder, _predictions(folder)), *ranked)}
    is_above = headline.verdict.standing == "above control"
    limits = {} if is_above else {ENSEMBLE: f"That claims nothing of fakes: {headline.verdict.sentence}"}
    return compare_named(named, pairs, MAIN_METRIC, limits, replicates=replicates, seed=seed, confidence=confidence)


def answer(comparison: Comparison, headline: ReportHeadline) -> list[str]:
    """Return sentences on an ensemble: its ROC AUC, the difference from its best member, and its verdict.

    The verdict says whether the ensemble is above its controls (simple predictors).

    Args:
        comparison: the outcome of ``against_members``.
        headline: the headline of the ensemble.
    """
    best = comparison.pairs[0]
    numbers = {name: interval_text(*interval.row()[:3]) for name, interval in comparison.values.items()}
    number = f"ROC AUC {numbers[ENSEMBLE]}; its best member, {best.first}, has {numbers[best.first]}."
    return [number, best.finding, *headline.sentences]
