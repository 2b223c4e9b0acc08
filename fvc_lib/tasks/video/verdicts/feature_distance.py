"""How far a video's features are from those of the run's own videos: is it like anything the run was tested on?

A network's features are what goes into its head. Those of each fold's test videos, which that network had not seen, are
what a new video is compared with: each dimension is brought to mean 0 and deviation 1, and the distance of a video is
the mean Euclidean one to its nearest neighbours of other groups (as in Sun et al., "Out-of-Distribution Detection with
Deep Nearest Neighbors", 2022, but over ranks). Its quantile is that of a cross-conformal test (``metrics/abstention``):
of videos from where the run's videos come from at most about a share p has a quantile of p or less. Videos of one group
are no independent witnesses, so each group has one vote, and few groups cannot show that anything is unlike them.

The network of all groups is asked alike: of its features those of the videos that chose its epoch are known, which it
was not trained on.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoint_files import load_weights, write_weights_with_digest
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, Networks

Features = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

_logger = logging.getLogger(__name__)
UNFAMILIAR_AT = 0.02
_NEAREST = 5
MOST_VIDEOS = 1000
UNKNOWN = (
    "Whether features are like those of the run's videos is not known: that needs a network and the clips that the run "
    "stored, or a bundle that was exported while they were there."
)


@dataclass(frozen=True)
class FoldReference:
    """Test videos of one fold.

    Attributes:
        features: float32 (N, F), by the network of the fold.
        groups: int64 (N,), the same number for the same group in all folds.
    """

    features: Features
    groups: npt.NDArray[np.int64]

    @cached_property
    def _scaling(self) -> tuple[Floats, Floats]:
        values = self.features.astype(np.float64)
        deviation = values.std(0)
        return values.mean(0), np.where(deviation > 0, deviation, 1.0)

    @cached_property
    def _known(self) -> Floats:
        return self._scaled(self.features)

    @cached_property
    def own(self) -> Floats:
        """The distance of each video to those of other groups, float64 (N,); infinite without any."""
        far = _distances(self._known, self._known)
        far[self.groups[:, None] == self.groups] = np.inf
        return _to_nearest(far)

    def of(self, features: Features) -> Floats:
        """Return the distances of new videos, float64 (M,), of features (M, F); raise ``DataError`` for another F."""
        if features.shape[1] != self.features.shape[1]:
            raise DataError(
                f"features: the network gives {features.shape[1]} numbers of a video, and the stored ones have "
                f"{self.features.shape[1]}: they are another network's."
            )
        return _to_nearest(_distances(self._scaled(features), self._known))

    def _scaled(self, features: Features) -> Floats:
        mean, deviation = self._scaling
        return np.asarray((features - mean) / deviation)


def _distances(some: Floats, others: Floats) -> Floats:
    """Return Euclidean distances, float64 (M, N)."""
    squares = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
    return np.asarray(np.sqrt(np.maximum(squares, 0)))


def _to_nearest(distances: Floats) -> Floats:
    """Return the mean distance to the nearest, or to all where there are fewer."""
    ascending = np.sort(distances, axis=1)[:, :_NEAREST]
    there = np.isfinite(ascending)
    summed = np.where(there, ascending, 0).sum(1)
    return np.asarray(np.where(there.any(1), summed / np.maximum(there.sum(1), 1), np.inf))


class FeatureDistance:
    """All folds' references.

    Attributes:
        folds: by number.
        num_groups: G, of all folds together.
    """

    def __init__(self, folds: Mapping[int, FoldReference]) -> None:
        self.folds = dict(folds)
        named, sizes = np.unique(np.concatenate([each.groups for each in folds.values()]), return_counts=True)
        self.num_groups, votes = len(named), dict(zip(named.tolist(), 1 / sizes, strict=True))
        self._votes = {fold: np.array([votes[each] for each in of.groups.tolist()]) for fold, of in folds.items()}

    @property
    def least(self) -> float:
        """The lowest quantile that there is."""
        return 1 / (1 + self.num_groups)

    def quantiles(self, features: Mapping[int, Features]) -> Floats:
        """Return the share of the run that is at least as far out as each new video, float64 (M,) in (0, 1].

        Args:
            features: (M, F) of the same videos, by the network of each fold.
        """
        summed = [self._further(fold, self.folds[fold].of(of)) for fold, of in features.items()]
        return np.asarray((1 + np.sum(summed, axis=0)) / (1 + self.num_groups))

    def quantile(self, features: Mapping[int, Features]) -> float:
        """Return the quantile of one video, features (F,); raise ``DataError`` where a network gave none."""
        if set(features) != set(self.folds):
            raise DataError("features: the network gives none of a video, and the stored ones are another network's.")
        return float(self.quantiles({fold: of[None] for fold, of in features.items()})[0])

    def _further(self, fold: int, distances: Floats) -> Floats:
        """Return the votes (M,) of the fold's videos that are at least as far out."""
        own, votes = self.folds[fold].own, self._votes[fold]
        return np.asarray(((own >= distances[:, None]) * votes).sum(1))

    @cached_property
    def digest(self) -> str:
        """A digest of everything that decides a quantile."""
        return sha256_of_json({name: sha256(of.tobytes()).hexdigest() for name, of in sorted(self.arrays().items())})

    @property
    def tells(self) -> bool:
        """Whether there are enough groups to call a video unlike them."""
        return self.least <= UNFAMILIAR_AT

    def is_unlike(self, quantile: float) -> bool:
        """Return whether a quantile is rare among familiar videos; a rounded last digit decides nothing."""
        return quantile <= UNFAMILIAR_AT * (1 + 1e-9)

    @property
    def _too_few(self) -> str:
        return f"{self.num_groups} groups are too few, at least {round(1 / UNFAMILIAR_AT) - 1} are needed"

    def limit(self) -> str:
        """Return a sentence on which videos count as unfamiliar, and how many of the run's own do."""
        if not self.tells:
            return f"Features are not compared: {self._too_few}."
        return (
            f"Unfamiliar, too, is a video whose features are further out than those of all but "
            f"{100 * UNFAMILIAR_AT:g} % of the run's {self.num_groups:,} groups are. An unseen generator need not show "
            "there."
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """``fold_K`` and ``groups_K`` of each network, for a file."""
        named = {f"fold_{fold}": each.features for fold, each in self.folds.items()}
        return named | {f"groups_{fold}": each.groups for fold, each in self.folds.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], folds: Collection[int]) -> Self:
        """Return what ``arrays`` stored for these networks; raise ``ValueError`` for anything else."""
        if set(arrays) != {f"{name}_{fold}" for fold in folds for name in ("fold", "groups")}:
            raise ValueError(f"got the arrays {', '.join(sorted(arrays)[:6])}, wanted two of each network")
        found = {}
        for fold in sorted(folds):
            features, groups = arrays[f"fold_{fold}"], arrays[f"groups_{fold}"]
            if (
                features.dtype != np.float32
                or features.ndim != 2
                or not features.size
                or not np.isfinite(features).all()
            ):
                raise ValueError(f"fold_{fold}: got {features.dtype} {features.shape}, wanted finite float32 (N, F)")
            if groups.dtype != np.int64 or groups.shape != features.shape[:1] or groups.size > MOST_VIDEOS:
                raise ValueError(f"groups_{fold}: got {groups.dtype} {groups.shape}, wanted int64 (N,)")
            found[fold] = FoldReference(features, groups)
        return cls(found)

    def sentence(self, quantile: float) -> str:
        """Return a sentence on a quantile."""
        if not self.tells:
            return f"Whether its features are unlike those of the run's videos cannot be said: {self._too_few}."
        share = f"{100 * quantile:.2g} % of the run's groups are as far from the others or further"
        if self.is_unlike(quantile):
            return f"Unfamiliar: its features are unlike those of the run's videos: {share} (this video counted)."
        return f"Its features are like those of the run's videos: {share}."


# --- Of a run


def distance_of(networks: Networks, known: KnownVideos, tell: Tell = silent) -> FeatureDistance | None:
    """Return the features of the run's tested videos, from the stored clips; None where clips or the head are missing.

    At most ``MOST_VIDEOS`` videos are taken, whole groups in an order by their names. The features are cached.

    Args:
        networks: of the run.
        known: its videos.
        tell: receives the progress.

    Raises:
        DataError: a stored clip is damaged.
    """
    if not networks.sees_frames:
        return None
    tested = known.tested
    if FINAL in networks.judges:
        tested = tested.drop_nulls("final_logit").with_columns(fold=pl.lit(FINAL, pl.Int64))
    tested = tested.select("video_id", "group_id", "fold")
    sizes = {group: of.height for (group,), of in tested.group_by("group_id")}
    order = sorted(sizes, key=lambda group: sha256_of_json(group))
    taken = np.array(order)[np.cumsum([sizes[group] for group in order]) <= MOST_VIDEOS]
    tested = tested.filter(pl.col("group_id").is_in(taken.tolist())).sort("fold", "video_id")
    if not tested.height:
        return None
    store = networks.store
    key = [tested.rows(), {fold: networks.folds[fold].weights for fold in networks.judges}, store.decode_hash]
    name = f"{networks.name}_{sha256_of_json(key)[:16]}.safetensors"
    path = Path(networks.config.cache_dir) / "feature_distance" / name
    features = _stored(path)
    if features is None:
        if not all(store.has(video_id, 0) for video_id in tested["video_id"]):
            return None
        features, done = {}, 0
        _logger.info("features of %d of the run's videos are computed, once", tested.height)
        for fold in tested["fold"].unique().sort().to_list():
            names = tested.filter(fold=fold)["video_id"].to_list()
            found = []
            for name in names:
                tell("looking at the run's own videos, once", done, tested.height)
                found.append(_features(networks, fold, name))
                done += 1
            if not all(found):
                return None
            features[str(fold)] = np.concatenate([each[0] for each in found])
        try:
            write_weights_with_digest(path, {name: torch.from_numpy(each) for name, each in features.items()}, {})
        except OSError as error:  # a cache that cannot be written costs time, and no verdict
            _logger.warning("%s: %s; the features will be computed again", path, error)
    groups = np.unique(tested["group_id"].to_numpy(), return_inverse=True)[1].astype(np.int64)
    folds = tested["fold"].to_numpy()
    return FeatureDistance({int(f): FoldReference(of, groups[folds == int(f)]) for f, of in features.items()})


def _stored(path: Path) -> dict[str, Features] | None:
    try:
        return {name: each.numpy() for name, each in load_weights(path).items()}
    except FvcError:
        return None


def _features(networks: Networks, fold: int, video_id: str) -> list[Features]:
    """Return the features of one video, float32 (1, F), in a list; empty where the network has none."""
    clips, found = networks.store.read(video_id, 0), list[Features]()
    number = networks.config.clips_per_video
    networks.logits(fold, np.array(clips).reshape(1, number, len(clips) // number, *clips.shape[1:]), found)
    return found
