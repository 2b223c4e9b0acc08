"""The findings of an audit as sentences, as tables for people, and as files for papers and programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from fvc_lib.analysis.audit.numbers import AVERAGE, GIVEN, KINDS_OF_LIKENESS, NEEDS_REALS, Audit, ends_of
from fvc_lib.analysis.read.cautions import interval_cautions
from fvc_lib.analysis.read.comparison import p_text
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC, Score, what_to_do
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
from fvc_lib.metrics.operating_points import BEST, operating_point
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.tables import csv_for_people

ANSWER, LATEX = "answer.txt", "audit.tex"
_TABLES = (
    "numbers", "common", "by_group", "controls", "shuffled", "differences", "slices", "thresholds", "coverage",
    "floors",
)  # fmt: skip
FILES = (ANSWER, LATEX, *(f"{name}.csv" for name in (*_TABLES, "agreement", "similar_ids")))
_SHOWN_POINT = "fpr=0.01"


# --- Sentences


def answer(audit: Audit) -> list[str]:
    """Return sentences on the first detector: its ROC AUC, rivals, controls, floor, worst slice and threshold.

    A control is a simple predictor, such as one that sees metadata alone. The floor is how well the detector tells two
    sources of real videos apart.
    """
    first, others = audit.detectors[0], len(audit.detectors) - 1
    value, low, high = audit.compared(first)
    if value is None:
        return [f"{first} answered videos of one label only, so nothing can be said."]
    text = f"{metric_name(MAIN_METRIC)} {interval_text(value, low, high)} on {_videos_of(audit, first)}"
    lines = [f"{first} has the highest of {others + 1} detectors: {text}." if others else f"{first}: {text}."]
    lines += [_better_than(audit, first, others)] if others else []
    return [*lines, _against_controls(audit, first), *_floor(audit, first), *_worst_slice(audit, first),
            *_threshold(audit, first)]  # fmt: skip


def _videos_of(audit: Audit, detector: str) -> str:
    """Return text that counts the videos and groups on which ``Audit.compared`` measures ``detector``."""
    number, groups, who = audit.num_common, audit.num_common_groups, "all"
    if audit.common.is_empty():
        own = audit.numbers.filter(detector=detector, metric=MAIN_METRIC)
        (number, groups), who = own.select("num_videos", "num_groups").row(0), "it"
    within = count_text(groups, "group")
    if number == audit.num_videos:
        return f"{count_text(number, 'video')} in {within}"
    return f"the {number:,} of {count_text(audit.num_videos, 'video')} that {who} answered, in {within}"


def _better_than(audit: Audit, first: str, others: int) -> str:
    if audit.differences.is_empty():
        return "Detectors cannot be compared: they share no videos of both labels."
    ahead = pl.when(first=first).then(-pl.col("difference")).when(second=first).then("difference") > 0
    shown = audit.differences.filter(pl.col("is_shown") & ahead).height
    on = f"corrected for {count_text(audit.differences.height, 'pair')}"
    unanswered = audit.num_videos - audit.of_coverage(first, "num_videos")
    rivals = audit.coverage.filter(pl.col("detector") != first)["auc_if_wrong"]
    if shown < others:
        some = (
            f"shown to be better than {shown} of the {others} others"
            if shown
            else "not shown to be better than any other"
        )
        return f"It is {some} ({on}): call it no winner."
    if unanswered and audit.of_coverage(first, "auc_if_wrong") <= max(rivals):
        left = count_text(unanswered, "video")
        return f"It is better than every other ({on}) there, but left {left} unanswered: call it no winner."
    return f"It is shown to be better than every other ({on})."


def _against_controls(audit: Audit, first: str) -> str:
    honest = audit.honest_controls(first).sort("value", descending=True)
    if honest.is_empty():
        return "No control could be computed: nothing says that this number comes from looking at the videos."
    in_reach = honest.filter(~pl.col("is_above"))
    best = (in_reach if in_reach.height else honest).row(0, named=True)
    control = Score(best["source"], best["value"], best["low"], best["high"])
    name = f"{source_name(control.source)} ({interval_text(control.value, control.low, control.high)})"
    counts = honest["num_videos"].to_list()
    on = f" Some controls and it are compared on {min(counts):,} videos." if min(counts) < max(counts) else ""
    if in_reach.height:
        why = what_to_do(control, {}) or "What tells the labels need not be in the pictures."
        return f"It is not above its best control, {name}. {why}{on}"
    if audit.above_controls(first) is None:
        missing = "That it is above metadata and clip length is not shown: they need the videos (--corpus)."
        return f"It is above the controls that need no videos; the best is {name}. {missing}"
    return f"It is above every control; the best is {name}.{on}"


def _floor(audit: Audit, first: str) -> list[str]:
    lines = []
    for row in audit.floors.filter(detector=first).iter_rows(named=True):
        value, low, _ = audit.compared(first)
        told = interval_text(row["value"], row["low"], row["high"])
        sources = f"{row['higher']!r} from {row['lower']!r}"
        if is_above_control(value, low, row["value"], row["high"]):
            end = f"its number is {(value or 0) - row['value']:.3f} above that floor"
        elif row["low"] is None or row["low"] <= 0.5:
            end = "that is too uncertain to say that its number is above it"
        else:
            end = "its number is not above that floor: it may recognise where videos come from, and no fakes"
        lines.append(f"It tells two sources of reals apart, {sources}, with {told}, where 0.5 would be right; {end}.")
    return lines


def _worst_slice(audit: Audit, first: str) -> list[str]:
    found = audit.slices.filter(~pl.col("is_small"), detector=first).drop_nulls("auc").head(1)
    return [
        f"Its worst {row['slice_by'].replace('_', ' ')} is {row['value']!r}: "
        f"{interval_text(row['auc'], row['low'], row['high'])}."
        for row in found.iter_rows(named=True)
    ]


def _threshold(audit: Audit, first: str) -> list[str]:
    how = audit.settings
    asked = f"{GIVEN}{how.threshold:g}" if how.threshold is not None else str(how.point)
    wanted = _SHOWN_POINT if asked == str(BEST) else asked
    rows = audit.thresholds.filter(pl.col("is_resolved"), detector=first, point=wanted).drop_nulls("fpr").to_dicts()
    if not rows:
        why = "half of the groups has too few reals for it"
        return [] if wanted == _SHOWN_POINT else [f"What {wanted} comes to cannot be told: {why}."]
    text = f"The threshold given, {how.threshold or 0:g}, calls"
    if how.threshold is None:
        chosen_for = operating_point(wanted).says
        text = f"A threshold for {chosen_for}, chosen on one half of the groups, calls on the other"
    return [f"{text} {rows[0]['fpr']:.1%} of the reals fake and finds {rows[0]['tpr']:.0%} of the fakes."]


def cautions(audit: Audit, *, has_groups: bool, found: pl.DataFrame, notes: Sequence[str] = ()) -> list[str]:
    """Return the limits of the audit's numbers, one sentence for each limit.

    Args:
        audit: the numbers.
        has_groups: whether the table of videos states groups.
        found: families of videos with similar ids, from ``numbers.similar_ids``.
        notes: sentences that come first.
    """
    lines, first = list(notes), audit.detectors[0]
    if not has_groups:
        lines.append(
            "The table names no groups, so each video is taken for a group of its own. Where videos are copies or cuts "
            "of each other, the intervals are too narrow."
        )
    for families in found.partition_by("kind", maintain_order=True):
        number, both = len(set(families["videos"].explode())), families.filter("has_both_labels").height
        mixed = f", {count_text(both, 'family', 'families')} with reals and fakes" if both else ""
        example = ", ".join(map(repr, families["videos"][0][:3]))
        lines.append(
            f"Suspicion: {number:,} videos have ids that look related across groups "
            f"({KINDS_OF_LIKENESS[families['kind'][0]]}{mixed}), such as {example}. Nothing shows that they are."
        )
    if ends := ends_of(audit.regrouped.filter(detector=first)):
        lines.append(
            f"With these videos as groups, {first} has {interval_text(*ends)}. State the groups if they are real."
        )
    for row in audit.coverage.filter(pl.col("answered_share") < 1).iter_rows(named=True):
        lacking = f"{audit.num_videos - row['num_videos']:,} of {audit.num_videos:,} videos"
        worst = f"its {metric_name(MAIN_METRIC)} would be {number_text(row['auc_if_wrong'])}"
        lines.append(f"{row['detector']} did not answer {lacking}. If all of these were wrong, {worst}.")
    for name in audit.detectors:
        value, _, high = audit.interval(name)
        if high is not None and high < 0.5:
            turned = "If its scores are higher for reals, say so: --higher-is-real."
            lines.append(f"{name} ranks reals above fakes ({number_text(value)}). {turned}")
    measured = audit.numbers.filter(pl.col("metric").is_in(list(PROBABILITY_METRICS)))["detector"].to_list()
    if without := [name for name in audit.detectors if name not in measured]:
        lines.append(f"Not in [0, 1], so without Brier score and calibration error: {', '.join(without)}.")
    reals = max(audit.coverage["num_real"].to_list())
    lines += [
        f"{metric_name(metric)} cannot be resolved: it needs {needed:,} reals, and there are {reals:,}."
        for metric, needed in NEEDS_REALS.items()
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
    "auc": "ROC AUC", "common": "On the videos all answered", "by_group": "One vote per group",
    "floors": "Real-versus-real floor",
    "above_controls": "Above controls", "shuffled": "Labels dealt to other groups", "answered_share": "Answered (%)",
    "called_share": "Called fake (%)", "fpr": "Reals called fake", "tpr": "Fakes found", "holm_p": "Holm p",
    "point": "Asked for", "num_videos": "Videos", "num_groups": "Groups",
}  # fmt: skip
_STANDINGS = {True: "yes", False: "no", None: "not shown"}


def main_table(audit: Audit) -> pl.DataFrame:
    """Return one row per detector: its ROC AUC, its floor, and whether it is above its controls.

    Numbers are text with intervals. Columns without a value are left out.
    """
    rows: list[dict[str, object]] = []
    for name in audit.detectors:
        row: dict[str, object] = {"detector": name, "auc": interval_text(*audit.interval(name))}
        for column in ("common", "by_group", "floors", "shuffled"):
            ends = ends_of(getattr(audit, column).filter(detector=name))
            row[column] = interval_text(*ends) if ends else None
        row["above_controls"] = _STANDINGS[audit.above_controls(name)] if audit.controls.height else None
        rows.append(row | {"answered_share": audit.of_coverage(name, "answered_share")})
    table = pl.DataFrame(rows, infer_schema_length=None)
    if audit.is_complete:
        table = table.drop("common", "answered_share")  # the same as the first
    return table.select(column for column in table if column.null_count() < table.height)


def ranking_table(audit: Audit) -> pl.DataFrame:
    """Return the ranking metrics of every detector on the videos that it answered, as text with intervals."""
    return _metric_table(audit, tuple(RANKING_METRICS))


def decision_table(audit: Audit) -> pl.DataFrame:
    """Return the metrics of every detector that need a threshold or a probability, as text with intervals."""
    return _metric_table(audit, (*DECISION_METRICS, *PROBABILITY_METRICS))


def _metric_table(audit: Audit, metrics: Sequence[str]) -> pl.DataFrame:
    rows = []
    for name in audit.detectors:
        ends = {metric: audit.interval(name, metric) for metric in metrics}
        rows.append([name, *(None if known[0] is None else interval_text(*known) for known in ends.values())])
    table = pl.DataFrame(rows, schema=dict.fromkeys(("detector", *metrics), pl.String), orient="row")
    return table.select(column for column in table if column.null_count() < table.height)


def threshold_table(audit: Audit, detectors: Sequence[str]) -> pl.DataFrame:
    """Return one row per detector and operating point: ``detector point fpr tpr thresholds``, all text.

    Each half of the groups chooses a threshold, and the rates are measured on the other half. Points that need more
    reals than a half has are left out.
    """
    rows = [
        (
            name, row["point"], interval_text(row["fpr"], row["fpr_low"], row["fpr_high"]),
            interval_text(row["tpr"], row["tpr_low"], row["tpr_high"]),
            f"{row['first_threshold']:.4g}, {row['second_threshold']:.4g}",
        )
        for name in detectors
        for row in audit.thresholds.filter(pl.col("is_resolved"), detector=name).iter_rows(named=True)
    ]  # fmt: skip
    return pl.DataFrame(rows, dict.fromkeys(("detector", "point", "fpr", "tpr", "thresholds"), pl.String), orient="row")


def difference_table(audit: Audit) -> pl.DataFrame:
    """Return one row per pair of detectors, all text: ``higher lower difference holm_p difference_is``.

    The smallest Holm p comes first. The difference is ``higher`` minus ``lower``.
    """
    rows = []
    for row in audit.differences.drop_nulls("difference").sort("holm_p", nulls_last=True).iter_rows(named=True):
        ends, pair = (row["difference"], row["low"], row["high"]), (row["second"], row["first"])
        if row["difference"] < 0:
            value, high, low = (None if end is None else -end for end in ends)
            ends, pair = (value, low, high), pair[::-1]
        p = "" if row["holm_p"] is None else p_text(row["holm_p"])
        rows.append((*pair, interval_text(*ends), p, "shown" if row["is_shown"] else "not shown"))
    names = ("higher", "lower", "difference", "holm_p", "difference_is")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def slice_table(audit: Audit, detector: str) -> pl.DataFrame:
    """Return the slices of one detector, the lowest ROC AUC first.

    A slice holds the videos of one generator, one source of reals or one corpus.
    """
    own = audit.slices.filter(detector=detector)
    texts = [interval_text(*ends) for ends in own.select("auc", "low", "high").iter_rows()]
    by = pl.col("slice_by").str.replace_all("_", " ")
    columns = ["called_share", "num_videos", "num_groups"]
    return own.select(by, "value", pl.Series("auc", texts, dtype=pl.String), *columns)


# --- Files


def write_tables(audit: Audit, found: pl.DataFrame, folder: Path, limits: Sequence[str] = ()) -> list[Path]:
    """Write the answer, a LaTeX table and every table with rows as CSV into ``folder``; return the files.

    ``limits`` are the sentences of ``cautions``. They stand below the answer in ``answer.txt``.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames: Mapping[str, pl.DataFrame] = {
        **{name: getattr(audit, name) for name in _TABLES},
        "agreement": _agreement(audit),
        "similar_ids": found.with_columns(pl.col("videos").list.join(" ")),
    }
    texts = {f"{name}.csv": csv_for_people(frame) for name, frame in frames.items() if frame.height}
    texts |= {LATEX: latex_table(audit), ANSWER: "\n".join([*answer(audit), *[""] * bool(limits), *limits, ""])}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _agreement(audit: Audit) -> pl.DataFrame:
    """Return one row per pair of detectors: ``first second rank_correlation``."""
    matrix = [] if audit.correlations is None else audit.correlations.tolist()
    rows = [
        (audit.detectors[one], audit.detectors[other], value)
        for one, values in enumerate(matrix)
        for other, value in enumerate(values)
        if one < other
    ]
    schema = {"first": pl.String, "second": pl.String, "rank_correlation": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row").fill_nan(None)


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
    where = f"{audit.num_videos:,} videos in {audit.num_groups:,} groups"
    level = rf"{100 * audit.settings.confidence:g}\% intervals over groups"
    caption = f"{where}; {level}. --: undefined, or not resolved by the number of reals."
    return latex(caption, ["Detector", *heads.values(), "videos"], rows)
