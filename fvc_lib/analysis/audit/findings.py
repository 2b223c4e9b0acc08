"""What an audit found, in sentences, in tables for people, and in files for papers and programs."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fvc_lib.analysis.audit.numbers import AVERAGE, GIVEN, NEEDS_REALS, Audit
from fvc_lib.analysis.audit.similar_ids import Suspicion
from fvc_lib.analysis.read.cautions import interval_cautions
from fvc_lib.analysis.read.comparison import p_text
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC, Score, what_to_do
from fvc_lib.analysis.wording import (
    count_text,
    interval_text,
    latex_text,
    metric_name,
    number_text,
    source_name,
)
from fvc_lib.metrics.cross_validation import DECISION_METRICS, PROBABILITY_METRICS, RANKING_METRICS
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE
from fvc_lib.metrics.operating_points import BEST, operating_point
from fvc_lib.metrics.paired_difference import is_above_control
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.tables import csv_for_people

ANSWER, LATEX = "answer.txt", "audit.tex"
_TABLES = (
    "numbers", "common", "by_group", "controls", "shuffled", "differences", "slices", "thresholds", "coverage",
    "floors", "agreement", "similar_ids",
)  # fmt: skip
FILES = (ANSWER, LATEX, *(f"{name}.csv" for name in _TABLES))
_SHOWN_POINT = "fpr=0.01"


def answer(audit: Audit) -> list[str]:
    """Return the audit in some sentences, the most important first."""
    first = audit.detectors[0]
    value, low, high = audit.compared(first)
    others = len(audit.detectors) - 1
    if value is None:
        return [f"{first} answered videos of one label only, so nothing can be said."]
    text = f"{metric_name(MAIN_METRIC)} {interval_text(value, low, high)} on {_where(audit, first)}"
    lines = [f"{first} has the highest of {others + 1} detectors: {text}." if others else f"{first}: {text}."]
    if others:
        lines.append(_better_than(audit, first, others))
    lines += [_against_controls(audit, first), *_floor(audit, first), *_worst_slice(audit, first)]
    lines += _thresholds(audit, first)
    return lines


def _where(audit: Audit, detector: str) -> str:
    """Return the videos and groups that ``Audit.compared`` measures."""
    if audit.common.height:
        number, groups, who = audit.num_common, audit.num_common_groups, "all"
    else:
        own = audit.numbers.filter(detector=detector, metric=MAIN_METRIC)
        number, groups = own.select("num_videos", "num_groups").row(0)
        who = "it"
    within = count_text(groups, "group")
    if number == audit.num_videos:
        return f"{count_text(number, 'video')} in {within}"
    return f"the {number:,} of {count_text(audit.num_videos, 'video')} that {who} answered, in {within}"


def _better_than(audit: Audit, first: str, others: int) -> str:
    if audit.differences.is_empty():
        return "Detectors cannot be compared: they share no videos of both labels."
    own = audit.differences.filter((pl.col("first") == first) | (pl.col("second") == first))
    ahead = pl.when(pl.col("first") == first).then(-pl.col("difference")).otherwise(pl.col("difference")) > 0
    shown = own.filter(pl.col("is_shown") & ahead).height
    on = f"corrected for {count_text(audit.differences.height, 'pair')}"
    if shown == others:
        unanswered = audit.num_videos - audit.of_coverage(first, "num_videos")
        worst = max(audit.of_coverage(name, "auc_if_wrong") for name in audit.detectors if name != first)
        if unanswered and audit.of_coverage(first, "auc_if_wrong") <= worst:
            left = count_text(unanswered, "video")
            return f"It is better than every other ({on}) there, but left {left} unanswered: call it no winner."
        return f"It is shown to be better than every other ({on})."
    some = (
        f"shown to be better than {shown} of the {others} others" if shown else "not shown to be better than any other"
    )
    return f"It is {some} ({on}): call it no winner."


def _against_controls(audit: Audit, first: str) -> str:
    honest = audit.honest_controls(first).sort("value", descending=True)
    if honest.is_empty():
        return "No control could be computed: nothing says that this number comes from looking at the videos."
    in_reach = honest.filter(~pl.col("is_above"))
    best = (in_reach if in_reach.height else honest).row(0, named=True)
    name = f"{source_name(best['source'])} ({interval_text(best['value'], best['low'], best['high'])})"
    fewest, most = honest.select(low=pl.col("num_videos").min(), high=pl.col("num_videos").max()).row(0)
    if in_reach.height:
        winner = Score(best["source"], best["value"], best["low"], best["high"])
        why = what_to_do(winner, {}) or "What tells the labels need not be in the pictures."
        on = f" on the {best['num_videos']:,} videos that this has" if best["num_videos"] < most else ""
        own = interval_text(best["detector_value"], best["detector_low"], best["detector_high"])
        return f"It is not above its best control, {name}{f', with {own}{on}' if on else ''}. {why}"
    if honest["source"].to_list() == ["constant"]:
        return "It is above chance; no other control could be computed, so what it reads is not known."
    if audit.above_controls(first) is None:
        return (
            f"It is above the controls that need no videos; the best is {name}. That it is above metadata and clip "
            "length is not shown: they need the videos (--corpus)."
        )
    on = f" Those of metadata and clip length, and it beside them, are of {fewest:,} videos." if fewest < most else ""
    return f"It is above every control; the best is {name}.{on}"


def _floor(audit: Audit, first: str) -> list[str]:
    floor, (value, low, _) = audit.floors.get(first), audit.compared(first)
    if floor is None:
        return []
    ends = floor.interval
    said = (
        f"It tells two sources of reals apart, {floor.higher!r} from {floor.lower!r}, with "
        f"{interval_text(ends.value, ends.low, ends.high)}, where 0.5 would be right"
    )
    if is_above_control(value, low, *ends.row()[0:3:2]):
        return [f"{said}; its number is {(value or 0) - ends.value:.3f} above that floor."]
    if ends.row()[1] is None or ends.low <= 0.5:
        return [f"{said}; that is too uncertain to say that its number is above it."]
    return [f"{said}; its number is not above that floor: it may recognise where videos come from, and no fakes."]


def _worst_slice(audit: Audit, first: str) -> list[str]:
    found = audit.slices.filter((pl.col("detector") == first) & pl.col("auc").is_not_null())
    large = found.filter(~pl.col("is_small"))
    if large.is_empty():
        return []
    worst = large.row(0, named=True)
    by, text = worst["slice_by"].replace("_", " "), interval_text(worst["auc"], worst["low"], worst["high"])
    return [f"Its worst {by} is {worst['value']!r}: {text}."]


def _thresholds(audit: Audit, first: str) -> list[str]:
    own = audit.thresholds.filter((pl.col("detector") == first) & pl.col("is_resolved") & pl.col("fpr").is_not_null())
    how = audit.settings
    asked = f"{GIVEN}{how.threshold:g}" if how.threshold is not None else str(how.point)
    wanted = _SHOWN_POINT if asked == str(BEST) else asked
    chosen = own.filter(pl.col("point") == wanted)
    row = (chosen if chosen.height else own.filter(pl.col("point").str.starts_with("fpr"))).head(1)
    told = []
    if wanted != _SHOWN_POINT and not chosen.height:
        told = [f"What {wanted} comes to cannot be told: half of the groups has too few reals for it."]
    if row.is_empty():
        return told
    found = row.row(0, named=True)
    if found["point"].startswith(GIVEN):
        text = f"The threshold given, {how.threshold:g}, calls {found['fpr']:.1%} of the"
    else:
        says = operating_point(found["point"]).says
        text = f"A threshold for {says}, chosen on one half of the groups, calls {found['fpr']:.1%} of the other half's"
    return [
        *told,
        f"{text} reals fake and finds {found['tpr']:.0%} of {'the' if GIVEN in found['point'] else 'its'} fakes.",
    ]


def cautions(audit: Audit, *, has_groups: bool, found: Sequence[Suspicion], notes: Sequence[str] = ()) -> list[str]:
    """Return what limits these numbers, one sentence each."""
    lines = list(notes)
    if not has_groups:
        lines.append(
            "The table names no groups, so each video is taken for a group of its own. Where videos are copies or cuts "
            "of each other, the intervals are too narrow."
        )
    for each in found:
        example = ", ".join(repr(video) for video in each.families[0][:3])
        both = f", {count_text(each.num_both_labels, 'family', 'families')} with reals and fakes" * bool(
            each.num_both_labels
        )
        lines.append(
            f"Suspicion: {each.num_videos:,} videos have ids that look related across groups ({each.says}{both}), such "
            f"as {example}. Nothing shows that they are."
        )
    first = audit.detectors[0]
    (_, low, high), regrouped = audit.interval(first), audit.regrouped.filter(pl.col("detector") == first)
    if regrouped.height and low is not None and high is not None:
        text = interval_text(*regrouped.select("value", "low", "high").row(0))
        lines.append(f"With these videos as groups, {first} has {text}. State the groups if they are real.")
    for row in audit.coverage.filter(pl.col("answered_share") < 1).iter_rows(named=True):
        lacking = f"{audit.num_videos - row['num_videos']:,} of {audit.num_videos:,} videos"
        lines.append(
            f"{row['detector']} did not answer {lacking}. Its own numbers are of those that it answered; hard videos "
            f"may be missing. Were all of them wrong, its {metric_name(MAIN_METRIC)} would be "
            f"{number_text(row['auc_if_wrong'])}."
        )
    for name in audit.detectors:
        value, _, high = audit.interval(name)
        if value is not None and high is not None and high < 0.5:
            lines.append(
                f"{name} ranks reals above fakes ({number_text(value)}). If its scores are higher for reals, say so: "
                "--higher-is-real."
            )
    measured = audit.numbers.filter(pl.col("metric").is_in(list(PROBABILITY_METRICS)))["detector"].unique()
    if without := [name for name in audit.detectors if name not in measured]:
        lines.append(
            f"Not in [0, 1], so no probabilities, no Brier score and no calibration error: {', '.join(without)}."
        )
    reals = int(audit.coverage["num_real"].max())  # type: ignore[arg-type]  # of numbers
    for metric, needed in NEEDS_REALS.items():
        if reals < needed:
            lines.append(
                f"{metric_name(metric)} cannot be resolved: it needs {needed:,} reals, and there are {reals:,}."
            )
    if audit.detectors[0] not in audit.floors:
        lines.append(
            "No real-versus-real floor: that needs two sources of reals (real_source) with "
            f"{FEWEST_GROUPS_OF_A_SOURCE} groups each. Nothing says whether a detector knows where videos come from."
        )
    lines += interval_cautions(*audit.compared(audit.detectors[0]))
    return lines


# --- Tables for people


def main_table(audit: Audit) -> pl.DataFrame:
    """One row per detector: its number, its floor, and whether it is above its controls."""
    rows: list[dict[str, object]] = []
    for name in audit.detectors:
        floor = audit.floors.get(name)
        rows.append(
            {
                "detector": name,
                "auc": interval_text(*audit.interval(name)),
                "common": _of(audit.common, name),
                "by_group": _of(audit.by_group, name),
                "floor": interval_text(*floor.interval.row()[:3]) if floor else None,
                "above_controls": _STANDINGS[audit.above_controls(name)] if audit.controls.height else None,
                "shuffled": _of(audit.shuffled, name),
                "answered_share": audit.of_coverage(name, "answered_share"),
            }
        )
    table = pl.DataFrame(rows, infer_schema_length=None)
    empty = [name for name in table.columns if table[name].null_count() == table.height]
    if (audit.coverage["answered_share"] == 1).all():
        empty += ["common", "answered_share"]  # the same as the first
    return table.drop(*dict.fromkeys(empty))


_STANDINGS = {True: "yes", False: "no", None: "not shown"}
HEADINGS = {
    "auc": "ROC AUC", "common": "On the videos all answered", "by_group": "One vote per group",
    "floor": "Real-versus-real floor",
    "above_controls": "Above controls", "shuffled": "Labels dealt to other groups", "answered_share": "Answered (%)",
    "called_share": "Called fake (%)", "fpr": "Reals called fake", "tpr": "Fakes found", "holm_p": "Holm p",
    "point": "Asked for", "num_videos": "Videos", "num_groups": "Groups",
}  # fmt: skip


def _of(frame: pl.DataFrame, name: str) -> str | None:
    row = frame.filter(pl.col("detector") == name)
    return interval_text(*row.select("value", "low", "high").row(0)) if row.height else None


def ranking_table(audit: Audit) -> pl.DataFrame:
    """Every detector's ranking metrics, on the videos it answered."""
    return _metric_table(audit, tuple(RANKING_METRICS))


def decision_table(audit: Audit) -> pl.DataFrame:
    """Every detector's metrics of decisions and of probabilities."""
    return _metric_table(audit, (*DECISION_METRICS, *PROBABILITY_METRICS))


def _metric_table(audit: Audit, metrics: Sequence[str]) -> pl.DataFrame:
    known = {(row[0], row[1]): row for row in audit.numbers.iter_rows()}
    reals = dict(audit.coverage.select("detector", "num_real").iter_rows())
    rows = []
    for name in audit.detectors:
        cells: dict[str, str | None] = {"detector": name}
        for metric in metrics:
            row = known.get((name, metric))
            if row is not None and row[2] is not None:
                cells[metric] = interval_text(*row[2:5])
            elif reals[name] < NEEDS_REALS.get(metric, 0):
                cells[metric] = "too few reals"
            else:
                cells[metric] = "no probability" if metric in PROBABILITY_METRICS else None
        rows.append(cells)
    table = pl.DataFrame(rows, schema=dict.fromkeys(("detector", *metrics), pl.String))
    return table.drop(*(name for name in metrics if table[name].is_in([None, "too few reals"], nulls_equal=True).all()))


def threshold_table(audit: Audit, detectors: Sequence[str]) -> pl.DataFrame:
    """Return the rates of each threshold on the half that did not choose it, as far as the reals resolve them."""
    rows = []
    for row in sorted(audit.thresholds.iter_rows(named=True), key=lambda row: audit.detectors.index(row["detector"])):
        if row["detector"] in detectors and row["is_resolved"]:
            rows.append(
                {
                    "detector": row["detector"],
                    "point": row["point"],
                    "fpr": interval_text(row["fpr"], row["fpr_low"], row["fpr_high"]),
                    "tpr": interval_text(row["tpr"], row["tpr_low"], row["tpr_high"]),
                    "thresholds": f"{row['first_threshold']:.4g}, {row['second_threshold']:.4g}",
                }
            )
    return pl.DataFrame(rows, schema=dict.fromkeys(("detector", "point", "fpr", "tpr", "thresholds"), pl.String))


def difference_table(audit: Audit) -> pl.DataFrame:
    """Pairs of detectors, the surest difference first."""
    rows = []
    for row in audit.differences.drop_nulls("difference").sort("holm_p", nulls_last=True).iter_rows(named=True):
        value, low, high = row["difference"], row["low"], row["high"]
        pair = [row["second"], row["first"]]
        if value < 0:
            pair = pair[::-1]
            value, low, high = -value, None if high is None else -high, None if low is None else -low
        p = "" if row["holm_p"] is None else p_text(row["holm_p"])
        rows.append((*pair, interval_text(value, low, high), p, "shown" if row["is_shown"] else "not shown"))
    names = ("higher", "lower", "difference", "holm_p", "difference_is")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def slice_table(audit: Audit, detector: str) -> pl.DataFrame:
    """One detector's slices, worst first."""
    own = audit.slices.filter(pl.col("detector") == detector)
    rows = [
        {
            "slice_by": row["slice_by"].replace("_", " "),
            "value": row["value"],
            "auc": interval_text(row["auc"], row["low"], row["high"]),
            "called_share": row["called_share"],
            "num_videos": row["num_videos"],
            "num_groups": row["num_groups"],
        }
        for row in own.iter_rows(named=True)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def similar_table(found: Sequence[Suspicion]) -> pl.DataFrame:
    """Families of ids that look related, a row each."""
    rows = [(each.kind, len(family), " ".join(family)) for each in found for family in each.families]
    return pl.DataFrame(rows, schema={"kind": pl.String, "num_videos": pl.Int64, "ids": pl.String}, orient="row")


# --- Files


def write_tables(audit: Audit, found: Sequence[Suspicion], folder: Path, told: Sequence[str] = ()) -> list[Path]:
    """Write every table as CSV, and the main one as LaTeX, into ``folder``; returns the files.

    ``told`` are the ``cautions``, which stand below the answer in the file that a terminal shows.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    floors = [
        (name, each.higher, each.lower, *each.interval.row()[:3], each.num_higher, each.num_lower)
        for name, each in audit.floors.items()
    ]
    floor_columns = ["detector", "higher", "lower", "value", "low", "high", "num_higher", "num_lower"]
    frames = (
        audit.numbers, audit.common, audit.by_group, audit.controls, audit.shuffled, audit.differences, audit.slices,
        audit.thresholds, audit.coverage, pl.DataFrame(floors, schema=floor_columns, orient="row"), _agreement(audit),
        similar_table(found),
    )  # fmt: skip
    texts = {f"{name}.csv": csv_for_people(each) for name, each in zip(_TABLES, frames, strict=True) if each.height}
    texts |= {LATEX: latex_table(audit), ANSWER: "\n".join([*answer(audit), *[""] * bool(told), *told, ""])}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _agreement(audit: Audit) -> pl.DataFrame:
    """``first second rank_correlation equal_decisions`` of every pair."""
    if audit.correlations is None:
        return pl.DataFrame()
    rows = [
        {
            "first": one,
            "second": other,
            "rank_correlation": float(audit.correlations[i, j]),
            "equal_decisions": None if audit.equal_decisions is None else float(audit.equal_decisions[i, j]),
        }
        for i, one in enumerate(audit.detectors)
        for j, other in enumerate(audit.detectors)
        if i < j
    ]
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None) if rows else pl.DataFrame()


def latex_table(audit: Audit) -> str:
    """Return the main table for a paper that uses booktabs."""
    level = f"{audit.settings.confidence:.0%}".replace("%", r"\%")
    metrics = (
        MAIN_METRIC, "partial_auc_to_10_percent", "average_precision", "equal_error_rate",
        "true_positive_rate_at_1_percent",
    )  # fmt: skip
    heads = ("AUC", r"pAUC$_{0.1}$", "AP", "EER", r"TPR@1\%")
    where = f"{audit.num_videos:,} videos in {audit.num_groups:,} groups; {level} intervals over groups"
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{where}. --: undefined, or not resolved by the number of reals.}}",
        rf"\begin{{tabular}}{{l{'l' * len(metrics)}r}}",
        r"\toprule",
        rf"Detector & {' & '.join(heads)} & videos \\",
        r"\midrule",
    ]
    for name in audit.detectors:
        values = [audit.interval(name, metric) for metric in metrics]
        cells = ["--" if ends[0] is None else interval_text(*ends) for ends in values]
        videos = audit.coverage.row(by_predicate=pl.col("detector") == name, named=True)["num_videos"]
        lines.append(" & ".join([latex_text(name), *cells, f"{videos:,}"]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def ensemble_sentence(audit: Audit) -> str:
    """Return a sentence on the average of all detectors."""
    rows = {name: ends for name, *ends in audit.common.iter_rows()}
    if AVERAGE not in rows:
        return "No ensemble: fewer than two detectors, or no common videos of both labels."
    best = rows[audit.detectors[0]][0]
    return f"{AVERAGE.capitalize()}: {interval_text(*rows[AVERAGE])}, the best single one {number_text(best)}."
