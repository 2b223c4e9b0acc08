"""Find new videos to which the results on a run's videos do not apply.

The codec, size, length, rate or features of a video may be unlike those of the run's videos. A video may also be black
or a still picture, or a copy of a video of the run.

A network's features are the inputs of its head. A new video is compared with the test videos of every fold, which the
fold's network had not seen. Every dimension is scaled to mean 0 and standard deviation 1. The distance of a video is
the mean Euclidean distance to its five nearest neighbours; a test video has neighbours of other groups only (Sun et
al., "Out-of-Distribution Detection with Deep Nearest Neighbors", 2022).

The quantile of a new video is the share of the run's videos that are at least as distant. A small quantile means that
the video is unlike the run's. It is the p-value of a cross-conformal test (``metrics/abstention``): at most about 1% of
videos that are like the run's have a quantile of 0.01 or less, and so on. Videos of one group are not independent, so
every group has one vote. With few groups the smallest possible quantile is too large to call any video unlike the
run's.

For the network trained on all groups, new videos are compared with its validation part: the few videos that chose its
epoch, but did not train its weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from pydantic import Field
from torch.nn import functional as F

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links, nearly_alike
from fvc_lib.corpus.copies.perceptual_hash import parse_hashes
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.tasks.predicting import Strict
from fvc_lib.tasks.video.classical import EmbeddedClips
from fvc_lib.tasks.video.data import ClipRow
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, Features, Floats, Networks

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Range = Annotated[list[_Number], Field(min_length=2, max_length=2)]

_SLACK = 0.1
FAMILIARITY = (
    "Unfamiliar is a codec that no video of the run has, and a side, length, frame rate or bit rate more than a tenth "
    "below the 1st or above the 99th percentile of the run's videos."
)


class TrainingRanges(Strict):
    """The codecs of a run's videos, and the ranges of their sizes, lengths and rates.

    Attributes:
        codecs: the codecs, sorted.
        ranges: ``[low, high]``, the 1st and the 99th percentile, by the name of the number, such as ``frames per
            second``. A number that is unknown for all videos is left out.
        share_unfamiliar: the share of the run's own videos outside these codecs and ranges.
    """

    codecs: list[str]
    ranges: dict[str, _Range]
    share_unfamiliar: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the run's videos outside these ranges

    def reasons(self, facts: Mapping[str, Any]) -> list[str]:
        """Return a list with one sentence that names the values of a video outside the ranges; empty if there are none.

        An unknown value counts as inside. A range is widened by a tenth at both ends before the comparison.

        Args:
            facts: codec, size, length and rates of the video, named as in INDEX.
        """
        odd = list[str]()
        if facts["codec"] not in self.codecs:
            odd.append(f"codec {facts['codec']} (the run's videos: {', '.join(self.codecs)})")
        numbers = _numbers(facts)
        for name, (low, high) in self.ranges.items():
            value = numbers[name]
            least = low * (1 - _SLACK)
            most = high * (1 + _SLACK)
            if value is not None and not least <= value <= most:
                odd.append(f"{name} {value:,.4g} (the run's videos: {low:,.4g} to {high:,.4g})")
        return [f"Unfamiliar: {'; '.join(odd)}."] if odd else []


def _numbers(facts: Mapping[str, Any]) -> dict[str, float | None]:
    shorter, longer = sorted((facts["width"], facts["height"]))
    return {
        "shorter side in pixels": shorter,
        "longer side in pixels": longer,
        "length in seconds": facts["duration_seconds"],
        "frames per second": facts["frames_per_second"],
        "bits per second": facts["bits_per_second"],
    }


def training_ranges(index: pl.DataFrame) -> TrainingRanges:
    """Return the codecs of the videos in ``index`` (INDEX), and percentiles of their sizes, lengths and rates.

    Percentiles are not interpolated: they are values of a video.
    """
    videos = list(index.iter_rows(named=True))
    ranges = dict[str, list[float]]()
    rows = [_numbers(video) for video in videos]
    numbers = pl.DataFrame(rows, infer_schema_length=None).cast(pl.Float64)
    for name, values in numbers.to_dict().items():
        low, high = values.quantile(0.01, "lower"), values.quantile(0.99, "higher")
        if low is not None and high is not None:
            ranges[name] = [low, high]
    found = TrainingRanges(codecs=index["codec"].unique().sort().to_list(), ranges=ranges)
    outside = sum(bool(found.reasons(video)) for video in videos)
    return found.model_copy(update={"share_unfamiliar": outside / max(1, len(videos))})


# --- Nothing to judge

_GRID = 16  # a frame is compared as a grid with this many cells per side
# A frame is black if its mean luma (0 to 255) is below _BLACK and every cell is closer to that mean than _FLAT.
_BLACK = 20.0
_FLAT = 8.0
# A video is frozen if the luma of every cell changes by less than this. A coarsely coded still may change more.
_FROZEN = 1.0


def is_black(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether all frames of ``clips``, uint8 (N, T, 3, H, W), are dark and without contrast."""
    cells = _cells(clips)
    means = cells.mean((1, 2), keepdims=True)
    return bool(means.max() < _BLACK and np.abs(cells - means).max() < _FLAT)


def is_frozen(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether the picture is the same in all frames of ``clips``, uint8 (N, T, 3, H, W).

    The mean luma of each cell of a grid is compared; it may vary by less than ``_FROZEN``.
    """
    return bool(np.ptp(_cells(clips), axis=0).max() < _FROZEN)


def _cells(clips: npt.NDArray[np.uint8]) -> Floats:
    """Return the mean luma (BT.601, 0 to 255) of each cell of a grid over the picture, for every frame.

    The result is float64 (N * T, ``_GRID``, ``_GRID``).
    """
    frames = torch.from_numpy(np.ascontiguousarray(clips)).flatten(0, 1).float()
    colours = F.adaptive_avg_pool2d(frames, _GRID).double().numpy()
    return np.tensordot(colours, np.array([0.299, 0.587, 0.114]), (1, 0))


# --- Copies


def copies(hashes: Sequence[str | None], new: str | None, max_bits: int) -> list[int]:
    """Return the indices into ``hashes`` of the videos that show the same footage as a video with hash ``new``.

    A real and a fake that was made from it may both be among them.

    Args:
        hashes: perceptual hash of every video of the run; None: missing.
        new: perceptual hash of the new video. If it is None, no video is a copy.
        max_bits: the largest number of bits in which the hashes of copies differ; 0: do not look for copies.
    """
    places = [place for place, text in enumerate(hashes) if text is not None]
    if new is None or not places or not max_bits:
        return []
    table, _ = parse_hashes([hashes[place] or "" for place in places])
    (one,), _ = parse_hashes([new])
    near = [places[row] for row in nearly_alike(table, one, max_bits).tolist()]
    return [place for place in near if near_duplicate_links([hashes[place], new], max_bits)]


# --- Features

UNFAMILIAR_AT = 0.02
_NEAREST = 5
MOST_VIDEOS = 1000
UNKNOWN = (
    "Whether features are like those of the run's videos is not known: that needs a network and the clips that the run "
    "stored, or a bundle that was exported while they were there."
)


class Neighbours:
    """A set of N videos, in which the nearest neighbours of other videos are searched.

    Args:
        known: features of the N videos, float32 (N, F); all features are scaled by their means and standard deviations.
    """

    def __init__(self, known: Features) -> None:
        values = known.astype(np.float64)
        self._mean, deviation = values.mean(0), values.std(0)
        self._deviation = np.where(deviation == 0, 1.0, deviation)
        self._rows = self._scaled(values)

    def _scaled(self, rows: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy((rows - self._mean) / self._deviation)

    def distances(self, new: Features, ignored: npt.NDArray[np.bool_] | Literal[False] = False) -> Floats:
        """Return the mean distance of each of M videos to its five nearest neighbours in the set, float64 (M,).

        If fewer than five neighbours are left, the mean is over these; without neighbours the distance is infinite.

        Args:
            new: features of the M videos, float32 (M, F).
            ignored: bool (M, N), True where a video of the set does not count as a neighbour; False: all count.
        """
        to_all = torch.cdist(self._scaled(new), self._rows).numpy()
        distances = np.where(ignored, np.inf, to_all)
        ascending = np.sort(distances, axis=1)
        nearest = np.ma.masked_invalid(ascending[:, :_NEAREST])
        return np.asarray(nearest.mean(1).filled(np.inf))


@dataclass(frozen=True)
class FeatureDistance:
    """The features of the run's test videos, which measure how unlike them a new video is.

    Attributes:
        features: features of the N test videos of every fold, float32 (N, F), by the fold's number. The network of the
            fold computed them.
        groups: group numbers of these videos, int64 (N,), by the fold's number. A number means the same group in all
            folds.
    """

    features: Mapping[int, Features]
    groups: Mapping[int, npt.NDArray[np.int64]]

    @cached_property
    def num_groups(self) -> int:
        """The number of different groups in all folds together."""
        return len(np.unique(np.concatenate([*self.groups.values()])))

    @cached_property
    def _own(self) -> dict[int, tuple[Neighbours, Floats, Floats]]:
        """A dict from the fold's number to ``(videos, distances, votes)`` for the N test videos of the fold.

        ``distances``, float64 (N,), are those to the nearest neighbours in other groups. ``votes``, float64 (N,), are
        the weights of the videos: a group has one vote, divided equally among its videos of all folds.
        """
        found = {}
        all_groups = np.concatenate([*self.groups.values()])
        for fold, groups in self.groups.items():
            is_same = groups[:, None] == groups
            num_same = (groups[:, None] == all_groups).sum(1)
            videos = Neighbours(self.features[fold])
            distances = videos.distances(self.features[fold], is_same)
            found[fold] = videos, distances, 1 / num_same
        return found

    def quantiles(self, features: Mapping[int, Features]) -> Floats:
        """Return the quantile of each of M new videos, float64 (M,) in (0, 1].

        The quantile is the share of the run's groups that lie at least as far from their nearest neighbours as the new
        video does; a small one means that the video is unlike the run's. The new video counts as one more group. A
        group's vote is divided equally among its videos.

        Args:
            features: features of the M new videos, float32 (M, F), by the number of the fold whose network computed
                them.
        """
        votes = 1.0
        for fold, (videos, own, shares) in self._own.items():
            is_farther = own >= videos.distances(features[fold])[:, None]
            votes += (is_farther * shares).sum(1)
        return np.asarray(votes / (1 + self.num_groups))

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the stored features and groups."""
        arrays = sorted(self.arrays().items())
        return sha256_of_json({name: sha256(of.tobytes()).hexdigest() for name, of in arrays})

    def reasons(self, quantile: float) -> tuple[str, ...]:
        """Return a tuple with one sentence if a video is unfamiliar, else an empty tuple.

        The sentence says that the video's features are unlike those of the run's videos. ``quantile`` is a result of
        ``quantiles``: the share of the run's groups that are at least as far from the other groups as the video is. The
        video is unfamiliar if this share is at most ``UNFAMILIAR_AT``.
        """
        if quantile > UNFAMILIAR_AT * (1 + 1e-9):
            return ()
        share = f"{100 * quantile:.2g} % of the run's groups are as far from the others or further"
        return (f"Unfamiliar: its features are unlike those of the run's videos: {share} (this video counted).",)

    def limit(self) -> str:
        """Return a sentence on which videos count as unfamiliar."""
        needed = round(1 / UNFAMILIAR_AT) - 1
        if self.num_groups < needed:
            return f"Features are not compared: {self.num_groups} groups are too few, at least {needed} are needed."
        return (
            f"Unfamiliar, too, is a video whose features are further out than those of all but "
            f"{100 * UNFAMILIAR_AT:g} % of the run's {self.num_groups:,} groups are. An unseen generator need not show "
            "there."
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store in a file, two for each fold K.

        They are ``fold_K``, float32 (N, F), the features of the fold's N videos by the fold's network, and
        ``groups_K``, int64 (N,), the group of each video.
        """
        named: dict[str, npt.NDArray[Any]] = {f"fold_{fold}": rows for fold, rows in self.features.items()}
        return named | {f"groups_{fold}": groups for fold, groups in self.groups.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], folds: Collection[int]) -> Self:
        """Build the object from the arrays that its method ``arrays`` returned, for example after reading a file.

        Args:
            arrays: ``fold_K``, float32 (N, F), and ``groups_K``, int64 (N,), for each fold K.
            folds: numbers of the folds to read.

        Raises:
            KeyError: a fold's arrays are missing.
            ValueError: an array has a wrong shape, dtype or value.
        """
        features = {fold: arrays[f"fold_{fold}"] for fold in sorted(folds)}
        groups = {fold: arrays[f"groups_{fold}"] for fold in features}
        for fold, rows in features.items():
            is_table = rows.ndim == 2 and rows.dtype == np.float32
            has_groups = groups[fold].shape == rows.shape[:1]
            if not is_table or not has_groups or not np.isfinite(rows).all():
                raise ValueError(f"fold {fold}: wanted finite float32 (N, F) and groups (N,)")
        return cls(features, groups)


def distance_of(networks: Networks, known: KnownVideos) -> FeatureDistance | None:
    """Return a measure of how unlike the run's videos a new video is.

    It holds the features of the run's tested videos, computed from the stored clips. At most ``MOST_VIDEOS`` videos
    are used: whole groups, in an arbitrary but fixed order.

    Args:
        networks: the networks of the run.
        known: the run's videos.

    Returns:
        The measure. None if no video is tested, a clip is missing, the model sees no frames, or the input of its head
        does not have one row per clip.

    Raises:
        DataError: a stored clip is damaged.
    """
    tested = known.tested
    if FINAL in networks.judges:
        tested = tested.drop_nulls("final_logit").with_columns(fold=pl.lit(FINAL, pl.Int64))
    sizes = tested.group_by("group_id").len().sort("group_id")
    shuffled = sizes.sample(fraction=1.0, shuffle=True, seed=0)
    fits = pl.col("len").cum_sum() <= MOST_VIDEOS
    taken = shuffled.filter(fits)["group_id"].to_list()
    tested = tested.filter(pl.col("group_id").is_in(taken)).sort("fold", "video_id")
    there = networks.sees_frames and all(networks.store.has(video_id, 0) for video_id in tested["video_id"])
    if not tested.height or not there:
        return None
    config = networks.config
    features = dict[int, Features]()
    groups = dict[int, npt.NDArray[np.int64]]()
    stored: EmbeddedClips | None = None
    if config.of_features:  # the features of a frozen trunk are the same in every fold, and the training stored them
        made = [(video_id, 0) for video_id in tested["video_id"]]
        device = networks.compute.device
        stored = EmbeddedClips(
            with_features(networks.store, made, config, device, begin=0.0, stop=lambda: False), config
        )
    number = pl.col("group_id").rank("dense").cast(pl.Int64) - 1
    numbered = tested.with_columns(number=number)
    for (fold,), rows in numbered.partition_by("fold", as_dict=True, maintain_order=True).items():
        video_ids = rows["video_id"].to_list()
        if stored is None:
            features[fold] = _features_of(networks, fold, video_ids)
        else:
            features[fold] = stored.of([ClipRow(one, 0, label=0) for one in video_ids]).astype(np.float32)
        groups[fold] = rows["number"].to_numpy()
        if len(features[fold]) < rows.height:
            return None
    return FeatureDistance(features, groups)


def _features_of(networks: Networks, fold: int, video_ids: Sequence[str]) -> Features:
    """Compute the features of N videos from stored clips, float32 (N, F).

    A feature is an input of the network's head. The result is empty if this input does not have one row per clip.

    Args:
        networks: the networks of the run.
        fold: the fold whose network sees the videos.
        video_ids: ids of the N videos.
    """
    store = networks.store
    config = networks.config
    rows = dict[int, list[Features]]()
    for video_id in video_ids:
        frames = np.array(store.read(video_id, 0))
        frames_per_clip = len(frames) // config.clips_per_video
        shape = (1, config.clips_per_video, frames_per_clip, *frames.shape[1:])
        networks.logits((fold,), frames.reshape(shape), rows)
    no_rows = [np.empty((0, 0), np.float32)]
    return np.concatenate(rows.get(fold, no_rows))
