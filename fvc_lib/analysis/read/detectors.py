"""Detectors beside each other: runs on the same folds, those that differ only in their seed taken as one detector.

A detector's number is the mean over its runs, on the same draws of groups for all; how far its runs lie apart is told
beside it as their smallest and largest value, which is a spread over trainings and no interval. A run that cannot be
judged is left out with its reason, and a detector of which a run is not above its controls is never marked as best.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fvc_lib.analysis.read import run_comparison
from fvc_lib.analysis.read.cautions import run_cautions
from fvc_lib.analysis.read.headline import ReportHeadline, run_headline
from fvc_lib.analysis.read.naming import ensemble_text, run_parameters, run_task, told_apart, trial_text
from fvc_lib.analysis.read.queries import memory_peaks, training_summary
from fvc_lib.analysis.read.run_comparison import JudgedRun, PairComparison, Refusal
from fvc_lib.analysis.wording import (
    clean_text,
    count_text,
    number_text,
)  # fmt: skip
from fvc_lib.metrics.declaration import direction
from fvc_lib.metrics.intervals import Interval, ReplicateValues, intervals_of
from fvc_lib.metrics.paired_difference import CorrectedT, paired_difference
from fvc_lib.services.atomic_files import AnyPath, as_mapping, read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import DataError, FvcError, command_text
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
from fvc_lib.services.tasks import DEFAULT_TASK, FOLD_TRAINING

MAIN_METRIC = "roc_auc"
METRICS = (MAIN_METRIC, "average_precision", "balanced_accuracy", "f1", "brier_score")
BEST, HIGHEST = "★", "☆"
MARKS = (
    f"{BEST}: the best value, and its difference from every other detector is shown (Holm over all pairs of the "
    f"metric), and all its runs are above their controls. {HIGHEST}: the best value, but one of these does not hold: "
    "call it no winner."
)
_OF_THE_SEED = frozenset({"seed", "folds_seed"})


@dataclass(frozen=True)
class Cost:
    """What a detector costs; None where it is not known.

    ``milliseconds_per_clip`` is one forward pass of one clip on the machine that made the comparison.
    """

    num_parameters: int | None = None
    num_trained: int | None = None
    milliseconds_per_clip: float | None = None
    peak_rss_bytes: int | None = None  # of its trainings' processes, the largest
    peak_device_bytes: int | None = None
    training_seconds: float | None = None  # of its model's trainings over all folds, mean over its runs


@dataclass(frozen=True)
class Detector:
    """One detector: its runs, which differ in their seeds alone, and what they say together."""

    name: str
    config: RunConfig  # of its first run
    runs: tuple[JudgedRun, ...]
    seeds: tuple[int, ...]
    headlines: tuple[ReportHeadline, ...]
    intervals: Mapping[str, Interval]  # by metric the mean over its runs, with an interval over groups
    spread: Mapping[str, tuple[float, float]]  # by metric the smallest and the largest value of a run
    cost: Cost = field(default_factory=Cost)
    parts: tuple[RunConfig, ...] = ()  # of all networks that judge a video; of an ensemble those of its members

    @property
    def is_ensemble(self) -> bool:
        """Whether several runs are one detector by being put together."""
        return len(self.parts) > 1

    @property
    def models(self) -> tuple[str, ...]:
        """Of its ``parts``, each once."""
        return tuple(dict.fromkeys(part.model for part in self.parts))

    @property
    def num_above_controls(self) -> int:
        """How many of its runs are above every control."""
        return sum(each.verdict.standing == "above control" for each in self.headlines)

    @property
    def is_above_controls(self) -> bool:
        """Whether every one of its runs is above every control."""
        return self.num_above_controls == len(self.runs)

    def spread_text(self, metric: str = MAIN_METRIC) -> str:
        """``0.81 to 0.86 over 3 seeds``, or that there is one, or that it is an ensemble."""
        low, high = self.spread[metric]
        if self.is_ensemble:
            return "an ensemble"
        if len(self.runs) == 1:
            return "one seed"
        return f"{number_text(low)} to {number_text(high)} over {len(self.runs)} seeds"


@dataclass(frozen=True)
class DetectorComparison:
    """What ``compare_detectors`` found, the reference first."""

    detectors: tuple[Detector, ...]
    differences: tuple[PairComparison, ...]  # of every other one from the reference, by the main metric (Holm)
    best: Mapping[str, tuple[str, bool]]  # by metric whose value is best, and whether the mark may say so (``MARKS``)
    left_out: tuple[Refusal, ...]  # runs that were not compared, and why
    cautions: tuple[str, ...]  # what must be known of all of it, sentences
    confidence: float
    of_runs: tuple[str, ...] = ()  # what must be said beside anything made of its runs (``headline.run_cautions``)
    told_apart: Mapping[str, str] = field(default_factory=dict)  # by name of a run the parameters that it differs in

    def with_costs(self, measured: Sequence[Mapping[str, Any]]) -> "DetectorComparison":
        """The same with what was measured of each detector, by the names of ``Cost``."""
        both = zip(self.detectors, measured, strict=True)
        return replace(self, detectors=tuple(replace(each, cost=replace(each.cost, **one)) for each, one in both))

    def summed_costs(
        self, measure: Callable[[Sequence[RunConfig]], Sequence[Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """What ``measure`` finds of each detector's ``parts``, summed; nothing where one of them has nothing."""
        told = iter(measure([part for each in self.detectors for part in each.parts]))
        found = []
        for each in self.detectors:
            of_parts = [next(told) for _ in each.parts]
            names = set.intersection(*map(set, of_parts)) if of_parts else set()
            found.append({name: sum(one[name] for one in of_parts) for name in sorted(names)})
        return found

    def mark(self, detector: Detector, metric: str) -> str:
        """``BEST``, ``HIGHEST`` or nothing; one detector alone is the best of nothing."""
        name, shown = self.best.get(metric, ("", False)) if len(self.detectors) > 1 else ("", False)
        return "" if name != detector.name else BEST if shown else HIGHEST


def runs_to_compare(names: Sequence[str], runs_dir: AnyPath) -> list[RunPaths]:
    """The runs and ensembles called ``names``; where none are, all of task video in the newest run's experiment, the
    oldest first, and then the ensembles that lie there.

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
    metrics: Sequence[str] = METRICS,
    without_run: Sequence[Sequence[str]] = (),
) -> DetectorComparison:
    """Compare the detectors of ``runs`` with that of ``reference`` (none: of the first that can be); reads only.

    ``without_run`` are names of what was asked for and has no run, each with the reason: they are left out as well.

    Differences are those of the means over a detector's runs, with an interval over groups and a p-value from the same
    draws for all (``metrics.paired_difference``). They speak of other videos; of other trainings the spread does.

    Raises:
        DataError: ``reference`` cannot be judged, or nothing is left to compare it with; the message says why.
    """
    different = list({run.root.resolve(): run for run in (*([reference] if reference else []), *runs)}.values())
    named = dict(zip(run_comparison.run_names(different), different, strict=True))
    readings = [read_run(run, name) for name, run in named.items()]
    if reference and isinstance(readings[0], Refusal):
        raise DataError(f"the reference cannot be compared. {readings[0].reason}")
    left_out = [Refusal((name,), why) for name, why in without_run]
    left_out += [reading for reading in readings if isinstance(reading, Refusal)]
    usable = _newest_of_each([reading for reading in readings if not isinstance(reading, Refusal)], left_out)
    alike, others = run_comparison.alike([reading.judged for reading in usable])
    chosen = {run.name for together in alike[:1] for run in together}
    for refusal in others:
        left_out.append(Refusal(tuple(name for name in refusal.runs if name not in chosen), refusal.reason))
    grouped: dict[str, list[Reading]] = {}
    for reading in usable:
        if reading.judged.name in chosen:
            grouped.setdefault(reading.detector, []).append(reading)
    # One detector that was trained several times shows its spread.
    if len(grouped) < 2 and (left_out or len(usable) < 2):
        reasons = " ".join(refusal.reason for refusal in left_out)
        what = "there is one detector, and nothing to compare it with." if grouped else "no run can be compared."
        raise DataError(f"{what} {reasons}".strip())
    names = names_of([readings[0] for readings in grouped.values()])
    drawn = {metric: _drawn(list(grouped.values()), metric, replicates, seed) for metric in metrics}
    detectors = tuple(
        _detector(name, readings, number, drawn, confidence)
        for number, (name, readings) in enumerate(zip(names, grouped.values(), strict=True))
    )
    main, _ = drawn[metrics[0]]
    against = [_pair(detectors, main, 0, number, confidence) for number in range(1, len(detectors))]
    cautions = _cautions(detectors)
    if isinstance(first := readings[0], Refusal):
        cautions.insert(0, f"{first.runs[0]}, the first run, is left out: the reference is {names[0]}.")
    trials = {each.name: trial_text(vars(each.config)) for each in detectors}
    told = _with_controls(run_comparison.adjusted(against, metrics[0], confidence), detectors)
    of_runs = [caution for each in detectors for judged in each.runs for caution in run_cautions(judged.run)]
    return DetectorComparison(
        detectors,
        tuple(run_comparison.of_trials(pair, trials) for pair in told),
        {metric: _best(detectors, metric, drawn[metric][0], confidence) for metric in metrics},
        tuple(left_out),
        tuple(dict.fromkeys(cautions)),
        confidence,
        tuple(dict.fromkeys(of_runs)),
        told_apart(named),
    )


# --- Which runs count: finished, whole, with results of their own predictions


@dataclass(frozen=True)
class Reading:
    """A run that may be compared: all it predicted, how it was made, and where it stands."""

    judged: JudgedRun
    run: RunPaths
    config: RunConfig
    headline: ReportHeadline
    parts: tuple[RunConfig, ...]

    @property
    def detector(self) -> str:
        """What is equal in runs that differ in nothing but their seeds.

        What a user's file held when a run was trained stands in its record, and may be another by now.
        """
        if is_ensemble(self.run.root):
            return sha256_of_json({**read_json_object(self.run.root / ENSEMBLE_RECORD), "name": ""})
        record = read_json_object(self.run.stage_checkpoint(FOLD_TRAINING, 0))
        then = as_mapping(as_mapping(record.get("fingerprint")).get("parameters"))
        files = [then.get(name, self.config.identity(name)) for name in ("model", "model_weights", "crop")]
        return sha256_of_json([self.config.model_copy(update={"seed": 0, "folds_seed": None}).training_hash, files])


def read_run(run: RunPaths, name: str) -> Reading | Refusal:
    """``run``, finished, whole and with results of its own predictions, or why it is not compared."""
    judged = run_comparison.read_judged_run(run, name)
    if isinstance(judged, Refusal):
        return judged
    try:
        config, headline, parts = run_config(run), run_headline(run), tuple[RunConfig, ...]()
        if is_ensemble(run.root):
            members = members_of(run.root, read_ensemble(run.root))
            parts = tuple(run_config(member) for member in members)
    except (FvcError, OSError) as error:
        return Refusal((name,), f"{name}: {clean_text(error)}")
    go_on = f"Go on with it: {command_text('--resume', run.root)}"
    why = " ".join(headline.notes)
    if not why and headline.earlier:
        why = f"its numbers are {headline.earlier}. {go_on}"
    elif not why and headline.model_score is None:
        why = f"it has no results. {go_on}"
    elif not why and not parts and headline.state not in ("done", "interactive", "running"):
        why = f"it is not finished ({headline.state}). {go_on}"
    elif not why and not _fits_its_results(judged, headline):
        why = f"its results are not those of its predictions. {command_text('--only', '05', '--resume', run.root)}"
    return Refusal((name,), f"{name}: {why}") if why else Reading(judged, run, config, headline, parts or (config,))


def _fits_its_results(judged: JudgedRun, headline: ReportHeadline) -> bool:
    drawn = run_comparison.replicates_of([judged], MAIN_METRIC, replicates=1, seed=0)
    score = headline.model_score
    return score is not None and math.isclose(float(drawn.values[0]), score.value or math.nan, abs_tol=1e-9)


def _newest_of_each(readings: Sequence[Reading], left_out: list[Refusal]) -> list[Reading]:
    """Of several runs of one training the newest: counted twice, a training would look certain."""
    newest: dict[str, Reading] = {}
    for reading in readings:
        key = f"{reading.detector} {reading.config.seed}"
        other = newest.setdefault(key, reading)
        if other is not reading:
            older, newer = sorted((other, reading), key=lambda each: each.run.run_id)
            newest[key] = newer
            what = f"{older.judged.name}: {newer.judged.name} has the same training parameters and seed and is newer."
            left_out.append(Refusal((older.judged.name,), what))
    return list(newest.values())


def names_of(readings: Sequence[Reading]) -> list[str]:
    """The model of each, and what else tells it from the others; in the end the name of its first run.

    Of an ensemble how it is made, and of what.
    """
    configs = [reading.config for reading in readings if not ensemble_text(reading.run)]
    values = [config.values_of(lambda declared: declared.hashed) for config in configs]
    fields = [name for name in DECLARED if name not in _OF_THE_SEED | {"model"}]
    differing = [name for name in fields if len({str(each.get(name)) for each in values}) > 1]
    of_runs = iter(
        ", ".join(
            [clean_text(config.model), *(f"{name} {clean_text(each.get(name)) or 'default'}" for name in differing)]
        )
        for config, each in zip(configs, values, strict=True)
    )
    names = [ensemble_text(reading.run) or next(of_runs) for reading in readings]
    return [
        name if names.count(name) == 1 else f"{name} of {reading.judged.name}"
        for name, reading in zip(names, readings, strict=True)
    ]


# --- Numbers, differences, and who is best


def _drawn(
    detectors: Sequence[Sequence[Reading]], metric: str, replicates: int, seed: int
) -> tuple[ReplicateValues, list[list[float]]]:
    """The mean over each detector's runs, on the same draws for all; and the values of the runs one by one."""
    runs = [reading.judged for readings in detectors for reading in readings]
    drawn = run_comparison.replicates_of(runs, metric, replicates=replicates, seed=seed)
    ends = np.cumsum([len(readings) for readings in detectors])
    parts = [np.arange(end - len(readings), end) for end, readings in zip(ends, detectors, strict=True)]
    means = replace(
        drawn,
        values=np.array([drawn.values[part].mean() for part in parts]),
        replicates=np.array([drawn.replicates[part].mean(0) for part in parts]),
        bounds=drawn.bounds[: len(parts)],
        is_distance=drawn.is_distance[: len(parts)],
    )
    return means, [drawn.values[part].tolist() for part in parts]


def _detector(
    name: str,
    readings: Sequence[Reading],
    number: int,
    drawn: Mapping[str, tuple[ReplicateValues, list[list[float]]]],
    confidence: float,
) -> Detector:
    readings = sorted(readings, key=lambda reading: reading.config.seed)
    runs = [reading.run for reading in readings]
    seconds = training_summary(runs).frame.filter(trained="model")["seconds"].drop_nulls().to_list()
    peaks = memory_peaks(runs).frame.filter(stage=FOLD_TRAINING)
    return Detector(
        name,
        readings[0].config,
        tuple(reading.judged for reading in readings),
        tuple(reading.config.seed for reading in readings),
        tuple(reading.headline for reading in readings),
        {metric: intervals_of(means, confidence)[number] for metric, (means, _) in drawn.items()},
        {metric: (min(values[number]), max(values[number])) for metric, (_, values) in drawn.items()},
        Cost(
            peak_rss_bytes=peaks["peak_rss_bytes"].max(),  # type: ignore[arg-type]
            peak_device_bytes=peaks["peak_device_bytes"].max(),  # type: ignore[arg-type]
            training_seconds=sum(seconds) / len(runs) if seconds else None,
        ),
        readings[0].parts,
    )


def _pair(
    detectors: Sequence[Detector], drawn: ReplicateValues, one: int, other: int, confidence: float
) -> PairComparison:
    difference = paired_difference(drawn, one, other, confidence=confidence)
    not_asked = CorrectedT(math.nan, math.nan, 0, math.nan)  # over folds and seeds at once it is not defined
    return PairComparison(detectors[one].name, detectors[other].name, difference, not_asked, math.nan, False, "")


def _with_controls(pairs: Sequence[PairComparison], detectors: Sequence[Detector]) -> tuple[PairComparison, ...]:
    """A difference in favour of a detector that may know nothing of fakes is said to be that."""
    short = {
        each.name: f" But only {each.num_above_controls} of {count_text(len(each.runs), 'run')} of {each.name} "
        f"{'is' if each.num_above_controls == 1 else 'are'} above every control."
        for each in detectors
        if not each.is_above_controls
    }
    better = [pair.second if pair.difference.value > 0 else pair.first for pair in pairs]
    return tuple(
        replace(pair, finding=pair.finding + (short.get(name, "") if pair.is_shown else ""))
        for pair, name in zip(pairs, better, strict=True)
    )


def _cautions(detectors: Sequence[Detector]) -> list[str]:
    """What must be known of all runs, then of single ones."""
    runs = [(each, seed, one) for each in detectors for seed, one in zip(each.seeds, each.headlines, strict=True)]
    of_all = [caution for caution in runs[0][2].cautions if all(caution in one.cautions for _, _, one in runs)]
    own = [
        f"{each.name}{'' if each.is_ensemble else f', seed {seed}'}: {caution}"
        for each, seed, one in runs
        for caution in one.cautions
        if caution not in of_all
    ]
    return of_all + own


def _best(detectors: Sequence[Detector], metric: str, drawn: ReplicateValues, confidence: float) -> tuple[str, bool]:
    """The detector with the best value, and whether it is above its controls and shown to be better than each other.

    It was chosen for its value, so the p-values are corrected for all pairs.
    """
    sign = 1.0 if direction(metric) == "higher" else -1.0
    values = [sign * each.intervals[metric].value for each in detectors]
    if not any(map(math.isfinite, values)):
        return "", False
    best = int(np.nanargmax(values))
    numbered = itertools.combinations(range(len(detectors)), 2)
    pairs = [_pair(detectors, drawn, one, other, confidence) for one, other in numbered]
    told = run_comparison.adjusted(pairs, metric, confidence)
    name = detectors[best].name
    shown = all(pair.is_shown for pair in told if name in (pair.first, pair.second))
    return name, shown and detectors[best].is_above_controls
