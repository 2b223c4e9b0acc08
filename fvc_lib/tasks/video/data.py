"""Stored clips as samples: training sees originals and augmented copies, all else originals only."""

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fvc_lib.corpus.protocols.protocol import TrainingRows, all_rows, training_rows
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, Sample, Stream
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, command_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, FOLDS, INDEX, LABELS, PROTOCOL, read_table
from fvc_lib.services.tasks import CONTROL_TRAININGS, KFOLD, REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.mixing import MixSettings, draw_mix, mixed_pixels, rows_of_classes
from fvc_lib.tasks.video.features import FeatureSource
from fvc_lib.tasks.video.real_sources import of_two_sources
from fvc_lib.tasks.video.selection import RecordedSelection
from fvc_lib.video.clips.clip_file import Pixels, Shape
from fvc_lib.video.clips.shards import ClipShards, shards_folder
from fvc_lib.video.clips.store import ClipStore, note_use

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClipRow:
    """A video's clips: the video, which copy of it (0 is the original), and what it is (0 real, 1 fake)."""

    video_id: str
    augmentation_index: int
    label: int

    @property
    def clip_id(self) -> str:
        """The name used in messages."""
        return f"{self.video_id}#{self.augmentation_index}"


class ClipSource(Protocol):
    """Where clips are read from: a ``ClipStore`` or ``ClipShards``."""

    @property
    def settings_hash(self) -> str:
        """What decides every clip besides the video's content."""
        ...

    def has(self, video_id: str, augmentation_index: int, /) -> bool:
        """Whether the clip is there; 0 is the original."""
        ...

    @property
    def shape(self) -> Shape:
        """(N T, 3, S, S): of a video's N clips, one after the other."""
        ...

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0, /) -> None:
        """Fill ``frames``, uint8 (t, 3, S, S), with those from number ``first`` on."""
        ...


def stream_of(source: ClipSource, clips: Sequence[tuple[str, int]], samples_of_each: int = 1) -> Stream | None:
    """How samples of ``clips`` (video id and augmentation index), so many of each, lie in a source read as a stream.

    None where it is not: then they may come in any order.
    """
    if not isinstance(source, ClipShards) or not source.buffer:
        return None
    found = np.array([source.place_of(*clip) for clip in clips], np.int64).reshape(-1, 2).repeat(samples_of_each, 0)
    return Stream(found[:, 0], found[:, 1], source.buffer)


def begin_pass(source: ClipSource) -> None:
    """From here on the clips of ``source`` are read once more."""
    if isinstance(source, ClipShards):
        source.begin_pass()


class ClipDataset:
    """Samples with ``frames`` uint8 (T, 3, S, S) and ``label`` float32 () from stored clips.

    Of a ``FeatureSource`` they have ``features`` float32 (T', F) in place of frames. With ``mixing`` they also have
    ``target`` float32 (), the share of fake in the mixture, and differ from epoch to epoch; ``label`` stays that of
    the clip itself.

    Of a row with several clips all are samples, one after the other; with ``draws`` one is, another in every epoch.
    The seed, the row and the epoch decide what is drawn: neither the order nor the process nor how a batch is split.

    Args:
        clips: N, of each row.
        draws: whether one of them is drawn.
        mixing: of training; None: every clip as it is.
        seed: with the clip and the epoch decides what is drawn.
        epoch: whose samples these are.
    """

    def __init__(
        self,
        source: ClipSource,
        rows: Sequence[ClipRow],
        *,
        clips: int = 1,
        draws: bool = False,
        mixing: MixSettings | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        self._source = source
        self.rows = tuple(rows)
        self._clips, self._per_row = clips, 1 if draws else clips
        self._mixing, self._seed, self._epoch = mixing, seed, epoch
        labels = np.array([row.label for row in self.rows])
        self._rows_of_class = rows_of_classes(labels) if mixing and mixing.balanced else None

    @property
    def classes(self) -> tuple[int, ...]:
        """The label of every sample."""
        return tuple(row.label for row in self.rows for _ in range(self._per_row))

    @property
    def stream(self) -> Stream | None:
        """How the samples lie in shards that are read as a stream; None where clips are read in any order."""
        return stream_of(self._source, [(row.video_id, row.augmentation_index) for row in self.rows], self._per_row)

    def __len__(self) -> int:
        return len(self.rows) * self._per_row

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch, each clip read straight into its place."""
        chosen = [self._chosen(index) for index in indices]
        labels = torch.tensor([float(row.label) for row, _ in chosen])
        ids = tuple(f"{row.clip_id}@{clip}" if clip else row.clip_id for row, clip in chosen)
        if isinstance(self._source, FeatureSource):
            features = self._source.features([(row.video_id, row.augmentation_index, clip) for row, clip in chosen])
            return Batch(ids, {"features": features, "label": labels})
        frames = np.empty((len(chosen), *self._shape), np.uint8)
        for (row, clip), place in zip(chosen, frames, strict=True):
            self._load(row, clip, place)
        tensors = {"frames": torch.from_numpy(frames), "label": labels}
        if self._mixing is not None:
            tensors["target"] = labels.clone()
            for number, (row, _) in enumerate(chosen):
                self._mix(tensors, number, row, self._mixing)
        return Batch(ids, tensors)

    def at_epoch(self, epoch: int) -> "ClipDataset":
        """The same clips as they are drawn and mixed in ``epoch`` (0-based)."""
        begin_pass(self._source)
        draws = self._per_row < self._clips
        if self._mixing is None and not draws:
            return self
        return ClipDataset(
            self._source,
            self.rows,
            clips=self._clips,
            draws=draws,
            mixing=self._mixing,
            seed=self._seed,
            epoch=epoch,
        )

    @property
    def _shape(self) -> Shape:
        """(T, 3, S, S) of one clip."""
        num_frames, *rest = self._source.shape
        return (num_frames // self._clips, rest[0], rest[1], rest[2])

    def _chosen(self, index: int) -> tuple[ClipRow, int]:
        """The row of a sample, and which of its clips."""
        if self._per_row == self._clips:
            return self.rows[index // self._clips], index % self._clips
        row = self.rows[index]
        generator = np.random.default_rng(stable_seed("clip of video", self._seed, row.clip_id, self._epoch))
        return row, int(generator.integers(self._clips))

    def _load(self, row: ClipRow, clip: int, frames: Pixels) -> None:
        self._source.load(row.video_id, row.augmentation_index, frames, clip * len(frames))

    def _mix(self, tensors: dict[str, Tensor], number: int, row: ClipRow, settings: MixSettings) -> None:
        generator = np.random.default_rng(stable_seed("clip mix", self._seed, row.clip_id, self._epoch))
        mix = draw_mix(settings, len(self.rows), self._source.shape[-1], generator, self._rows_of_class)
        if mix is None:
            return
        frames = np.empty(self._shape, np.uint8)
        partner, clip = self._chosen(mix.partner)
        self._load(partner, clip, frames)
        tensors["frames"][number] = mixed_pixels(tensors["frames"][number], torch.from_numpy(frames), mix)
        tensors["target"][number] = mix.share * row.label + (1 - mix.share) * partner.label


def clip_rows(videos: pl.DataFrame, augmentations_per_video: int = 0) -> tuple[ClipRow, ...]:
    """Rows for ``videos`` (columns ``video_id``, ``label``): originals, and so many augmented copies of each."""
    pairs = videos.sort("video_id").select("video_id", "label").iter_rows()
    return tuple(
        ClipRow(video_id, index, LABELS.index(label))
        for video_id, label in pairs
        for index in range(augmentations_per_video + 1)
    )


def without_missing_originals(videos: pl.DataFrame, source: ClipSource) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """``videos`` that have an original clip, and the ids of those that do not."""
    present = pl.Series([source.has(video_id, 0) for video_id in videos["video_id"]], dtype=pl.Boolean)
    return videos.filter(present), tuple(videos.filter(~present)["video_id"].sort())


def require_clips(source: ClipSource, rows: Iterable[ClipRow]) -> None:
    """Check before training that every clip is there; else raise ``DataError``, which names up to ten."""
    missing = [row.clip_id for row in rows if not source.has(row.video_id, row.augmentation_index)]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise DataError(
            f"{len(missing)} clips are not in the clip store: {', '.join(missing[:10])}{more}. Run 03_augmentation "
            "again with the same decode and augmentation parameters."
        )


def class_weights(rows: Sequence[ClipRow]) -> tuple[float, float]:
    """Loss weights (real, fake) that give both classes equal influence and average to one over ``rows``.

    ``DataError`` where only one class is there, so that nothing can be learned.
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


# The outer fold under seal: whoever looks at it before the selection is on record is stopped and named.


@dataclass(frozen=True)
class OuterFold:
    """What was under the seal: the test clips with their labels, in the order of the video ids, and their groups."""

    rows: tuple[ClipRow, ...]
    group_of: Mapping[str, str]


class SealedFold:
    """The videos that a fold is tested on; before it is opened only how many they are can be known.

    Neither their labels nor their ids can be had, so that no network can score them either. ``open`` wants the recorded
    selection of the very same fold, by the fingerprint ``clips``, and does it once. Everything else that would show
    them, copying and pickling included, raises ``LeakageError`` with the place in the code that tried.
    """

    __slots__ = ("_clips", "_contents", "_name", "_opened_by")

    def __init__(self, name: str, rows: Sequence[ClipRow], group_of: Mapping[str, str], clips: str) -> None:
        self._name = name
        self._contents = OuterFold(tuple(rows), dict(group_of))
        self._clips = clips
        self._opened_by = ""

    def open(self, selection: RecordedSelection) -> OuterFold:
        """Break the seal; ``LeakageError`` for an unrecorded selection or another fold's, or a second time."""
        if not isinstance(selection, RecordedSelection):
            self._refuse("the labels, with a selection that is not recorded,")
        if selection.clips != self._clips:
            self._refuse("the labels, with the selection of another fold,")
        if self._opened_by:
            self._refuse(f"the labels a second time (the first was {self._opened_by})")
        self._opened_by = _place(2)
        return self._contents

    @property
    def rows(self) -> tuple[ClipRow, ...]:
        """Refused: ``open`` gives them."""
        self._refuse("the labels")

    @property
    def group_of(self) -> Mapping[str, str]:
        """Refused: ``open`` gives them."""
        self._refuse("the groups")

    def __len__(self) -> int:
        return len(self._contents.rows)

    def __iter__(self) -> Iterator[ClipRow]:
        self._refuse("the labels")

    def __getitem__(self, index: int) -> ClipRow:
        self._refuse("a label")

    def __reduce__(self) -> NoReturn:
        self._refuse("a copy")

    def __repr__(self) -> str:
        return f"<sealed {self._name}: {len(self)} videos>"

    def _refuse(self, what: str) -> NoReturn:
        """Raise, naming who asked for ``what``."""
        raise LeakageError(
            f"{self._name}: {_place(3)} asked for {what} of {len(self)} videos that test it. Epoch, threshold and "
            "temperature come from the inner validation part; record them first (selection.record_selection), then "
            "open the fold with the record, once."
        )


def _place(depth: int) -> str:
    """The function that called, so many calls up from here, as ``module.function (line n)``."""
    frame = sys._getframe(depth)
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname} (line {frame.f_lineno})"


# Which clips play which part in one outer fold. From here on the outer fold's labels are under seal.


@dataclass(frozen=True)
class FoldClips:
    """One outer fold as clips, each part in the order of the video ids.

    Training has originals and augmented copies; inner validation, which chooses epoch, temperature and threshold, and
    the sealed test part have originals. ``missing`` are ids of videos, in any part, that have no clip; ``fingerprint``
    is over all of it and the clips' settings; ``groups`` are those of the training videos, ``validation_groups`` of the
    validation videos, by video. Of the network of all groups ``fold`` is None and the test part empty.
    """

    fold: int | None
    train: tuple[ClipRow, ...]
    validation: tuple[ClipRow, ...]
    validation_groups: Mapping[str, str]
    test: SealedFold
    missing: tuple[str, ...]
    fingerprint: str
    groups: Mapping[str, str]

    @property
    def num_validation_groups(self) -> int:
        """How many groups chose."""
        return len(set(self.validation_groups.values()))


def open_clips(config: RunConfig, made: pl.DataFrame) -> ClipSource:
    """What ``config`` trains from: the shared store, or the shards of the clips that ``made`` (AUGMENTED) lists, read
    in any order or as a stream.

    Shards are read and checked as a whole here, before anything depends on them.

    Raises:
        DataError: the shards are missing or damaged.
    """
    store = ClipStore.of(config)
    if config.clip_source == "store":
        store.note_use()
        return store
    shards = ClipShards(shards_folder(store, made), config.shuffle_buffer)
    if shards.settings_hash != store.settings_hash or shards.shape != store.shape:
        raise DataError(f"shards in {str(shards.folder)!r}: made with other settings. Run 03_augmentation again.")
    shards.verify()
    note_use(shards.folder, {})
    return shards


def made_clips(paths: RunPaths) -> list[tuple[str, int]]:
    """Video id and augmentation index of every clip that was made, sorted; no labels."""
    made = read_table(paths.augmented_metadata, AUGMENTED).select("video_id", "augmentation_index")
    return sorted(set(made.iter_rows()))


def rows_to_train_on(paths: RunPaths, config: RunConfig, fold: int | None) -> TrainingRows:
    """What training ``fold`` of a run is split from, with the labels it is trained on, which may be shuffled.

    None is the network of all groups: whoever takes part in any training.

    Of protocol ``kfold`` the run's folds as they are, also of runs that have no table of the protocol yet.
    """
    if config.protocol == KFOLD:
        rows = TrainingRows(read_table(paths.folds, FOLDS))
    else:
        table = read_table(paths.protocol, PROTOCOL)
        rows = all_rows(table) if fold is None else training_rows(table, fold)
    # By group over all that is trained on or tested, within each outer fold, so that what another fold's groups are
    # called says nothing of this one's labels; the same for every fold of a run with one set of folds.
    return rows.shuffled(stable_seed("shuffle_labels", config.seed)) if config.shuffle_labels else rows


def read_fold(
    paths: RunPaths, config: RunConfig, fold: int | None, *, source: Any = None
) -> tuple[Any, FoldClips, dict[str, FoldClips]]:
    """One outer fold of a run: where its clips are read from, the fold, and the fold of each control by name.

    ``source`` takes the place of the run's clips: it says with ``has`` which videos take part.

    The network of all groups (None) has no controls. A control (``tasks.CONTROL_TRAININGS``) is not there where it is
    turned off, where a few mixed groups cannot carry
    shuffled labels, or where there are no two sources of reals: no fault of the data.

    Raises:
        DataError: as ``open_clips`` and ``fold_clips``, or a clip that was made is gone since.
    """
    rows, known = rows_to_train_on(paths, config, fold), set[str]()
    if source is None:
        made = read_table(paths.augmented_metadata, AUGMENTED)
        known = set(made["video_id"])
        try:
            source = open_clips(config, made)
        except DataError as error:
            raise DataError(f"{error} That is: {command_text('--from', '03', '--resume', paths.root)}") from error
    clips = fold_clips(rows, source, config, fold)
    gone = [video_id for video_id in clips.missing if video_id in known]
    if gone:  # folds would train on different videos
        raise DataError(
            f"clips of {len(gone)} videos were made and are gone from the clip store, the first: "
            f"{', '.join(gone[:5])}. Make them again: {command_text('--from', '03', '--resume', paths.root)}"
        )
    wanted: dict[str, Callable[[], TrainingRows]] = {}
    if fold is None:
        return source, clips, {}
    if config.shuffled_label_control:
        wanted[SHUFFLED_LABELS] = lambda: rows.shuffled(stable_seed("control", config.seed))
    if config.real_source_control:
        wanted[REAL_SOURCES] = lambda: of_two_sources(rows, read_table(paths.index, INDEX), config, fold, clips.missing)
    controls = {}
    for name, relabelled in wanted.items():
        try:
            controls[name] = fold_clips(relabelled(), source, config, fold)
        except DataError as error:
            _logger.warning("fold %d has no control on %s: %s", fold, CONTROL_TRAININGS[name], error)
    return source, clips, controls


def fold_clips(rows: TrainingRows, source: ClipSource, config: RunConfig, fold: int | None) -> FoldClips:
    """Split ``rows`` for ``fold`` and look up the clips in ``source``.

    A video whose original clip could not be made takes no part and is named; an augmented copy that is missing while
    its original is there means that the stage before did not finish.

    Raises:
        DataError: too many videos without a clip, unfinished augmentation, no such fold, or one class only.
    """
    _, missing = without_missing_originals(rows.folds, source)
    if len(missing) > config.max_rejected_share * rows.folds.height:
        raise DataError(
            f"{len(missing)} of {rows.folds.height} videos have no clip in {config.cache_dir!r} (allowed share: "
            f"{config.max_rejected_share:g}), the first: {', '.join(missing[:5])}. Run 03_augmentation with these "
            "parameters and look at what it reports."
        )
    if missing:
        _logger.warning("%d videos have no clip and take no part: %s", len(missing), ", ".join(missing))
    share, seed = config.inner_validation_share, config.seed
    split = rows.split(fold, inner_validation_share=share, seed=seed, without=missing)
    train = clip_rows(split.train, config.augmentations_per_video)
    validation, test = clip_rows(split.validation), clip_rows(split.test)
    require_clips(source, train)
    fingerprint = rows_fingerprint(source, [("train", train), ("validation", validation), ("test", test)])
    group_of = dict(split.test.select("video_id", "group_id").iter_rows())
    return FoldClips(
        fold=fold,
        train=train,
        validation=validation,
        validation_groups=dict(split.validation.select("video_id", "group_id").iter_rows()),
        test=SealedFold(f"outer fold {fold}", test, group_of, fingerprint),
        missing=missing,
        fingerprint=fingerprint,
        groups=dict(split.train.select("video_id", "group_id").iter_rows()),
    )
