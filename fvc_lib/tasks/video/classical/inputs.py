"""One outer fold as a model on features sees it: its parts, and its table or a frozen trunk's features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.detectors.classical import refuse_random_trunk, refuse_settings, trunk_config
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.classical.table import FeatureTable, read_features
from fvc_lib.tasks.video.data import ClipRow, FoldClips
from fvc_lib.tasks.video.features import FeatureSource, with_features


@dataclass(frozen=True)
class EmbeddedClips:
    """Features that the frozen ``trunk`` gives of a run's clips, ``clips_per_video`` of each video."""

    features: FeatureSource
    trunk: str
    clips_per_video: int

    @property
    def names(self) -> tuple[str, ...]:
        """(F,) numbered names."""
        return tuple(f"{self.trunk}_{number}" for number in range(self.features.feature_shape[1]))

    @property
    def families(self) -> tuple[str, ...]:
        """(F,) the trunk, as the family of each feature."""
        return (self.trunk,) * self.features.feature_shape[1]

    def of(self, rows: Sequence[ClipRow]) -> npt.NDArray[np.float64]:
        """Return float64 (N, F): the mean over the frames of a clip and over the clips of a video."""
        clips = [(row.video_id, row.augmentation_index, clip) for row in rows for clip in range(self.clips_per_video)]
        means = self.features.features(clips).numpy().astype(np.float64).mean(1)
        return np.asarray(means.reshape(len(rows), self.clips_per_video, -1).mean(1))


@dataclass(frozen=True)
class FeatureFold:
    """One outer fold of a model on features, and the same fold for each control by name."""

    source: FeatureTable | EmbeddedClips
    clips: FoldClips
    controls: dict[str, FoldClips]


def read_feature_fold(
    paths: RunPaths, config: RunConfig, fold: int, *, stop: Callable[[], bool] = lambda: False
) -> FeatureFold:
    """Read the features and parts of outer fold ``fold``; compute the trunk's features that are missing.

    Raises:
        DataError: as ``data.read_fold`` and ``read_features``.
        StoppedError: ``stop`` returned True; computed features stay in the cache.
        UsageError: settings that a model on features has no use for, or a trunk without weights.
    """
    refuse_settings(config)
    if config.of_features == "forensic":
        table = read_features(paths, config)
        without_copies = config.model_copy(update={"augmentations_per_video": 0})
        return FeatureFold(*data.read_fold(paths, without_copies, fold, source=table))
    refuse_random_trunk(config)
    clips_source, clips, controls = data.read_fold(paths, config, fold)
    device = resolve_device(config.device, "off").device
    begin = (fold / config.num_trainings + stable_seed(paths.run_id) / 2**63) % 1
    featured = with_features(clips_source, data.made_clips(paths), trunk_config(config), device, begin=begin, stop=stop)
    embedded = EmbeddedClips(featured, DETECTORS.get(config.model).trunk, config.clips_per_video)
    return FeatureFold(embedded, clips, controls)
