"""Which runs may be one detector together, and whether that is better than the best of them.

All must be finished, whole and without a leak, and have predicted the same videos with the same labels, groups and
folds, by the same protocol: what differs is said of the first two that do, and nothing is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import polars as pl

from fvc_lib.analysis.read import run_comparison
from fvc_lib.analysis.read.detectors import Reading, names_of, read_run
from fvc_lib.analysis.read.headline import ReportHeadline
from fvc_lib.analysis.read.naming import run_parameters, trial_text
from fvc_lib.analysis.read.protocols import protocol_name
from fvc_lib.analysis.read.run_comparison import Comparison, PairComparison, Refusal
from fvc_lib.analysis.wording import clean_text, count_text, interval_text, number_text, source_name
from fvc_lib.metrics.intervals import intervals_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.records.ensembles import FoldRule, is_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import PROTOCOL, read_table

ENSEMBLE = "the ensemble"


@dataclass(frozen=True)
class Members:
    """Runs that make one ensemble.

    Attributes:
        readings: of each run, in the order given.
        detectors: for each run the place of its detector; runs that differ in their seed alone share one.
        names: of the detectors.
    """

    readings: tuple[Reading, ...]
    detectors: tuple[int, ...]
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[Reading, int]]:
        """Each run with the place of its detector."""
        return zip(self.readings, self.detectors, strict=True)

    def config(self, replicates: int, confidence: float) -> RunConfig:
        """The first run's, with these settings of intervals."""
        changed = {"bootstrap_replicates": replicates, "confidence": confidence}
        return self.readings[0].config.model_copy(update=changed)


def read_members(runs: Sequence[RunPaths]) -> Members:
    """Read ``runs`` and check that they may be one ensemble.

    Raises:
        UsageError: fewer than two different runs, an ensemble among them, or the same training twice.
        DataError: a run that is not finished or whole, or runs on other videos, labels, groups, folds or protocols.
    """
    different = list({run.root.resolve(): run for run in runs}.values())
    if inner := next((run for run in different if is_ensemble(run.root)), None):
        raise UsageError(f"{inner.run_id} is an ensemble itself. Name its runs.")
    if len(different) < 2:
        raise UsageError(f"got {count_text(len(different), 'run')}, and an ensemble is of two or more.")
    names = run_comparison.run_names(different)
    readings = [read_run(run, name) for run, name in zip(different, names, strict=True)]
    if refused := [each for each in readings if isinstance(each, Refusal)]:
        raise DataError(f"no ensemble is made: {' '.join(each.reason for each in refused)}")
    usable = [each for each in readings if isinstance(each, Reading)]
    for other in usable[1:]:
        if told := difference(usable[0], other):
            raise DataError(f"no ensemble is made of {usable[0].judged.name} and {other.judged.name}: {told}")
    places: dict[str, int] = {}
    detectors = tuple(places.setdefault(each.detector, len(places)) for each in usable)
    seen: dict[tuple[int, int], str] = {}
    for each, place in zip(usable, detectors, strict=True):
        before = seen.setdefault((place, each.config.seed), each.judged.name)
        if before != each.judged.name:
            told = f"{before} and {each.judged.name} have the same training parameters and seed"
            raise UsageError(f"{told}: counted twice, one training would have two votes. Name one of them.")
    firsts = [usable[detectors.index(place)] for place in range(len(places))]
    return Members(tuple(usable), detectors, tuple(names_of(firsts)))


def difference(first: Reading, other: Reading) -> str:
    """In words what differs first in what two runs were trained and judged on; empty where nothing does."""
    if not first.judged.data.equals(other.judged.data):
        told = run_comparison.difference_of_data(first.judged, other.judged)
        return f"they were not judged on the same videos and folds: {told}."
    asked = [run_parameters(each.run) for each in (first, other)]
    one, two = map(protocol_name, asked)
    if one != two:
        return f"their protocols differ, {one} and {two}, so they were not trained on the same videos."
    if first.config.operating_point != other.config.operating_point:
        points = f"{first.config.operating_point} and {other.config.operating_point}"
        return f"their thresholds were chosen for other operating points, {points}. Fork one of them to the other's."
    parts = [_parts(each.run) for each in (first, other)]
    if parts[0] is None or parts[1] is None:
        return ""
    for here, there, run in ((parts[0], parts[1], first), (parts[1], parts[0], other)):
        only = here.join(there, on=here.columns, how="anti", nulls_equal=True)
        if only.height:
            row = only.row(0, named=True)
            what = f"{row['part']} of training {row['fold']}, {row['label']}, group {row['group_id']}"
            told = f"{run.judged.name} has {count_text(only.height, 'video')} in another part, group or label"
            return f"{told}, for example {clean_text(row['video_id'])!r} ({clean_text(what)})."
    return ""


def _parts(run: RunPaths) -> pl.DataFrame | None:
    """Which part each video plays in each training; None in runs of versions that kept no such table."""
    if not run.protocol.is_file():
        return None
    return read_table(run.protocol, PROTOCOL).select("fold", "part", "video_id", "group_id", "label").sort(pl.all())


def against_members(
    folder: RunPaths,
    found: Members,
    headline: ReportHeadline,
    *,
    metric: str = "roc_auc",
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """The ensemble in ``folder`` minus each member, the best first, on the same drawn groups; p by Holm over all.

    The best member is the one with the highest number on these very videos, which favours it. A difference is said to
    be that of no more than its controls allow: of an ensemble that is not above its own nothing is claimed.

    Raises:
        DataError: the folder's tables are missing or damaged.
    """
    judged = run_comparison.read_judged_run(folder, ENSEMBLE)
    if isinstance(judged, Refusal):
        raise DataError(judged.reason)
    runs = [judged, *(each.judged for each in found.readings)]
    drawn = run_comparison.replicates_of(runs, metric, replicates=replicates, seed=seed)
    intervals = intervals_of(drawn, confidence)
    order = sorted(range(1, len(intervals)), key=lambda place: -intervals[place].value)
    pairs = [run_comparison.pair_of(runs, drawn, place, 0, metric, confidence) for place in order]
    told = run_comparison.adjusted(pairs, metric, confidence)
    trials = {each.name: trial_text(run_parameters(each.run)) for each in runs}
    if headline.verdict.standing != "above control":
        told = tuple(_without_claim(pair, headline) for pair in told)
    values = {runs[place].name: intervals[place] for place in (0, *order)}
    pairs = [run_comparison.of_trials(pair, trials) for pair in told]
    return Comparison(metric, confidence, replicates, values, tuple(pairs))


def _without_claim(pair: PairComparison, headline: ReportHeadline) -> PairComparison:
    if not pair.is_shown:
        return pair
    finding = f"{pair.finding} That claims nothing of fakes: {headline.verdict.sentence}"
    return replace(pair, is_shown=False, finding=finding)


def answer(comparison: Comparison, headline: ReportHeadline) -> list[str]:
    """Sentences: the number, whether it is better than the best member, and where it stands."""
    best, value = comparison.pairs[0], comparison.values[ENSEMBLE]
    member = comparison.values[best.first]
    number = interval_text(value.value, value.low, value.high)
    own = interval_text(member.value, member.low, member.high)
    told = f"ROC AUC {number}; its best member, {best.first}, has {own}."
    return [told, best.finding, *headline.sentences]


HEADINGS = {
    "roc_auc": "ROC AUC of groups not trained on", "best_control": "Best control", "fitted_on": "Fitted on videos",
    "in_groups": "of groups",
}  # fmt: skip


def member_table(found: Members) -> pl.DataFrame:
    """One row per run: its detector, its number and its best control."""
    rows = []
    for reading, place in found:
        score, best = reading.headline.model_score, reading.headline.verdict.best_control
        rows.append(
            {
                "run_id": reading.judged.name,
                "detector": found.names[place],
                "seed": reading.config.seed,
                "roc_auc": interval_text(score.value, score.low, score.high) if score else "",
                "best_control": f"{source_name(best.source)}, {number_text(best.value)}" if best else "none",
                "standing": reading.headline.verdict.standing,
            }
        )
    return pl.DataFrame(rows)


def weight_table(names: Sequence[str], rules: Sequence[FoldRule]) -> pl.DataFrame:
    """One row per fold: what was fitted on, the detectors' weights, intercept and threshold."""
    rows = [
        {
            "fold": fold,
            "fitted_on": rule.num_videos,
            "in_groups": rule.num_groups,
            **dict(zip(names, rule.weights, strict=True)),
            "intercept": rule.intercept,
            "threshold": rule.threshold,
        }
        for fold, rule in enumerate(rules)
    ]
    table = pl.DataFrame(rows)
    return table if any(rule.num_videos for rule in rules) else table.drop("fitted_on", "in_groups", "intercept")
