"""The findings of an audit as sentences, as tables for people, and as files for papers and programs."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fvc_lib.analysis.audit.numbers import AVERAGE, Audit, ends_of
from fvc_lib.analysis.read.comparison import p_text
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC, Score, interval_cautions, what_to_do
from fvc_lib.analysis.wording import (
    count_text,
    interval_text,
    latex_table as latex,
    latex_text,
    metric_name,
    number_text,
    source_name,
)
from fvc_lib.metrics.cross_validation import DECISION_METRICS, PROBABILITY_METRICS, RANKING_METRICS
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE
from fvc_lib.metrics.intervals import is_above_control
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.tables import csv_for_people

ANSWER, LATEX = "answer.txt", "audit.tex"
_TABLES = ("numbers", "common", "controls", "shuffled", "differences", "slices", "thresholds", "coverage", "floors")
FILES = (ANSWER, LATEX, *(f"{name}.csv" for name in (*_TABLES, "similar_ids")))
# Reals that a rate needs at least, by the metric that is NaN with fewer.
_NEEDS_REALS = {"true_positive_rate_at_1_percent": 100, "true_positive_rate_at_0_1_percent": 1000}

# --- Sentences


def answer(audit: Audit) -> list[str]:
    """Return sentences on the first detector: its ROC AUC, rivals, controls, floor, worst slice and threshold.

    A control is a simple predictor, such as one that sees metadata alone. The floor is how well the detector tells two
    sources of real videos apart.
    """
    first, number = audit.detectors[0], len(audit.detectors)
    ends = audit.compared(first)
    if ends[0] is None:
        return [f"{first} answered videos of one label only, so nothing can be said."]
    text = f"{metric_name(MAIN_METRIC)} {interval_text(*ends)} on {_videos_of(audit, first)}"
    lines = [f"{first} has the highest of {number} detectors: {text}." if number > 1 else f"{first}: {text}."]
    if number > 1:
        lines.append(_against_others(audit, first))
    return [*lines, _against_controls(audit, first), *_floor(audit, first), *_worst_slice(audit, first),
            *_threshold(audit, first)]  # fmt: skip


def _videos_of(audit: Audit, detector: str) -> str:
    """Return text that counts the videos and groups on which ``Audit.compared`` measures ``detector``."""
    number, groups, who = audit.num_common, audit.num_common_groups, "all"
    if audit.common.is_empty():
        own = audit.numbers.filter(detector=detector, metric=MAIN_METRIC)
        (number, groups), who = own.select("num_videos", "num_groups").row(0), "it"
    every = count_text(audit.num_videos, "video")
    videos = every if number == audit.num_videos else f"the {number:,} of {every} that {who} answered,"
    return f"{videos} in {count_text(groups, 'group')}"


def _against_others(audit: Audit, first: str) -> str:
    if audit.differences.is_empty():
        return "Detectors cannot be compared: they share no videos of both labels."
    ahead = pl.when(first=first).then(-pl.col("difference")).when(second=first).then("difference") > 0
    shown = audit.differences.filter(pl.col("is_shown") & ahead).height
    others, on = len(audit.detectors) - 1, f"corrected for {count_text(audit.differences.height, 'pair')}"
    if shown < others:
        better = f"better than {shown} of the {others} others" if shown else "better than any other"
        return f"It is {'' if shown else 'not '}shown to be {better} ({on}): call it no winner."
    unanswered = audit.num_videos - audit.of_coverage(first, "num_videos")
    rivals = audit.coverage.filter(pl.col("detector") != first)["auc_if_wrong"]
    if unanswered and audit.of_coverage(first, "auc_if_wrong") <= max(rivals):
        left = count_text(unanswered, "video")
        return f"It is better than every other ({on}) there, but left {left} unanswered: call it no winner."
    return f"It is shown to be better than every other ({on})."


def _against_controls(audit: Audit, first: str) -> str:
    honest = audit.honest_controls(first).sort("is_above", -pl.col("value"))
    if honest.is_empty():
        return "No control could be computed: nothing says that this number comes from looking at the videos."
    control = Score(*honest.select("source", "value", "low", "high").row(0))
    name = f"{source_name(control.source)} ({interval_text(control.value, control.low, control.high)})"
    if not honest["is_above"].all():
        why = what_to_do(control, {}) or "What tells the labels need not be in the pictures."
        return f"It is not above its best control, {name}. {why}"
    if audit.above_controls(first) is None:
        missing = "That it is above metadata and clip length is not shown: they need the videos (--corpus)."
        return f"It is above the controls that need no videos; the best is {name}. {missing}"
    return f"It is above every control; the best is {name}."


def _floor(audit: Audit, first: str) -> list[str]:
    lines, (value, low, _) = [], audit.compared(first)
    for row in audit.floors.filter(detector=first).iter_rows(named=True):
        is_above = is_above_control(value, low, row["value"], row["high"])
        lines.append(
            f"It tells two sources of reals apart, {row['higher']!r} from {row['lower']!r}, with "
            f"{interval_text(row['value'], row['low'], row['high'])}, where 0.5 would be right. Its number is "
            f"{'above that floor' if is_above else 'not shown to be above that floor: it may recognise sources'}."
        )
    return lines


def _worst_slice(audit: Audit, first: str) -> list[str]:
    worst = audit.slices.filter(~pl.col("is_small"), detector=first).drop_nulls("auc").head(1)
    return [
        f"Its worst {row['slice_by'].replace('_', ' ')} is {row['value']!r}: "
        f"{interval_text(row['auc'], row['low'], row['high'])}."
        for row in worst.iter_rows(named=True)
    ]


def _threshold(audit: Audit, first: str) -> list[str]:
    """Return a sentence on the threshold that the settings ask for; by default that of 1 % false alarms."""
    how = audit.settings
    point = "fpr=0.01" if how.decides_at == "best" else how.decides_at
    rows = audit.thresholds.filter(detector=first, point=point).drop_nulls("fpr").to_dicts()
    if not rows or not rows[0]["is_resolved"]:
        return [f"{point} cannot be judged: half of the groups has too few reals."] if point == how.decides_at else []
    chosen = f"A threshold for {point}, chosen on one half of the groups, on the other half"
    subject = chosen if how.threshold is None else f"The given {point}"
    rates = f"{rows[0]['fpr']:.1%} of the reals fake and finds {rows[0]['tpr']:.0%} of the fakes"
    return [f"{subject} calls {rates}."]


def cautions(audit: Audit, *, has_groups: bool, alike: pl.DataFrame, notes: Sequence[str] = ()) -> list[str]:
    """Return the limits of the audit's numbers, one sentence for each limit.

    Args:
        audit: the numbers.
        has_groups: whether the table of videos states groups.
        alike: families of videos with similar ids, from ``numbers.similar_ids``.
        notes: sentences that come first.
    """
    lines, first = list(notes), audit.detectors[0]
    if not has_groups:
        lines.append(
            "The table names no groups, so each video is taken for a group of its own. Where videos are copies or cuts "
            "of each other, the intervals are too narrow."
        )
    if alike.height:
        videos, example = alike["videos"].explode().n_unique(), ", ".join(map(repr, alike["videos"][0][:3]))
        lines.append(
            f"Suspicion: {videos:,} videos have ids that look related across groups, such as {example}. Nothing shows "
            "that they are; if they are, state the groups, or the intervals are too narrow."
        )
    for row in audit.coverage.filter(pl.col("answered_share") < 1).iter_rows(named=True):
        lines.append(
            f"{row['detector']} did not answer {audit.num_videos - row['num_videos']:,} of {audit.num_videos:,} videos."
            f" If all of these were wrong, its {metric_name(MAIN_METRIC)} would be {number_text(row['auc_if_wrong'])}."
        )
    for name in audit.detectors:
        value, _, high = audit.interval(name)
        if high is not None and high < 0.5:
            turned = "If its scores are higher for reals, say so: --higher-is-real."
            lines.append(f"{name} ranks reals above fakes ({number_text(value)}). {turned}")
    measured = audit.numbers.filter(pl.col("metric").is_in(list(PROBABILITY_METRICS)))["detector"]
    if without := [name for name in audit.detectors if name not in measured]:
        lines.append(f"Not in [0, 1], so without Brier score and calibration error: {', '.join(without)}.")
    reals = max(audit.coverage["num_real"].to_list())
    lines += [
        f"{metric_name(metric)} cannot be resolved: it needs {needed:,} reals, and there are {reals:,}."
        for metric, needed in _NEEDS_REALS.items()
        if reals < needed
    ]
    if audit.floors.filter(detector=first).is_empty():
        lines.append(
            "No real-versus-real floor: that needs two sources of reals (real_source) with "
            f"{FEWEST_GROUPS_OF_A_SOURCE} groups each. Nothing says whether a detector knows where videos come from."
        )
    return [*lines, *interval_cautions(*audit.compared(first))]


def ensemble_sentence(audit: Audit) -> str:
    """Return a sentence that compares the average of all detectors with the best single detector."""
    ends = ends_of(audit.common.filter(detector=AVERAGE))
    if ends is None:
        return "No ensemble: fewer than two detectors, or no common videos of both labels."
    best = number_text(audit.compared(audit.detectors[0])[0])
    return f"{AVERAGE.capitalize()}: {interval_text(*ends)}, the best single one {best}."


# --- Tables for people

HEADINGS = {
    "auc": "ROC AUC", "common": "On the videos all answered", "floors": "Real-versus-real floor",
    "above_controls": "Above controls", "shuffled": "Labels dealt to other groups", "answered_share": "Answered (%)",
    "called_share": "Called fake (%)", "fpr": "Reals called fake", "tpr": "Fakes found", "holm_p": "Holm p",
    "difference": "Second minus first", "is_shown": "Shown", "num_videos": "Videos", "num_groups": "Groups",
}  # fmt: skip
_STANDINGS = {True: "yes", False: "no", None: "not shown"}


def main_table(audit: Audit) -> pl.DataFrame:
    """Return one row per detector: its ROC AUC, its floor, and whether it is above its controls.

    Numbers are text with intervals. Columns without a value are left out.
    """
    rows = []
    for name in audit.detectors:
        row: dict[str, object] = {"detector": name, "auc": interval_text(*audit.interval(name))}
        for column in ("common", "floors", "shuffled"):
            ends = ends_of(getattr(audit, column).filter(detector=name))
            row[column] = interval_text(*ends) if ends else None
        row["above_controls"] = _STANDINGS[audit.above_controls(name)] if audit.controls.height else None
        rows.append(row | {"answered_share": audit.of_coverage(name, "answered_share")})
    return _known_columns(pl.DataFrame(rows, infer_schema_length=None))


def _known_columns(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(column for column in table if column.null_count() < table.height)


def metric_table(audit: Audit, *, of_ranking: bool) -> pl.DataFrame:
    """Return metrics of every detector on the videos that it answered, as text with intervals.

    They are the ranking metrics, or else those that need a threshold or a probability.
    """
    rows = []
    for name in audit.detectors:
        row: dict[str, str | None] = {"detector": name}
        for metric in RANKING_METRICS if of_ranking else (*DECISION_METRICS, *PROBABILITY_METRICS):
            ends = audit.interval(name, metric)
            row[metric] = None if ends[0] is None else interval_text(*ends)
        rows.append(row)
    return _known_columns(pl.DataFrame(rows, infer_schema_length=None))


def _interval_column(table: pl.DataFrame, name: str, low: str, high: str) -> pl.Series:
    """Return three columns of numbers as one column of text."""
    texts = [interval_text(*ends) for ends in table.select(name, low, high).iter_rows()]
    return pl.Series(name, texts, dtype=pl.String)


def threshold_table(audit: Audit) -> pl.DataFrame:
    """Return one row for each of the first five detectors and each operating point: ``fpr`` and ``tpr`` as text.

    Each half of the groups chooses a threshold, and the rates are measured on the other half. Points that need more
    reals than a half has are left out.
    """
    rows = audit.thresholds.filter(pl.col("is_resolved"), pl.col("detector").is_in(audit.detectors[:5]))
    rates = [_interval_column(rows, rate, f"{rate}_low", f"{rate}_high") for rate in ("fpr", "tpr")]
    return rows.select("detector", "point", *rates, "lowest_threshold", "highest_threshold")


def difference_table(audit: Audit) -> pl.DataFrame:
    """Return one row per pair of detectors, the smallest Holm p first: ``first second difference holm_p is_shown``."""
    rows = audit.differences.drop_nulls("difference").sort("holm_p", nulls_last=True)
    p = rows["holm_p"].map_elements(p_text, pl.String)
    return rows.select("first", "second", _interval_column(rows, "difference", "low", "high"), p, "is_shown")


def slice_table(audit: Audit, detector: str) -> pl.DataFrame:
    """Return the slices of one detector, the lowest ROC AUC first.

    A slice holds the videos of one generator, one source of reals or one corpus.
    """
    own = audit.slices.filter(detector=detector)
    auc = _interval_column(own, "auc", "low", "high")
    by = pl.col("slice_by").str.replace_all("_", " ")
    return own.select(by, "value", auc, "called_share", "num_videos", "num_groups")


# --- Files


def write_tables(audit: Audit, alike: pl.DataFrame, folder: Path, limits: Sequence[str] = ()) -> list[Path]:
    """Write the answer, a LaTeX table and every table with rows as CSV into ``folder``; return the files.

    ``limits`` are the sentences of ``cautions``. They stand below the answer in ``answer.txt``.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames: dict[str, pl.DataFrame] = {name: getattr(audit, name) for name in _TABLES}
    frames["similar_ids"] = alike.with_columns(pl.col("videos").list.join(" "))
    texts = {f"{name}.csv": csv_for_people(frame) for name, frame in frames.items() if frame.height}
    texts |= {LATEX: latex_table(audit), ANSWER: "\n".join([*answer(audit), *[""] * bool(limits), *limits, ""])}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def latex_table(audit: Audit) -> str:
    """Return five metrics of every detector as a LaTeX table, which needs the package booktabs."""
    heads = {
        MAIN_METRIC: "AUC", "partial_auc_to_10_percent": r"pAUC$_{0.1}$", "average_precision": "AP",
        "equal_error_rate": "EER", "true_positive_rate_at_1_percent": r"TPR@1\%",
    }  # fmt: skip
    rows = []
    for name in audit.detectors:
        ends = [audit.interval(name, metric) for metric in heads]
        cells = ["--" if known[0] is None else interval_text(*known) for known in ends]
        rows.append([latex_text(name), *cells, f"{audit.of_coverage(name, 'num_videos'):,}"])
    level = rf"{100 * audit.settings.confidence:g}\% intervals over groups"
    caption = (
        f"{audit.num_videos:,} videos in {audit.num_groups:,} groups; {level}. --: undefined, or not resolved by the "
        "number of reals."
    )
    return latex(caption, ["Detector", *heads.values(), "videos"], rows)
