"""A comparison of detectors as tables, LaTeX and files: numbers with marks, what was left out, what to cite."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.read import run_comparison
from fvc_lib.analysis.read.detectors import BEST, HIGHEST, MAIN_METRIC, DetectorComparison
from fvc_lib.analysis.read.naming import trial_text
from fvc_lib.analysis.wording import (
    bytes_text,
    clean_text,
    count_text,
    duration_text,
    interval_text,
    latex_text,
    number_text,
    source_name,
)  # fmt: skip
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.registry import CORPORA, DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, csv_for_people, read_table

TABLE_FILES = ("detectors.csv", "runs.csv", "detectors.tex", "references.bib")


def detector_table(found: DetectorComparison) -> pl.DataFrame:
    """One row per detector, for people: texts with units, the mark behind the main number."""
    by_name = {pair.second: pair for pair in found.differences}
    rows = []
    for detector in found.detectors:
        interval, pair, cost = detector.intervals[MAIN_METRIC], by_name.get(detector.name), detector.cost
        text = interval_text(interval.value, interval.low, interval.high)
        rows.append(
            {
                "detector": detector.name,
                "auc": f"{text} {found.mark(detector, MAIN_METRIC)}".strip(),
                "over_seeds": detector.spread_text(),
                "difference": run_comparison.difference_text(pair) if pair else "reference",
                "holm_p": run_comparison.p_text(pair.holm_p_value) if pair else "",
                "above_controls": f"{detector.num_above_controls} of {count_text(len(detector.runs), 'run')}",
                "parameters": _whole(cost.num_parameters),
                "trained": _whole(cost.num_trained),
                "ms_per_clip": number_text(cost.milliseconds_per_clip, 1),
                "peak_memory": bytes_text(cost.peak_rss_bytes),
                "device_memory": "" if cost.peak_device_bytes is None else bytes_text(cost.peak_device_bytes),
                "training": duration_text(cost.training_seconds),
            }
        )
    table = pl.DataFrame(rows)
    return table if any(table["device_memory"]) else table.drop("device_memory")


HEADINGS = {
    "auc": "ROC AUC, mean over seeds", "over_seeds": "ROC AUC of its runs",
    "difference": "Difference from the reference", "holm_p": "Holm p", "above_controls": "Above every control",
    "trained": "of them trained", "ms_per_clip": "ms per clip", "control_auc": "Its ROC AUC",
}  # fmt: skip


def metric_table(found: DetectorComparison) -> pl.DataFrame:
    """Every metric of every detector with its interval over groups and the mark."""
    rows = []
    for detector in found.detectors:
        row = {"detector": detector.name}
        for metric, interval in detector.intervals.items():
            text = interval_text(interval.value, interval.low, interval.high)
            row[metric] = f"{text} {found.mark(detector, metric)}".strip()
        rows.append(row)
    return pl.DataFrame(rows)


def run_table(found: DetectorComparison) -> pl.DataFrame:
    """Every run that was compared beside its best control, and where it stands."""
    rows = []
    for detector in found.detectors:
        for run, seed, headline in zip(detector.runs, detector.seeds, detector.headlines, strict=True):
            score, best = headline.model_score, headline.verdict.best_control
            rows.append(
                {
                    "run_id": run.name,
                    "detector": detector.name,
                    "seed": None if detector.is_ensemble else seed,
                    "roc_auc": interval_text(score.value, score.low, score.high) if score else "",
                    "best_control": source_name(best.source) if best else "none",
                    "control_auc": interval_text(best.value, best.low, best.high) if best else "",
                    "standing": headline.verdict.standing,
                    "verdict": headline.verdict.sentence,
                    "trial": trial_text(vars(detector.config)) or None,
                }
            )
    table = pl.DataFrame(rows, infer_schema_length=None)
    return table if table["trial"].count() else table.drop("trial")


def left_out_table(found: DetectorComparison) -> pl.DataFrame:
    """The runs that were not compared, and why."""
    rows = [
        (", ".join(found.told_apart.get(run) or run for run in refusal.runs), ", ".join(refusal.runs), refusal.reason)
        for refusal in found.left_out
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(("detector", "run_id", "why"), pl.String), orient="row")


def number_table(found: DetectorComparison) -> pl.DataFrame:
    """One row per detector, for programs: plain numbers, nothing rounded."""
    by_name = {pair.second: pair for pair in found.differences}
    rows = []
    for detector in found.detectors:
        pair = by_name.get(detector.name)
        row: dict[str, Any] = {
            "detector": detector.name,
            "model": " + ".join(detector.models),
            "is_reference": pair is None,
            "seeds": None if detector.is_ensemble else " ".join(map(str, detector.seeds)),
            "runs": " ".join(run.name for run in detector.runs),
            "trial": trial_text(vars(detector.config)) or None,
            "num_runs_above_controls": detector.num_above_controls,
            "num_videos": detector.intervals[MAIN_METRIC].num_rows,
            "num_groups": detector.intervals[MAIN_METRIC].num_groups,
        }
        for metric, interval in detector.intervals.items():
            low, high = detector.spread[metric]
            row |= {metric: interval.value, f"{metric}_low": interval.low, f"{metric}_high": interval.high}
            row |= {f"{metric}_smallest_of_seeds": low, f"{metric}_largest_of_seeds": high}
            row[f"{metric}_mark"] = {BEST: "best, shown", HIGHEST: "best, not shown"}.get(found.mark(detector, metric))
        if pair:
            row |= {"difference": pair.difference.value, "difference_low": pair.difference.low}
            row |= {"difference_high": pair.difference.high, "p": pair.difference.p_value, "holm_p": pair.holm_p_value}
        rows.append(row | vars(detector.cost))
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None)


def latex_table(found: DetectorComparison) -> str:
    """The main table for a paper that uses booktabs: bold where ``BEST`` marks, underlined where ``HIGHEST`` does."""
    by_name = {pair.second: pair for pair in found.differences}
    caption = (
        rf"\caption{{Detectors on the same folds. AUC: mean over seeds with {100 * found.confidence:.0f}\% "
        r"intervals over groups; min--max over seeds is a spread, no interval; $\Delta$: paired "
        r"difference from the first row, $p$ corrected by Holm. Bold: best, and shown to differ from all others; "
        rf"underlined: best, not shown.{''.join(f' {latex_text(each)}' for each in found.of_runs)}}}"
    )
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        caption,
        r"\begin{tabular}{lllllrrrr}",
        r"\toprule",
        r"Detector & AUC & min--max & $\Delta$ & $p$ & above controls & parameters & ms/clip & training \\",
        r"\midrule",
    ]
    for detector in found.detectors:
        interval, pair, cost = detector.intervals[MAIN_METRIC], by_name.get(detector.name), detector.cost
        value = number_text(interval.value)
        mark = {BEST: r"\textbf{%s}", HIGHEST: r"\underline{%s}"}.get(found.mark(detector, MAIN_METRIC), "%s")
        whole = interval_text(interval.value, interval.low, interval.high)
        low, high = detector.spread[MAIN_METRIC]
        cells = [
            latex_text(detector.name) + "".join(map(_cited, detector.models)),
            mark % value + whole[len(value) :],
            f"{number_text(low)}--{number_text(high)}" if len(detector.runs) > 1 else detector.spread_text(),
            run_comparison.difference_text(pair).replace("-", "$-$") if pair else "--",
            run_comparison.p_text(pair.holm_p_value).replace("<", "$<$") if pair else "--",
            f"{detector.num_above_controls}/{len(detector.runs)}",
            _whole(cost.num_parameters),
            number_text(cost.milliseconds_per_clip, 1),
            duration_text(cost.training_seconds),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _cited(model: str) -> str:
    keys = [line.partition("{")[2].rstrip(",") for line in _bibtex_of(model).splitlines() if line.startswith("@")]
    return rf"~\cite{{{','.join(keys)}}}" if keys else ""


def _whole(number: int | None) -> str:
    return number_text(None) if number is None else f"{number:,}"


def bibliography(found: DetectorComparison) -> str:
    """BibTeX of the detectors and corpora compared, each once; a comment for what declares none."""
    texts = []
    for detector in found.detectors:
        for model in detector.models:
            texts.append(_bibtex_of(model) or f"% {clean_text(model)}: declares no publication")
        texts += _bibtex_of_corpora(detector.config, detector.runs[0].run)
    entries = (entry.strip() for text in texts for entry in re.split(r"\n(?=@)", text))
    return "\n\n".join(dict.fromkeys(entries)) + "\n"


def _bibtex_of(model: str) -> str:
    try:
        return DETECTORS.get(model).bibtex.strip()
    except FvcError:  # its package or file is not on this machine
        return ""


def _bibtex_of_corpora(config: RunConfig, run: RunPaths) -> list[str]:
    """Of each layout as which ``run`` read its corpora: what lies there today may be another."""
    paths = [*filter(None, (config.corpus, *config.more_corpora))]
    if not paths:
        return ["% the built-in sample corpus is generated and has no publication"]
    loaders, texts = dict(CORPORA.items()), []
    with suppress(DataError):
        for layout in read_table(run.index, INDEX, without=["perceptual_hash"])["label_source"].unique().sort():
            loader = loaders.get(layout)
            texts.append(loader.bibtex.strip() or (f"% {loader.paper}" if loader.paper else "") if loader else "")
    unknown = f"% corpus {clean_text(' + '.join(Path(path).name for path in paths))}: no publication is known here"
    return [text or unknown for text in texts] or [unknown]


def write_tables(found: DetectorComparison, folder: Path) -> list[Path]:
    """Write the comparison for papers and programs into ``folder``, and return the files.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        csv_for_people(number_table(found)),
        csv_for_people(run_table(found)),
        latex_table(found),
        bibliography(found),
    ]
    for name, text in zip(TABLE_FILES, texts, strict=True):
        write_text(folder / name, text)
    return [folder / name for name in TABLE_FILES]


def folder_of_comparison(asked: str, runs: Sequence[RunPaths]) -> Path:
    """Where a comparison's files go: where it was ``asked`` for, else ``comparison`` beside the first run.

    Raises:
        UsageError: there is no run.
    """
    if not runs:
        raise UsageError("there are no runs to compare. Name some in compared_runs.")
    return Path(asked).expanduser().absolute() if asked else runs[0].root.parent / "comparison"
