"""The real-versus-real floor: the AUC with which two sources of real videos can be told apart.

A detector of fakes has no reason to separate two sources of reals. If it does, it recognises where videos come from.
Reals and fakes come from different sources, too, so the detector's AUC of reals and fakes must be above this floor.
There are two floors:

- ``real_source_floor``: the AUC of the run's scores for the two sources; nothing is trained for it;
- the real-source control (``config.real_source_control``): the same detector trained to name the source of a real, with
  the same recipe, clips and groups. Each video is scored by a network trained without its group.

The sources are the two with the most videos among those with at least 10 groups of reals. The control is possible in a
fold whose test part has both sources and whose training part has 2 groups of each, to learn from and to choose on.
"""

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import polars as pl

from fvc_lib.corpus.protocols import TrainingRows, training_rows
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, roc_auc
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE, leans_by_chance, mean_lean
from fvc_lib.metrics.intervals import Interval, group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LABELS
from fvc_lib.tasks.video.controls import auc_within_folds, fake_labels, targets_of

REAL_SOURCE_FLOOR = "real_source_floor"
REAL_SOURCE_CONTROL = "real_source_control"
MARGIN = "margin_over_floor"


def two_largest_sources(reals: pl.DataFrame) -> tuple[str, str]:
    """Return the two sources with the most videos, the larger first.

    ``reals`` has columns ``real_source group_id``. Raises ``DataError`` if fewer than two sources have 10 groups.
    """
    sizes = reals.drop_nulls("real_source").group_by("real_source").agg(pl.len(), pl.col("group_id").n_unique())
    sizes = sizes.sort("len", "real_source", descending=[True, False])
    large = sizes.filter(pl.col("group_id") >= FEWEST_GROUPS_OF_A_SOURCE)["real_source"].to_list()
    if len(large) < 2:
        known = ", ".join(f"{name} ({groups})" for name, _, groups in sizes.rows()[:5])
        raise DataError(
            f"two sources of reals (column real_source) with {FEWEST_GROUPS_OF_A_SOURCE} groups each are needed; "
            f"groups by source: {known or 'none is known'}"
        )
    return large[0], large[1]


def by_source(rows: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Return the reals of the two largest sources; ``label`` becomes real for the larger source and fake for the other.

    ``rows`` has columns ``video_id group_id label``; raises as ``two_largest_sources``.
    """
    source = pl.col("real_source") if "real_source" in index.columns else pl.lit(None, pl.String).alias("real_source")
    reals = rows.filter(label=LABELS[0]).join(
        index.select("video_id", source), on="video_id", how="left", maintain_order="left"
    )
    first, second = two_largest_sources(reals)
    both = reals.filter(pl.col("real_source").is_in([first, second]))
    label = pl.when(pl.col("real_source") == second).then(pl.lit(LABELS[1])).otherwise(pl.lit(LABELS[0]))
    return both.with_columns(label=label)


def of_two_sources(
    rows: TrainingRows, index: pl.DataFrame, config: RunConfig, fold: int, without: Collection[str] = ()
) -> TrainingRows:
    """Return the rows for training the real-source control of ``fold``: the reals of two sources, labelled by source.

    Args:
        rows: the rows that the model is trained on, with true labels.
        index: INDEX schema.
        config: share and seed of the inner validation part.
        fold: number of the outer fold.
        without: ids of videos that have no clip.

    Raises:
        DataError: the control is impossible; the message is the reason, without a full stop.
    """
    if config.shuffle_labels:
        raise DataError("labels were shuffled on purpose")
    sources = by_source(rows.folds.filter(~pl.col("video_id").is_in(sorted(without))), index)
    relabelled = replace(rows, folds=sources.select(rows.folds.columns))
    if sources.filter(fold=fold)["label"].n_unique() < len(LABELS):
        raise DataError(f"fold {fold} does not test reals of both sources")
    try:
        relabelled.split(fold, inner_validation_share=config.inner_validation_share, seed=config.seed)
    except DataError as error:
        raise DataError(f"too few reals of the two sources are trained on: {error}") from error
    return relabelled


def possible_floor(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    config: RunConfig,
    left_out: Collection[str] = (),
    protocol: pl.DataFrame | None = None,
) -> tuple[pl.DataFrame, str]:
    """Return the videos that the real-source control tests (FOLDS), labelled by source.

    The second value is the reason why there are none; empty if there are some. ``protocol`` is a PROTOCOL table; None:
    the parts follow from ``folds``.
    """
    due, why = [folds.clear()], ""
    for fold in folds["fold"].unique().sort():
        rows = TrainingRows(folds) if protocol is None else training_rows(protocol, fold)
        try:
            due.append(of_two_sources(rows, index, config, fold, left_out).folds.filter(fold=fold))
        except DataError as error:
            why = why or str(error)
    tested = pl.concat(due).sort("video_id")
    return tested, "" if tested.height else why


def floor_sentence(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    config: RunConfig,
    left_out: Collection[str] = (),
    protocol: pl.DataFrame | None = None,
) -> str:
    """Return a sentence on the number of reals that the real-source control tests, or on why it is impossible."""
    due, why = possible_floor(index, folds, config, left_out, protocol)
    if why:
        return f"Trained floor: not possible ({why.rstrip('.')})."
    sizes = [due.filter(label=label).height for label in LABELS]
    tested = f"{due['fold'].n_unique()} of {folds['fold'].n_unique()} folds"
    return f"Trained floor: {sizes[0]} reals of the larger source and {sizes[1]} of the other, tested in {tested}."


def control_scores(due: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame | None:
    """Return ``due`` (``possible_floor``) with the control's ``score``; None if any of these videos has no score.

    Raises:
        DataError: a prediction names another source than the index, or is of another fold.
    """
    known = predictions.select("video_id", "fold", "source_score", "source_label")
    both = due.join(known, on="video_id", how="left", suffix="_then", maintain_order="left")
    if both["source_score"].null_count():
        return None
    other = both.filter((pl.col("source_label") != fake_labels(both)) | (pl.col("fold") != pl.col("fold_then")))
    if other.height:
        raise DataError(
            f"the real-source control of {other.height} videos was trained on other sources than the index has now, "
            f"e.g. {other['video_id'][0]!r}. Run 04_fold_training again for these folds."
        )
    return both.select(*due.columns, score="source_score", threshold=pl.lit(0.5))


def margin_over_floor(
    model: tuple[pl.DataFrame, tuple[object, FloatArray]],
    floor: tuple[pl.DataFrame, tuple[object, FloatArray]],
    config: RunConfig,
) -> Interval:
    """Return the model's AUC minus that of the real-source control, with an interval.

    Both AUCs are computed on the same bootstrap draws of groups.

    Args:
        model: table (``video_id group_id label``), and the metric with its values (N,) in the order of the rows
            (``results.measured``).
        floor: the same for the control; its videos are a subset of the model's.
        config: replicates, confidence and seed.
    """
    (scored, (metric, values)), (reals, (of_floor, floor_values)) = model, floor
    place = {video_id: number for number, video_id in enumerate(scored["video_id"])}
    where = np.array([place[video_id] for video_id in reals["video_id"]], dtype=np.int64)
    sources = fake_labels(reals)

    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        above: FloatArray = metric(labels, scores, weights)  # type: ignore[operator]
        below: FloatArray = of_floor(sources, floor_values, weights[:, where])  # type: ignore[operator]
        return above - below

    return group_interval(
        fake_labels(scored),
        values,
        scored["group_id"].to_list(),
        Metric(definition),
        replicates=config.bootstrap_replicates,
        seed=config.seed,
        confidence=config.confidence,
    )


def real_source_floor(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> Interval | None:
    """Return how well a detector's scores tell the two largest sources of reals apart, as an AUC within folds.

    The source with the higher scores over all folds counts as positive, so the value is at least 0.5. Folds with the
    opposite direction would cancel out. So 0.5 plus the mean over folds of abs(AUC - 0.5) is returned if it is larger.
    The part of that mean that is expected by chance is subtracted first, in squares, so that a large value loses
    little. The interval's lower end is then above 0.5 only if at most (1 - confidence) / 2 of random permutations of
    the sources reach this mean.

    Nothing is trained for it. Returns None if fewer than two sources (``real_source`` of INDEX) have 10 groups.
    """
    try:
        judged = by_source(predictions.sort("video_id"), index)
    except DataError:
        return None
    floor = auc_within_folds(judged, "group_id", config)
    if floor.value < 0.5:
        floor = replace(floor, value=1 - floor.value, low=1 - floor.high, high=1 - floor.low)
    targets = targets_of(judged)
    rows = fake_labels(judged), judged["score"].to_numpy()
    lean = float(mean_lean(*rows, judged["fold"].to_numpy(), targets)[0])
    if not lean > floor.value - 0.5 + 1e-12:  # all folds lean one way, or there is no value
        return floor
    chance = leans_by_chance(*rows, judged["group_id"].to_numpy(), judged["fold"].to_numpy(), targets, seed=config.seed)
    beyond_chance = math.sqrt(max(0.0, lean**2 - float(chance.mean()) ** 2))
    if beyond_chance <= floor.value - 0.5:
        return floor
    # Exchange the labels of the two sources in every fold (of a target) whose AUC is below 0.5.
    parts = []
    for part in judged.partition_by([name for name in ("target", "fold") if name in judged.columns]):
        labels, leans_back = fake_labels(part), False
        if 0 < labels.sum() < labels.size:
            leans_back = roc_auc(labels, part["score"].to_numpy()) < 0.5
        other = pl.col("label").replace_strict({LABELS[0]: LABELS[1], LABELS[1]: LABELS[0]})
        parts.append(part.with_columns(label=other) if leans_back else part)
    apart = auc_within_folds(pl.concat(parts), "group_id", config)
    taken = apart.value - 0.5 - beyond_chance
    is_chance = (1 + int((chance >= lean).sum())) / (1 + chance.size) > (1 - config.confidence) / 2
    low = apart.low - taken
    return replace(apart, value=0.5 + beyond_chance, low=min(low, 0.5) if is_chance else low, high=apart.high - taken)
