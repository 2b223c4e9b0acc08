"""Find new videos to which the results on a run's videos do not apply.

These are videos with codecs, sizes, lengths or rates outside the range of the run's videos, clips that show nothing,
copies of the run's videos, and videos with unlike features.

A network's features are the inputs of its head. A new video is compared with each fold's test videos, which the fold's
network had not seen. Every dimension is scaled to mean 0 and standard deviation 1. The distance of a video is the mean
Euclidean distance to its five nearest neighbours; a test video has neighbours of other groups only (as in Sun et al.,
"Out-of-Distribution Detection with Deep Nearest Neighbors", 2022, but over ranks). The quantile of a new video is the
share of the run's videos with at least its distance. It is that of a cross-conformal test (``metrics/abstention``): of
videos from the same source as the run's, at most about a share p has a quantile of p or less. Videos of one group are
not independent, so every group has one vote, and with few groups no video can be called unlike them.

For the network of all groups, new videos are compared with the videos that chose its epoch. It was not trained on them.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from pydantic import Field
from torch.nn import functional as F

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links, nearly_alike
from fvc_lib.corpus.copies.perceptual_hash import parse_hashes
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoint_files import load_weights, write_weights_with_digest
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.stage_logs import Tell, silent
from fvc_lib.tasks.predicting import Strict
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, Features, Floats, Networks

_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Range = Annotated[list[_Number], Field(min_length=2, max_length=2)]
_logger = logging.getLogger(__name__)

# A number by which a video may be unfamiliar: its name for people, and its unit.
_WATCHED = {
    "shorter_side_pixels": ("shorter side", "pixels"),
    "longer_side_pixels": ("longer side", "pixels"),
    "duration_seconds": ("length", "seconds"),
    "frames_per_second": ("frame rate", "frames a second"),
    "bits_per_second": ("bit rate", "bits a second"),
}
_SLACK = 0.1
FAMILIARITY = (
    "Unfamiliar is a codec that no video of the run has, and a side, length, frame rate or bit rate more than a tenth "
    "below the 1st or above the 99th percentile of the run's videos."
)


class TrainingRanges(Strict):
    """The codecs of a run's videos with their counts, and the ranges of their sizes, lengths and rates.

    A range is the 1st and the 99th percentile; null if the number is known for no video.
    """

    codec: dict[str, _Count]
    shorter_side_pixels: _Range | None
    longer_side_pixels: _Range | None
    duration_seconds: _Range | None
    frames_per_second: _Range | None
    bits_per_second: _Range | None
    share_unfamiliar: Annotated[float, Field(ge=0, le=1)] = 0.0  # of the run's videos, outside these ranges

    def reasons(self, facts: Mapping[str, Any]) -> list[str]:
        """Return one sentence on how a video is outside the ranges; an empty list if it is inside.

        ``facts`` are the values of the video's probe, named as in INDEX. Unknown values are not outside.
        """
        odd = list[str]()
        if facts["codec"] not in self.codec:
            odd.append(f"codec {facts['codec']} (the run's videos: {', '.join(sorted(self.codec))})")
        shorter, longer = sorted((facts["width"], facts["height"]))
        values = {**facts, "shorter_side_pixels": shorter, "longer_side_pixels": longer}
        for column, (name, unit) in _WATCHED.items():
            value, known = values[column], getattr(self, column)
            if value is not None and known and not known[0] * (1 - _SLACK) <= value <= known[1] * (1 + _SLACK):
                odd.append(f"{name} {value:,.4g} {unit} (the run's videos: {known[0]:,.4g} to {known[1]:,.4g})")
        return [f"Unfamiliar: {'; '.join(odd)}."] if odd else []


def training_ranges(index: pl.DataFrame) -> TrainingRanges:
    """Return the codecs and ranges of the videos in ``index`` (INDEX); percentiles are not interpolated."""
    videos = index.with_columns(
        shorter_side_pixels=pl.min_horizontal("width", "height"),
        longer_side_pixels=pl.max_horizontal("width", "height"),
    ).select(pl.col(list(_WATCHED)).cast(pl.Float64))
    low, high = videos.quantile(0.01, "lower").row(0), videos.quantile(0.99, "higher").row(0)
    found: dict[str, Any] = {}
    for name, *pair in zip(_WATCHED, low, high, strict=True):
        found[name] = None if None in pair else pair
    ranges = TrainingRanges(codec=dict(sorted(index["codec"].value_counts().rows())), **found)
    outside = sum(bool(ranges.reasons(video)) for video in index.iter_rows(named=True))
    return ranges.model_copy(update={"share_unfamiliar": outside / max(1, index.height)})


# --- Nothing to judge

_GRID = 16  # cells per side of a frame that are compared
_BLACK = 20.0  # grey levels of 255: a black frame is darker than this on average, and
_FLAT = 8.0  # no cell of it is further from the average
_FROZEN = 1.0  # grey levels: every cell of a still changes less; a coarsely coded still may change more and is missed


def is_black(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether all frames of ``clips``, uint8 (N, T, 3, H, W), are black."""
    cells = _cells(clips)
    means = cells.mean((1, 2), keepdims=True)
    return bool(means.max() < _BLACK and np.abs(cells - means).max() < _FLAT)


def is_frozen(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether no cell of the picture changes over all frames of ``clips``, uint8 (N, T, 3, H, W)."""
    return bool(np.ptp(_cells(clips), axis=0).max() < _FROZEN)


def _cells(clips: npt.NDArray[np.uint8]) -> Floats:
    """Return the mean luma (BT.601) of each cell of a grid, float64 (N * T, ``_GRID``, ``_GRID``), 0 to 255."""
    luma = np.tensordot(clips.reshape(-1, *clips.shape[2:]), np.array([0.299, 0.587, 0.114]), (1, 0))
    return np.asarray(F.adaptive_avg_pool2d(torch.from_numpy(luma), _GRID).numpy())


# --- Copies


class KnownFootage:
    """The perceptual hashes of the run's videos (None if missing), to find copies of them among new videos."""

    def __init__(self, hashes: Sequence[str | None], max_bits: int) -> None:
        self._max_bits, self._hashes = max_bits, hashes
        self._places = np.array([place for place, text in enumerate(hashes) if text is not None], np.int64)
        self._table = parse_hashes([text for text in hashes if text is not None and max_bits])[0]

    def copied(self, new: str | None) -> list[int]:
        """Return the indices into ``hashes`` of the videos that show the same footage as a video with hash ``new``.

        Both a real and a fake made from it may be among them. Empty if ``new`` is None or ``max_bits`` is 0.
        """
        if new is None or not self._table.size:
            return []
        one, near = parse_hashes([new])[0][0], self._places
        if len(one) == self._table.shape[1]:
            near = near[nearly_alike(self._table, one, self._max_bits)]
        return [place for place in near.tolist() if near_duplicate_links([self._hashes[place], new], self._max_bits)]


# --- Features

UNFAMILIAR_AT = 0.02
_NEAREST = 5
MOST_VIDEOS = 1000
UNKNOWN = (
    "Whether features are like those of the run's videos is not known: that needs a network and the clips that the run "
    "stored, or a bundle that was exported while they were there."
)


@dataclass(frozen=True)
class FoldReference:
    """The features of one fold's test videos, with which new videos are compared.

    Attributes:
        features: float32 (N, F), computed by the network of the fold.
        groups: int64 (N,), the number of each video's group; a group has the same number in all folds.
    """

    features: Features
    groups: npt.NDArray[np.int64]

    @cached_property
    def own(self) -> Floats:
        """The distance of each video to videos of other groups, float64 (N,); infinite if there is no other group."""
        return self.distances(self.features, self.groups[:, None] == self.groups)

    def distances(self, features: Features, ignored: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Return the mean distance of each of M videos to its nearest neighbours here, float64 (M,).

        Args:
            features: float32 (M, F).
            ignored: bool (M, N), True for neighbours that do not count; None: all count.
        """
        values = self.features.astype(np.float64)
        deviation = values.std(0)
        deviation[deviation == 0] = 1.0
        new, known = (torch.from_numpy((rows - values.mean(0)) / deviation) for rows in (features, values))
        distances = torch.cdist(new, known).numpy()
        if ignored is not None:
            distances[ignored] = np.inf
        nearest = np.ma.masked_invalid(np.sort(distances, axis=1)[:, :_NEAREST])
        return np.asarray(nearest.mean(1).filled(np.inf))


class FeatureDistance:
    """How far a new video's features are from those of the run's videos, over all folds.

    Attributes:
        folds: references by the fold's number.
        num_groups: number of groups in all folds together.
    """

    def __init__(self, folds: Mapping[int, FoldReference]) -> None:
        self.folds = dict(folds)
        groups = np.concatenate([of.groups for of in folds.values()])
        self.num_groups = len(np.unique(groups))
        self._votes = {fold: 1 / (groups == of.groups[:, None]).sum(1) for fold, of in folds.items()}

    def quantiles(self, features: Mapping[int, Features]) -> Floats:
        """Return the quantile of each of M new videos, float64 (M,) in (0, 1].

        It is the share of the run's groups that are at least as far from the others, with the new video counted as one
        more group. A group's vote is divided equally among its videos.

        Args:
            features: float32 (M, F) of the same M videos for each fold, by the fold's network.

        Raises:
            DataError: the features are not of these networks.
        """
        votes = 1.0
        for fold, of in self.folds.items():
            if fold not in features or features[fold].shape[1] != of.features.shape[1]:
                raise DataError("features: the stored ones are another network's. Export the bundle again.")
            votes += ((of.own >= of.distances(features[fold])[:, None]) * self._votes[fold]).sum(1)
        return np.asarray(votes / (1 + self.num_groups))

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the stored features and groups."""
        return sha256_of_json({name: sha256(of.tobytes()).hexdigest() for name, of in sorted(self.arrays().items())})

    def reasons(self, quantile: float) -> tuple[str, ...]:
        """Return a sentence on a video whose ``quantile`` is at most ``UNFAMILIAR_AT``; else nothing."""
        if quantile > UNFAMILIAR_AT * (1 + 1e-9):
            return ()
        share = f"{100 * quantile:.2g} % of the run's groups are as far from the others or further"
        return (f"Unfamiliar: its features are unlike those of the run's videos: {share} (this video counted).",)

    def limit(self) -> str:
        """Return a sentence on which videos count as unfamiliar."""
        if 1 / (1 + self.num_groups) > UNFAMILIAR_AT:
            needed = round(1 / UNFAMILIAR_AT) - 1
            return f"Features are not compared: {self.num_groups} groups are too few, at least {needed} are needed."
        return (
            f"Unfamiliar, too, is a video whose features are further out than those of all but "
            f"{100 * UNFAMILIAR_AT:g} % of the run's {self.num_groups:,} groups are. An unseen generator need not show "
            "there."
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store in a file: ``fold_K`` (features) and ``groups_K`` for each fold K."""
        named = {f"fold_{fold}": of.features for fold, of in self.folds.items()}
        return named | {f"groups_{fold}": of.groups for fold, of in self.folds.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], folds: Collection[int]) -> Self:
        """Return the references stored in ``arrays`` (see the method ``arrays``).

        Raises:
            ValueError: ``arrays`` are not exactly the arrays of ``folds``, or have a wrong shape, dtype or value.
        """
        if set(arrays) != {f"{name}_{fold}" for fold in folds for name in ("fold", "groups")}:
            raise ValueError(f"got the arrays {', '.join(sorted(arrays)[:6])}, wanted two of each network")
        references = {fold: FoldReference(arrays[f"fold_{fold}"], arrays[f"groups_{fold}"]) for fold in sorted(folds)}
        for fold, of in references.items():
            shape = of.features.shape
            fits = len(shape) == 2 and 0 < len(of.features) <= MOST_VIDEOS and of.groups.shape == shape[:1]
            if not fits or of.features.dtype != np.float32 or not np.isfinite(of.features).all():
                raise ValueError(f"fold {fold}: wanted finite float32 (N, F) and groups (N,), N at most {MOST_VIDEOS}")
        return cls(references)


def distance_of(networks: Networks, known: KnownVideos, tell: Tell = silent) -> FeatureDistance | None:
    """Return the features of the run's tested videos, computed from the stored clips or read from the cache.

    At most ``MOST_VIDEOS`` videos are taken: whole groups, in an arbitrary but fixed order. Returns None if no video is
    tested, a clip is missing, the model sees no frames, or the head does not get one row per clip.

    Args:
        networks: the networks of the run.
        known: the run's videos.
        tell: called with the progress.

    Raises:
        DataError: a stored clip is damaged.
    """
    tested = known.tested
    if FINAL in networks.judges:
        tested = tested.drop_nulls("final_logit").with_columns(fold=pl.lit(FINAL, pl.Int64))
    sizes = dict(tested.group_by("group_id").len().iter_rows())
    order = sorted(sizes, key=sha256_of_json)
    total = accumulate(sizes[group] for group in order)
    taken = [group for group, count in zip(order, total, strict=True) if count <= MOST_VIDEOS]
    tested = tested.filter(pl.col("group_id").is_in(taken)).select("video_id", "group_id", "fold")
    tested = tested.sort("fold", "video_id")
    if not tested.height or not networks.sees_frames:
        return None
    key = [tested.rows(), {fold: networks.folds[fold].weights for fold in networks.judges}, networks.store.decode_hash]
    name = f"{networks.name}_{sha256_of_json(key)[:16]}.safetensors"
    path = Path(networks.config.cache_dir) / "feature_distance" / name
    try:
        features = {int(fold): rows.numpy() for fold, rows in load_weights(path).items()}
    except FvcError:
        computed = _features_of_run(networks, tested, tell)
        if computed is None:
            return None
        features = computed
        try:
            write_weights_with_digest(path, {str(fold): torch.from_numpy(rows) for fold, rows in features.items()}, {})
        except OSError as error:  # a cache that cannot be written costs time, and no verdict
            _logger.warning("%s: %s; the features will be computed again", path, error)
    groups = tested["group_id"].rank("dense").cast(pl.Int64).to_numpy() - 1
    folds = tested["fold"].to_numpy()
    return FeatureDistance({fold: FoldReference(of, groups[folds == fold]) for fold, of in features.items()})


def _features_of_run(networks: Networks, tested: pl.DataFrame, tell: Tell) -> dict[int, Features] | None:
    """Return the features float32 (N, F) of the videos ``tested`` (``video_id group_id fold``) by fold.

    None if a clip is missing, or the head does not get one row per clip.
    """
    store, number = networks.store, networks.config.clips_per_video
    if not all(store.has(video_id, 0) for video_id in tested["video_id"]):
        return None
    _logger.info("features of %d of the run's videos are computed, once", tested.height)
    rows: dict[int, list[Features]] = {}
    for done, (video_id, _, fold) in enumerate(tested.iter_rows()):
        tell("looking at the run's own videos, once", done, tested.height)
        clips = np.array(store.read(video_id, 0))
        clips = clips.reshape(1, number, len(clips) // number, *clips.shape[1:])
        networks.logits(fold, clips, rows.setdefault(fold, []))
    if sum(map(len, rows.values())) < tested.height:
        return None
    return {fold: np.concatenate(of_fold) for fold, of_fold in rows.items()}
