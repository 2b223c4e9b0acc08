"""Robustness: compare scores of disturbed videos with those of the same videos undisturbed.

A level is one kind of disturbance at one strength.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from fvc_lib.analysis.read.comparison import difference_text, replicates_over_folds
from fvc_lib.analysis.read.headline import HEADLINE_METRIC as MAIN_METRIC
from fvc_lib.analysis.wording import count_text, interval_text, metric_name
from fvc_lib.metrics.intervals import holm, intervals_of, paired_difference
from fvc_lib.services.tables import ROBUSTNESS_RESULTS, check_table, column_types

UNDISTURBED, WITHOUT_LOSS = "undisturbed", "lossless"
# The first measures ranking, the second decisions at thresholds that were chosen on undisturbed videos.
METRICS = (MAIN_METRIC, "balanced_accuracy")
_ENDS = ("value", "low", "high")
_DIFFERENCE = ("difference", "difference_low", "difference_high")
HEADINGS = {"strength": "Level", "num_failed": "Without a score", "holm_p_value": "Holm p"}


def robustness_results(
    scored: pl.DataFrame,
    strengths: Mapping[str, str],
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
    trial: str = "",
) -> pl.DataFrame:
    """Return ``tables.ROBUSTNESS_RESULTS``: metrics at each level, and their difference from undisturbed videos.

    A level is one kind of disturbance at one strength. Disturbed videos are compared with the same videos undisturbed.
    If a disturbed video has no score, the comparison leaves out both versions of it, and ``num_failed`` counts it. Rows
    of undisturbed videos come first, then the levels by ascending ROC AUC. Levels without a ROC AUC come last.

    Args:
        scored: rows of ``tables.ROBUSTNESS``. If ``target`` (the corpus or generator that a video tests) has several
            values, each metric is the plain mean over the targets.
        strengths: maps the name of a level to a text for its strength. Other levels get "as it is".
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of the half-samples.
        confidence: coverage of every interval.
        trial: text for the column ``trial`` if the run is on part of its corpus (``runs.trial_text``).
    """
    before = scored.filter(level=UNDISTURBED)
    rows: list[dict[str, Any]] = []
    for (level, kind), of_level in scored.group_by("level", "kind", maintain_order=True):
        disturbed = of_level.drop_nulls("score").select("video_id", disturbed="score")
        both = before.join(disturbed, on="video_id", maintain_order="left")
        row = {
            "level": level,
            "kind": kind,
            "strength": strengths.get(str(level), "as it is"),
            "trial": trial or None,
            "num_videos": both.height,
            "num_groups": both["group_id"].n_unique(),
            "num_failed": of_level.height - both.height,
        }
        numbers = _numbers(both, replicates, seed, confidence) if both["label"].n_unique() == 2 else {}
        if level == UNDISTURBED:  # the other levels are compared with it
            numbers = {metric: {end: known[end] for end in _ENDS} for metric, known in numbers.items()}
        rows += [{**row, "metric": metric, **numbers.get(metric, {})} for metric in METRICS]
    table = pl.DataFrame(rows, schema=column_types(ROBUSTNESS_RESULTS)).fill_nan(None)
    tested = pl.when(~pl.col("level").is_in([UNDISTURBED, WITHOUT_LOSS])).then("p_value")
    adjusted = tested.map_batches(lambda p_values: pl.Series(holm(p_values)), return_dtype=pl.Float64).fill_nan(None)
    table = table.with_columns(holm_p_value=adjusted.over("metric"))
    worst = pl.when(metric=MAIN_METRIC).then("value").max().over("level")
    by = (pl.col("level") != UNDISTURBED, worst, "metric")
    table = table.sort(*by, descending=[False, False, True], nulls_last=True)
    return check_table(table, ROBUSTNESS_RESULTS, "robustness results")


def _numbers(both: pl.DataFrame, replicates: int, seed: int, confidence: float) -> dict[str, dict[str, float]]:
    """Compare one level with the undisturbed videos. Return a dict from metric to a dict from name to number.

    The names are ``value low high difference difference_low difference_high p_value undisturbed``. ``value`` is the
    metric of the disturbed videos, and ``undisturbed`` is that of the undisturbed ones. ``difference`` is
    ``value`` minus ``undisturbed``. Undefined numbers are NaN.

    Args:
        both: one row per video, with its scores in the columns ``score`` (undisturbed) and ``disturbed``.
        replicates: number of half-samples (random halves of the groups) behind each interval.
        seed: seed of the half-samples.
        confidence: coverage of every interval.
    """
    measures = [(metric, both[column], both["threshold"]) for metric in METRICS for column in ("score", "disturbed")]
    drawn = replicates_over_folds(both, measures, replicates=replicates, seed=seed)
    intervals, numbers = intervals_of(drawn, confidence), {}
    for place, metric in zip((0, 2), METRICS, strict=True):
        before, after = intervals[place : place + 2]
        paired = paired_difference(drawn, place, place + 1, confidence=confidence)
        numbers[metric] = {
            "value": after.value,
            "low": after.low,
            "high": after.high,
            "difference": paired.value,
            "difference_low": paired.low,
            "difference_high": paired.high,
            "p_value": paired.p_value,
            "undisturbed": before.value,
        }
    return numbers


def findings(results: pl.DataFrame, confidence: float = 0.95, cautions: Sequence[str] = ()) -> list[str]:
    """Return sentences on how much disturbances lower the ROC AUC of a detector.

    They give the ROC AUC of undisturbed videos, the worst level (one disturbance at one strength), the number of levels
    with a shown loss, and the number of videos without a score.

    Args:
        results: rows of ``tables.ROBUSTNESS_RESULTS``.
        confidence: coverage of the intervals. A loss is shown if its p-value, adjusted by Holm's method, is at most
            1 - confidence.
        cautions: cautions of the run (``headline.run_cautions``), which are returned first.
    """
    main, name = results.filter(metric=MAIN_METRIC), metric_name(MAIN_METRIC)
    levels = main.filter(pl.col("level") != UNDISTURBED)
    sentences = list(cautions)
    counts = main.filter(level=UNDISTURBED).select("value", "low", "high", "num_videos", "num_groups")
    for value, low, high, videos, groups in counts.rows():
        sentences.append(f"Undisturbed: {name} {interval_text(value, low, high)}, {videos} videos in {groups} groups.")
        if low is None or low <= 0.5:
            sentences.append("Its interval does not lie above 0.5: such a detector has nothing to lose.")
    worst = levels.drop_nulls("value").head(1).select("kind", "strength", "value", "low", "high", *_DIFFERENCE)
    for kind, strength, value, low, high, *ends in worst.rows():
        number = f"{name} {interval_text(value, low, high)}"
        sentences.append(f"Worst: {kind}, {strength}: {number}, difference {difference_text(*ends)}.")
    disturbing = levels.filter(pl.col("level") != WITHOUT_LOSS)
    shown = disturbing.filter(pl.col("difference") < 0, pl.col("holm_p_value") <= round(1 - confidence, 12))
    sentences.append(
        f"At {shown.height} of {count_text(disturbing.height, 'level')} a loss of {name} is shown ({confidence:.0%}, "
        "corrected for their number by Holm's method). A loss that is not shown may be there all the same."
    )
    control = levels.filter(level=WITHOUT_LOSS).drop_nulls("difference")["difference"]
    changes = f"changes by {control[0]:+z.4f}" if control.len() else "was not scored, so what re-encoding does is open"
    sentences.append(f"Control, written again without loss: {name} {changes}.")
    if failed := sum(levels["num_failed"]):
        sentences.append(f"Left out on both sides, since they have no score: {count_text(failed, 'disturbed video')}.")
    return sentences
