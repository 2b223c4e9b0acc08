"""Which clips play which part in one outer fold. From here on the outer fold's labels are under seal."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import polars as pl

from fvc_lib.corpus.folds import shuffle_labels_by_group, split_for_fold
from fvc_lib.learning.data import (
    ClipRow,
    ClipSource,
    clip_rows,
    require_clips,
    rows_fingerprint,
    without_missing_originals,
)
from fvc_lib.learning.outer_fold import SealedFold
from fvc_lib.learning.random_state import stable_seed
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, FOLDS, read_table
from fvc_lib.video.clip_store import ClipStore, note_use
from fvc_lib.video.shard_reading import ClipShards
from fvc_lib.video.shards import shards_folder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoldClips:
    """One outer fold as clips, each part in the order of the video ids.

    Attributes:
        train: originals and augmented copies of the training videos.
        validation: originals of the inner validation videos, which choose epoch, temperature and threshold.
        num_validation_groups: that these belong to.
        test: originals of the outer fold, under seal.
        missing: ids of videos, in any part, that have no clip.
        fingerprint: over all of it and the clips' settings.
    """

    fold: int
    train: tuple[ClipRow, ...]
    validation: tuple[ClipRow, ...]
    num_validation_groups: int
    test: SealedFold
    missing: tuple[str, ...]
    fingerprint: str


def open_clips(config: RunConfig, made: pl.DataFrame) -> ClipSource:
    """What ``config`` trains from: the shared store, or the shards of the clips that ``made`` (AUGMENTED) lists.

    Shards are read and checked as a whole here, before anything depends on them.

    Raises:
        DataError: the shards are missing or damaged.
    """
    store = ClipStore.of(config)
    if config.clip_source == "store":
        store.note_use()
        return store
    shards = ClipShards(shards_folder(store, made))
    if shards.settings_hash != store.settings_hash or shards.shape != store.shape:
        raise DataError(f"shards in {str(shards.folder)!r}: made with other settings. Run 03_augmentation again.")
    shards.verify()
    note_use(shards.folder, {})
    return shards


def read_fold(paths: RunPaths, config: RunConfig, fold: int) -> tuple[ClipSource, FoldClips]:
    """The clips of one outer fold of a run, and where they are read from.

    Raises:
        DataError: as ``open_clips`` and ``fold_clips``, or a clip that was made is gone since.
    """
    folds, made = read_table(paths.folds, FOLDS), read_table(paths.augmented_metadata, AUGMENTED)
    if config.shuffle_labels:
        folds = _shuffled(folds, config, "shuffle_labels")
    source = open_clips(config, made)
    clips = fold_clips(folds, source, config, fold)
    _refuse_thinned_store(made, clips)
    return source, clips


def read_control_fold(paths: RunPaths, config: RunConfig, fold: int, source: ClipSource) -> FoldClips | None:
    """The same fold under shuffled labels; None where a few mixed groups cannot carry them: no fault of the data."""
    folds = read_table(paths.folds, FOLDS)
    if config.shuffle_labels:
        folds = _shuffled(folds, config, "shuffle_labels")
    try:
        return fold_clips(_shuffled(folds, config, "control"), source, config, fold)
    except DataError as error:
        _logger.warning("fold %d has no shuffled-label control: %s", fold, error)
        return None


def fold_clips(folds: pl.DataFrame, source: ClipSource, config: RunConfig, fold: int) -> FoldClips:
    """Split ``folds`` (FOLDS) for ``fold`` and look up the clips in ``source``.

    A video whose original clip could not be made takes no part and is named; an augmented copy that is missing while
    its original is there means that the stage before did not finish.

    Raises:
        DataError: too many videos without a clip, unfinished augmentation, no such fold, or one class only.
    """
    usable, missing = without_missing_originals(folds, source)
    if len(missing) > config.max_rejected_share * folds.height:
        raise DataError(
            f"{len(missing)} of {folds.height} videos have no clip in {config.cache_dir!r} (allowed share: "
            f"{config.max_rejected_share:g}), the first: {', '.join(missing[:5])}. Run 03_augmentation with these "
            "parameters and look at what it reports."
        )
    if missing:
        _logger.warning("%d videos have no clip and take no part: %s", len(missing), ", ".join(missing))
    share, seed = config.inner_validation_share, config.seed
    split = split_for_fold(usable, fold, inner_validation_share=share, seed=seed)
    train = clip_rows(split.train, config.augmentations_per_video)
    validation, test = clip_rows(split.validation), clip_rows(split.test)
    require_clips(source, train)
    fingerprint = rows_fingerprint(source, [("train", train), ("validation", validation), ("test", test)])
    group_of = dict(split.test.select("video_id", "group_id").iter_rows())
    return FoldClips(
        fold=fold,
        train=train,
        validation=validation,
        num_validation_groups=split.validation["group_id"].n_unique(),
        test=SealedFold(f"outer fold {fold}", test, group_of, fingerprint),
        missing=missing,
        fingerprint=fingerprint,
    )


def _shuffled(folds: pl.DataFrame, config: RunConfig, purpose: str) -> pl.DataFrame:
    """Labels shuffled by group over the whole corpus, the same for every fold of a run.

    Within each outer fold, so that what another fold's groups are called says nothing of this one's labels.
    """
    return shuffle_labels_by_group(folds, stable_seed(purpose, config.seed))


def _refuse_thinned_store(made: pl.DataFrame, clips: FoldClips) -> None:
    """A clip that was made and is gone since would make folds train on different videos."""
    known = set(made["video_id"])
    gone = [video_id for video_id in clips.missing if video_id in known]
    if gone:
        raise DataError(
            f"clips of {len(gone)} videos were made and are gone from the clip store, the first: "
            f"{', '.join(gone[:5])}. Make them again: run_notebooks.py --from 03."
        )
