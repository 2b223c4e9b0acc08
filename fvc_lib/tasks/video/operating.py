"""What the decisions of all folds got right and wrong at the operating point, with intervals over groups."""

import math
from collections.abc import Sequence

import polars as pl

from fvc_lib.metrics.classification import FloatArray, IntArray, decide, divide, weighted_metric
from fvc_lib.metrics.operating_points import confusion_at, operating_point
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CLIP_SCORES, PROTOCOL, read_table
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.video.controls import auc_within_folds, fake_labels
from fvc_lib.tasks.video.results import interval_rows, share_called_fake, with_targets
from fvc_lib.tasks.video.selection import RecordedSelection


@weighted_metric
def precision(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Weight of the fakes among what is called fake over all of that."""
    return divide(weights @ (labels * decisions), weights @ decisions)


def confusion_table(predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """``label called_fake called_real called_fake_share low high num_groups``, and as a last row the precision.

    Every video is decided by its own fold's threshold; ``predictions`` are all folds' (PREDICTIONS). A class without
    videos has no share, and one with fewer than two groups no interval. ``called_fake_share`` of the row ``called
    fake`` is the share of fakes among those: it depends on how many fakes the corpus has.
    """
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    thresholds = predictions["threshold"].to_numpy()
    counts = confusion_at(labels, scores, thresholds)
    rows: list[tuple[object, ...]] = []
    decisions = decide(scores, thresholds).astype(float)
    for label, called_fake, called_real in (
        ("fake", counts.hits, counts.misses),
        ("real", counts.false_alarms, counts.rejections),
    ):
        of_class = (predictions["label"] == label).to_numpy()
        found: Sequence[float | int | None] = (None, None, None, 0, 0)
        if of_class.any():
            part = predictions.filter(pl.Series(of_class))
            found = interval_rows(part, [(share_called_fake, decisions[of_class])], config)[0]
        rows.append((label, called_fake, called_real, *found[:3], found[4]))
    found = interval_rows(predictions, [(precision, decisions)], config)[0]
    rows.append(("called fake", counts.hits + counts.false_alarms, None, *found[:3], found[4]))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def operating_sentence(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> str:
    """What each fold's threshold was chosen for, and where the reals are too few to choose or to see it."""
    chosen = [each.selection for each in selections if each is not None]
    asked = {each.operating_point for each in chosen}
    if len(asked) != 1:
        return "What the thresholds were chosen for is not recorded, or differs between the folds."
    point = operating_point(asked.pop())
    sentence = f"Thresholds were chosen on inner validation videos for {point.says}."
    blind = [each.num_real for each in chosen if not point.is_resolved_by(each.num_real)]
    if blind:
        sentence += (
            f" In {len(blind)} of {len(chosen)} folds that part has too few reals to resolve it (the least {min(blind)}"
            "): there no real was called fake, which promises less than was asked for."
        )
    num_real = int((predictions["label"] == "real").sum())
    if not point.is_resolved_by(num_real):
        sentence += f" Nor can the {num_real} reals that were tested show whether it was kept."
    return sentence


def clip_level_sentence(run: RunPaths, config: RunConfig) -> str:
    """The AUC of clips judged one by one, as papers report frames, or why it was not measured."""
    files = [run.clip_scores(fold) for fold in range(config.num_trainings)]
    if config.clips_per_video == 1:
        return "Frame-level AUC: not measured. A video is one clip, and the network gives a clip one score."
    if not all(path.is_file() for path in files):
        return "Clip-level AUC: not recorded by the version that trained this run."
    clips = pl.concat([read_table(path, CLIP_SCORES) for path in files])
    protocol = None if config.protocol == KFOLD else read_table(run.protocol, PROTOCOL)
    scored = with_targets(clips.with_columns(score=pl.col("logit")), protocol)
    found = auc_within_folds(scored, "group_id", config)
    ends = f" [{found.low:.3f}, {found.high:.3f}]" if math.isfinite(found.low) else ""
    return (
        f"Clip-level AUC, each of a video's {config.clips_per_video} clips judged alone: {found.value:.3f}{ends}. "
        "Every other number here is of videos. Frame-level AUC: not measured, as the network gives a clip one score."
    )


_SCHEMA = {
    "label": pl.String, "called_fake": pl.Int64, "called_real": pl.Int64, "called_fake_share": pl.Float64,
    "low": pl.Float64, "high": pl.Float64, "num_groups": pl.Int64,
}  # fmt: skip
