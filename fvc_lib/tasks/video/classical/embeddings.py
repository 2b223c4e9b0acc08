"""Features of a frozen trunk as the numbers that a model sees: the mean over a clip's frames, and over its clips."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.data import ClipRow, FoldClips
from fvc_lib.tasks.video.features import FeatureSource, with_features


@dataclass(frozen=True)
class EmbeddedClips:
    """What a trunk says of the clips of a run; ``clips_per_video`` of each video."""

    features: FeatureSource
    trunk: str
    clips_per_video: int

    @property
    def names(self) -> tuple[str, ...]:
        """(F,), numbered: a trunk's features have no names."""
        return tuple(f"{self.trunk}_{number}" for number in range(self.features.feature_shape[1]))

    @property
    def families(self) -> tuple[str, ...]:
        """(F,), the trunk of each."""
        return (self.trunk,) * self.features.feature_shape[1]

    def of(self, rows: Sequence[ClipRow]) -> npt.NDArray[np.float64]:
        """Float64 (N, F) of ``rows``."""
        clips = [(row.video_id, row.augmentation_index, clip) for row in rows for clip in range(self.clips_per_video)]
        found = self.features.features(clips).numpy().astype(np.float64).mean(1)
        return np.asarray(found.reshape(len(rows), self.clips_per_video, -1).mean(1))


def trunk_config(config: RunConfig) -> RunConfig:
    """Of the network whose trunk a model on embeddings sees, nothing of which is trained."""
    return config.model_copy(update={"model": DETECTORS.get(config.model).trunk, "tune": "head"})


def embeddings_of(
    paths: RunPaths, config: RunConfig, fold: int, stop: Callable[[], bool]
) -> tuple[EmbeddedClips, FoldClips, dict[str, FoldClips]]:
    """The trunk's features of all clips, computed where they are missing, and the parts of ``fold`` and its controls.

    Raises:
        UsageError: the trunk has no weights.
        StoppedError: as asked; what was computed stays.
    """
    source, clips, controls = data.read_fold(paths, config, fold)
    device = resolve_device(config.device, "off").device
    begin = (fold / config.num_trainings + stable_seed(paths.run_id) / 2**63) % 1
    found: Any = with_features(source, data.made_clips(paths), trunk_config(config), device, begin=begin, stop=stop)
    if not isinstance(found, FeatureSource):
        raise _without_weights(config)
    return EmbeddedClips(found, DETECTORS.get(config.model).trunk, config.clips_per_video), clips, controls


def refuse_random_trunk(config: RunConfig) -> None:
    """``UsageError`` where the trunk would begin without weights, before a run begins."""
    spec = DETECTORS.get(config.model)
    if not config.model_weights and not spec.brings_weights:
        raise _without_weights(config)


def _without_weights(config: RunConfig) -> UsageError:
    return UsageError(
        f"model {config.model!r}: its trunk begins without weights, so its features say nothing. Give -p model_weights "
        "FILE_OR_FOLDER, or take a trunk that brings its weights (efficientnet_lite0)."
    )
