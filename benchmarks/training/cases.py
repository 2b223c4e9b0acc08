"""What is trained in the comparison, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.clips import fill, video_id
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video.data import ClipDataset, ClipRow
from fvc_lib.tasks.video.training import VideoTask, engine_settings
from fvc_lib.video.clips.store import ClipStore


@dataclass(frozen=True)
class Case:
    """One training: a network, its clips (``num_frames`` x ``size`` x ``size``) and how they are batched.

    Attributes:
        weights: a file or folder for ``model_weights``; all of the network is trained.
    """

    model: str = "frame_cnn"
    num_frames: int = 6
    size: int = 112
    micro_batch: int = 8
    effective_batch_size: int = 16
    weights: str = ""

    def __str__(self) -> str:
        return self.model


MODELS = ("frame_cnn", "r2plus1d_small")


@dataclass(frozen=True)
class Training:
    """A case with its clips in a store of ``num_stored``; longer data sets go through them again and again.

    The loss's weights are uneven, as class weights usually are, so that the engine has to scale its summed gradients.
    """

    case: Case
    folder: Path
    num_stored: int = 64
    loss_weights: tuple[float, float] = (0.9, 1.1)

    @property
    def config(self) -> RunConfig:
        """The run's parameters."""
        case = self.case
        return RunConfig(
            cache_dir=str(self.folder / "cache"), model=case.model, num_frames=case.num_frames, fixed_size=case.size,
            batch_size=case.micro_batch, effective_batch_size=case.effective_batch_size, device="cpu",
            early_stopping_epochs=0, model_weights=case.weights, tune="all",
        )  # fmt: skip

    def store_clips(self) -> None:
        """Write the clips, of noise."""
        fill(ClipStore.of(self.config), self.num_stored)

    def settings(self, epochs: int, checkpoint_seconds: float = 120.0) -> EngineSettings:
        """The engine's, as a fold of a run has them."""
        return replace(engine_settings(self.config, 0), epochs=epochs, checkpoint_seconds=checkpoint_seconds)

    def task(self, windows_per_epoch: int, num_validation: int) -> VideoTask:
        """The video task on so many effective batches of training clips, and so many validation clips."""
        store = ClipStore.of(self.config)
        training = self._rows(windows_per_epoch * self.case.effective_batch_size)
        return VideoTask(
            ClipDataset(store, training),
            ClipDataset(store, self._rows(num_validation)),
            config=self.config,
            weights=self.loss_weights,
        )

    def _rows(self, count: int) -> Sequence[ClipRow]:
        return [ClipRow(video_id(number % self.num_stored), 0, number % 2) for number in range(count)]
