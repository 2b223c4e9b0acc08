"""Features of a frozen trunk, computed once per clip and stored next to the clips, for every fold and control.

A trunk is a network below its head. With pretrained weights that are not trained it computes the same features of a
clip in every epoch, fold and run. They are stored as ``clips/decode_<hash>/features_<hash>/ab/abcd_0.npy``, float32
(T', F). The hash after ``features_`` covers the clips' settings, the network, its weights, its code and the kind of
device. Folds that run at the same time share the work without a lock: every fold begins at a different clip and skips
clips whose features exist.
"""

import importlib.metadata
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import Detector, Trunk, build_detector
from fvc_lib.engine.device import clips_in_a_pass, filled_up, release_cached_memory
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import in_batches
from fvc_lib.services.atomic_files import atomic_output, sha256_of_json
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.shared_training import functions_of
from fvc_lib.video.clips.store import (
    ClipStore,
    Pixels,
    Shape,
    check_clip_name,
    check_digest,
    note_use,
    write_with_digest,
)

_DETECTORS = "fvc_lib.detectors"
Clip = tuple[str, int, int]  # video id, augmentation index, and the number of the clip within the video


@dataclass(frozen=True)
class FeatureSource:
    """The clips of a run (``data.ClipSource``), together with the features that a frozen trunk computed of them.

    A video has an original (augmentation index 0) and augmented copies. Each of them has one or more clips.
    """

    clips: Any  # the clip source
    folder: Path  # the folder of the stored features
    feature_shape: tuple[int, int]  # (T', F)
    _checked: set[Clip] = field(default_factory=set, compare=False)  # clips whose file this process has verified

    @property
    def settings_hash(self) -> str:
        """The hash of all settings that determine the clips."""
        return str(self.clips.settings_hash)

    @property
    def shape(self) -> Shape:
        """Shape (N T, 3, S, S) of the frames of one video: N clips with T frames each."""
        shape: Shape = self.clips.shape
        return shape

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the clips of this copy of the video exist; augmentation index 0 is the original."""
        return bool(self.clips.has(video_id, augmentation_index))

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0) -> None:
        """Fill ``frames`` with consecutive frames of a video's clips, beginning with frame number ``first``.

        Args:
            video_id: id of the video.
            augmentation_index: 0 for the original; other numbers are augmented copies.
            frames: uint8 (t, 3, S, S), the array to fill with t frames.
            first: number of the first frame, from 0. It counts the frames of all N clips of the video, T in each clip.
        """
        self.clips.load(video_id, augmentation_index, frames, first)

    def path(self, clip: Clip) -> Path:
        """Return the path of the file with a clip's features; the file need not exist."""
        video_id, copy, number = clip
        check_clip_name(video_id, copy)
        return self.folder / video_id[:2] / f"{video_id}_{copy}{f'-{number}' if number else ''}.npy"

    def features(self, clips: Sequence[Clip]) -> Tensor:
        """Return the stored features of B clips, float32 (B, T', F).

        Raises:
            DataError: a file is missing or damaged.
        """
        stored = np.empty((len(clips), *self.feature_shape), np.float32)
        for number, clip in enumerate(clips):
            path = self.path(clip)
            try:
                if clip not in self._checked:
                    check_digest(path)
                    self._checked.add(clip)
                stored[number] = np.load(path, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DataError(f"features {str(path)!r}: {error}. Delete the file, and resume the run.") from error
        return torch.from_numpy(stored)


def with_features(
    source: Any,
    made: Sequence[tuple[str, int]],
    config: RunConfig,
    device: torch.device,
    *,
    begin: float,
    stop: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Any:
    """Return ``source`` with the features of all its clips if the trunk is frozen; else ``source`` itself.

    Only missing features are computed, so a stopped computation continues where it stopped. A clip's features are the
    same to the bit in any batch and process, unless memory ran out on a GPU.

    Args:
        source: the clips (``data.ClipSource``).
        made: pairs of video id and augmentation index, which name all clips.
        config: names the network.
        device: the device that computes the features.
        begin: the fraction of the list of clips to begin at, in [0, 1). Folds that run at the same time use different
            fractions, so that they share the work.
        stop: called before each batch; returns True to stop.
        progress: called with (done, total) clips.

    Returns:
        A ``FeatureSource``, or ``source``.

    Raises:
        StoppedError: ``stop`` returned True.
        UsageError: the network cannot be built, or a setting contradicts features that are computed once
            (``frozen_trunk``).
    """
    if (config.tune or DETECTORS.get(config.model).tune) != "head":
        return source
    with forked_random_state(0, torch.device("cpu")):
        trunk = frozen_trunk(build_detector(config), config)
    clips = [(*clip, number) for clip in made if source.has(*clip) for number in range(config.clips_per_video)]
    if trunk is None or trunk.weights is None or not clips:
        return source
    weights = trunk.weights
    seeing = trunk.eval().to(device)
    num_frames = config.clips.num_frames
    length, width = _computed(seeing, source, clips[:1], num_frames, device, 1).shape[1:]
    folder = ClipStore.of(config).decode_folder / f"features_{_identity(trunk, source, config, device)[:32]}"
    featured = FeatureSource(source, folder, (length, width))
    note_use(folder, {"model": config.model, "weights": weights.sha256, "clips": source.settings_hash})
    first = int(begin * len(clips))
    missing = [clip for clip in [*clips[first:], *clips[:first]] if not featured.path(clip).exists()]
    there = len(clips) - len(missing)

    def compute(start: int, size: int) -> int:
        progress(there + start, len(clips))
        if stop():
            raise StoppedError(
                f"stopped as asked with the features of {start} of {len(missing)} clips computed, which stay: resume "
                "the run to go on."
            )
        # Another fold may have computed some meanwhile.
        todo = [clip for clip in missing[start : start + size] if not featured.path(clip).exists()]
        computed = _computed(seeing, source, todo, num_frames, device, size) if todo else ()
        for clip, features in zip(todo, computed, strict=True):
            np.save(content := io.BytesIO(), features.numpy(), allow_pickle=False)
            with atomic_output(featured.path(clip)) as temporary, temporary.open("wb") as stream:
                write_with_digest(stream, content.getvalue())
        return len(todo)

    size = clips_in_a_pass(device, config.batch_size or DETECTORS.get(config.model).micro_batch)
    list(in_batches(len(missing), size, device, compute))
    progress(len(clips), len(clips))
    release_cached_memory(device)
    return featured


def frozen_trunk(network: nn.Module, config: RunConfig) -> Trunk | None:
    """Return the trunk of ``network`` if its features can be computed once; None if they must be computed every epoch.

    The trunk is the network without its head. Its features can be computed once if it has pretrained weights that are
    not trained. Random weights differ between trainings, so they do not qualify. Nor does the trunk of a user's file.

    Raises:
        UsageError: the features can be computed once, but a setting contradicts this. It changes clips during training,
            such as mixup, or it freezes or unfreezes stages of the trunk.
    """
    trunk = network.trunk if isinstance(network, Detector) else None
    tune = config.tune or DETECTORS.get(config.model).tune
    if tune != "head" or not isinstance(trunk, Trunk) or not trunk.weights:
        return None
    stages = (config.freeze_backbone_epochs, config.unfreeze_stage_epochs)
    if any((config.mixup_alpha, config.cutmix_alpha, config.wavelet_bands, *stages)):
        raise UsageError(
            "mixup_alpha, cutmix_alpha, wavelet_bands, freeze_backbone_epochs, unfreeze_stage_epochs: with a frozen "
            "trunk training sees features that are computed once of each clip, and no stage below the head is trained. "
            "Leave them out, or train more: -p tune norms, last:N or all."
        )
    return trunk


def _identity(trunk: Trunk, source: Any, config: RunConfig, device: torch.device) -> str:
    """Return a hex SHA-256 of everything that determines a clip's features, except the clip."""
    weights = trunk.weights.sha256 if trunk.weights else ""
    packages = ("torch", *DETECTORS.get(config.model).packages)
    versions = [[package, importlib.metadata.version(package)] for package in packages]
    pixels = [trunk.normalised.mean.flatten().tolist(), trunk.normalised.deviation.flatten().tolist()]
    # The code of the trunk's classes and of what they call. The device counts, because devices round differently.
    code = [functions_of(trunk), *(code_hash(module, _DETECTORS) for module in DETECTORS.declared_in(config.model))]
    return sha256_of_json(
        [source.settings_hash, config.identity("model"), weights, pixels, code, versions, device.type]
    )


def _computed(
    trunk: Trunk, source: Any, clips: Sequence[Clip], num_frames: int, device: torch.device, batch_size: int
) -> Tensor:
    """Compute the features of B clips in one batch, float32 (B, T', F) on the CPU.

    Args:
        trunk: the network without its head, on ``device``.
        source: the clips.
        clips: the B clips.
        num_frames: T, the number of frames of a clip.
        device: the device that computes.
        batch_size: the size to which the batch is padded, so that results do not depend on B.
    """
    frames = np.empty((len(clips), num_frames, *source.shape[1:]), np.uint8)
    for (video_id, copy, number), pixels in zip(clips, frames, strict=True):
        source.load(video_id, copy, pixels, number * num_frames)
    with torch.inference_mode():
        features: Tensor = trunk(filled_up(torch.from_numpy(frames), batch_size).to(device))[: len(clips)]
    return features.float().cpu().contiguous()
