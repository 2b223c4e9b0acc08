"""Which clips play which part in one outer fold."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import polars as pl

from fvc_lib.corpus.folds import split_for_fold
from fvc_lib.learning.data import (
    ClipRow,
    ClipSource,
    clip_rows,
    require_clips,
    rows_fingerprint,
    without_missing_originals,
)
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.video.clip_store import ClipStore, note_use
from fvc_lib.video.shard_reading import ClipShards
from fvc_lib.video.shards import shards_folder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoldClips:
    """One outer fold as clips, each part in the order of the video ids.

    Attributes:
        train: originals and augmented copies of the training videos.
        validation: originals of the inner validation videos, which choose epoch and threshold.
        test: originals of the outer fold.
        group_of: group by video id, over the test part.
        missing: ids of videos, in any part, that have no clip.
        fingerprint: over all of it and the clips' settings.
    """

    fold: int
    train: tuple[ClipRow, ...]
    validation: tuple[ClipRow, ...]
    test: tuple[ClipRow, ...]
    group_of: dict[str, str]
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
    parts = [("train", train), ("validation", validation), ("test", test)]
    return FoldClips(
        fold=fold,
        train=train,
        validation=validation,
        test=test,
        group_of=dict(split.test.select("video_id", "group_id").iter_rows()),
        missing=missing,
        fingerprint=rows_fingerprint(source, parts),
    )
