"""Pictures as samples: decoded when they are asked for, and in training seen a little differently in every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fvc_lib.learning.image_labels import ImageLabels
from fvc_lib.learning.image_mixing import (
    MixSettings,
    draw_mix,
    mixed_class_target,
    mixed_image,
    mixed_values,
)
from fvc_lib.learning.image_records import UNKNOWN_CLASS, ImageRecords
from fvc_lib.learning.image_views import decoded_side, middle_view, training_view
from fvc_lib.learning.random_state import stable_seed
from fvc_lib.learning.task import Batch, Sample, stack_samples
from fvc_lib.metrics.weighting import FloatArray
from fvc_lib.services.path_text import path_from_text
from fvc_lib.video.still_image import decode_image


@dataclass(frozen=True)
class ImageAugmentation:
    """How training pictures differ from epoch to epoch; all of it follows from the seed, the picture and the epoch."""

    seed: int
    mixing: MixSettings


class ImageDataset:
    """Samples of one part of a corpus.

    A sample has ``image`` uint8 (3, S, S); ``class_target`` float32 (C,), what each class weighs in its loss, all zero
    where no class is known; ``class_index`` int64 (), -1 likewise, of the picture itself even where another one is
    mixed in; ``values`` float32 (T,), scaled, 0 where not known; and ``known`` float32 (T,) of 0 and 1.

    Args:
        root: of the corpus.
        records: the pictures.
        labels: what is to be said of them, with the scaling.
        size: S, in pixels.
        class_weights: float64 (C,) of each class in the loss; None: 1 each.
        augmentation: of training; None: every picture as it is.
        epoch: whose samples these are.
    """

    def __init__(
        self,
        root: Path,
        records: ImageRecords,
        labels: ImageLabels,
        size: int,
        *,
        class_weights: FloatArray | None = None,
        augmentation: ImageAugmentation | None = None,
        epoch: int = 0,
    ) -> None:
        self.root = root
        self.records = records
        self.labels = labels
        self.size = size
        self._class_weights = np.ones(len(labels.classes)) if class_weights is None else class_weights
        self._augmentation = augmentation
        self._epoch = epoch

    @property
    def classes(self) -> tuple[int, ...] | None:
        """The class of every picture; None where one has none: drawing evenly from classes would not draw it."""
        indices = self.records.class_indices
        return None if (indices == UNKNOWN_CLASS).any() else tuple(indices.tolist())

    def at_epoch(self, epoch: int) -> ImageDataset:
        """The same pictures as they look in ``epoch`` (0-based)."""
        if self._augmentation is None or epoch == self._epoch:
            return self
        return ImageDataset(
            self.root, self.records, self.labels, self.size,
            class_weights=self._class_weights, augmentation=self._augmentation, epoch=epoch,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        own = self._own_tensors(index)
        augmentation = self._augmentation
        if augmentation is not None:
            mix = draw_mix(augmentation.mixing, len(self), self.size, self._generator("mix", index))
            if mix is not None:
                other = self._own_tensors(mix.partner)
                values, known = mixed_values(own["values"], own["known"], other["values"], other["known"], mix)
                own["image"] = mixed_image(own["image"], other["image"], mix)
                own["class_target"] = mixed_class_target(own["class_target"], other["class_target"], mix)
                own["values"], own["known"] = values, known
        return Sample(self.records.image_ids[index], own)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch."""
        return stack_samples([self[index] for index in indices])

    def _own_tensors(self, index: int) -> dict[str, Tensor]:
        """Of one picture by itself."""
        class_index = int(self.records.class_indices[index])
        class_target = torch.zeros(len(self.labels.classes))
        if class_index != UNKNOWN_CLASS:
            class_target[class_index] = float(self._class_weights[class_index])
        values = self.records.values[index]
        known = np.isfinite(values)
        scaled = np.where(known, self.labels.scaled(values), 0.0) if values.size else values
        return {
            "image": self._view(index),
            "class_target": class_target,
            "class_index": torch.tensor(class_index),
            "values": torch.from_numpy(scaled.astype(np.float32)),
            "known": torch.from_numpy(known.astype(np.float32)),
        }

    def _view(self, index: int) -> Tensor:
        training = self._augmentation is not None
        path = self.root / path_from_text(self.records.paths[index])
        pixels = decode_image(path, shortest_side=decoded_side(self.size, training=training))
        picture = torch.from_numpy(pixels).permute(2, 0, 1)
        if not training:
            return middle_view(picture, self.size).contiguous()
        return training_view(picture, self.size, self._generator("view", index)).contiguous()

    def _generator(self, purpose: str, index: int) -> np.random.Generator:
        """Of one picture in one epoch: so neither order nor process nor batch changes what is drawn."""
        seed = self._augmentation.seed if self._augmentation is not None else 0
        return np.random.default_rng(stable_seed(f"image {purpose}", seed, self.records.image_ids[index], self._epoch))


def balancing_weights(records: ImageRecords, num_classes: int) -> FloatArray:
    """Loss weights float64 (C,) that give all classes equal influence and average to 1 over the pictures with a class.

    Args:
        records: of the training part, where every class occurs.
        num_classes: C.
    """
    counts = np.bincount(records.class_indices[records.class_indices >= 0], minlength=num_classes)
    weights: FloatArray = counts.sum() / (num_classes * np.maximum(counts, 1))
    return weights
