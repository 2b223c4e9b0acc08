"""Controls: predictors that see no pixel or learned shuffled labels, evaluated exactly like the model.

A control gives every video an out-of-fold score and a threshold. The threshold is the share of fakes in the training
part, which is best for balanced accuracy if the score is a calibrated probability.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from threadpoolctl import threadpool_limits

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.corpus.protocols import Tells, training_rows
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.intervals import Interval, group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tasks import KFOLD
from fvc_lib.video.decode.probe import PacketFacts

# FOLDS tables by number of the training; training k tests only fold k of its table. None: one table, all folds tested.
Trainings = Sequence[pl.DataFrame] | None

SCORED_COLUMNS = ("video_id", "group_id", "label", "fold", "score", "threshold")

CONSTANT = "constant"
METADATA_ONLY = "metadata_only"
LENGTH_ONLY = "length_only"
GROUP_LOOKUP_BY_ROW = "group_lookup_by_row"
GROUP_LOOKUP_BY_GROUP = "group_lookup_by_group"
SHUFFLED_LABELS = "shuffled_labels"

# Columns of the index that describe a video without its pixels. Path, source and manipulation would name the label.
CATEGORIES = ("platform", "codec", "container", "pixel_format")
LENGTH = ("num_frames", "duration_seconds")
SIZE_AND_RATE = ("frames_per_second", "width", "height")
NUMBERS = (
    *SIZE_AND_RATE, *LENGTH, "bits_per_second", "size_bytes", "rotation_degrees", "has_audio",
    *(fact.name for fact in fields(PacketFacts)),
)  # fmt: skip

_MAX_CATEGORIES = 200  # per column; the boosting takes at most 255
_MOST_FOLDS = 5  # for ``controls_of_scores``


def all_controls(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    seed: int,
    trainings: Trainings = None,
) -> dict[str, pl.DataFrame]:
    """Return the scores of every control by its name; ``shuffled_labels`` only if ``predictions`` have it.

    Args:
        index: INDEX schema; must hold every video of ``folds``.
        folds: the outer folds (FOLDS schema), with the labels that the model was tested with.
        predictions: PREDICTIONS schema.
        seed: seed of the split by row.
        trainings: the trainings of a protocol other than ``kfold`` (``trainings_of``), so that controls learn from the
            same videos as the model.

    Returns:
        Tables with the columns ``SCORED_COLUMNS``.

    Raises:
        DataError: fewer than two folds, or a video is not in the index.
    """
    folds = folds.sort("video_id")  # sums in floating point, and so the boosting, depend on the order
    dealt = folds
    if trainings is not None:  # each video once, in five arbitrary folds
        dealt = pl.concat(trainings).unique("video_id", keep="first", maintain_order=True).sort("video_id")
        dealt = dealt.with_columns(fold=(pl.int_range(pl.len()) % 5).cast(pl.Int64))
    by_row = group_lookup(split_by_row(dealt, seed=seed)).join(folds, on="video_id", how="semi", maintain_order="left")
    controls = {
        CONSTANT: tested(constant, folds, trainings),
        METADATA_ONLY: tested(lambda rows: metadata_only(index, rows), folds, trainings),
        LENGTH_ONLY: tested(lambda rows: metadata_only(index, rows, LENGTH), folds, trainings),
        GROUP_LOOKUP_BY_ROW: by_row,
        GROUP_LOOKUP_BY_GROUP: tested(group_lookup, folds, trainings),
    }
    shuffled = shuffled_labels(predictions, trainings)
    return controls if shuffled is None else {**controls, SHUFFLED_LABELS: shuffled}


def trainings_of(protocol: pl.DataFrame | None, config: RunConfig, left_out: Collection[str] = ()) -> Trainings:
    """Return one FOLDS table for each training of a PROTOCOL table, with the labels that it learns.

    ``left_out`` are ids of videos to remove, such as those that could not be decoded. None for protocol ``kfold``,
    where every video is tested and one table of folds suffices.
    """
    if protocol is None or config.protocol == KFOLD:
        return None
    trainings = []
    for number in range(config.num_trainings):
        rows = training_rows(protocol, number)
        if config.shuffle_labels:
            from fvc_lib.engine.random_state import stable_seed  # brings torch

            rows = rows.shuffled(stable_seed("shuffle_labels", config.seed))
        trainings.append(rows.folds.filter(~pl.col("video_id").is_in(sorted(left_out))))
    return trainings


def tested(control: Callable[[pl.DataFrame], pl.DataFrame], folds: pl.DataFrame, trainings: Trainings) -> pl.DataFrame:
    """Return the control's scores of ``folds``; with ``trainings`` those of the tested videos, sorted by video id."""
    if trainings is None:
        return control(folds)
    return pl.concat(control(rows).filter(fold=number) for number, rows in enumerate(trainings)).sort("video_id")


def constant(folds: pl.DataFrame) -> pl.DataFrame:
    """Score each test video of a fold by the share of fakes among the fold's training videos.

    Raises:
        DataError: fewer than two folds.
    """
    return _scored(folds, _training_priors(folds))


def metadata_only(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    names: Sequence[str] = (*CATEGORIES, *NUMBERS),
    *,
    rounds: int = 100,
    further: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Score by gradient boosting on the columns ``names`` of ``index``, trained on each fold's training videos.

    If it beats chance, metadata predict the labels, and a model of pixels may use the same hint (a frame size survives
    as sharpness). The model may learn from missing values. A category that is not in the training part counts as
    missing. The model is scikit-learn's ``HistGradientBoostingClassifier`` (after LightGBM, Ke et al.,
    NIPS 2017) with ``rounds`` trees. With ``further``, a table of ``video_id`` and numbers, it learns from these
    numbers as well, and is no longer a control.

    Raises:
        DataError: fewer than two folds, or a video is not in the index.
    """
    absent = folds.join(index, on="video_id", how="anti")
    if absent.height:
        raise DataError(
            f"{absent.height} videos of the folds are not in the index, e.g. {absent['video_id'][0]!r}. "
            "Both must come from one run: run 01_data_index and 02_folds again."
        )
    known = folds.select("video_id").join(index, on="video_id", how="left", maintain_order="left")
    numbers = known.select(pl.col(name).cast(pl.Float64) for name in NUMBERS if name in names and name in known.columns)
    if further is not None:
        more = folds.select("video_id").join(further, on="video_id", how="left", maintain_order="left")
        numbers = numbers.hstack(more.drop("video_id").cast(pl.Float64))
    values = numbers.fill_null(np.nan).to_numpy() if numbers.width else np.empty((folds.height, 0))
    categories = [name for name in CATEGORIES if name in names]
    fold, is_fake, scores = folds["fold"].to_numpy(), fake_labels(folds), _training_priors(folds)
    for number in np.unique(fold):
        test = fold == number
        present = values[:, ~np.isnan(values[~test]).all(0)]  # a number without a value in training cannot be binned
        features = np.hstack([*(_category_codes(known[name], ~test) for name in categories), present])
        if np.unique(is_fake[~test]).size < 2 or not features.shape[1]:
            continue  # there is nothing to learn but the prior
        model = _boosting(int((~test).sum()), len(categories), rounds)
        # On so few rows many threads take a hundred times longer than one if other processes use the cores as well.
        with threadpool_limits(1, user_api="openmp"):
            model.fit(features[~test], is_fake[~test])
            scores[test] = model.predict_proba(features[test])[:, 1]
    return _scored(folds, scores)


def group_lookup(folds: pl.DataFrame) -> pl.DataFrame:
    """Score a video by the share of fakes among its group's videos in the training part.

    If the training part has no video of the group, the score is the share of fakes in the whole training part. With
    grouped folds that is always so, and the control equals ``constant``; any difference means that the folds leak. With
    folds split by row (``split_by_row``) it shows the result that recognising groups alone would give.

    Raises:
        DataError: fewer than two folds.
    """
    fakes = pl.col("is_fake").sum()
    rows = folds.with_columns(is_fake=pl.col("label") == "fake", prior=_training_priors(folds))
    in_training = pl.len().over("group_id") - pl.len().over("group_id", "fold")
    fakes_in_training = fakes.over("group_id").cast(pl.Int64) - fakes.over("group_id", "fold").cast(pl.Int64)
    score = pl.when(in_training > 0).then(fakes_in_training / in_training).otherwise(pl.col("prior"))
    return _scored(folds, rows.select(score=score)["score"].to_numpy())


def split_by_row(folds: pl.DataFrame, *, seed: int) -> pl.DataFrame:
    """Return ``folds`` with new folds that ignore groups: the naive split, stratified by label.

    The shuffled reals and then the shuffled fakes are assigned to the folds in turn. The result does not depend on the
    order of rows.
    """
    ordered, generator = folds.sort("video_id"), np.random.default_rng(seed)
    is_fake = fake_labels(ordered)
    dealt = np.concatenate([generator.permutation(np.flatnonzero(is_fake == label)) for label in (0, 1)])
    fold = np.empty(ordered.height, dtype=np.int64)
    fold[dealt] = np.arange(ordered.height) % folds["fold"].n_unique()
    by_row = ordered.with_columns(fold=pl.Series(fold))
    return folds.select("video_id").join(by_row, on="video_id", how="left", maintain_order="left").select(folds.columns)


def shuffled_labels(predictions: pl.DataFrame, trainings: Trainings = None) -> pl.DataFrame | None:
    """Return the scores and labels of the shuffled-label control; None if it was not run.

    This control is the model's training on labels shuffled by group. Videos without its score or label are left out.
    """
    run = predictions.drop_nulls(["control_score", "control_label"])
    if run.is_empty() or (trainings is None and run["fold"].n_unique() < 2):
        return None
    judged = run.with_columns(label="control_label")
    if trainings is None:
        return _scored(judged, run["control_score"].to_numpy())
    # Shuffling keeps the share of fakes in a training part, up to one group.
    priors = {n: (rows.filter(pl.col("fold") != n)["label"] == "fake").mean() for n, rows in enumerate(trainings)}
    return judged.select(*SCORED_COLUMNS[:4], score="control_score", threshold=pl.col("fold").replace_strict(priors))


def fake_labels(frame: pl.DataFrame) -> IntArray:
    """Return int64 (N,): 1 if ``label`` is fake, 0 if it is real."""
    return (frame["label"] == "fake").cast(pl.Int64).to_numpy()


def targets_of(scored: pl.DataFrame) -> npt.NDArray[Any] | None:
    """Return the column ``target`` (N,) of ``scored``; None unless it has several targets."""
    return scored["target"].to_numpy() if "target" in scored.columns and scored["target"].n_unique() > 1 else None


def _training_priors(folds: pl.DataFrame) -> FloatArray:
    """Return float64 (N,), for each row the share of fakes in the training part of its fold."""
    if folds["fold"].n_unique() < 2:
        raise DataError(
            f"controls: got {folds['fold'].n_unique()} fold, wanted at least 2: nothing is left to train on. "
            "Run 02_folds again with num_folds of 2 or more."
        )
    fakes = (pl.col("label") == "fake").cast(pl.Int64)
    in_training = pl.len() - pl.len().over("fold")
    priors = folds.select(prior=(fakes.sum() - fakes.sum().over("fold")) / in_training)["prior"]
    return priors.to_numpy().copy()


def _scored(folds: pl.DataFrame, scores: FloatArray) -> pl.DataFrame:
    scored = folds.with_columns(score=pl.Series(scores), threshold=pl.Series(_training_priors(folds)))
    return scored.select(SCORED_COLUMNS)


def _category_codes(column: pl.Series, training: npt.NDArray[np.bool_]) -> FloatArray:
    """Return codes float64 (N, 1) of categories, 0 for the most frequent among the ``training`` rows.

    Null counts as a category. Rare categories beyond ``_MAX_CATEGORIES``, and those not in training rows, are NaN.
    """
    seen = column.filter(pl.Series(training)).to_frame("value")
    ranked = seen.group_by("value").len().sort(["len", "value"], descending=[True, False])["value"]
    codes = {value: float(code) for code, value in enumerate(ranked.head(_MAX_CATEGORIES))}
    return np.array([[codes.get(value, np.nan)] for value in column])


def _boosting(num_training: int, num_categories: int, rounds: int) -> Any:
    """Return an unfitted gradient boosting of small trees.

    Leaves are smaller for few videos: with 50 videos the default size of 20 would allow a single split.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second to load

    return HistGradientBoostingClassifier(
        learning_rate=0.1,
        max_iter=rounds,
        max_leaf_nodes=15,
        min_samples_leaf=min(max(num_training // 10, 3), 20),
        l2_regularization=1.0,
        categorical_features=list(range(num_categories)),
        early_stopping=False,  # it would hold out single videos, not groups
        random_state=0,
    )


def auc_within_folds(scored: pl.DataFrame, unit: str, config: RunConfig) -> Interval:
    """Return the AUC within folds of ``scored`` (columns ``label score fold``), with an interval.

    The interval is over the values of the column ``unit``, such as ``group_id``. With a column ``target`` of several
    targets, the AUC is the plain mean over targets.
    """
    values, fold = scored["score"].to_numpy(), scored["fold"].to_numpy()
    metric, scores = measure_over_folds("roc_auc", values, 0.5, fold, targets_of(scored))
    return group_interval(
        fake_labels(scored),
        scores,
        scored[unit].to_list(),
        metric,
        replicates=config.bootstrap_replicates,
        seed=config.seed,
        confidence=config.confidence,
    )


def tells_labels(config: RunConfig) -> Tells:
    """Return the function by which ``protocols.make_protocol`` gets the AUC, and its low end, of index columns."""
    return lambda index, folds, columns: auc_within_folds(
        metadata_only(index, folds, columns), "group_id", config
    ).row()[:2]


def group_recognition(videos: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return the AUC of ``group_lookup``, which only knows the labels of a group's other videos, with two splits.

    It needs labels and groups but no files, so the annotations of a corpus suffice (``index.undisputed_labels``).

    Args:
        videos: columns ``video_id group_id label``, each video once.
        config: number of folds, replicates, confidence and seed.

    Returns:
        ``split value low high num_rows num_groups``, a row for the split ``by row`` and one ``by group``; ``value`` is
        the AUC within folds, ``low`` and ``high`` are the ends of its interval over groups.

    Raises:
        DataError: fewer groups with a label than folds.
    """
    folds = make_folds(videos, config.num_folds, config.seed)
    dealt = {"by row": split_by_row(folds, seed=config.seed), "by group": folds}
    rows = [(split, *auc_within_folds(group_lookup(each), "group_id", config).row()) for split, each in dealt.items()]
    return pl.DataFrame(rows, schema=["split", "value", "low", "high", "num_rows", "num_groups"], orient="row")


# Controls for a table of scores that need not come from FVC


def controls_of_scores(
    videos: pl.DataFrame, groups: Sequence[str], of_corpus: pl.DataFrame | None = None, *, seed: int = 0
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Return out-of-fold scores of each control that can be computed, and sentences on missing controls.

    Args:
        videos: columns ``video_id label``, N rows sorted by ``video_id``.
        groups: N group ids, one per row of ``videos``.
        of_corpus: INDEX columns of those of the videos that are in a corpus; None: no corpus.
        seed: seed of the folds and of the split by row.

    Returns:
        Tables by control name, with columns ``video_id group_id label fold score threshold`` and rows as in ``videos``;
        and the sentences. In the metadata and length controls ``fold score threshold`` are null for videos that the
        corpus does not have.
    """
    rows = videos.select("video_id", "label", group_id=pl.Series("group_id", list(groups), dtype=pl.String))
    num_folds = min(_MOST_FOLDS, most_folds(rows))
    if num_folds < 2:
        return {}, ["No control: a label is in fewer than two groups, so nothing can be learned and tested."]
    folds = make_folds(rows, num_folds, seed)
    controls, missing = {CONSTANT: constant(folds)}, []
    if folds["group_id"].n_unique() < folds.height:
        controls[GROUP_LOOKUP_BY_GROUP] = group_lookup(folds)
        controls[GROUP_LOOKUP_BY_ROW] = group_lookup(split_by_row(folds, seed=seed))
    else:
        missing.append("No group lookup: every video is a group of its own.")
    there = rows if of_corpus is None else rows.join(of_corpus, on="video_id", how="semi", maintain_order="left")
    num_folds = min(_MOST_FOLDS, most_folds(there))
    if of_corpus is None or num_folds < 2:
        missing.append(
            "No metadata and no clip length control: without videos of both labels in a corpus (--corpus) nobody can "
            "say whether codec, frame size or length give the labels away."
        )
        return controls, missing
    if there.height < rows.height:
        missing.append(
            "The metadata and clip length controls, and detectors next to them, are of fewer videos: "
            f"{rows.height - there.height:,} of {rows.height:,} videos are not in the corpus."
        )
    folds = make_folds(there, num_folds, seed)
    for name, columns in ((METADATA_ONLY, (*CATEGORIES, *NUMBERS)), (LENGTH_ONLY, LENGTH)):
        scored = metadata_only(of_corpus, folds, columns).drop("group_id", "label")
        controls[name] = rows.join(scored, on="video_id", how="left", maintain_order="left")
    return controls, missing
