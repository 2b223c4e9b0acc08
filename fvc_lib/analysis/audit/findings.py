"""The findings of an audit as sentences, as tables for people, and as files.

An audit compares detectors by their scores for the same videos (``analysis.audit.numbers``).
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fvc_lib.analysis.audit.numbers import LEAST_ANSWERED, MEASURE, Audit, ends_of
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC, floor_margin, interval_cautions, judge
from fvc_lib.analysis.wording import count_text, interval_text, metric_name, number_text
from fvc_lib.metrics.cross_validation import DECISION_METRICS, PROBABILITY_METRICS, RANKING_METRICS
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.tables import csv_for_people

ANSWER = "answer.txt"
_TABLES = ("numbers", "common", "controls", "shuffled", "differences", "slices", "thresholds", "coverage", "floors")
FILES = (ANSWER, *(f"{name}.csv" for name in _TABLES))
# Fewest real videos that a metric needs. With fewer, the metric is NaN.
_NEEDS_REALS = {"true_positive_rate_at_1_percent": 100, "true_positive_rate_at_0_1_percent": 1000}

# --- Sentences


def answer(audit: Audit) -> list[str]:
    """Return the main result of an audit, as sentences on the detector with the highest ROC AUC.

    The sentences compare this detector with the other detectors and with the controls. Then they give its floor and its
    worst slice.

    - A control is a simple predictor, such as one that sees metadata alone.
    - The floor is the ROC AUC with which the scores tell two sources of real videos apart.
    - A slice holds the videos with one value of a property, such as one generator.
    """
    first, number = audit.detectors[0], len(audit.detectors) - len(audit.apart)
    ends = audit.compared(first)
    if ends[0] is None:
        return [f"{first} answered videos of one label only, so nothing can be said."]
    text = f"{metric_name(MAIN_METRIC)} {interval_text(*ends)} on {_videos_of(audit, first)}"
    lines = [f"{first}: {text}."]
    if number > 1:
        lines = [f"{first} has the highest of {number} detectors: {text}.", _against_others(audit, first)]
    if audit.apart:
        left, names = count_text(len(audit.apart), "detector"), ", ".join(audit.apart)
        lines.append(f"{left} answered less than {LEAST_ANSWERED:.0%} of the videos and cannot be compared: {names}.")
    scores = audit.scores(first)
    lines += [judge(scores, measure=MEASURE).sentence, *floor_margin(scores)]
    worst = audit.slices.filter(~pl.col("is_small"), detector=first).drop_nulls("auc").head(1)
    for by, value, auc, low, high in worst.select("slice_by", "value", "auc", "low", "high").rows():
        lines.append(f"Its worst {by.replace('_', ' ')} is {value!r}: {interval_text(auc, low, high)}.")
    return lines


def _videos_of(audit: Audit, detector: str) -> str:
    """Return text on how many videos and groups the ROC AUC of ``detector`` is measured on.

    Examples: ``96 videos in 24 groups``, and ``the 90 of 96 videos that all answered, in 24 groups``. A detector
    answers a video by giving it a score.
    """
    number = audit.num_common
    groups = audit.num_common_groups
    who = "all"
    if audit.common.is_empty():
        rows = audit.numbers.filter(detector=detector, metric=MAIN_METRIC)
        (number, groups), who = rows.select("num_videos", "num_groups").row(0), "it"
    videos = count_text(audit.num_videos, "video")
    if number < audit.num_videos:
        videos = f"the {number:,} of {videos} that {who} answered,"
    return f"{videos} in {count_text(groups, 'group')}"


def _against_others(audit: Audit, first: str) -> str:
    if audit.differences.is_empty():
        return "Detectors cannot be compared: they share no videos of both labels."
    ahead = pl.when(first=first).then(-pl.col("difference")).when(second=first).then("difference") > 0
    shown = audit.differences.filter("is_shown", ahead).height
    others = len(audit.detectors) - len(audit.apart) - 1
    on = f"corrected for {count_text(audit.differences.height, 'pair')}"
    if shown < others:
        return f"It is shown to be better than {shown} of {count_text(others, 'other')} ({on}): call it no winner."
    unanswered = audit.num_videos - audit.of_coverage(first, "num_videos")
    rivals = audit.coverage.filter(pl.col("detector") != first)["auc_if_wrong"]
    if unanswered and audit.of_coverage(first, "auc_if_wrong") <= max(rivals):
        left = count_text(unanswered, "video")
        return f"It is better than every other ({on}) there, but left {left} unanswered: call it no winner."
    return f"It is shown to be better than every other ({on})."


def cautions(audit: Audit, *, has_groups: bool, notes: Sequence[str] = ()) -> list[str]:
    """Return sentences on the limits of an audit, such as videos without a score, or too few reals for a metric.

    Args:
        audit: the outcome of ``audit_scores``.
        has_groups: whether the user's table of videos has a column of groups. A group holds copies and cuts of the
            same video.
        notes: further sentences, which are returned first.
    """
    lines = list(notes)
    first = audit.detectors[0]
    main = metric_name(MAIN_METRIC)
    if not has_groups:
        lines.append(
            "The table names no groups, so each video is taken for a group of its own. Where videos are copies or cuts "
            "of each other, the intervals are too narrow."
        )
    compared = audit.coverage.filter(~pl.col("detector").is_in(audit.apart))
    partly = compared.filter(pl.col("num_videos") < audit.num_videos)
    if partly.height:
        left = partly.select("detector", audit.num_videos - pl.col("num_videos"), "auc_if_wrong").rows()
        each = ", ".join(f"{name} {number:,} ({number_text(value)})" for name, number, value in left)
        lines.append(f"Videos without an answer, and the {main} if all of these were wrong: {each}.")
    for row in audit.numbers.filter(pl.col("high") < 0.5, metric=MAIN_METRIC).iter_rows(named=True):
        turned = f"{row['detector']} ranks reals above fakes ({number_text(row['value'])})"
        lines.append(f"{turned}. If its scores are higher for reals, say so: --higher-is-real.")
    reals = max(audit.coverage["num_real"])
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


# --- Tables for people


HEADINGS = {
    "auc": "ROC AUC", "floors": "Real-versus-real floor", "standing": "Verdict",
    "shuffled": "Labels dealt to other groups", "answered_share": "Answered (%)", "called_share": "Called fake (%)",
    "fpr": "Reals called fake", "tpr": "Fakes found", "holm_p": "Holm p", "difference": "Second minus first",
    "is_shown": "Shown", "num_videos": "Videos", "num_groups": "Groups",
}  # fmt: skip


def table_lines(audit: Audit) -> list[str]:
    """Return the table of all detectors as lines of aligned text, for the terminal.

    The first two lines are the caption and the headings. Then there is one line per detector: ROC AUC, share of videos
    with a score, and the shares of reals and fakes that are called fake.
    """
    from fvc_lib.analysis.pages.display import HtmlTable  # plotly takes seconds to load

    table = main_table(audit).select("detector", "auc", "answered_share", "fpr", "tpr")
    caption = f"Rates are of the videos that each answered, decided at {audit.settings.decides_at}"
    shown = HtmlTable(table, caption, HEADINGS, max_rows=table.height, missing="-")
    return repr(shown).expandtabs(2 + max(20, *map(len, audit.detectors))).splitlines()


def main_table(audit: Audit) -> pl.DataFrame:
    """Return the table of an audit for people, one row per detector. Most values are text.

    Columns:

    - ``detector``: name of the detector.
    - ``auc``: ROC AUC with its interval (``Audit.compared``).
    - ``answered_share``: share of the videos that the detector scored, a number in [0, 1].
    - ``fpr`` and ``tpr``: shares of reals and of fakes that are called fake, at the threshold that the setting
      ``decides_at`` chooses. Null if there are too few reals to choose a threshold.
    - ``floors``: ROC AUC with which the scores tell two sources of real videos apart. Left out if not known.
    - ``shuffled``: ROC AUC after labels were shuffled between groups.
    - ``standing``: the verdict against the controls (simple predictors), such as "not shown".
    """
    decided = audit.thresholds.filter("is_resolved", point=audit.settings.decides_at)
    rows = []
    for name in audit.detectors:
        rates = decided.filter(detector=name).select("fpr", "tpr")
        fpr, tpr = (f"{rate:.1%}" for rate in rates.row(0)) if rates.height else (None, None)
        row = {"detector": name, "auc": interval_text(*audit.compared(name)), "fpr": fpr, "tpr": tpr}
        for column in ("floors", "shuffled"):
            if ends := ends_of(getattr(audit, column).filter(detector=name)):
                row[column] = interval_text(*ends)
        rows.append(row | {"standing": judge(audit.scores(name), measure=MEASURE).standing})
    shares = audit.coverage.select("detector", "answered_share")
    return pl.DataFrame(rows, infer_schema_length=None).join(shares, on="detector", maintain_order="left")


def metric_table(audit: Audit, *, of_ranking: bool) -> pl.DataFrame:
    """Return a table of metrics as text with intervals, one row per detector and one column per metric.

    Each detector is measured on the videos that it scored.

    Args:
        audit: the outcome of ``audit_scores``.
        of_ranking: whether to return the metrics of ranking, such as ROC AUC. If False, return the metrics of decisions
            at a threshold and of probabilities.
    """
    metrics = RANKING_METRICS if of_ranking else (*DECISION_METRICS, *PROBABILITY_METRICS)
    known = audit.numbers.filter(pl.col("metric").is_in(list(metrics))).drop_nulls("value")
    ends = known.select("detector", "metric", "value", "low", "high").rows()
    texts = [(detector, metric, interval_text(*numbers)) for detector, metric, *numbers in ends]
    return pl.DataFrame(texts, ["detector", "metric", "value"], orient="row").pivot("metric", index="detector")


# --- Files


def write_tables(audit: Audit, folder: Path, limits: Sequence[str] = ()) -> list[Path]:
    """Write ``answer.txt``, and every table of ``audit`` that is not empty as CSV. Return the paths.

    Args:
        audit: the outcome of ``audit_scores``.
        folder: folder to write into, which is created if it is missing.
        limits: sentences of ``cautions``. In ``answer.txt`` they follow the main result and the table of all detectors.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.csv": csv_for_people(frame) for name in _TABLES if (frame := getattr(audit, name)).height}
    texts[ANSWER] = "\n".join([*answer(audit), "", *table_lines(audit), "", *limits, ""])
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
