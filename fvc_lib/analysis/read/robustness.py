"""Robustness: compare each level of disturbance with the same videos undisturbed, on the same drawn groups."""

from collections.abc import Mapping

import numpy as np
import polars as pl

from fvc_lib.analysis.read.cautions import run_cautions
from fvc_lib.analysis.read.naming import run_parameters, trial_text
from fvc_lib.analysis.wording import count_text, interval_text, metric_name
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.intervals import intervals_of, replicate_values
from fvc_lib.metrics.paired_difference import holm, paired_difference
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import ROBUSTNESS_RESULTS, check_table, column_types

UNDISTURBED, WITHOUT_LOSS = "undisturbed", "lossless"
MAIN_METRIC = "roc_auc"
# Ranking, and decisions at thresholds that were chosen on undisturbed videos.
METRICS = (MAIN_METRIC, "balanced_accuracy")
_OWN = ("value", "low", "high")
HEADINGS = {"strength": "Level", "num_failed": "Without a score"}


def robustness_results(
    scored: pl.DataFrame,
    strengths: Mapping[str, str],
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
    run: RunPaths | None = None,
) -> pl.DataFrame:
    """Return each level's metrics and their loss against the same videos undisturbed (ROBUSTNESS_RESULTS).

    A video that cannot be written or read at a level is left out of both sides and counted. Undisturbed comes first,
    then the levels by ascending ROC AUC; levels without one come last.

    Args:
        scored: ROBUSTNESS; over several values of ``target``, numbers are their plain mean.
        strengths: in words, by level.
        replicates: number of half-samples of the groups.
        seed: of the draws.
        confidence: of every interval.
        run: of the scores, for the column ``trial``.
    """
    trial = (run and trial_text(run_parameters(run))) or None
    before = scored.filter(level=UNDISTURBED)
    rows = []
    for (level, kind), of_level in scored.group_by("level", "kind", maintain_order=True):
        both = before.join(
            of_level.drop_nulls("score").select("video_id", disturbed="score"), on="video_id", maintain_order="left"
        )
        shared = {"level": level, "kind": kind, "strength": strengths.get(str(level), "as it is"), "trial": trial}
        counts = {
            "num_videos": both.height,
            "num_groups": both["group_id"].n_unique(),
            "num_failed": of_level.height - both.height,
        }
        numbers = _numbers(both, replicates, seed, confidence) if both["label"].n_unique() == 2 else {}
        if level == UNDISTURBED:  # it is what the others are compared with
            numbers = {metric: {name: each[name] for name in _OWN} for metric, each in numbers.items()}
        rows += [{**shared, "metric": metric, **numbers.get(metric, {}), **counts} for metric in METRICS]
    table = pl.DataFrame(rows, schema=column_types(ROBUSTNESS_RESULTS))
    for metric in METRICS:
        tested = (pl.col("metric") == metric) & ~pl.col("level").is_in([UNDISTURBED, WITHOUT_LOSS])
        p_values = table.filter(tested)["p_value"].fill_null(np.nan).to_numpy()
        adjusted = dict(zip(table.filter(tested)["level"], holm(p_values).tolist(), strict=True))
        table = table.with_columns(
            pl.when(tested)
            .then(pl.col("level").replace_strict(adjusted, default=None, return_dtype=pl.Float64).fill_nan(None))
            .otherwise("holm_p_value")
            .alias("holm_p_value")
        )
    worst = dict(table.filter(metric=MAIN_METRIC).select("level", "value").iter_rows())
    ordered = sorted(worst, key=lambda name: (name != UNDISTURBED, worst[name] is None, worst[name] or 0.0))
    place = pl.col("level").replace_strict({name: number for number, name in enumerate(ordered)})
    return check_table(table.sort(place, maintain_order=True), ROBUSTNESS_RESULTS, "robustness results")


def _numbers(both: pl.DataFrame, replicates: int, seed: int, confidence: float) -> dict[str, dict[str, float | None]]:
    """Return value, interval and paired difference of ``disturbed`` against ``score``, by metric."""
    thresholds, folds = both["threshold"].to_numpy(), both["fold"].to_numpy()
    several = "target" in both.columns and both["target"].n_unique() > 1  # then results are the mean over them
    targets = both["target"].to_numpy() if several else None
    measures = [
        measure_over_folds(metric, both[column].to_numpy(), thresholds, folds, targets)
        for metric in METRICS
        for column in ("score", "disturbed")
    ]
    labels = (both["label"] == "fake").cast(pl.Int64).to_numpy()
    drawn = replicate_values(labels, measures, both["group_id"].to_list(), replicates=replicates, seed=seed)
    intervals, numbers = intervals_of(drawn, confidence), {}
    for number, metric in enumerate(METRICS):
        first, second = 2 * number, 2 * number + 1
        paired = paired_difference(drawn, first, second, confidence=confidence)
        value, low, high, *_ = intervals[second].row()
        known = {
            "difference": paired.value, "difference_low": paired.low, "difference_high": paired.high,
            "p_value": paired.p_value, "undisturbed": intervals[first].value,
        }  # fmt: skip
        finite = {name: each if np.isfinite(each) else None for name, each in known.items()}
        numbers[metric] = {"value": value, "low": low, "high": high, **finite}
    return numbers


def level_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return one row per level, worst first, with intervals as text."""
    main = results.filter(pl.col("level") != UNDISTURBED, metric=MAIN_METRIC)
    decided = {row["level"]: row for row in results.filter(metric="balanced_accuracy").iter_rows(named=True)}
    rows = [
        {
            "kind": row["kind"],
            "strength": row["strength"],
            MAIN_METRIC: interval_text(row["value"], row["low"], row["high"]),
            "difference": _difference(row),
            "Holm p": row["holm_p_value"],
            "balanced accuracy, difference": _difference(decided[row["level"]]),
            "num_videos": row["num_videos"],
            "num_failed": row["num_failed"],
        }
        for row in main.iter_rows(named=True)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def _difference(row: Mapping[str, object]) -> str | None:
    if row["difference"] is None:
        return None
    value, low, high = (row[name] for name in ("difference", "difference_low", "difference_high"))
    shown = f"{value:+z.3f}"
    return shown if low is None or high is None else f"{shown} [{low:+z.3f}, {high:+z.3f}]"


def findings(results: pl.DataFrame, confidence: float = 0.95, run: RunPaths | None = None) -> list[str]:
    """Return sentences on the worst level, the losses that are shown, and their limits.

    If ``run`` is given, its cautions come first.
    """
    main, name = results.filter(metric=MAIN_METRIC), metric_name(MAIN_METRIC)
    before, levels = main.filter(level=UNDISTURBED), main.filter(pl.col("level") != UNDISTURBED)
    sentences = [] if run is None else list(run_cautions(run))
    sentences += [
        f"Undisturbed: {name} {interval_text(row['value'], row['low'], row['high'])}, "
        f"{count_text(row['num_videos'], 'video')} in {count_text(row['num_groups'], 'group')}."
        for row in before.iter_rows(named=True)
    ]
    known = levels.drop_nulls("value")
    if known.height:
        worst = known.row(0, named=True)
        sentences.append(
            f"Worst: {worst['kind']}, {worst['strength']}: {name} "
            f"{interval_text(worst['value'], worst['low'], worst['high'])}, "
            f"{_difference(worst)} against the same videos undisturbed."
        )
    else:
        sentences.append(f"{name} is not defined at any level: a class is missing.")
    disturbing = levels.filter(pl.col("level") != WITHOUT_LOSS)
    shown = disturbing.filter((pl.col("difference") < 0) & (pl.col("holm_p_value") <= round(1 - confidence, 12)))
    below = disturbing.filter(pl.col("difference_high") < 0).height
    of = count_text(disturbing.height, "level")
    lower = f"is the {name} shown to be lower than on the undisturbed videos"
    sentences.append(
        f"At {f'{shown.height} of {of}' if shown.height else f'none of {of}'} {lower} ({confidence:.0%}, corrected for "
        f"their number by Holm's method); each looked at alone, without that correction, at {below or 'none'}. A loss "
        "that is not shown may be there all the same."
    )
    control = levels.filter(level=WITHOUT_LOSS)
    if control.height and control["difference"][0] is not None:
        sentences.append(
            f"Control: written anew without loss, the {name} changes by {control['difference'][0]:+z.4f}; what the "
            "levels lose beyond that is theirs."
        )
    if not control.height:
        sentences.append(
            f"Not scored: the control ({WITHOUT_LOSS}), so what writing a file anew alone changes is not known."
        )
    chance = [row for row in before.iter_rows(named=True) if row["low"] is None or row["low"] <= 0.5]
    if chance:
        sentences.append(
            f"The {name} undisturbed is not above 0.5 by its interval: a detector that tells nothing has nothing to "
            "lose, and small losses here are no robustness."
        )
    failed = levels.filter(pl.col("num_failed") > 0)
    if failed.height:
        listed = ", ".join(f"{row['level']} {row['num_failed']}" for row in failed.iter_rows(named=True))
        sentences.append(f"Videos without a score, left out on both sides: {listed}.")
    return sentences
