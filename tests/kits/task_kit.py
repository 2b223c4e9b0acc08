"""Tiny instances of the three tasks, real but for their sizes, on which every promise of the engine is tested alike."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.engine.task import Sample
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.image.training import ImageDataset, ImageRecords, ImageTask, labels_of_training
from fvc_lib.tasks.mixing import MixSettings
from fvc_lib.tasks.video.data import ClipDataset, ClipRow
from fvc_lib.tasks.video.training import VideoTask
from tests.kits.video_text_kit import VOCABULARY, MadeUpPairs, TinyVideoTexts, planned

KINDS = ("video", "image", "video_text")
ROWS, VALIDATION = 22, 6  # windows of 8, 8 and 6 at an effective batch of 8
_SIDE = 16


def each_task(*, long: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrises a test's ``kind``, and with it what ``make_engine`` trains; of the kinds in ``long`` not always."""
    kinds = [pytest.param(kind, marks=pytest.mark.long) if kind in long else kind for kind in KINDS]
    return pytest.mark.parametrize("kind", kinds, indirect=True)


@dataclass(frozen=True)
class TinyTasks:
    """``tasks(rank)`` makes the task anew, in any process: that of a rank as well.

    Attributes:
        kind: which of ``KINDS``, or ``recipe``.
        folder: holds the pictures of task image.
        rows: training samples.
        validation: samples.
    """

    kind: str
    folder: Path
    rows: int = ROWS
    validation: int = VALIDATION

    def __call__(self, rank: int = 0) -> Any:
        return _MAKERS[self.kind](self)

    def sized(self, **sizes: int) -> TinyTasks:
        """With other numbers of samples."""
        return replace(self, **sizes)


@dataclass(frozen=True)
class Clips:
    """Made-up clips, whose fakes are noisier than real ones: every other one."""

    first: int
    number: int
    drawn: dict[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        label = torch.tensor(float(index % 2))
        return Sample(f"clip{index}", {"frames": self._frames(index), "label": label})

    def _frames(self, index: int) -> torch.Tensor:
        if index not in self.drawn:
            generator = torch.Generator().manual_seed(self.first + index)
            noise = torch.randn(2, 3, _SIDE, _SIDE, generator=generator) * (14 if index % 2 else 10)
            self.drawn[index] = (noise + 128).round().clamp(0, 255).to(torch.uint8)
        return self.drawn[index]


def _video(tasks: TinyTasks, **settings: Any) -> VideoTask:
    training, validation = Clips(0, tasks.rows), Clips(1000, tasks.validation)
    config = RunConfig(model="frame_cnn", **settings)
    return VideoTask(training, validation, config=config, weights=(0.7, 1.6))


def _recipe(tasks: TinyTasks) -> VideoTask:
    """Task video with all that may be added to its training."""
    task = _video(tasks, label_smoothing=0.1, freeze_backbone_epochs=1)
    rows = [ClipRow(str(number), 0, number % 2) for number in range(tasks.rows)]
    task.training_data = ClipDataset(DrawnClips(), rows, mixing=MixSettings(0.5, 0.4, 1.0), seed=3)
    return task


class DrawnClips:
    """The training clips as a store would give them."""

    settings_hash, shape = "drawn", (2, 3, _SIDE, _SIDE)

    def load(self, video_id: str, augmentation_index: int, frames: np.ndarray, first: int = 0) -> None:
        frames[:] = Clips(0, ROWS)._frames(int(video_id)).numpy()


class TinyImages(ImageTask):
    """With a narrow backbone of a stem and two blocks."""

    def build_model(self) -> ImageModel:
        labels = self.training_data.labels
        return ImageModel(SmallResnet((8, 16)), len(labels.classes), len(labels.targets))


def write_pictures(folder: Path) -> None:
    """More pictures than any test asks for; their colour says the class, their brightness a number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2 * ROWS):
        generator = np.random.default_rng(number)
        picture = generator.integers(0, 60, (18, 20, 3)) + 4 * (number % 13)
        picture[..., number % 3] += 90
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"picture{number:03d}.png")


def _image(tasks: TinyTasks) -> ImageTask:
    """Some without a class, some without a number; mixed, and with a backbone that is freed stage by stage."""
    numbers = np.arange(tasks.rows + tasks.validation)
    values = np.stack([numbers % 13 * 10.0, numbers % 3 * 2.0 + 1], axis=1)
    values[5::7, 0] = np.nan
    values[6::9] = np.nan
    classes = np.where(numbers % 11 == 3, -1, numbers % 3)
    ids = tuple(f"picture{number:03d}" for number in numbers)
    table = pl.DataFrame({"image_id": ids, "group_id": ids, "path": [f"{name}.png" for name in ids]})
    parts = slice(0, tasks.rows), slice(tasks.rows, None)
    training, validation = (ImageRecords(table[part], classes[part], values[part]) for part in parts)
    labels = labels_of_training(("a", "b", "c"), ("calories", "mass"), ("kcal", "g"), training.values)
    mixing = MixSettings(share=0.5, mixup_alpha=0.4, cutmix_alpha=1.0)
    return TinyImages(
        ImageDataset(tasks.folder, training, labels, _SIDE, mixing=mixing, seed=7),
        ImageDataset(tasks.folder, validation, labels, _SIDE),
        RunConfig(task="image", freeze_backbone_epochs=1, unfreeze_stage_epochs=1),
    )


def _video_text(tasks: TinyTasks) -> TinyVideoTexts:
    """Both losses; every fourth text describes two videos."""
    config = planned(num_frames=2, fixed_size=_SIDE, contrastive_loss="sigmoid", caption_weight=0.5)

    def data(first: int, number: int) -> MadeUpPairs:
        texts = tuple(first + n - (n % 4 == 3) for n in range(number))
        return MadeUpPairs(tuple(range(first, first + number)), texts, config)

    return TinyVideoTexts(data(0, tasks.rows), data(100, tasks.validation), config, VOCABULARY)


_MAKERS = {"video": _video, "recipe": _recipe, "image": _image, "video_text": _video_text}


def changed(task: Any, kind: type, **attributes: Any) -> Any:
    """A copy of ``task`` that is a ``kind`` first and what it was then: whatever it can do, it still can.

    ``kind`` overrides some of a task's methods and calls theirs by ``super()``.
    """
    found = copy.copy(task)
    found.__class__ = type(kind.__name__, (kind, type(task)), {})
    vars(found).update(attributes)
    return found


def with_noise(outputs: dict[str, torch.Tensor], noise: torch.Tensor) -> dict[str, torch.Tensor]:
    """``noise``, one number or one per sample, added to every output that is a real number."""
    return {
        name: values + noise.view(-1, *[1] * (values.ndim - 1)) if values.is_floating_point() else values
        for name, values in outputs.items()
    }


def when_backward(outputs: dict[str, torch.Tensor], call: Any) -> None:
    """``call(gradient)`` once a backward pass comes through these outputs, where one can."""
    for values in outputs.values():
        if values.requires_grad:
            values.register_hook(call)
            return
