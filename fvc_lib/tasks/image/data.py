"""Pictures as training samples: their labels, their parts, and the crop that the network sees."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, Sample, stack_samples
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import PARTS
from fvc_lib.tasks.mixing import Mix, MixSettings, draw_mix, mixed_pixels, mixed_target, rows_of_classes
from fvc_lib.video.decode.still_image import decode_image

UNKNOWN_CLASS = -1
_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class ImageLabels:
    """Names of the C classes and T targets, and the scaling of the targets; saved with the model.

    ``units`` may be empty. ``means`` and ``deviations`` (standard deviations; 1 if all values are equal) are those of
    the training pictures with a value.
    """

    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    def scaled(self, values: FloatArray) -> FloatArray:
        """Scale values (..., T) to mean 0 and standard deviation 1 in training."""
        return np.asarray((values - np.array(self.means)) / np.array(self.deviations))

    def in_units(self, scaled: FloatArray) -> FloatArray:
        """Return scaled values (..., T) in the targets' units."""
        return np.asarray(scaled * np.array(self.deviations) + np.array(self.means))


def labels_of_training(
    classes: tuple[str, ...], targets: tuple[str, ...], units: tuple[str, ...], values: FloatArray
) -> ImageLabels:
    """Return the labels, scaled by the training part's ``values``: float64 (N, T), NaN where unknown.

    Raises:
        DataError: no training picture has a value of a target.
    """
    counts = np.isfinite(values).sum(axis=0)
    unknown = [name for name, count in zip(targets, counts, strict=True) if not count]
    if unknown:
        raise DataError(
            f"targets {', '.join(unknown)}: no picture of the training part has this number, so it cannot be learned. "
            "Choose others with -p targets, or give the training pictures this number."
        )
    if not targets:
        return ImageLabels(classes)
    means, deviations = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    deviations = np.where(deviations > 1e-12 * np.maximum(1.0, np.abs(means)), deviations, 1.0)
    return ImageLabels(classes, targets, units, tuple(means.tolist()), tuple(deviations.tolist()))


@dataclass(frozen=True)
class ImageRecords:
    """N pictures in the order of their ids."""

    image_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    paths: tuple[str, ...]  # relative to the corpus' root, as tables have them
    class_indices: IntArray  # int64 (N,), places in ``ImageLabels.classes``; -1 where none is known
    values: FloatArray  # float64 (N, T) in the targets' units; NaN where not known

    def __len__(self) -> int:
        return len(self.image_ids)


@dataclass(frozen=True)
class ImageParts:
    """A split corpus; ``fingerprint`` covers contents, labels, values and parts, but no paths."""

    labels: ImageLabels
    train: ImageRecords
    validation: ImageRecords
    test: ImageRecords
    fingerprint: str


def image_parts(images: pl.DataFrame, targets: pl.DataFrame) -> ImageParts:
    """Return the parts of ``images`` (IMAGES) with their classes and ``targets`` (IMAGE_TARGETS).

    Pictures without a class and without a value are left out.

    Raises:
        DataError: a part is empty, the training part lacks a class or a target, or a target has two units.
    """
    classes = tuple(sorted(images["class_label"].drop_nulls().unique().to_list()))
    units = _units(targets)
    values = _wide(images, targets, tuple(units))
    something = [pl.col(name).is_not_null() for name in ("class_label", *(f"value:{target}" for target in units))]
    known = values.filter(pl.any_horizontal(*something))
    parts = {part: _records(known.filter(pl.col("part") == part), classes, tuple(units)) for part in PARTS}
    empty = [part for part, records in parts.items() if not len(records)]
    if empty:
        raise DataError(
            f"images: no picture with a class or a number in the {' and the '.join(empty)} part. Give the corpus more "
            "groups."
        )
    _refuse_untrained_classes(parts["train"], classes)
    labels = labels_of_training(classes, tuple(units), tuple(units.values()), parts["train"].values)
    fingerprint = _fingerprint(labels, parts)
    return ImageParts(labels, parts["train"], parts["validation"], parts["test"], fingerprint)


def require_files(root: Path, parts: ImageParts) -> None:
    """Raise ``DataError`` if a picture is missing from ``root``; the error names up to ten."""
    everything = (path for part in (parts.train, parts.validation, parts.test) for path in part.paths)
    missing = [path for path in everything if not (root / path_from_text(path)).is_file()]
    if missing:
        more = f" and {len(missing) - _NAMED_AT_MOST} more" if len(missing) > _NAMED_AT_MOST else ""
        raise DataError(
            f"{len(missing)} pictures are gone from {str(root)!r} since they were indexed: "
            f"{', '.join(map(repr, missing[:_NAMED_AT_MOST]))}{more}. Put them back, or index the corpus in a new run."
        )


def _units(targets: pl.DataFrame) -> dict[str, str]:
    """Return the unit of each target, sorted by target."""
    pairs = targets.select("target", "unit").unique().sort("target", "unit")
    twice = pairs.filter(pl.col("target").is_duplicated())["target"].unique().sort().to_list()
    if twice:
        raise DataError(f"targets {', '.join(twice)}: got several units each. Give every row of a target the same.")
    return {str(target): str(unit) for target, unit in pairs.iter_rows()}


def _wide(images: pl.DataFrame, targets: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return ``images`` sorted by id, with a column ``value:NAME`` per target; null where unknown."""
    wide = images.sort("image_id")
    for name in names:
        column = targets.filter(pl.col("target") == name).select("image_id", pl.col("value").alias(f"value:{name}"))
        wide = wide.join(column, on="image_id", how="left", maintain_order="left")
    return wide


def _records(part: pl.DataFrame, classes: Sequence[str], targets: Sequence[str]) -> ImageRecords:
    number_of = {label: number for number, label in enumerate(classes)}
    columns = [part[f"value:{name}"].to_numpy() for name in targets]
    indices = [UNKNOWN_CLASS if label is None else number_of[label] for label in part["class_label"]]
    return ImageRecords(
        image_ids=tuple(part["image_id"]),
        group_ids=tuple(part["group_id"]),
        paths=tuple(part["path"]),
        class_indices=np.array(indices, dtype=np.int64),
        values=np.stack(columns, axis=1).astype(np.float64) if columns else np.empty((part.height, 0)),
    )


def _refuse_untrained_classes(train: ImageRecords, classes: Sequence[str]) -> None:
    learned = set(train.class_indices.tolist())
    unlearned = [label for number, label in enumerate(classes) if number not in learned]
    if unlearned:
        named = ", ".join(map(repr, unlearned[:_NAMED_AT_MOST]))
        raise DataError(
            f"{len(unlearned)} classes have no picture in the training part, so they cannot be learned: {named}. Leave "
            "them out of the corpus, or give them more groups."
        )


def _fingerprint(labels: ImageLabels, parts: Mapping[str, ImageRecords]) -> str:
    digest = hashlib.sha256(repr((labels.classes, labels.targets, labels.units)).encode("utf-8", "surrogateescape"))
    for part, records in parts.items():
        digest.update(f"{part}\x1f{len(records)}\n".encode())
        digest.update("\n".join(records.image_ids).encode("utf-8", "surrogateescape"))
        digest.update(records.class_indices.tobytes())
        digest.update(records.values.tobytes())
    return digest.hexdigest()


# The square crop that a network sees. Crops are mild because targets such as calories depend on the whole picture: a
# strong zoom makes a small portion look large.

_LEAST_AREA = 0.7
_WIDEST = 1.15  # width over height
_COLOUR = 0.15  # brightness, contrast and saturation between 1 - this and 1 + this


def decoded_side(size: int, *, training: bool) -> int:
    """Return the length in pixels that the shorter side needs so that a view of ``size`` is not enlarged."""
    return math.ceil(size / math.sqrt(_LEAST_AREA / _WIDEST)) if training else size


def middle_view(pixels: Tensor, size: int) -> Tensor:
    """Return the largest centred square of uint8 (3, H, W), resized to uint8 (3, size, size)."""
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return resized(pixels[:, top : top + side, left : left + side], size)


def training_view(pixels: Tensor, size: int, generator: np.random.Generator) -> Tensor:
    """Return a random crop of uint8 (3, H, W), maybe mirrored, with jittered colours, as uint8 (3, size, size).

    The number of draws from ``generator`` does not depend on the picture.
    """
    area, shape, across, down = generator.uniform(size=4)
    flips = generator.uniform() < 0.5
    brightness, contrast, saturation = 1 + _COLOUR * generator.uniform(-1, 1, size=3)
    view = resized(_cropped(pixels, area, shape, across, down), size)
    if flips:
        view = view.flip(2)
    return _coloured(view, brightness, contrast, saturation)


def _cropped(pixels: Tensor, area: float, shape: float, across: float, down: float) -> Tensor:
    """Crop a picture; its area, aspect ratio and place are given by draws in [0, 1)."""
    height, width = pixels.shape[1:]
    side = min(height, width)  # of the square that evaluation sees
    scale = math.sqrt(_LEAST_AREA + (1 - _LEAST_AREA) * area)
    stretch = math.exp((2 * shape - 1) * math.log(_WIDEST) / 2)
    crop_height = max(1, min(height, round(side * scale / stretch)))
    crop_width = max(1, min(width, round(side * scale * stretch)))
    # Stay around the middle square, which is all that evaluation sees.
    top = _start(height, crop_height, side, down)
    left = _start(width, crop_width, side, across)
    return pixels[:, top : top + crop_height, left : left + crop_width]


def _start(length: int, crop: int, side: int, draw: float) -> int:
    room = max(side, crop) - crop
    first = (length - max(side, crop)) // 2 + math.floor(draw * (room + 1))
    return min(max(0, first), length - crop)


def _coloured(view: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    colours = view.float() * brightness
    # Sum with NumPy: torch's sum depends on the number of threads, which differs in loader processes.
    mean = float(_grey(colours).numpy().mean(dtype=np.float64))
    colours = mean + contrast * (colours - mean)
    grey = _grey(colours)
    colours = grey + saturation * (colours - grey)
    return _as_bytes(colours)


def _grey(colours: Tensor) -> Tensor:
    """Return the luma (H, W) of float (3, H, W), by ITU-R BT.601."""
    red, green, blue = colours
    grey: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return grey


def _as_bytes(colours: Tensor) -> Tensor:
    return colours.round().clamp(0, 255).to(torch.uint8)


def resized(pixels: Tensor, size: int) -> Tensor:
    """Resize uint8 (3, H, W) to uint8 (3, size, size), bilinearly and with antialiasing."""
    if pixels.shape[1:] == (size, size):
        return pixels
    scaled = F.interpolate(pixels[None].float(), size=(size, size), mode="bilinear", antialias=True)
    return _as_bytes(scaled[0])


def mixed_values(
    values: Tensor, known: Tensor, partner_values: Tensor, partner_known: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Return mixed values (T,) and which are known (T,): only those that both pictures have."""
    both = known * partner_known
    return both * (mix.share * values + (1 - mix.share) * partner_values), both


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Samples of one part of a corpus.

    A sample has these tensors:

    - ``image`` uint8 (3, S, S);
    - ``class_target`` float32 (C,): the weight of each class in the loss; all zero without a class;
    - ``class_index`` int64 (): the picture's own class, also when another picture is mixed in; -1 without a class;
    - ``values`` float32 (T,): scaled; 0 where unknown;
    - ``known`` float32 (T,): 1 where the value is known, else 0.
    """

    root: Path  # of the corpus
    records: ImageRecords
    labels: ImageLabels
    size: int  # S, in pixels
    class_weights: FloatArray | None = None  # float64 (C,): loss weights; None: 1 each
    mixing: MixSettings | None = None  # set for training: then views are random and differ between epochs
    seed: int = 0  # seed, picture and epoch determine everything random
    epoch: int = 0

    @property
    def classes(self) -> tuple[int, ...] | None:
        """The class of each picture; None if a picture has no class, since balanced sampling would never draw it."""
        indices = self.records.class_indices
        return None if (indices == UNKNOWN_CLASS).any() else tuple(indices.tolist())

    def at_epoch(self, epoch: int) -> Self:
        """Return the samples of ``epoch`` (0-based)."""
        return self if self.mixing is None else replace(self, epoch=epoch)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        own = self._own_tensors(index)
        mix = self._mix(index)
        if mix is not None:
            other = self._own_tensors(mix.partner)
            values, known = mixed_values(own["values"], own["known"], other["values"], other["known"], mix)
            own["image"] = mixed_pixels(own["image"], other["image"], mix)
            own["class_target"] = mixed_target(own["class_target"], other["class_target"], mix)
            own["values"], own["known"] = values, known
        return Sample(self.records.image_ids[index], own)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        return stack_samples([self[index] for index in indices])

    def _mix(self, index: int) -> Mix | None:
        if self.mixing is None:
            return None
        rows = self._rows_of_class if self.mixing.balanced else None
        return draw_mix(self.mixing, len(self), self.size, self._generator("mix", index), rows)

    @cached_property
    def _rows_of_class(self) -> list[np.ndarray]:
        return rows_of_classes(self.records.class_indices)

    def _own_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of one picture, before mixing."""
        class_index = int(self.records.class_indices[index])
        class_target = torch.zeros(len(self.labels.classes))
        if class_index != UNKNOWN_CLASS:
            class_target[class_index] = 1.0 if self.class_weights is None else float(self.class_weights[class_index])
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
        training = self.mixing is not None
        path = self.root / path_from_text(self.records.paths[index])
        pixels = decode_image(path, shortest_side=decoded_side(self.size, training=training))
        picture = torch.from_numpy(pixels).permute(2, 0, 1)
        if not training:
            return middle_view(picture, self.size).contiguous()
        return training_view(picture, self.size, self._generator("view", index)).contiguous()

    def _generator(self, purpose: str, index: int) -> np.random.Generator:
        """Return a generator for one picture and epoch; order, process and batch do not matter."""
        image_id = self.records.image_ids[index]
        return np.random.default_rng(stable_seed(f"image {purpose}", self.seed, image_id, self.epoch))


def balancing_weights(records: ImageRecords, num_classes: int) -> FloatArray:
    """Return loss weights float64 (C,) that give all classes equal influence, with mean 1 over labelled pictures."""
    counts = np.bincount(records.class_indices[records.class_indices >= 0], minlength=num_classes)
    weights: FloatArray = counts.sum() / (num_classes * np.maximum(counts, 1))
    return weights
