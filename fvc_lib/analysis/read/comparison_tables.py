"""Comparisons as tables, LaTeX and files: numbers with marks, runs that are left out, and publications to cite."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.read.comparison import (
    BEST,
    COSTS,
    HIGHEST,
    MAIN_METRIC,
    Detector,
    DetectorComparison,
    JudgedRun,
    Members,
    difference_text,
    p_text,
)
from fvc_lib.analysis.wording import (
    bytes_text,
    clean_text,
    count_text,
    duration_text,
    interval_text,
    latex_table,
    latex_text,
    number_text,
    source_name,
)
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.records.ensembles import FoldRule
from fvc_lib.services.registry import CORPORA, DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, csv_for_people, read_table

TABLE_FILES = ("detectors.csv", "runs.csv", "detectors.tex", "references.bib")
HEADINGS = {
    "auc": "ROC AUC, mean over seeds", "over_seeds": "ROC AUC of its runs",
    "difference": "Difference from the reference", "holm_p": "Holm p", "above_controls": "Above every control",
    "num_trained": "of them trained", "milliseconds_per_clip": "ms per clip", "control_auc": "Its ROC AUC",
    "best_control": "Best control", "fitted_on": "Fitted on videos", "in_groups": "of groups",
}  # fmt: skip


def detector_table(found: DetectorComparison) -> pl.DataFrame:
    """Return one row per detector, as texts with units and the mark behind the main number."""
    by_name = {pair.second: pair for pair in found.differences}
    rows = []
    for detector in found.detectors:
        pair, cost = by_name.get(detector.name), detector.cost
        rows.append(
            {
                "detector": detector.name,
                "auc": _marked(found, detector, MAIN_METRIC),
                "over_seeds": detector.spread_text(),
                "difference": difference_text(pair) if pair else "reference",
                "holm_p": p_text(pair.holm_p_value) if pair else "",
                "above_controls": f"{detector.num_above_controls} of {count_text(len(detector.runs), 'run')}",
                "num_parameters": cost.get("num_parameters"),
                "num_trained": cost.get("num_trained"),
                "milliseconds_per_clip": number_text(cost.get("milliseconds_per_clip"), 1),
                "peak_memory": bytes_text(cost.get("peak_rss_bytes")),
                "device_memory": bytes_text(cost.get("peak_device_bytes")),
                "training": duration_text(cost.get("training_seconds")),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def _marked(found: DetectorComparison, detector: Detector, metric: str) -> str:
    interval = detector.intervals[metric]
    return f"{interval_text(interval.value, interval.low, interval.high)} {found.mark(detector, metric)}".strip()


def metric_table(found: DetectorComparison) -> pl.DataFrame:
    """Return every metric of every detector with its interval over groups and the mark."""
    return pl.DataFrame(
        {"detector": each.name, **{metric: _marked(found, each, metric) for metric in each.intervals}}
        for each in found.detectors
    )


def run_table(found: DetectorComparison) -> pl.DataFrame:
    """Return every run that was compared, with its best control and its standing."""
    rows = [
        {**_run_row(run), "detector": detector.name, "verdict": run.headline.verdict.sentence,
         "seed": None if detector.is_ensemble else run.config.seed, "trial": detector.trial or None}
        for detector in found.detectors for run in detector.runs
    ]  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def _run_row(run: JudgedRun) -> dict[str, Any]:
    score, best = run.headline.model_score, run.headline.verdict.best_control
    return {
        "run_id": run.name,
        "detector": "",
        "seed": run.config.seed,
        "roc_auc": interval_text(score.value, score.low, score.high) if score else "",
        "best_control": source_name(best.source) if best else "none",
        "control_auc": interval_text(best.value, best.low, best.high) if best else "",
        "standing": run.headline.verdict.standing,
    }


def left_out_table(found: DetectorComparison) -> pl.DataFrame:
    """Return the runs that are not compared, with the reasons."""
    rows = [(", ".join(refusal.runs), refusal.reason) for refusal in found.left_out]
    return pl.DataFrame(rows, schema=dict.fromkeys(("run_id", "why"), pl.String), orient="row")


def member_table(members: Members) -> pl.DataFrame:
    """Return one row per run of an ensemble: its detector, its number and its best control."""
    return pl.DataFrame({**_run_row(run), "detector": members.names[place]} for run, place in members)


def weight_table(names: Sequence[str], rules: Sequence[FoldRule]) -> pl.DataFrame:
    """Return one row per fold: the size of the fit, the detectors' weights, intercept and threshold."""
    return pl.DataFrame(
        {
            "fold": fold,
            "fitted_on": rule.num_videos,
            "in_groups": rule.num_groups,
            **dict(zip(names, rule.weights, strict=True)),
            "intercept": rule.intercept,
            "threshold": rule.threshold,
        }
        for fold, rule in enumerate(rules)
    )


# --- For programs and papers


def number_table(found: DetectorComparison) -> pl.DataFrame:
    """Return one row per detector with plain numbers, not rounded."""
    by_name = {pair.second: pair for pair in found.differences}
    rows = []
    for detector in found.detectors:
        pair, main = by_name.get(detector.name), detector.intervals[MAIN_METRIC]
        row: dict[str, Any] = {
            "detector": detector.name,
            "model": " + ".join(detector.models),
            "is_reference": pair is None,
            "seeds": None if detector.is_ensemble else " ".join(str(run.config.seed) for run in detector.runs),
            "runs": " ".join(run.name for run in detector.runs),
            "trial": detector.trial or None,
            "num_runs_above_controls": detector.num_above_controls,
            "num_videos": main.num_rows,
            "num_groups": main.num_groups,
        }
        for metric, interval in detector.intervals.items():
            low, high = detector.spread[metric]
            mark = {BEST: "best, shown", HIGHEST: "best, not shown"}.get(found.mark(detector, metric))
            values = (interval.value, interval.low, interval.high, low, high, mark)
            ends = ("", "_low", "_high", "_smallest_of_seeds", "_largest_of_seeds", "_mark")
            row |= {f"{metric}{end}": value for end, value in zip(ends, values, strict=True)}
        if pair:
            row |= {"difference": pair.difference.value, "difference_low": pair.difference.low}
            row |= {"difference_high": pair.difference.high, "p": pair.difference.p_value, "holm_p": pair.holm_p_value}
        rows.append(row | {name: detector.cost.get(name) for name in COSTS})
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None)


def paper_table(found: DetectorComparison) -> str:
    """Return the main table as LaTeX: bold where ``BEST`` marks, underlined where ``HIGHEST`` does."""
    caption = (
        rf"Detectors on the same folds. AUC: mean over seeds with {100 * found.confidence:.0f}\% intervals over "
        r"groups; the AUC of single runs is a spread, no interval; $\Delta$: paired difference from the first row, $p$ "
        r"corrected by Holm. Bold: best, and shown to differ from all others; underlined: best, not shown."
    )
    rows = []
    for detector, row in zip(found.detectors, detector_table(found).iter_rows(named=True), strict=True):
        value, _, rest = row["auc"].partition(" ")
        mark = {BEST: r"\textbf{%s}", HIGHEST: r"\underline{%s}"}.get(rest[-1:], "%s")
        auc = f"{mark % value} {rest.strip(f' {BEST}{HIGHEST}')}"
        numbers = [latex_text(row[name]) for name in ("over_seeds", "difference", "holm_p", "above_controls")]
        costs = [f"{row['num_parameters'] or '--'}", row["milliseconds_per_clip"], row["training"]]
        rows.append([latex_text(detector.name) + "".join(map(_cited, detector.models)), auc, *numbers, *costs])
    heads = [
        "Detector",
        "AUC",
        "of its runs",
        r"$\Delta$",
        "$p$",
        "above controls",
        "parameters",
        "ms/clip",
        "training",
    ]
    return latex_table(" ".join([caption, *map(latex_text, found.of_runs)]), heads, [rows])


def _cited(model: str) -> str:
    keys = re.findall(r"^@\w+\{([^,]+),", _bibtex_of(model), re.MULTILINE)
    return rf"~\cite{{{','.join(keys)}}}" if keys else ""


def bibliography(found: DetectorComparison) -> str:
    """Return the BibTeX of the detectors and corpora compared, each once; a comment for those that declare none."""
    texts = []
    for detector in found.detectors:
        for model in detector.models:
            texts.append(_bibtex_of(model) or f"% {clean_text(model)}: declares no publication")
        texts += _bibtex_of_corpora(detector.runs[0])
    entries = (entry.strip() for text in texts for entry in re.split(r"\n(?=@)", text))
    return "\n\n".join(dict.fromkeys(entries)) + "\n"


def _bibtex_of(model: str) -> str:
    try:
        return DETECTORS.get(model).bibtex.strip()
    except FvcError:  # its package or file is not on this machine
        return ""


def _bibtex_of_corpora(run: JudgedRun) -> list[str]:
    """Return the publications of the layouts that ``run`` read its corpora as."""
    paths = [*filter(None, (run.config.corpus, *run.config.more_corpora))]
    if not paths:
        return ["% the built-in sample corpus is generated and has no publication"]
    unknown = f"% corpus {clean_text(' + '.join(Path(path).name for path in paths))}: no publication is known here"
    loaders, texts = dict(CORPORA.items()), []
    with suppress(DataError):
        for layout in read_table(run.run.index, INDEX, without=["perceptual_hash"])["label_source"].unique().sort():
            texts.append((loaders[layout].bibtex.strip() if layout in loaders else "") or unknown)
    return texts or [unknown]


def write_tables(found: DetectorComparison, folder: Path) -> list[Path]:
    """Write the comparison for papers and programs into ``folder``, and return the files.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers, runs = csv_for_people(number_table(found)), csv_for_people(run_table(found))
    for name, text in zip(TABLE_FILES, (numbers, runs, paper_table(found), bibliography(found)), strict=True):
        write_text(folder / name, text)
    return [folder / name for name in TABLE_FILES]


def folder_of_comparison(asked: str, runs: Sequence[RunPaths]) -> Path:
    """Return the folder for a comparison's files: ``asked``, else ``comparison`` next to the first run.

    Raises:
        UsageError: there is no run.
    """
    if not runs:
        raise UsageError("there are no runs to compare. Name some in compared_runs.")
    return Path(asked).expanduser().absolute() if asked else runs[0].root.parent / "comparison"
