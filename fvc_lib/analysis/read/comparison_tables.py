"""Comparisons of detectors as tables, LaTeX and files.

The mark behind a number says whether it is the best (``comparison.MARKS``).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.read.comparison import (
    BEST,
    COSTS,
    HIGHEST,
    Detector,
    DetectorComparison,
    JudgedRun,
    PairComparison,
    difference_text,
    p_text,
)
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC
from fvc_lib.analysis.read.runs import read_tables, trial_text
from fvc_lib.analysis.wording import (
    bytes_text,
    clean_text,
    count_text,
    duration_text,
    interval_text,
    latex_table,
    latex_text,
    number_text,
)
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.records.ensembles import FoldRule
from fvc_lib.services.registry import CORPORA, DETECTORS
from fvc_lib.services.tables import INDEX, csv_for_people

TABLE_FILES = ("detectors.csv", "runs.csv", "detectors.tex", "references.bib")
HEADINGS = {
    "auc": "ROC AUC, mean over seeds", "over_seeds": "ROC AUC of its runs",
    "difference": "Difference from the reference", "holm_p": "Holm p", "above_controls": "Above every control",
    "num_trained": "of them trained", "milliseconds_per_clip": "ms per clip",
    "fitted_on": "Fitted on videos", "in_groups": "of groups",
}  # fmt: skip


def detector_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return one row per detector for readers: ROC AUC with interval and mark, difference from the reference, costs.

    Most values are text with units. ``number_table`` has the numbers.
    """
    by_name, rows = {pair.second: pair for pair in comparison.differences}, []
    for detector in comparison.detectors:
        pair, cost = by_name.get(detector.name), detector.cost
        counted = count_text(len(detector.runs), "run")
        lowest, highest = map(number_text, detector.spread[MAIN_METRIC])
        rows.append(
            {
                "detector": detector.name,
                "auc": _marked(detector, MAIN_METRIC),
                "over_seeds": f"{lowest} to {highest} ({counted})",
                "difference": _difference(pair) if pair else "reference",
                "holm_p": p_text(pair.holm_p_value) if pair else "",
                "above_controls": f"{detector.num_above_controls} of {counted}",
                "num_parameters": cost.get("num_parameters"),
                "num_trained": cost.get("num_trained"),
                "milliseconds_per_clip": number_text(cost.get("milliseconds_per_clip"), 1),
                "peak_memory": bytes_text(cost.get("peak_rss_bytes")),
                "training": duration_text(cost.get("training_seconds")),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def _difference(pair: PairComparison) -> str:
    return difference_text(pair.difference.value, pair.difference.low, pair.difference.high)


def _marked(detector: Detector, metric: str) -> str:
    interval = detector.intervals[metric]
    return f"{interval_text(interval.value, interval.low, interval.high)} {detector.marks[metric]}".strip()


def metric_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return one row per detector and one column per metric: text with the interval over groups and the mark."""
    return pl.DataFrame(
        {"detector": detector.name, **{metric: _marked(detector, metric) for metric in detector.intervals}}
        for detector in comparison.detectors
    )


def run_table(runs: Sequence[tuple[JudgedRun, str]]) -> pl.DataFrame:
    """Return one row per run: its ROC AUC with interval, and its verdict against the controls.

    ``runs`` are pairs of a run and the name of its detector (``runs_of``).
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
    """Return pairs of a compared run and the name of its detector."""
    return [(run, detector.name) for detector in comparison.detectors for run in detector.runs]


def left_out_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return one row per run that is not compared: ``run_id why``."""
    return pl.DataFrame(comparison.left_out, {"run_id": pl.String, "why": pl.String}, orient="row")


def weight_table(names: Sequence[str], rules: Sequence[FoldRule]) -> pl.DataFrame:
    """Return one row per fold of an ensemble: the rule that combines the detectors' scores.

    Columns are ``fold fitted_on in_groups``, the weight of each detector, and ``intercept threshold``. The rule was
    fitted on ``fitted_on`` videos in ``in_groups`` groups.

    Args:
        names: names of the detectors, in the order of the weights.
        rules: the rule of each fold.
    """
    rows = [
        (fold, rule.num_videos, rule.num_groups, *rule.weights, rule.intercept, rule.threshold)
        for fold, rule in enumerate(rules)
    ]
    return pl.DataFrame(rows, ["fold", "fitted_on", "in_groups", *names, "intercept", "threshold"], orient="row")


# --- Files for programs and papers


def number_table(comparison: DetectorComparison) -> pl.DataFrame:
    """Return one row per detector for programs: all metrics and costs as numbers that are not rounded."""
    by_name, rows = {pair.second: pair for pair in comparison.differences}, []
    marks = {BEST: "best, shown", HIGHEST: "best, not shown"}
    for detector in comparison.detectors:
        row: dict[str, Any] = {
            "detector": detector.name,
            "model": " + ".join(detector.models),
            "runs": " ".join(run.name for run in detector.runs),
            "trial": trial_text(vars(detector.runs[0].config)) or None,
            "num_runs_above_controls": detector.num_above_controls,
        }
        for metric, interval in detector.intervals.items():
            row |= {f"{metric}_{name}": number for name, number in vars(interval).items()}
            row[f"{metric}_smallest"], row[f"{metric}_largest"] = detector.spread[metric]
            row[f"{metric}_mark"] = marks.get(detector.marks[metric])
        if pair := by_name.get(detector.name):
            row |= {f"difference_{name}": number for name, number in vars(pair.difference).items()}
            row["difference_holm_p"] = pair.holm_p_value
        rows.append(row | {name: detector.cost.get(name) for name in COSTS})
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None)


def paper_table(comparison: DetectorComparison) -> str:
    """Return the table of detectors as LaTeX for a paper; the caption ends with the cautions of the runs."""
    caption = (
        rf"Detectors on the same folds. AUC: mean over seeds with {100 * comparison.confidence:.0f}\% intervals over "
        r"groups; the AUC of single runs is a spread, no interval; $\Delta$: paired difference from the first row, $p$ "
        r"corrected by Holm. $\star$: best, and shown to differ from all others; $\circ$: best, not shown."
    )
    heads = {
        "detector": "Detector", "auc": "AUC", "over_seeds": "of its runs", "difference": r"$\Delta$", "holm_p": "$p$",
        "above_controls": "above controls", "num_parameters": "parameters", "milliseconds_per_clip": "ms/clip",
        "training": "training",
    }  # fmt: skip
    rows = []
    for texts in detector_table(comparison).select(*heads).rows():
        cells = ["--" if text is None else latex_text(text) for text in texts]
        rows.append([cell.replace(BEST, r"$\star$").replace(HIGHEST, r"$\circ$") for cell in cells])
    return latex_table(" ".join([caption, *map(latex_text, comparison.cautions)]), list(heads.values()), rows)


def bibliography(comparison: DetectorComparison) -> str:
    """Return the BibTeX entries of the compared detectors and corpora, without repetition.

    A detector or corpus that declares no publication gets a comment.
    """
    run, loaders = comparison.detectors[0].runs[0], dict(CORPORA.items())
    index = read_tables([(run.name, run.run.index)], INDEX, without=["perceptual_hash"]).frame
    entries = {model: _bibtex_of(model) for detector in comparison.detectors for model in detector.models}
    for corpus, layout in index.select("corpus", "label_source").unique().sort("corpus").rows():
        entries[f"corpus {corpus}"] = loaders[layout].bibtex if layout in loaders else ""
    texts = [entry.strip() or f"% {clean_text(name)}: declares no publication" for name, entry in entries.items()]
    return "\n\n".join(dict.fromkeys(texts)) + "\n"


def _bibtex_of(model: str) -> str:
    try:
        return DETECTORS.get(model).bibtex
    except FvcError:  # its package or file is not on this machine
        return ""


def write_tables(comparison: DetectorComparison, folder: Path) -> list[Path]:
    """Write ``TABLE_FILES`` (CSV, LaTeX and BibTeX) into ``folder``, and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers, runs = csv_for_people(number_table(comparison)), csv_for_people(run_table(runs_of(comparison)))
    files = [folder / name for name in TABLE_FILES]
    for file, text in zip(files, (numbers, runs, paper_table(comparison), bibliography(comparison)), strict=True):
        write_text(file, text)
    return files
