"""Controls: predictors that see no pixel or learned shuffled labels, evaluated exactly like the model.

Words in capitals, such as FOLDS and INDEX, are table schemas (``services.tables``). A control gives every video an
out-of-fold score and a threshold. The threshold is the share of fakes in the training part, which is best for balanced
accuracy if the score is a calibrated probability.

Two further controls give the real-versus-real floor: the AUC with which two sources of real videos can be told apart. A
detector of fakes has no reason to separate two sources of reals. If it does, it recognises where videos come from.
Reals and fakes come from different sources, too, so the detector's AUC of reals and fakes must be above this floor:

- ``real_source_floor``: the AUC of the run's scores for the two sources; nothing is trained for it;
- the real-source control (``config.real_source_control``): the same detector, trained to name the source of a real
  video instead of its label, with the same settings, clips and groups. A video is scored by a network that was trained
  without its group.

The two sources are those with the most videos, among all sources with at least 10 groups of reals. The control is
possible in a fold if the test part has both sources and the training part has 2 groups of each source: one to learn
from and one to choose the epoch on.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from threadpoolctl import threadpool_limits

from fvc_lib.corpus.folds import TrainingRows, make_folds, most_folds
from fvc_lib.corpus.protocols import Tells, all_rows, training_rows
from fvc_lib.detectors.classical import boosting
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric, roc_auc
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.floors import FEWEST_GROUPS_OF_A_SOURCE, leans_by_chance, mean_lean
from fvc_lib.metrics.intervals import Interval, group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LABELS
from fvc_lib.services.tasks import KFOLD
from fvc_lib.video.decode.probe import PacketFacts

# One FOLDS table for every training, by number; training k tests only fold k of its table. None: all trainings share
# one table, and all its folds are tested.
Trainings = Sequence[pl.DataFrame] | None

CONSTANT = "constant"
METADATA_ONLY = "metadata_only"
LENGTH_ONLY = "length_only"
SHAPE_ONLY = "shape_only"
GROUP_LOOKUP_BY_ROW = "group_lookup_by_row"
GROUP_LOOKUP_BY_GROUP = "group_lookup_by_group"
SHUFFLED_LABELS = "shuffled_labels"
REAL_SOURCE_FLOOR = "real_source_floor"
REAL_SOURCE_CONTROL = "real_source_control"
MARGIN = "margin_over_floor"

# Columns of the index that describe a video without its pixels. Path, source and manipulation would name the label.
CATEGORIES = ("platform", "codec", "container", "pixel_format")
LENGTH = ("num_frames", "duration_seconds")
SIZE_AND_RATE = ("frames_per_second", "width", "height")
METADATA = (
    *CATEGORIES, *SIZE_AND_RATE, *LENGTH, "bits_per_second", "size_bytes", "rotation_degrees", "has_audio",
    *(fact.name for fact in fields(PacketFacts)),
)  # fmt: skip

# Width over height of the upright picture: black bars show it to a network whose frames are letterboxed.
_ASPECT = (
    pl.when(pl.col("rotation_degrees") % 180 == 90)
    .then(pl.col("height") / pl.col("width"))
    .otherwise(pl.col("width") / pl.col("height"))
)

_OF_VIDEO = ("video_id", "group_id", "label", "fold")
_MAX_CATEGORIES = 200  # per column; the boosting takes at most 255
_MOST_FOLDS = 5  # for ``controls_of_scores``

_FAKE = (pl.col("label") == "fake").cast(pl.Int64)
# The share of fakes in the training part of a row's fold.
_NUM_TRAINING = pl.len() - pl.len().over("fold")
_PRIOR = (_FAKE.sum() - _FAKE.sum().over("fold")) / _NUM_TRAINING


# Rules that need no training of a network


def all_controls(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    seed: int,
    trainings: Trainings = None,
    has_bars: bool = False,
) -> dict[str, pl.DataFrame]:
    """Return one table of scores per control, by the control's name.

    The control ``shuffled_labels`` is included only if ``predictions`` have its scores.

    Args:
        index: INDEX schema; must hold every video of ``folds``.
        folds: the outer folds (FOLDS schema), with the labels that the model was tested on.
        predictions: PREDICTIONS schema.
        seed: seed of the split by row, which ignores groups.
        trainings: one FOLDS table per training (``trainings_of``), so that controls learn from the same videos as the
            model; None for protocol ``kfold``.
        has_bars: whether the model's frames are letterboxed, which adds the control on the shape of the picture.

    Returns:
        Tables with the columns ``video_id group_id label fold score threshold``.

    Raises:
        DataError: a video is not in the index.
    """
    folds = folds.sort("video_id")  # sums in floating point, and so the boosting, depend on the order
    dealt = folds
    if trainings is not None:  # put every video into one of five arbitrary folds
        dealt = pl.concat(trainings).unique("video_id", keep="first", maintain_order=True).sort("video_id")
        dealt = dealt.with_columns(fold=(pl.int_range(pl.len()) % 5).cast(pl.Int64))
    looked_up = group_lookup(split_by_row(dealt, seed=seed))
    by_row = looked_up.join(folds, on="video_id", how="semi", maintain_order="left")
    controls = {
        CONSTANT: tested(constant, folds, trainings),
        METADATA_ONLY: tested(lambda rows: metadata_only(index, rows), folds, trainings),
        LENGTH_ONLY: tested(lambda rows: metadata_only(index, rows, LENGTH), folds, trainings),
        GROUP_LOOKUP_BY_ROW: by_row,
        GROUP_LOOKUP_BY_GROUP: tested(group_lookup, folds, trainings),
    }
    if has_bars:
        shapes = index.with_columns(aspect_ratio=_ASPECT)
        controls[SHAPE_ONLY] = tested(lambda rows: metadata_only(shapes, rows, ("aspect_ratio",)), folds, trainings)
    shuffled = shuffled_labels(predictions, trainings)
    return controls if shuffled is None else {**controls, SHUFFLED_LABELS: shuffled}


def rows_to_train_on(table: pl.DataFrame, config: RunConfig, fold: int | None) -> TrainingRows:
    """Return the videos of one training, which ``TrainingRows.split`` divides into training, validation and test part.

    If ``config.shuffle_labels`` is on, the labels are shuffled by group.

    Args:
        table: FOLDS for protocol ``kfold``, else PROTOCOL.
        config: protocol, seed, and whether labels are shuffled.
        fold: number of the outer fold; None: the network trained on all groups.
    """
    if config.protocol == KFOLD:
        rows = TrainingRows(table)
    else:
        rows = all_rows(table) if fold is None else training_rows(table, fold)
    if not config.shuffle_labels:
        return rows
    from fvc_lib.engine.random_state import stable_seed  # brings torch

    # Groups exchange labels within an outer fold only, so labels of one fold reveal nothing about those of another.
    return rows.shuffled(stable_seed("shuffle_labels", config.seed))


def trainings_of(protocol: pl.DataFrame | None, config: RunConfig, left_out: Collection[str] = ()) -> Trainings:
    """Return one FOLDS table per training of a protocol, with the labels that the training learns.

    A protocol (PROTOCOL schema) states which videos each training learns from and tests. In the table of training k the
    tested videos have fold k. The result is None for protocol ``kfold``: every video is tested there, and one table of
    folds suffices.

    Args:
        protocol: the PROTOCOL table; None: protocol ``kfold``.
        config: gives the protocol's name, the number of trainings and whether labels are shuffled.
        left_out: ids of videos to remove, such as those that could not be decoded.
    """
    if protocol is None or config.protocol == KFOLD:
        return None
    is_used = ~pl.col("video_id").is_in(sorted(left_out))
    numbers = range(config.num_trainings)
    return [rows_to_train_on(protocol, config, number).folds.filter(is_used) for number in numbers]


def tested(control: Callable[[pl.DataFrame], pl.DataFrame], folds: pl.DataFrame, trainings: Trainings) -> pl.DataFrame:
    """Return a control's table of scores for the videos that the run tests.

    Args:
        control: function that returns the table of scores for a FOLDS table.
        folds: the outer folds, which are used if ``trainings`` is None.
        trainings: one FOLDS table per training. The control is then computed for every training k, and only its scores
            of fold k are returned, sorted by video id.
    """
    if trainings is None:
        return control(folds)
    return pl.concat(control(rows).filter(fold=number) for number, rows in enumerate(trainings)).sort("video_id")


def constant(folds: pl.DataFrame) -> pl.DataFrame:
    """Return scores by the share of fakes: every test video gets the share in the training videos of its fold.

    The columns are ``video_id group_id label fold score threshold``; the threshold equals the score.
    """
    return folds.select(*_OF_VIDEO, score=_PRIOR, threshold=_PRIOR)


def metadata_only(
    index: pl.DataFrame, folds: pl.DataFrame, names: Sequence[str] = METADATA, *, rounds: int = 100
) -> pl.DataFrame:
    """Return scores by gradient boosting on columns of the index, for the test videos of every fold.

    A classifier is trained on the training videos of each fold: scikit-learn's ``HistGradientBoostingClassifier``
    (after LightGBM, Ke et al., NIPS 2017). It may learn from missing values. A category that is not in the training
    part counts as missing. If the scores beat chance, metadata predict the labels. A model of pixels may then use the
    same hint: a frame size, for example, survives as sharpness.

    Args:
        index: INDEX schema.
        folds: FOLDS schema.
        names: the columns of ``index`` that the classifier sees.
        rounds: number of trees.

    Returns:
        The rows of ``folds`` with the columns ``video_id group_id label fold score threshold``. The score is the
        probability of fake; where nothing can be learned, it is the share of fakes in the training videos.

    Raises:
        DataError: a video is not in the index.
    """
    absent = folds.join(index, on="video_id", how="anti")["video_id"]
    if absent.len():
        raise DataError(f"The index lacks {absent.len()} videos of the folds, e.g. {absent[0]!r}. Run 01 and 02 again.")
    known = folds.select("video_id").join(index, on="video_id", how="left", maintain_order="left")
    scored = constant(folds)
    scores = scored["score"].to_numpy().copy()
    fold = folds["fold"].to_numpy()
    is_fake = fake_labels(folds)
    for number in np.unique(fold):
        test = fold == number
        columns = [_numbers(known[name], ~test) for name in names]
        # The boosting cannot bin a column without a value in training.
        usable = [place for place, values in enumerate(columns) if not np.isnan(values[~test]).all()]
        lacks_a_label = np.unique(is_fake[~test]).size < 2
        if lacks_a_label or not usable:
            continue  # nothing can be learned, so the score stays the share of fakes
        features = np.stack([columns[place] for place in usable], axis=1)
        num_training = int((~test).sum())
        are_categories = [names[place] in CATEGORIES for place in usable]
        model = boosting(num_training, rounds, 15, are_categories)
        # On so few rows many threads take a hundred times longer than one if other processes use the cores as well.
        with threadpool_limits(1, user_api="openmp"):
            model.fit(features[~test], is_fake[~test])
            scores[test] = model.predict_proba(features[test])[:, 1]
    return scored.with_columns(score=pl.Series(scores))


def _numbers(column: pl.Series, training: npt.NDArray[np.bool_]) -> FloatArray:
    """Return a column of the index as float64 (N,), NaN where a number is missing.

    A category becomes its rank by frequency among the rows marked in ``training``, bool (N,); the most frequent one
    is 0. Null counts as a category. Ranks from ``_MAX_CATEGORIES`` on and categories of no training row become NaN.
    """
    if column.name not in CATEGORIES:
        return column.cast(pl.Float64).fill_null(np.nan).to_numpy()
    seen = column.filter(pl.Series(training)).to_frame("value")
    counts = seen.group_by("value").len().sort("len", "value", descending=[True, False])
    ranked = counts["value"].head(_MAX_CATEGORIES)
    return column.replace_strict(ranked, range(ranked.len()), default=np.nan, return_dtype=pl.Float64).to_numpy()


def group_lookup(folds: pl.DataFrame) -> pl.DataFrame:
    """Return scores by the labels of a group: the share of fakes among the group's videos in the training part.

    The columns are ``video_id group_id label fold score threshold``. If the training part has no video of the group,
    the score is the share of fakes in the whole training part.

    If folds keep groups together, the training part never has a video of the group, and the control equals
    ``constant``. Any difference means that the folds leak. If folds are split by row (``split_by_row``), the scores
    show what recognising groups alone would give.
    """
    in_training = pl.len().over("group_id") - pl.len().over("group_id", "fold")
    fakes = _FAKE.sum().over("group_id") - _FAKE.sum().over("group_id", "fold")
    score = pl.when(in_training > 0).then(fakes / in_training).otherwise(_PRIOR)
    return folds.select(*_OF_VIDEO, score=score, threshold=_PRIOR)


def split_by_row(folds: pl.DataFrame, *, seed: int) -> pl.DataFrame:
    """Return ``folds`` with new fold numbers that ignore groups: the naive split, stratified by label.

    The number of folds stays. The reals are shuffled and assigned to the folds in turn, then the fakes. The result does
    not depend on the order of rows.
    """
    ordered = folds.sort("video_id")
    generator = np.random.default_rng(seed)
    is_fake = fake_labels(ordered)
    of_labels = (np.flatnonzero(is_fake == label) for label in (0, 1))
    dealt = np.concatenate([generator.permutation(places) for places in of_labels])
    turns = np.argsort(dealt)  # the position of every video in the order of assignment
    fold = pl.Series(turns % folds["fold"].n_unique())
    by_row = ordered.select("video_id", fold=fold)
    return folds.drop("fold").join(by_row, on="video_id", how="left", maintain_order="left").select(folds.columns)


def shuffled_labels(predictions: pl.DataFrame, trainings: Trainings = None) -> pl.DataFrame | None:
    """Return the scores of the shuffled-label control; None if there are none.

    The columns are ``video_id group_id label fold score threshold``. This control is the model's training on labels
    that were shuffled by group; ``label`` is the shuffled label. Videos without a score or a label of the control are
    left out. The result is None if no video has both, or if there is a single fold and ``trainings`` is None.

    Args:
        predictions: PREDICTIONS schema.
        trainings: one FOLDS table per training; None for protocol ``kfold``.
    """
    run = predictions.drop_nulls(["control_score", "control_label"])
    if run.is_empty() or (trainings is None and run["fold"].n_unique() < 2):
        return None
    threshold = _PRIOR
    if trainings is not None:  # shuffling keeps the share of fakes in a training part, up to one group
        priors = {n: (rows.filter(pl.col("fold") != n)["label"] == "fake").mean() for n, rows in enumerate(trainings)}
        threshold = pl.col("fold").replace_strict(priors)
    judged = run.with_columns(label="control_label")
    return judged.select(*_OF_VIDEO, score="control_score", threshold=threshold)


# The AUC of scores


def fake_labels(frame: pl.DataFrame) -> IntArray:
    """Return the column ``label`` as int64 (N,): 1 for fake, 0 for real."""
    return frame.select(_FAKE)["label"].to_numpy()


def targets_of(scored: pl.DataFrame) -> npt.NDArray[Any] | None:
    """Return the column ``target`` (N,) of ``scored``; None if it is missing or has a single value.

    Some protocols hold out whole corpora or generators for testing. ``target`` is the name of the held-out corpus or
    generator that the video belongs to.
    """
    has_targets = "target" in scored.columns and scored["target"].n_unique() > 1
    return scored["target"].to_numpy() if has_targets else None


def interval_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of confidence intervals as keyword arguments for the functions of ``metrics.intervals``.

    They are ``replicates`` (number of resamples), ``seed`` and ``confidence``.
    """
    return {"replicates": config.bootstrap_replicates, "seed": config.seed, "confidence": config.confidence}


def auc_within_folds(scored: pl.DataFrame, config: RunConfig) -> Interval:
    """Return the AUC within folds, with an interval over groups.

    Within folds means that only videos of the same fold are compared, since each fold has its own network. ``scored``
    has the columns ``group_id label score fold``. If the protocol holds out whole corpora or generators, it also has
    ``target``, the name of the held-out corpus or generator. With several targets, the AUC is computed for every target
    and averaged with equal weights.
    """
    return _interval(scored, *_auc(scored), config)


def _auc(scored: pl.DataFrame) -> tuple[Metric, FloatArray]:
    """Return ``(metric, scores)``: a function that computes the AUC within folds, and the scores to call it with.

    ``scores`` are float64 (N,), one per row of ``scored``.
    """
    folds = scored["fold"].to_numpy()
    return measure_over_folds("roc_auc", scored["score"].to_numpy(), 0.5, folds, targets_of(scored))


def _interval(scored: pl.DataFrame, metric: Metric, values: FloatArray, config: RunConfig) -> Interval:
    groups = scored["group_id"].to_list()
    return group_interval(fake_labels(scored), values, groups, metric, **interval_settings(config))


def tells_labels(config: RunConfig) -> Tells:
    """Return a function that measures how well columns of the index predict the labels.

    ``protocols.make_protocol`` calls it with rows of the index, their FOLDS table and names of columns. It returns
    ``(auc, low)``: the AUC of ``metadata_only`` on these columns, and the lower end of its interval.
    """

    def tells(index: pl.DataFrame, folds: pl.DataFrame, columns: tuple[str, ...]) -> tuple[float | None, float | None]:
        ordered = [name for name in METADATA if name in columns]
        return auc_within_folds(metadata_only(index, folds, ordered), config).row()[:2]

    return tells


def group_recognition(videos: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Compare the AUC of ``group_lookup`` for a split that ignores groups and for a split that keeps them together.

    ``group_lookup`` only knows the labels of the other videos in a group. It needs no files, so the annotations of a
    corpus suffice (``index.undisputed_labels``).

    Args:
        videos: columns ``video_id group_id label``, one row per video.
        config: number of folds, replicates, confidence and seed.

    Returns:
        Two rows, for the split ``by row`` and the split ``by group``, with the columns ``split value low high num_rows
        num_groups``; ``value`` is the AUC within folds, ``low`` and ``high`` are the ends of its interval over groups.

    Raises:
        DataError: a label is in fewer groups than there are folds.
    """
    folds = make_folds(videos, config.num_folds, config.seed)
    dealt = {"by row": split_by_row(folds, seed=config.seed), "by group": folds}
    aucs = {split: auc_within_folds(group_lookup(table), config) for split, table in dealt.items()}
    rows = [(split, *auc.row()) for split, auc in aucs.items()]
    return pl.DataFrame(rows, schema=["split", "value", "low", "high", "num_rows", "num_groups"], orient="row")


# Controls for a table of scores that need not come from FVC


def controls_of_scores(
    videos: pl.DataFrame, groups: Sequence[str], of_corpus: pl.DataFrame | None = None, *, seed: int = 0
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Return out-of-fold scores of the controls that can be computed, and sentences on missing controls.

    The controls are compared with a table of scores that need not come from FVC, so new folds are made here.

    Args:
        videos: columns ``video_id label``, N rows sorted by ``video_id``.
        groups: N group ids, one per row of ``videos``.
        of_corpus: INDEX columns of the videos that are in a corpus; None: no corpus.
        seed: seed of the folds and of the split by row.

    Returns:
        ``(controls, sentences)``: tables by the control's name, with the columns ``video_id group_id label fold score
        threshold`` and rows as in ``videos``; and the sentences. In the metadata and length controls ``fold score
        threshold`` are null for videos that the corpus does not have.
    """
    rows = videos.select("video_id", "label", group_id=pl.Series("group_id", list(groups), dtype=pl.String))
    folds = _some_folds(rows, seed)
    if folds is None:
        return {}, ["No control: a label is in fewer than two groups, so nothing can be learned and tested."]
    controls = {
        CONSTANT: constant(folds),
        GROUP_LOOKUP_BY_GROUP: group_lookup(folds),
        GROUP_LOOKUP_BY_ROW: group_lookup(split_by_row(folds, seed=seed)),
    }
    there = None if of_corpus is None else _some_folds(rows.join(of_corpus, on="video_id", how="semi"), seed)
    if of_corpus is None or there is None:
        return controls, ["No metadata and no clip length control: give the corpus of both labels' videos (--corpus)."]
    for name, columns in ((METADATA_ONLY, METADATA), (LENGTH_ONLY, LENGTH)):
        scored = metadata_only(of_corpus, there, columns).drop("group_id", "label")
        controls[name] = rows.join(scored, on="video_id", how="left", maintain_order="left")
    absent = rows.height - there.height
    fewer = f"{absent:,} of {rows.height:,} videos are not in the corpus: the metadata and length controls lack them."
    return controls, [fewer] if absent else []


def _some_folds(rows: pl.DataFrame, seed: int) -> pl.DataFrame | None:
    """Return a FOLDS table of ``rows`` with at most five folds; None if a label is in fewer than two groups.

    ``rows`` has the columns ``video_id group_id label``.
    """
    num_folds = min(_MOST_FOLDS, most_folds(rows))
    return make_folds(rows, num_folds, seed) if num_folds > 1 else None


# The real-versus-real floor


def by_source(rows: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Return the reals of the two largest sources, with the source in place of the label.

    Only sources with at least 10 groups are considered. The column ``label`` becomes ``real`` for the source with more
    videos and ``fake`` for the other.

    Args:
        rows: columns ``video_id group_id label``.
        index: INDEX schema; its column ``real_source`` names the source.

    Raises:
        DataError: fewer than two sources have 10 groups.
    """
    sources = index.select("video_id", "real_source")
    reals = rows.filter(label="real").join(sources, on="video_id", how="left", maintain_order="left")
    by_name = reals.drop_nulls("real_source").group_by("real_source")
    sizes = by_name.agg(pl.len(), pl.col("group_id").n_unique())
    large = sizes.filter(pl.col("group_id") >= FEWEST_GROUPS_OF_A_SOURCE)
    if large.height < 2:
        raise DataError(f"fewer than two sources of reals (real_source) have {FEWEST_GROUPS_OF_A_SOURCE} groups")
    names = large.sort("len", "real_source", descending=[True, False])["real_source"].head(2)
    both = reals.filter(pl.col("real_source").is_in(names.to_list()))
    return both.with_columns(label=pl.col("real_source").replace_strict(names, LABELS))


def of_two_sources(
    rows: TrainingRows, index: pl.DataFrame, config: RunConfig, fold: int, without: Collection[str] = ()
) -> TrainingRows:
    """Return the rows that train the real-source control of ``fold``: the reals of two sources, labelled by source.

    This control is a model that learns the source of a real video instead of real or fake.

    Args:
        rows: the rows that the model is trained on, with true labels.
        index: INDEX schema; its column ``real_source`` names the source.
        config: share and seed of the inner validation part.
        fold: number of the outer fold.
        without: ids of videos that have no clip.

    Raises:
        DataError: the control is impossible; the message is the reason.
    """
    if config.shuffle_labels:
        raise DataError("labels were shuffled on purpose")
    lacks_clip = pl.col("video_id").is_in(sorted(without))
    sources = by_source(rows.folds.filter(~lacks_clip), index)
    relabelled = replace(rows, folds=sources.select(rows.folds.columns))
    if sources.filter(fold=fold)["label"].n_unique() < len(LABELS):
        raise DataError(f"fold {fold} does not test reals of both sources")
    relabelled.split(fold, inner_validation_share=config.inner_validation_share, seed=config.seed)
    return relabelled


def possible_floor(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    config: RunConfig,
    left_out: Collection[str] = (),
    protocol: pl.DataFrame | None = None,
) -> tuple[pl.DataFrame, str]:
    """Return ``(due, sentence)``: the videos that the real-source control tests, and a sentence on them.

    The real-source control is a model that learns the source of a real video instead of real or fake. ``due`` is a
    FOLDS table in which the label stands for the source (``by_source``). If the control is impossible, ``due`` is empty
    and the sentence says why.

    Args:
        index: INDEX schema.
        folds: FOLDS schema, with true labels.
        config: share and seed of the inner validation part.
        left_out: ids of videos without a clip.
        protocol: PROTOCOL schema; None: the training part of a fold is all other folds.
    """
    due, why = [folds.clear()], ""
    for fold in folds["fold"].unique().sort():
        rows = TrainingRows(folds) if protocol is None else training_rows(protocol, fold)
        try:
            relabelled = of_two_sources(rows, index, config, fold, left_out)
            due.append(relabelled.folds.filter(fold=fold))
        except DataError as error:
            why = str(error)
    tested = pl.concat(due).sort("video_id")
    says = f"{tested.height} reals of two sources" if tested.height else f"not possible ({why.rstrip('.')})"
    return tested, f"Trained floor: {says}."


def control_scores(due: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame | None:
    """Return ``due`` with the columns ``score``, of the real-source control, and ``threshold``, which is 0.5.

    The real-source control is a model that learns which of two sources a real video comes from. The result is None if
    the control has no score for a video, or was trained on other sources than those in ``due``.

    Args:
        due: FOLDS schema, with the source as label: the videos that the control must score (``possible_floor``).
        predictions: PREDICTIONS schema; its column ``source_score`` has the control's scores.
    """
    scores = predictions.select("video_id", "fold", "source_label", score="source_score")
    keys = ["video_id", "fold", "source_label"]
    scored = due.with_columns(source_label=_FAKE).join(scores, on=keys, how="left", maintain_order="left")
    return None if scored["score"].null_count() else scored.with_columns(threshold=pl.lit(0.5))


def margin_over_floor(scored: pl.DataFrame, reals: pl.DataFrame, config: RunConfig) -> Interval:
    """Return the model's AUC minus the AUC of the real-source control, with an interval.

    The real-source control is a model that learns sources instead of labels. Both AUCs are computed on the same random
    half-samples of the groups.

    Args:
        scored: the model's scores, sorted by ``video_id``; columns ``video_id group_id label fold score`` and maybe
            ``target``.
        reals: the control's scores of some of these videos, labelled by source (``control_scores``).
        config: gives replicates, confidence and seed.
    """
    rows = scored["video_id"].search_sorted(reals["video_id"]).to_numpy()
    sources = fake_labels(reals)
    of_model, values = _auc(scored)
    of_control, control_values = _auc(reals)

    def definition(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
        margins: FloatArray = of_model(labels, scores, weights) - of_control(sources, control_values, weights[:, rows])
        return margins

    return _interval(scored, Metric(definition), values, config)


def real_source_floor(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> Interval | None:
    """Return the real-versus-real floor: the AUC with which scores tell the two largest sources of reals apart.

    A detector's AUC of reals and fakes must be above this floor. Nothing is trained. Two estimates are computed, and
    the larger one is returned with its interval:

    1. ``max(A, 1 - A)``, where A is the AUC within folds, averaged over folds. It is too low if some folds score the
       first source higher, and others the second.
    2. ``0.5 + sqrt(max(0, m**2 - c**2))``, where m is the mean over folds of abs(AUC - 0.5) (``mean_lean``). Chance
       alone makes m positive. So the sources are permuted among the groups of each fold; c is the mean of m over many
       permutations (``leans_by_chance``).

    The p-value of estimate 2 is the share of permutations whose m is at least the observed m. If it is above
    (1 - confidence) / 2, the lower end of the interval is set to at most 0.5.

    Args:
        index: INDEX schema; its column ``real_source`` names the source.
        predictions: PREDICTIONS schema, maybe with ``target``.
        config: gives replicates, confidence and seed.

    Returns:
        The AUC and its interval; None if fewer than two sources have 10 groups.
    """
    try:
        judged = by_source(predictions.sort("video_id"), index)
    except DataError:
        return None
    floor = auc_within_folds(judged, config)
    if floor.value < 0.5:
        floor = replace(floor, value=1 - floor.value, low=1 - floor.high, high=1 - floor.low)
    targets, folds = targets_of(judged), judged["fold"].to_numpy()
    rows = fake_labels(judged), judged["score"].to_numpy()
    lean = float(mean_lean(*rows, folds, targets)[0])
    if not lean > floor.value - 0.5 + 1e-12:  # all folds have the same direction, or there is no value
        return floor
    chance = leans_by_chance(*rows, judged["group_id"].to_numpy(), folds, targets, seed=config.seed)
    beyond_chance = math.sqrt(max(0.0, lean**2 - float(chance.mean()) ** 2))
    if beyond_chance <= floor.value - 0.5:
        return floor
    # Exchange the labels of the two sources in every fold whose AUC is below 0.5, separately for every target.
    parts = []
    exchanged = pl.col("label").replace_strict(LABELS, LABELS[::-1])
    for part in judged.partition_by([name for name in ("target", "fold") if name in judged.columns]):
        leans_back = roc_auc(fake_labels(part), part["score"].to_numpy()) < 0.5
        parts.append(part.with_columns(label=exchanged) if leans_back else part)
    apart = auc_within_folds(pl.concat(parts), config)
    taken = apart.value - 0.5 - beyond_chance
    is_chance = (1 + int((chance >= lean).sum())) / (1 + chance.size) > (1 - config.confidence) / 2
    low = apart.low - taken
    return replace(apart, value=0.5 + beyond_chance, low=min(low, 0.5) if is_chance else low, high=apart.high - taken)
