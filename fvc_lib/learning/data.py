"""Stored clips as samples: training sees originals and augmented copies, all else originals only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
import torch

from fvc_lib.learning.task import Batch, Sample
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LABELS
from fvc_lib.video.clip_file import Pixels, Shape

LABEL_NUMBERS = {label: number for number, label in enumerate(LABELS)}


@dataclass(frozen=True)
class ClipRow:
    """One clip: a video, which of its clips (0 is the original), and what it is (0 real, 1 fake)."""

    video_id: str
    augmentation_index: int
    label: int

    @property
    def clip_id(self) -> str:
        """The name used in messages."""
        return f"{self.video_id}#{self.augmentation_index}"


class ClipSource(Protocol):
    """Where clips are read from: ``video.clip_store.ClipStore`` and ``video.shard_reading.ClipShards`` are such."""

    @property
    def settings_hash(self) -> str:
        """What decides every clip besides the video's content."""
        ...

    def has(self, video_id: str, augmentation_index: int, /) -> bool:
        """Whether the clip is there; 0 is the original."""
        ...

    @property
    def shape(self) -> Shape:
        """(T, 3, S, S) of every clip."""
        ...

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, /) -> None:
        """Fill ``frames``, uint8 (T, 3, S, S), with the clip."""
        ...


class ClipDataset:
    """Samples with ``frames`` uint8 (T, 3, S, S) and ``label`` float32 () from stored clips; nothing is random."""

    def __init__(self, source: ClipSource, rows: Sequence[ClipRow]) -> None:
        self._source = source
        self.rows = tuple(rows)

    @property
    def classes(self) -> tuple[int, ...]:
        """The label of every row."""
        return tuple(row.label for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch, each clip read straight into its place."""
        rows = [self.rows[index] for index in indices]
        frames = np.empty((len(rows), *self._source.shape), np.uint8)
        for row, place in zip(rows, frames, strict=True):
            self._source.load(row.video_id, row.augmentation_index, place)
        labels = torch.tensor([float(row.label) for row in rows])
        return Batch(tuple(row.clip_id for row in rows), {"frames": torch.from_numpy(frames), "label": labels})


def clip_rows(videos: pl.DataFrame, augmentations_per_video: int = 0) -> tuple[ClipRow, ...]:
    """Rows for ``videos`` (columns ``video_id``, ``label``): originals, and so many augmented copies of each."""
    pairs = videos.sort("video_id").select("video_id", "label").iter_rows()
    return tuple(
        ClipRow(video_id, index, LABEL_NUMBERS[label])
        for video_id, label in pairs
        for index in range(augmentations_per_video + 1)
    )


def without_missing_originals(videos: pl.DataFrame, source: ClipSource) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """``videos`` that have an original clip, and the ids of those that do not."""
    present = pl.Series([source.has(video_id, 0) for video_id in videos["video_id"]], dtype=pl.Boolean)
    return videos.filter(present), tuple(videos.filter(~present)["video_id"].sort())


def require_clips(source: ClipSource, rows: Iterable[ClipRow]) -> None:
    """Check before training that every clip is there.

    Raises:
        DataError: some are not; up to ten are named.
    """
    missing = [row.clip_id for row in rows if not source.has(row.video_id, row.augmentation_index)]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise DataError(
            f"{len(missing)} clips are not in the clip store: {', '.join(missing[:10])}{more}. Run 03_augmentation "
            "again with the same decode and augmentation parameters."
        )


def class_weights(rows: Sequence[ClipRow]) -> tuple[float, float]:
    """Loss weights (real, fake) that give both classes equal influence and average to one over ``rows``.

    Raises:
        DataError: only one class is there, so nothing can be learned.
    """
    counts = np.bincount([row.label for row in rows], minlength=2)
    if not counts.all():
        raise DataError(
            f"training part: got {counts[0]} real and {counts[1]} fake clips, wanted some of both. Use fewer folds or "
            "add groups of the missing class."
        )
    real, fake = (counts.sum() / (2 * counts)).tolist()
    return real, fake


def prior_logit(rows: Sequence[ClipRow], class_balance: str) -> float:
    """What brings a logit to the share of fakes in ``rows``, on which a network with ``class_balance`` was trained.

    A loss or a sampler that gives both classes equal influence teaches the odds as if there were as many fakes as
    reals: with four fakes to a real even a perfect network would be off by 0.18 (expected calibration error), and no
    temperature undoes a shift. Adding log(fakes / reals) does (C. Elkan, "The foundations of cost-sensitive learning",
    IJCAI 2001, theorem 2). The order of the videos stays as it is. 0 where the classes were left as they are.

    Raises:
        DataError: as ``class_weights``.
    """
    if class_balance == "none":
        return 0.0
    real, fake = class_weights(rows)
    return math.log(real / fake)


def rows_fingerprint(source: ClipSource, parts: Sequence[tuple[str, Sequence[ClipRow]]]) -> str:
    """Hex SHA-256 over which clips, with which labels, made with which settings, play which part."""
    digest = hashlib.sha256(source.settings_hash.encode())
    for part, rows in parts:
        for row in rows:
            digest.update(f"{part}\x1f{row.clip_id}\x1f{row.label}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
