"""Samples of an outer fold, from stored clips. Only the training part uses augmented copies."""

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fvc_lib.corpus.folds import TrainingRows, make_folds, most_folds
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, Sample
from fvc_lib.metrics.classification import IntArray
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import LABELS
from fvc_lib.services.tasks import CONTROL_TRAININGS, REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.mixing import MixSettings, draw_mix, mixed_pixels
from fvc_lib.tasks.video.calibration import RecordedSelection
from fvc_lib.tasks.video.controls import of_two_sources
from fvc_lib.tasks.video.features import FeatureSource
from fvc_lib.video.clips.shards import ClipShards, shards_folder
from fvc_lib.video.clips.store import FIRST_BLEND, ClipStore, Pixels, note_use
from fvc_lib.video.wavelet_bands import BandSwap, with_bands_of

_logger = logging.getLogger(__name__)
INNER_PARTS = 2  # parts of the training groups whose held-out logits calibrate a network


@dataclass(frozen=True)
class ClipRow:
    """One copy of a video, original or augmented, that may have several clips.

    Attributes:
        video_id: id of the video.
        augmentation_index: number of the copy; 0 is the original, and from ``FIRST_BLEND`` on copies are pseudo-fakes.
        label: 0 is real, 1 is fake.
        group_id: id of the video's group.
        counterpart: id of the real video that a fake was made from, for ``wavelet_bands``; empty if it is not known.
    """

    video_id: str
    augmentation_index: int
    label: int
    group_id: str = ""
    counterpart: str = field(default="", compare=False)

    @property
    def clip_id(self) -> str:
        """The name of the copy in messages, ``video_id#copy``."""
        return f"{self.video_id}#{self.augmentation_index}"

    @property
    def is_pseudo_fake(self) -> bool:
        """Whether the copy is a real video whose face was blended with itself, to be learned as a fake."""
        return self.augmentation_index >= FIRST_BLEND


# A source gives the clips of a video's copy. It has ``has``, ``load``, ``settings_hash`` and ``shape``, which is
# (N T, 3, S, S) for N clips of T frames.
ClipSource = ClipStore | ClipShards | FeatureSource


class ClipDataset:
    """Samples with ``frames`` uint8 (T, 3, S, S) and ``label`` float32 () from stored clips.

    With a ``FeatureSource``, ``features`` float32 (T', F) replace the frames. With ``mixing``, samples also have
    ``target`` float32 (), the share of fake in the mixture, while ``label`` is that of the unmixed clip. All random
    choices depend on seed, row and epoch alone.

    Args:
        source: the clips.
        rows: one entry per original video or augmented copy.
        clips: N, the number of clips per row.
        draws: True: a row gives one sample, a random clip of the row that changes with the epoch; False: a row gives N
            samples, all its clips.
        mixing: mixup and cutmix for training; None: no mixing.
        bands: probability that wavelet bands of a fake are replaced by those of the real that it was made from.
        seed: seed of all random choices.
    """

    def __init__(
        self,
        source: ClipSource,
        rows: Sequence[ClipRow],
        *,
        clips: int = 1,
        draws: bool = False,
        mixing: MixSettings | None = None,
        bands: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._source = source
        self.rows = tuple(rows)
        self._clips = clips
        self._per_row = 1 if draws else clips
        self._mixing, self._bands = mixing, bands
        self._seed, self._epoch = seed, 0
        num_frames, *pixels = source.shape
        self._shape = (num_frames // clips, *pixels)  # (T, 3, S, S) of one clip

    def __len__(self) -> int:
        return len(self.rows) * self._per_row

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        tensors = {name: tensor[0] for name, tensor in batch.tensors.items()}
        return Sample(batch.sample_ids[0], tensors)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        chosen = [self._chosen(index) for index in indices]
        labels = torch.tensor([float(row.label) for row, _ in chosen])
        ids = tuple(f"{row.clip_id}@{clip}" if clip else row.clip_id for row, clip in chosen)
        if isinstance(self._source, FeatureSource):
            clips = [(row.video_id, row.augmentation_index, clip) for row, clip in chosen]
            features = self._source.features(clips)
            return Batch(ids, {"features": features, "label": labels})
        frames = np.empty((len(chosen), *self._shape), np.uint8)
        for (row, clip), place in zip(chosen, frames, strict=True):
            self._load(row, clip, place)
            if self._bands and row.counterpart:
                self._swap_bands(row, clip, place)
        tensors = {"frames": torch.from_numpy(frames), "label": labels}
        if self._mixing is not None:
            tensors["target"] = labels.clone()
            for number, (row, _) in enumerate(chosen):
                self._mix(tensors, number, row, self._mixing)
        return Batch(ids, tensors)

    def at_epoch(self, epoch: int) -> "ClipDataset":
        """Return a copy of the data set whose random choices are those of ``epoch`` (0-based)."""
        other = copy.copy(self)
        other._epoch = epoch
        return other

    def _chosen(self, index: int) -> tuple[ClipRow, int]:
        """Return the row of sample ``index``, and the number of its clip within the row."""
        if self._per_row == self._clips:
            return self.rows[index // self._clips], index % self._clips
        row = self.rows[index]
        seed = stable_seed("clip of video", self._seed, row.clip_id, self._epoch)
        generator = np.random.default_rng(seed)
        return row, int(generator.integers(self._clips))

    def _load(self, row: ClipRow, clip: int, frames: Pixels) -> None:
        self._source.load(row.video_id, row.augmentation_index, frames, clip * len(frames))

    def _swap_bands(self, row: ClipRow, clip: int, frames: Pixels) -> None:
        seed = stable_seed("wavelet bands", self._seed, row.clip_id, self._epoch)
        swap = BandSwap.draw(np.random.default_rng(seed), self._bands)
        if swap.lowest or swap.lower:
            real = np.empty_like(frames)
            self._load(replace(row, video_id=row.counterpart), clip, real)
            frames[:] = with_bands_of(frames, real, swap)

    def _mix(self, tensors: dict[str, Tensor], number: int, row: ClipRow, settings: MixSettings) -> None:
        seed = stable_seed("clip mix", self._seed, row.clip_id, self._epoch)
        generator = np.random.default_rng(seed)
        mix = draw_mix(settings, len(self.rows), self._source.shape[-1], generator)
        if mix is None:
            return
        frames = np.empty(self._shape, np.uint8)
        partner, clip = self._chosen(mix.partner)
        self._load(partner, clip, frames)
        tensors["frames"][number] = mixed_pixels(tensors["frames"][number], torch.from_numpy(frames), mix)
        tensors["target"][number] = mix.share * row.label + (1 - mix.share) * partner.label


def clip_rows(videos: pl.DataFrame, augmentations_per_video: int = 0) -> tuple[ClipRow, ...]:
    """Return one ``ClipRow`` for every original and every augmented copy of ``videos``, sorted by video id.

    ``videos`` has the columns ``video_id label group_id``. Each video gives its original first, then
    ``augmentations_per_video`` copies.
    """
    facts = videos.sort("video_id").select("video_id", "label", "group_id")
    return tuple(
        ClipRow(video_id, index, LABELS.index(label), group_id)
        for video_id, label, group_id in facts.iter_rows()
        for index in range(augmentations_per_video + 1)
    )


def rows_to_fit(videos: pl.DataFrame, source: Any, config: RunConfig) -> tuple[ClipRow, ...]:
    """Return the rows of ``videos`` that a model is fitted to: originals, augmented copies and pseudo-fakes.

    A pseudo-fake is a real video whose face was blended with itself, to be learned as a fake; it keeps the group of the
    real. Reals without a face have no pseudo-fakes in ``source``. Only this function adds pseudo-fakes, so validation
    and test parts have none.

    Args:
        videos: columns ``video_id label group_id``.
        source: the clips, or features of them.
        config: gives the number of augmented copies and of pseudo-fakes of a video.
    """
    rows, num_copies = list[ClipRow](), config.num_copies
    for row in clip_rows(videos, num_copies):
        rows.append(row)
        if row.label == 1 or row.augmentation_index < num_copies:
            continue
        # After the last copy of a real.
        for number in range(FIRST_BLEND, FIRST_BLEND + config.self_blended):
            if source.has(row.video_id, number):
                fake = replace(row, augmentation_index=number, label=1)
                rows.append(fake)
    return tuple(rows)


def labels_of(rows: Sequence[ClipRow]) -> IntArray:
    """Return the labels of N ``rows``, int64 (N,): 0 is real, 1 is fake."""
    return np.array([row.label for row in rows])


def class_weights(rows: Sequence[ClipRow]) -> tuple[float, float]:
    """Return loss weights (real, fake) that give both classes equal influence; their mean over ``rows`` is 1.

    Raises:
        DataError: ``rows`` lack a class.
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
    """Return log(fakes / reals) of ``rows``, to be added to logits of a network that was trained with balanced classes.

    Pseudo-fakes are not counted. If ``class_balance`` is ``none``, the network has learned the share of fakes in its
    rows. The result is then 0, or with pseudo-fakes the number that corrects for their share.

    A network with balanced classes assumes as many fakes as reals. With four fakes per real, even a perfect network
    would have an expected calibration error of 0.18. No temperature corrects that (C. Elkan, "The foundations of
    cost-sensitive learning", IJCAI 2001, theorem 2).
    """
    originals = [row for row in rows if not row.is_pseudo_fake]
    real, fake = class_weights(originals)
    prior = math.log(real / fake)
    if class_balance == "none":
        real, fake = class_weights(rows)
        prior -= math.log(real / fake)
    return prior


class SealedFold:
    """The test videos of a fold, which can be read once, after the choices of its training are recorded.

    Before that only ``len`` works. So neither labels nor ids of the test videos can influence the choice of epoch,
    temperature or threshold.
    """

    def __init__(self, name: str, rows: Sequence[ClipRow], clips: str) -> None:
        self.__name, self.__rows = name, tuple(rows)
        self.__clips = clips  # fingerprint of the fold
        self.__is_open = False

    def open(self, selection: RecordedSelection) -> tuple[ClipRow, ...]:
        """Return the rows of the test videos, sorted by video id.

        Args:
            selection: the record of the training's choices (epoch, temperature, threshold). It proves that they were
                made before this call.

        Raises:
            LeakageError: ``selection`` is not the record of this fold, or the fold was opened before.
        """
        if self.__is_open or not isinstance(selection, RecordedSelection) or selection.clips != self.__clips:
            raise LeakageError(
                f"{self.__name}: its {len(self)} test videos are sealed. Record the choice of epoch, threshold and "
                "temperature (calibration.record_selection), and open the fold with that record, once."
            )
        self.__is_open = True
        return self.__rows

    def __len__(self) -> int:
        return len(self.__rows)


@dataclass(frozen=True)
class FoldClips:
    """The clips of one outer fold; each part is sorted by video id.

    Attributes:
        fold: the fold's number; None for the network trained on all groups, whose test part is empty.
        train: originals, augmented copies and pseudo-fakes.
        validation: originals on which temperature and threshold are chosen. By default they are the inner validation
            part, on which the epoch is chosen, too. With ``config.cross_fits`` they are the originals of ``train``, and
            their logits come from models that did not see their groups.
        test: the sealed test part, originals only.
        missing: ids of videos that have no clip and are in no part.
        fingerprint: hash of the parts, labels and clip settings.
    """

    fold: int | None
    train: tuple[ClipRow, ...]
    validation: tuple[ClipRow, ...]
    test: SealedFold
    missing: tuple[str, ...]
    fingerprint: str

    @property
    def num_validation_groups(self) -> int:
        """Number of groups in ``validation``."""
        return len({row.group_id for row in self.validation})

    @property
    def fewest_groups(self) -> int:
        """The smaller of two counts outside the test part: groups with a real video, and groups with a fake video."""
        return most_folds(_videos_of((*self.train, *self.validation)))


def open_clips(config: RunConfig, made: pl.DataFrame) -> ClipSource:
    """Return the object that reads the run's clips, from the clip store or from shards (``config.clip_source``).

    The store has one file per clip and is shared by runs. Shards are a few large files with the clips that ``made``
    (table AUGMENTED) lists. All shards are checked before this function returns.

    Raises:
        DataError: the shards are missing or damaged.
    """
    store = ClipStore.of(config)
    if config.clip_source == "store":
        store.note_use()
        return store
    shards = ClipShards(shards_folder(store, made))
    note_use(shards.folder, {})
    return shards


def made_clips(made: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the sorted pairs (video id, augmentation index) of all clips that the table ``made`` (AUGMENTED) lists."""
    return sorted(set(made.select("video_id", "augmentation_index").iter_rows()))


def with_counterparts(clips: FoldClips, index: pl.DataFrame) -> FoldClips:
    """Return the fold with the real counterpart of each training fake, which the augmentation ``wavelet_bands`` needs.

    The counterpart of a fake is a real of its group with the same number of frames and the same frame size. Fakes have
    one if every frame was made from a frame of a real, as in a face swap. Augmented copies have none, since they show
    other parts of the picture than their reals.

    Args:
        clips: the fold.
        index: an INDEX table.

    Raises:
        DataError: no training fake has a counterpart in the training part.
    """
    alike = ["group_id", "num_frames", "width", "height"]
    trained = {row.video_id for row in clips.train}
    videos = index.select("video_id", "label", *alike).filter(pl.col("video_id").is_in(trained))
    reals = videos.filter(label="real").group_by(alike).agg(real=pl.col("video_id").min())
    pairs = videos.filter(label="fake").join(reals, on=alike)
    real_of = dict(pairs.select("video_id", "real").iter_rows())
    if not real_of:
        raise DataError(
            "wavelet_bands: no training fake has a real of its group with as many frames of the same size. It needs "
            "fakes made frame by frame from reals, such as swaps or reconstructions. Leave it out for other corpora."
        )
    own = (real_of.get(row.video_id, "") if row.label and not row.augmentation_index else "" for row in clips.train)
    train = tuple(replace(row, counterpart=real) for row, real in zip(clips.train, own, strict=True))
    return replace(clips, train=train)


def control_clips(
    rows: TrainingRows, index: Callable[[], pl.DataFrame], source: ClipSource, config: RunConfig, clips: FoldClips
) -> dict[str, FoldClips]:
    """Return the clips of each control of a fold, by the control's name (``tasks.CONTROL_TRAININGS``).

    A control is the same training on other labels: shuffled labels, or the source of a real video instead of its class.
    A control is absent if it is turned off, or if the groups are too few for it. The network trained on all groups has
    no controls.

    Args:
        rows: the rows that the model is trained on.
        index: function that returns INDEX. Only the control on sources of reals calls it.
        source: the clips.
        config: which controls are wanted.
        clips: the parts that the model is trained, validated and tested on.
    """
    fold = clips.fold
    controls = dict[str, FoldClips]()
    if fold is None:
        return controls
    for name, is_wanted in (
        (SHUFFLED_LABELS, config.shuffled_label_control),
        (REAL_SOURCES, config.real_source_control),
    ):
        if not is_wanted:
            continue
        try:
            if name == SHUFFLED_LABELS:
                relabelled = rows.shuffled(stable_seed("control", config.seed))
                used = config
            else:
                relabelled = of_two_sources(rows, index(), config, fold, clips.missing)
                used = config.model_copy(update={"self_blended": 0})  # label 1 is a source of reals here
            controls[name] = fold_clips(relabelled, source, used, fold)
        except DataError as error:
            _logger.info("fold %d has no control on %s: %s", fold, CONTROL_TRAININGS[name], error)
    return controls


def fold_clips(rows: TrainingRows, source: Any, config: RunConfig, fold: int | None) -> FoldClips:
    """Split ``rows`` into the parts of ``fold``, and check that ``source`` has their clips.

    Videos without an original clip are left out and listed in ``missing``.

    Raises:
        DataError: too many videos have no clip, an augmented copy is missing, the fold does not exist, or a part has
            one class only.
    """
    without_clip = (video_id for video_id in rows.folds["video_id"] if not source.has(video_id, 0))
    missing = tuple(sorted(without_clip))
    if len(missing) > config.max_rejected_share * rows.folds.height:
        raise DataError(
            f"{len(missing)} of {rows.folds.height} videos have no clip in {config.cache_dir!r}, or lack forensic "
            f"features that the model takes (allowed share: {config.max_rejected_share:g}), the first: {missing[0]}. "
            "Run 03_augmentation and 03b_forensic_features with these parameters and look at what they report."
        )
    if missing:
        names = ", ".join(missing)
        _logger.warning("%d videos have no clip or no forensic features, and take no part: %s", len(missing), names)
    share, seed = config.inner_validation_share, config.seed
    split = rows.split(fold, inner_validation_share=share, seed=seed, without=missing)
    rows_of_train, rows_of_validation = split.train, split.validation
    if config.cross_fits:
        rows_of_train = rows_of_validation = pl.concat([split.train, split.validation])
    train = rows_to_fit(rows_of_train, source, config)
    validation = clip_rows(rows_of_validation)
    test = clip_rows(split.test)
    gone = [row.clip_id for row in train if not source.has(row.video_id, row.augmentation_index)]
    if gone:
        raise DataError(
            f"{len(gone)} clips are not in the clip store, the first: {gone[0]}. Run 03_augmentation again with the "
            "same decode and augmentation parameters."
        )
    digest = hashlib.sha256(source.settings_hash.encode())
    for part, part_rows in (("train", train), ("validation", validation), ("test", test)):
        lines = "".join(f"{part}\x1f{row.clip_id}\x1f{row.label}\n" for row in part_rows)
        digest.update(lines.encode("utf-8", "surrogateescape"))
    fingerprint = digest.hexdigest()
    sealed = SealedFold(f"outer fold {fold}", test, fingerprint)
    return FoldClips(fold, train, validation, sealed, missing, fingerprint)


def inner_folds(rows: Sequence[ClipRow], most: int, seed: int) -> IntArray:
    """Divide N training rows into at most ``most`` inner folds, and return the fold number of each row, int64 (N,).

    All rows of a group are in one fold. If a label is in fewer than ``most`` groups, there are only that many folds.
    """
    videos = _videos_of(rows)
    num_folds = min(most, most_folds(videos))
    folds = make_folds(videos, num_folds, stable_seed("inner folds", seed) % 2**32)
    fold_of = dict(folds.select("video_id", "fold").iter_rows())
    return np.array([fold_of[row.video_id] for row in rows])


def inner_parts(clips: FoldClips, seed: int) -> list[FoldClips]:
    """Divide the training groups of a fold into two halves, and return the two ``FoldClips`` for cross-fitting.

    Each result has the rows of one half as ``train``, and the originals of the other half as ``validation``. A network
    that is trained on ``train`` gives held-out logits of ``validation``. The choices of such a network cannot open the
    test part of a result.
    """
    part_of = inner_folds(clips.train, INNER_PARTS, seed)
    rows = list(zip(clips.train, part_of, strict=True))
    parts = list[FoldClips]()
    for part in range(INNER_PARTS):
        train = tuple(row for row, its_part in rows if its_part != part)
        held_out = tuple(row for row, its_part in rows if its_part == part and not row.augmentation_index)
        fingerprint = sha256_of_json([clips.fingerprint, part])
        parts.append(replace(clips, train=train, validation=held_out, fingerprint=fingerprint))
    return parts


def _videos_of(rows: Sequence[ClipRow]) -> pl.DataFrame:
    """Return a table ``video_id group_id label`` with one row per video of ``rows``; pseudo-fakes are left out."""
    videos = [(row.video_id, row.group_id, LABELS[row.label]) for row in rows if not row.is_pseudo_fake]
    return pl.DataFrame(videos, schema=["video_id", "group_id", "label"], orient="row").unique(maintain_order=True)
