"""Compare detectors: their metrics, differences from a reference and costs, as tables and files.

A detector is a set of runs that differ in their seeds alone, or an ensemble. A control is a simple predictor that a
detector must beat, such as one that sees metadata alone. In tables, a mark (a star) stands behind the best value of a
metric (``MARKS``).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from fvc_lib.analysis.read.comparison import (
    Comparison,
    JudgedRun,
    PairComparison,
    Refusal,
    compare_named,
    names_of,
)
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC, run_cautions
from fvc_lib.analysis.read.queries import memory_peaks, training_summary
from fvc_lib.analysis.read.runs import read_tables, trial_text
from fvc_lib.analysis.wording import (
    better_direction,
    clean_text,
    count_text,
    interval_text,
    number_text,
)
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.registry import CORPORA, DETECTORS
from fvc_lib.services.tables import INDEX, csv_for_people
from fvc_lib.services.tasks import FOLD_TRAINING

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
    "peak_rss_bytes", "peak_device_bytes",  # the maximum over the processes of training
    "training_seconds",  # sum over the folds of the model, mean over runs
)  # fmt: skip
MeasureCosts = Callable[[Sequence[RunConfig]], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class DetectorComparison:
    """The result of ``compare_detectors``: metrics and costs of detectors, and differences from a reference detector.

    Attributes:
        runs: maps the name of a detector to its runs, ordered by seed. The reference comes first.
        metrics: maps a metric to the comparison of all detectors in it.
        num_above_controls: maps the name of a detector to the number of its runs that are above every control.
        costs: maps the name of a detector to its costs, a dict such as ``{"training_seconds": 95.0}``. The names are
            those of ``COSTS``. Unknown costs are left out.
        differences: ``MAIN_METRIC`` of every other detector minus that of the reference.
        left_out: names of runs that are not compared, with reasons.
        cautions: sentences that belong next to any table of these runs (``headline.run_cautions``).
        confidence: coverage of the intervals.
    """

    runs: Mapping[str, Sequence[JudgedRun]]
    metrics: Mapping[str, Comparison]
    num_above_controls: Mapping[str, int]
    costs: Mapping[str, Mapping[str, float]]
    differences: tuple[PairComparison, ...]
    left_out: tuple[Refusal, ...]
    cautions: tuple[str, ...]
    confidence: float


def compare_detectors(
    runs: Sequence[JudgedRun],
    left_out: Sequence[Refusal] = (),
    *,
    replicates: int = 2000,
    confidence: float = 0.95,
    measure_costs: MeasureCosts | None = None,
) -> DetectorComparison:
    """Compare detectors in all ``DETECTOR_METRICS``. The detector of the first run is the reference.

    Intervals and p-values describe how results may vary with the choice of videos. The spread over runs describes how
    they may vary with the seed of the training.

    Args:
        runs: finished runs and ensembles on the same data (``comparison.comparable_runs``).
        left_out: runs that are not compared, and wanted combinations of parameters without a run. Both have a reason.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        confidence: coverage of every interval.
        measure_costs: takes the configurations of a detector's networks, and returns for each a dict from entries of
            ``COSTS`` to values. The costs of a detector are the sums over its networks. None: nothing is measured.

    Raises:
        DataError: there are fewer than two detectors. One detector is enough if it has several runs, and no run was
            left out.
    """
    names = dict.fromkeys(run.detector for run in runs)
    in_order = sorted(runs, key=lambda run: run.config.seed)
    by_detector = {name: [run for run in in_order if run.detector == name] for name in names}
    if len(by_detector) < 2 and (left_out or len(runs) < 2):  # one detector trained several times shows its spread
        reasons = " ".join(reason for _, reason in left_out)
        raise DataError(f"{count_text(len(by_detector), 'detector')} can be compared, wanted two or more. {reasons}")
    named = dict(zip(names_of([several[0] for several in by_detector.values()]), by_detector.values(), strict=True))
    above = {
        name: sum(run.headline.verdict.standing == "above control" for run in several)
        for name, several in named.items()
    }
    limits = {
        name: f"But only {above[name]} of {count_text(len(several), 'run')} of {name} lie above every control."
        for name, several in named.items()
        if above[name] < len(several)
    }

    def compared(pairs: Sequence[tuple[str, str]], metric: str) -> Comparison:
        return compare_named(named, pairs, metric, limits, replicates=replicates, seed=0, confidence=confidence)

    every_pair = list(itertools.combinations(named, 2))
    of_metric = {metric: compared(every_pair, metric) for metric in DETECTOR_METRICS}
    from_reference = compared(every_pair[: len(named) - 1], MAIN_METRIC)  # the first pairs are those of the first name
    costs = {name: _costs(several, measure_costs) for name, several in named.items()}
    cautioned = [(caution, run.name) for run in runs for caution in run_cautions(run.run)]
    cautions = []
    for caution in dict(cautioned):
        runs_with_it = ", ".join(name for one, name in cautioned if one == caution)
        cautions.append(f"{runs_with_it}: {caution}")
    return DetectorComparison(
        named, of_metric, above, costs, from_reference.pairs, tuple(left_out), tuple(cautions), confidence
    )


def _costs(judged: Sequence[JudgedRun], measure: MeasureCosts | None) -> dict[str, float]:
    runs = [run.run for run in judged]
    measured = measure(judged[0].parts) if measure else [{}]
    peaks = memory_peaks(runs).frame.filter(stage=FOLD_TRAINING)
    costs = peaks.select(pl.max("peak_rss_bytes", "peak_device_bytes")).row(0, named=True)
    costs["training_seconds"] = training_summary(runs).frame.filter(trained="model")["seconds"].sum() / len(runs)
    costs |= {name: sum(network[name] for network in measured) for name in set.intersection(*map(set, measured))}
    return {name: value for name, value in costs.items() if value}


def mark(compared: Comparison, name: str) -> str:
    """Return the mark of the detector ``name`` in the metric of ``compared``: a star, or an empty text.

    The star ``BEST`` means that the detector has the best value, and that its difference from every other detector is
    shown. ``HIGHEST`` means that it has the best value, but not all differences are shown. The text is empty if another
    detector is better, or if there is only one.

    The p-values of ``compared`` must be adjusted for all pairs, because the values decide which detector is best.
    """
    best = max if better_direction(compared.metric) == "higher" else min
    values = [interval.value for interval in compared.values.values() if math.isfinite(interval.value)]
    if len(values) < 2 or compared.values[name].value != best(values):
        return ""
    return BEST if all(pair.is_shown for pair in compared.pairs if name in (pair.first, pair.second)) else HIGHEST


# --- Tables for readers

ANSWER = "answer.txt"  # sentences for the terminal
TABLE_FILES = ("detectors.csv", "runs.csv", "references.bib", ANSWER)
HEADINGS = {
    "over_seeds": "ROC AUC of its runs", "above_controls": "Above every control", "num_trained": "of them trained",
    "milliseconds_per_clip": "ms per clip",
}  # fmt: skip


def detector_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return a table for readers that compares all detectors, one row per detector.

    Each metric has a column of text: the value, its interval, and a star behind the best value (``MARKS``). Further
    columns are the lowest and highest ROC AUC of the detector's runs, the number of runs above all controls, and the
    costs (``COSTS``).
    """
    rows = []
    for name, runs in comparison.runs.items():
        counted = count_text(len(runs), "run")
        lowest, highest = map(number_text, comparison.metrics[MAIN_METRIC].spread[name])
        row = {
            "detector": name,
            **{metric: _marked(compared, name) for metric, compared in comparison.metrics.items()},
            "over_seeds": f"{lowest} to {highest} ({counted})",
            "above_controls": f"{comparison.num_above_controls[name]} of {counted}",
        }
        rows.append(row | {cost: comparison.costs[name].get(cost) for cost in COSTS})
    return pl.DataFrame(rows, infer_schema_length=None)


def _marked(compared: Comparison, name: str) -> str:
    interval = compared.values[name]
    return f"{interval_text(interval.value, interval.low, interval.high)} {mark(compared, name)}".strip()


def run_table(runs: Sequence[tuple[JudgedRun, str]]) -> pl.DataFrame:
    """Return one row per run: ``run_id detector seed roc_auc standing verdict trial``.

    ``roc_auc`` is text with the interval. ``standing`` says in a few words whether the run is above its controls, the
    simple predictors that it must beat; ``verdict`` is a sentence on it. ``trial`` is a text if the run used only part
    of its corpus. ``runs`` are pairs of a run and the name of its detector (``runs_of``).
    """
    rows = []
    for run, detector in runs:
        verdict = run.headline.verdict
        row = {"run_id": run.name, "detector": detector, "seed": None if len(run.parts) > 1 else run.config.seed}
        if score := run.headline.model_score:
            row["roc_auc"] = interval_text(score.value, score.low, score.high)
        row |= {"standing": verdict.standing, "verdict": verdict.sentence, "trial": trial_text(vars(run.config))}
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def runs_of(comparison: DetectorComparison) -> list[tuple[JudgedRun, str]]:
    """Return all compared runs as pairs ``(run, name of its detector)``, in the order of the detectors."""
    return [(run, name) for name, runs in comparison.runs.items() for run in runs]


def left_out_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return one row per run that is not compared. Columns are ``run_id`` and ``why``, the reason."""
    return pl.DataFrame(comparison.left_out, {"run_id": pl.String, "why": pl.String}, orient="row")


# --- Files for programs and papers


def number_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return the numbers of all detectors for programs, not rounded, one row per detector and quantity.

    A quantity is one of these:

    - a metric, such as ``roc_auc``, or a cost, such as ``training_seconds``.
    - ``roc_auc_minus_reference``: the difference from the reference detector.
    - ``holm_p``: the p-value of this difference, adjusted by Holm's method for the number of differences.

    Columns are ``detector quantity value low high smallest largest mark``. ``low`` and ``high`` are the ends of the
    interval. ``smallest`` and ``largest`` are the extremes over the detector's runs. ``mark`` is a star at the best
    value of a metric (``MARKS``).
    """
    rows: list[tuple[object, ...]] = []
    for name, costs in comparison.costs.items():
        for metric, compared in comparison.metrics.items():
            value_and_ends = compared.values[name].row()[:3]
            rows.append((name, metric, *value_and_ends, *compared.spread[name], mark(compared, name) or None))
        rows += [(name, cost, value, None, None, None, None, None) for cost, value in costs.items()]
    for pair in comparison.differences:
        ends = pair.difference.row()[:3]
        rows.append((pair.second, f"{MAIN_METRIC}_minus_reference", *ends, None, None, None))
        rows.append((pair.second, "holm_p", pair.holm_p_value, None, None, None, None, None))
    names = ("value", "low", "high", "smallest", "largest")
    schema = {"detector": pl.String, "quantity": pl.String, **dict.fromkeys(names, pl.Float64), "mark": pl.String}
    return pl.DataFrame(rows, schema, orient="row").fill_nan(None)


def bibliography(comparison: DetectorComparison) -> str:
    """Return the BibTeX entries of the compared detectors and corpora, without repetition.

    A detector or corpus that declares no publication gets a comment.
    """
    firsts, loaders = [runs[0] for runs in comparison.runs.values()], dict(CORPORA.items())
    index = read_tables([(firsts[0].name, firsts[0].run.index)], INDEX, without=["perceptual_hash"]).frame
    entries = {part.model: "" for run in firsts for part in run.parts}
    for model in entries:
        with suppress(FvcError):  # its package or file is not on this machine
            entries[model] = DETECTORS.get(model).bibtex
    for corpus, layout in index.select("corpus", "label_source").unique().sort("corpus").rows():
        entries[f"corpus {corpus}"] = loaders[layout].bibtex if layout in loaders else ""
    texts = [entry.strip() or f"% {clean_text(name)}: declares no publication" for name, entry in entries.items()]
    return "\n\n".join(dict.fromkeys(texts)) + "\n"


def answer(comparison: DetectorComparison) -> list[str]:
    """Return sentences for the terminal on the outcome of a comparison.

    They name the detector with the highest ROC AUC, state the difference of each detector from the reference, and end
    with cautions.
    """
    main = comparison.metrics[MAIN_METRIC]
    lines = [f"{name} has the highest ROC AUC, {_marked(main, name)}" for name in main.values if mark(main, name)]
    return [*lines, *(pair.finding for pair in comparison.differences), *comparison.cautions, MARKS]


def write_tables(comparison: DetectorComparison, folder: Path) -> list[Path]:
    """Write ``TABLE_FILES`` (CSV, BibTeX and sentences) into ``folder``, and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers, runs = csv_for_people(number_table(comparison)), csv_for_people(run_table(runs_of(comparison)))
    texts = (numbers, runs, bibliography(comparison), "\n".join([*answer(comparison), ""]))
    for name, text in zip(TABLE_FILES, texts, strict=True):
        write_text(folder / name, text)
    return [folder / name for name in TABLE_FILES]
