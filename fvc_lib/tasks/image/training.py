"""Task image: train a network that predicts a class and numbers from a picture, and predict the test part."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, Unpack

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.corpus.images import image_root
from fvc_lib.detectors.frames.backbone import ImageModel, build_backbone
from fvc_lib.detectors.network import num_trained_stages, recomputable_blocks_of, train_last
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.task import Batch, LossSum, Outputs, Sample, SampleColumns
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.calibration import class_probabilities, expected_calibration_error, fit_class_temperature
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.intervals import values_of
from fvc_lib.metrics.recognition import class_measures, ranks_of_class, regression_measures
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import content_digest, path_from_text, sha256_of_json, write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings, class_losses, draw_mix, mixed_pixels, mixed_target
from fvc_lib.tasks.shared_training import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome
from fvc_lib.video.decode.still_image import decode_image

DEFAULT_MICRO_BATCH = 8
LABELS = "labels.json"  # file of ``ImageLabels``, next to the weights
UNKNOWN_CLASS = -1
_CLASS_METRICS = ("top1", "top5", "macro_f1")
_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class ImageLabels:
    """Names of the C classes and T targets (numbers to predict), and the scaling of the targets.

    They are saved with the model.

    Attributes:
        classes: names of the classes, sorted.
        targets: names of the targets.
        units: unit of each target; may be an empty text.
        means: mean of each target over the training pictures that have a value.
        deviations: standard deviation of each target over these pictures; 1 if all values are equal.
        temperature: divisor of the class logits, fitted on the validation part, which also chose the epoch. None before
            the training has finished, and if none can be fitted.
        calibration_error: expected calibration error of the predicted class's probability on the test part, with this
            temperature.
    """

    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    temperature: float | None = None
    calibration_error: float | None = None

    def scaled(self, values: FloatArray) -> FloatArray:
        """Return values (..., T) minus the training mean, divided by the training standard deviation."""
        return np.asarray((values - np.array(self.means)) / np.array(self.deviations))

    def in_units(self, scaled: FloatArray) -> FloatArray:
        """Return scaled values (..., T) in the targets' units."""
        return np.asarray(scaled * np.array(self.deviations) + np.array(self.means))


def labels_of_training(
    classes: tuple[str, ...], targets: tuple[str, ...], units: tuple[str, ...], values: FloatArray
) -> ImageLabels:
    """Return the ``ImageLabels`` of a training, and compute the means and standard deviations of its targets.

    Args:
        classes: names of the classes.
        targets: names of the T targets.
        units: unit of each target.
        values: values of the N training pictures, float64 (N, T); NaN if unknown.

    Raises:
        DataError: a target has no value in any training picture.
    """
    if unknown := [name for name, column in zip(targets, values.T, strict=True) if not np.isfinite(column).any()]:
        raise DataError(
            f"targets {', '.join(unknown)}: no picture of the training part has this number, so it cannot be learned. "
            "Choose others with -p targets, or give the training pictures this number."
        )
    means, deviations = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    deviations = np.where(deviations > 1e-12 * np.maximum(1.0, np.abs(means)), deviations, 1.0)
    return ImageLabels(classes, targets, units, tuple(means.tolist()), tuple(deviations.tolist()))


@dataclass(frozen=True, eq=False)
class ImageRecords:
    """N pictures of a corpus, sorted by their ids, with their true classes and values.

    Attributes:
        table: N rows with the columns ``image_id group_id path``; paths are relative to the corpus's root.
        class_indices: int64 (N,), indices into ``ImageLabels.classes``; -1 where no class is known.
        values: float64 (N, T) in the targets' units; NaN where not known.
    """

    table: pl.DataFrame
    class_indices: IntArray
    values: FloatArray


@dataclass(frozen=True)
class ImageParts:
    """The pictures of a corpus, split into training, validation and test part.

    ``fingerprint`` is a digest of ids, labels, values and parts, not of paths.
    """

    labels: ImageLabels
    train: ImageRecords
    validation: ImageRecords
    test: ImageRecords
    fingerprint: str


def image_parts(images: pl.DataFrame, targets: pl.DataFrame) -> ImageParts:
    """Split the pictures of a corpus into training, validation and test part, with their classes and values.

    Args:
        images: IMAGES, whose column ``part`` names the part of each picture.
        targets: IMAGE_TARGETS, the numbers to predict.

    Raises:
        DataError: the training part lacks a class or a target.
    """
    classes = tuple(images["class_label"].drop_nulls().unique().sort())
    units = dict(targets.sort("target").select("target", "unit").iter_rows())
    index_of = dict(zip(classes, range(len(classes)), strict=True))
    index = pl.col("class_label").replace_strict(index_of, default=UNKNOWN_CLASS, return_dtype=pl.Int64)
    values = [f"value:{name}" for name in units]
    named = targets.with_columns(column=pl.format("value:{}", "target"))
    numbers = named.pivot("column", index="image_id", values="value")
    known = images.sort("image_id").with_columns(index=index).join(numbers, "image_id", "left", maintain_order="left")
    parts = {}
    for name in tables.PARTS:
        rows = known.filter(part=name)
        matrix = rows.select(pl.col(values).fill_null(math.nan)).to_numpy(order="c").reshape(rows.height, len(values))
        parts[name] = ImageRecords(rows.select("image_id", "group_id", "path"), rows["index"].to_numpy(), matrix)
    if unlearned := sorted(set(classes).difference(known.filter(part="train")["class_label"])):
        raise DataError(
            f"{len(unlearned)} classes have no picture in the training part, so they cannot be learned: "
            f"{', '.join(map(repr, unlearned[:_NAMED_AT_MOST]))}. Leave them out, or give them more groups."
        )
    labels = labels_of_training(classes, tuple(units), tuple(units.values()), parts["train"].values)
    content = [
        [part, records.table["image_id"].to_list(), records.class_indices.tolist(), records.values.tobytes().hex()]
        for part, records in parts.items()
    ]
    return ImageParts(labels, **parts, fingerprint=sha256_of_json([classes, units, content]))


# The square crop that a network sees. Crops are mild because targets such as calories depend on the whole picture: a
# strong zoom makes a small portion look large.

_LEAST_AREA = 0.7
_WIDEST = 1.15  # width over height
_COLOUR = 0.15  # brightness, contrast and saturation are scaled by 1 - this to 1 + this


def middle_view(pixels: Tensor, size: int) -> Tensor:
    """Return the largest centred square of a picture, resized to ``size`` pixels per side: uint8 (3, size, size).

    Networks are evaluated on these squares. ``pixels`` are the whole picture, uint8 (3, H, W).
    """
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return _resized(pixels[:, top : top + side, left : left + side], size)


def training_view(pixels: Tensor, size: int, generator: np.random.Generator) -> Tensor:
    """Return a random crop of a picture, maybe mirrored, with random colours: uint8 (3, size, size).

    The number of random draws from ``generator`` does not depend on the picture.

    Args:
        pixels: uint8 (3, H, W).
        size: side of the result in pixels.
        generator: source of all random draws.
    """
    area, shape, across, down, flip = generator.uniform(size=5)
    brightness, contrast, saturation = 1 + _COLOUR * generator.uniform(-1, 1, size=3)
    height, width = pixels.shape[1:]
    side = min(height, width)  # side of the square that evaluation sees
    scale = math.sqrt(_LEAST_AREA + (1 - _LEAST_AREA) * area)
    stretch = math.exp((2 * shape - 1) * math.log(_WIDEST) / 2)
    rows = _placed(height, round(side * scale / stretch), side, down)
    columns = _placed(width, round(side * scale * stretch), side, across)
    view = _resized(pixels[:, rows, columns], size)
    colours = (view.flip(2) if flip < 0.5 else view).float() * brightness
    # Sum with NumPy: torch's sum depends on the number of threads, which differs in loader processes.
    mean = float(_grey(colours).numpy().mean(dtype=np.float64))
    colours = mean + contrast * (colours - mean)
    grey = _grey(colours)
    return _as_bytes(grey + saturation * (colours - grey))


def _placed(length: int, crop: int, side: int, draw: float) -> slice:
    """Return the slice of pixels that a random crop takes along one axis of a picture.

    Args:
        length: length of the picture along the axis, in pixels.
        crop: length of the crop in pixels.
        side: side of the largest centred square of the picture, in pixels. A crop of at most this length lies inside
            the square; a longer crop is centred.
        draw: random number in [0, 1) that chooses among the allowed positions.
    """
    crop = max(1, min(length, crop))
    first = (length - max(side, crop)) // 2 + math.floor(draw * (max(side, crop) - crop + 1))
    first = min(max(0, first), length - crop)
    return slice(first, first + crop)


def _grey(colours: Tensor) -> Tensor:
    """Return the luma (brightness by ITU-R BT.601), float (H, W), of a picture with colours, float (3, H, W)."""
    return colours[0] * 0.299 + colours[1] * 0.587 + colours[2] * 0.114


def _as_bytes(colours: Tensor) -> Tensor:
    return colours.round().clamp(0, 255).to(torch.uint8)


def _resized(pixels: Tensor, size: int) -> Tensor:
    """Return the picture ``pixels``, uint8 (3, H, W), resized to a square, uint8 (3, size, size).

    The interpolation is bilinear with antialiasing. Proportions change if H and W differ.
    """
    return _as_bytes(F.interpolate(pixels[None].float(), size=(size, size), mode="bilinear", antialias=True)[0])


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Samples of one part (training, validation or test) of a corpus.

    A sample has these tensors:

    - ``image`` uint8 (3, S, S);
    - ``class_target`` float32 (C,): the weight of each class in the loss; all zero without a class;
    - ``class_index`` int64 (): the class of the picture itself, even if another one is mixed in; -1 without a class;
    - ``values`` float32 (T,): scaled; 0 where unknown;
    - ``known`` float32 (T,): 1 where the value is known, else 0. A mixed value is known where both pictures have it.

    Attributes:
        root: folder of the corpus.
        records: the pictures.
        labels: the C classes and T targets (numbers to predict) of the corpus.
        size: S, in pixels.
        class_weights: loss weights float64 (C,), or one for all classes.
        mixing: settings of mixup and cutmix. If given, the samples are for training: crops are random and differ
            between epochs. None: crops are centred squares.
        seed: seed of the random crops and mixtures, which depend on seed, picture and epoch alone.
        epoch: number of the epoch, from 0.
    """

    root: Path
    records: ImageRecords
    labels: ImageLabels
    size: int
    class_weights: FloatArray | float = 1.0
    mixing: MixSettings | None = None
    seed: int = 0
    epoch: int = 0

    def at_epoch(self, epoch: int) -> Self:
        """Return the samples of ``epoch`` (0-based): the same pictures with other random crops and mixtures.

        Samples for evaluation do not depend on the epoch.
        """
        return self if self.mixing is None else replace(self, epoch=epoch)

    def __len__(self) -> int:
        return self.records.table.height

    def __getitem__(self, index: int) -> Sample:
        own = self._own_tensors(index)
        mix = self.mixing and draw_mix(self.mixing, len(self), self.size, self._generator("mix", index))
        if mix:
            other = self._own_tensors(mix.partner)
            own["image"] = mixed_pixels(own["image"], other["image"], mix)
            own["known"] = own["known"] * other["known"]
            for name in ("class_target", "values"):
                own[name] = mixed_target(own[name], other[name], mix)
            own["values"] = own["known"] * own["values"]
        return Sample(self.records.table["image_id"][index], own)

    def _own_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of the picture with number ``index``, by name, before another picture is mixed in."""
        class_index, values = int(self.records.class_indices[index]), self.records.values[index]
        is_class = (torch.arange(len(self.labels.classes)) == class_index).float()
        path = self.root / path_from_text(self.records.table["path"][index])
        training = self.mixing is not None
        # Every random crop has at least ``size`` pixels per side, so none is enlarged.
        side = math.ceil(self.size / math.sqrt(_LEAST_AREA / _WIDEST)) if training else self.size
        picture = torch.from_numpy(decode_image(path, shortest_side=side)).permute(2, 0, 1)
        if training:
            view = training_view(picture, self.size, self._generator("view", index))
        else:
            view = middle_view(picture, self.size)
        return {
            "image": view.contiguous(),
            "class_target": is_class * torch.as_tensor(self.class_weights).float(),
            "class_index": torch.tensor(class_index),
            "values": torch.from_numpy(np.nan_to_num(self.labels.scaled(values)).astype(np.float32)),
            "known": torch.from_numpy(np.isfinite(values).astype(np.float32)),
        }

    def _generator(self, purpose: str, index: int) -> np.random.Generator:
        """Return a random generator for one picture in one epoch.

        Its seed depends on ``purpose`` (such as ``mix``), the data set's seed, the picture's id and the epoch alone.
        """
        image_id = self.records.table["image_id"][index]
        return np.random.default_rng(stable_seed(f"image {purpose}", self.seed, image_id, self.epoch))


def balancing_weights(records: ImageRecords, num_classes: int) -> FloatArray:
    """Return the loss weights of the C classes, float64 (C,). Rare classes get larger weights.

    A weight is inversely proportional to the number of pictures of the class. The mean weight over the pictures with a
    class is 1.
    """
    counts = np.bincount(records.class_indices[records.class_indices >= 0], minlength=num_classes)
    return np.asarray(counts.sum() / (num_classes * np.maximum(counts, 1)))


class ImageScores(SampleColumns):
    """A collector of a network's outputs for all pictures, which computes metrics from them.

    Reads the outputs ``class_logits`` (B, C) and ``values`` (B, T) and the batch's ``class_index``, ``values`` and
    ``known``.

    Args:
        labels: names of the classes and targets, and the scaling of the targets.
    """

    def __init__(self, labels: ImageLabels) -> None:
        super().__init__()
        self.labels = labels

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the network's outputs for the pictures of ``batch`` to the collected ones."""
        columns = {
            "class_index": batch.tensors["class_index"],
            "logits": outputs["class_logits"].float(),
            "predicted": outputs["values"].double(),
            "value": batch.tensors["values"].double(),
            "known": batch.tensors["known"] > 0,
        }
        self.add(batch.sample_ids, columns)

    @property
    def has_finite_logits(self) -> bool:
        """Whether all logits are finite."""
        return bool(torch.isfinite(self.column("logits")).all())

    def classes(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Return ``(rows, class_indices, logits)`` of the N pictures that have a class.

        They are the row numbers of these pictures among all pictures, int64 (N,), their true classes, int64 (N,), and
        their logits, float64 (N, C), with 0 in place of NaN.
        """
        class_indices = self.column("class_index").numpy()
        rows = np.flatnonzero(class_indices >= 0)
        return rows, class_indices[rows], torch.nan_to_num(self.column("logits")[rows].double()).numpy()

    def target(self, name: str) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return the true and the predicted values of one target, for the N pictures that have a value of it.

        Args:
            name: name of the target.

        Returns:
            ``(rows, values, predicted)``: row numbers among all pictures, int64 (N,); true and predicted values,
            float64 (N,) in the target's unit, NaN for a prediction that is not finite.
        """
        number = self.labels.targets.index(name)
        rows = np.flatnonzero(self.column("known")[:, number].numpy())
        values, predicted = (self.labels.in_units(self.column(c).numpy())[rows, number] for c in ("value", "predicted"))
        return rows, values, np.where(np.isfinite(predicted), predicted, math.nan)

    def compute(self) -> dict[str, float]:
        """Return the metrics by name.

        They are ``top1``, ``top5`` and ``macro_f1`` of the class, and ``mae_NAME`` and ``r2_NAME`` for every target
        NAME. A metric is NaN if an output that it needs is not finite. It is left out if no picture has a class, or a
        value of the target.
        """
        metrics = dict[str, float]()
        _, class_indices, logits = self.classes()
        if class_indices.size:
            ranks, predicted = ranks_of_class(logits, class_indices), logits.argmax(axis=1)
            scores = values_of(class_measures(ranks, class_indices, predicted))
            metrics = {name: scores[name] if self.has_finite_logits else math.nan for name in _CLASS_METRICS}
        for name in self.labels.targets:
            _, values, numbers = self.target(name)
            if values.size:
                scores = values_of(regression_measures(values, numbers))
                metrics |= {f"{error}_{name}": scores[error] for error in ("mae", "r2")}
        return metrics


def calibrated(labels: ImageLabels, validation: ImageScores, test: ImageScores) -> ImageLabels:
    """Return ``labels`` with a fitted temperature and the calibration error.

    The temperature is fitted on the validation part. The error is the expected calibration error on the test part at
    this temperature. ``labels`` are returned unchanged if a part has no picture with a class, or if a validation logit
    is not finite.
    """
    _, fitted, fitted_logits = validation.classes()
    _, tested, tested_logits = test.classes()
    if not fitted.size or not tested.size or not validation.has_finite_logits:
        return labels
    temperature = fit_class_temperature(fitted, fitted_logits)
    probabilities = class_probabilities(tested_logits, temperature)
    right = (probabilities.argmax(axis=1) == tested).astype(np.int64)
    error = float(expected_calibration_error(right, probabilities.max(axis=1)))
    return replace(labels, temperature=temperature, calibration_error=error)


def image_model(config: RunConfig, labels: ImageLabels) -> ImageModel:
    """Return the backbone that ``config`` names, with output layers for the classes and targets of ``labels``.

    It is initialised from torch's current random state. If ``config`` names weights, the backbone begins with them.
    """
    weights = Path(config.backbone_weights) if config.backbone_weights else None
    backbone = build_backbone(config.backbone, weights, config.image_size)
    return ImageModel(backbone, len(labels.classes), len(labels.targets))


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Data, network and loss of task image: a label-smoothed cross-entropy on the class plus a Huber loss on values.

    The cross-entropy is 0 for a picture without a class, and the Huber loss is 0 for a picture without values. Every
    picture weighs 1, so the loss of a batch is the mean over its pictures, even if the batch is split for memory.

    Attributes:
        training_data: samples of the training part.
        validation_data: samples of the validation part.
        config: backbone, image size, label smoothing, and the epochs in which the backbone's stages (blocks of layers)
            are frozen.
    """

    training_data: ImageDataset
    validation_data: ImageDataset
    config: RunConfig

    def build_model(self) -> ImageModel:
        """Return the backbone with new heads, initialised from torch's current random state."""
        return image_model(self.config, self.training_data.labels)

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze or unfreeze the backbone's stages (blocks of layers) for ``epoch`` (0-based)."""
        assert isinstance(model, ImageModel)
        config, stages = self.config, model.backbone.stages()
        number = num_trained_stages(
            epoch, len(stages), freeze_epochs=config.freeze_backbone_epochs, stage_epochs=config.unfreeze_stage_epochs
        )
        train_last(stages, number)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the outputs for B pictures: ``class_logits`` (B, C) and scaled ``values`` (B, T)."""
        outputs: Outputs = model(batch.tensors["image"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the sum of the pictures' losses on class and values, and the number of pictures as its weight."""
        tensors, smoothing = batch.tensors, self.config.label_smoothing
        losses = class_losses(outputs["class_logits"], tensors["class_target"], label_smoothing=smoothing)
        losses = losses + value_losses(outputs["values"], tensors["values"], tensors["known"])
        return LossSum(losses.sum(), losses.new_tensor(float(len(losses))))

    def new_accumulator(self) -> ImageScores:
        """Return an empty ``ImageScores``, which collects the outputs of an evaluation."""
        return ImageScores(self.training_data.labels)


def value_losses(predicted: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Return the loss of each picture's values, float (B,): the Huber loss with delta 1, averaged over known values.

    The loss of a picture without known values is 0.

    Args:
        predicted: float (B, T), scaled; T may be 0.
        values: float (B, T), scaled; entries that are not known may have any value.
        known: float (B, T), 1 where a value is known, else 0.
    """
    present = known > 0
    errors = torch.where(present, predicted.float() - values, 0.0)
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return losses.sum(1) / present.sum(1).clamp_min(1)


# --- The training.


def train_images(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train an image network, choose the epoch on the validation part, and predict the test part once.

    The test part is predicted with the weights of the chosen epoch. An earlier attempt is resumed. The input is
    ``tables/images.parquet`` and ``tables/image_targets.parquet``. The outputs are the checkpoints, next to them
    ``labels.json`` (classes, targets, their scaling and the calibration), and the tables
    ``tables/image_predictions.parquet`` and ``tables/target_predictions.parquet``.

    Raises:
        VideoError: a picture is missing or damaged.
        DataError: the training part lacks a class or a target, or an output for a test picture is not finite.
        UsageError: backbone or weights do not load.
        FvcError: another error of a training. ``shared_training.OpenTraining`` lists these, and explains ``options``.
    """
    read = partial(image_training, paths, config)
    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def image_training(paths: RunPaths, config: RunConfig, _ranks: Ranks | None = None) -> Training[TrainingRecord]:
    """Return the plan of an image training (data, network, settings, final scoring), which has not begun.

    The pictures come from the run's tables, and ``config`` gives the network and the settings. Every rank reads all
    tables, so ``_ranks`` has no effect.

    Raises:
        DataError: the training part lacks a class or a target.
    """
    images = tables.read_table(paths.images, tables.IMAGES)
    parts = image_parts(images, tables.read_table(paths.image_targets, tables.IMAGE_TARGETS))
    balances = config.class_balance == "loss"
    weights = balancing_weights(parts.train, len(parts.labels.classes)) if balances else 1.0
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha)
    validation = ImageDataset(image_root(config), parts.validation, parts.labels, config.image_size, weights)
    training = replace(validation, records=parts.train, mixing=mixing, seed=stable_seed("images", config.seed))
    initial = content_digest(config.backbone_weights) if config.backbone_weights else ""
    return Training(
        stage=STAGE,
        model_name=config.backbone,
        settings=shared_training.settings_of(config, stable_seed(STAGE, config.seed), DEFAULT_MICRO_BATCH),
        parameters=config.training_values() | {"backbone_weights": initial},
        networks=[Network(ImageTask(training, validation, config), parts.fingerprint)],
        sizes={f"num_{part}": getattr(parts, part).table.height for part in tables.PARTS},
        finish=partial(_finish, paths, validation, replace(validation, records=parts.test)),
        outputs=[paths.image_predictions, paths.target_predictions, paths.training_checkpoints(STAGE) / LABELS],
    )


def _finish(
    paths: RunPaths, validation: ImageDataset, test: ImageDataset, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    """Predict the test part once, and fit the temperature of the class logits on the validation part.

    Args:
        paths: paths of the run.
        validation: samples of the validation part.
        test: samples of the test part.
        trained: the trained network, as the only element.

    Returns:
        The record of the training, and a function that writes the tables of classes and numbers, and the labels.

    Raises:
        DataError: an output for a test picture is not finite.
    """
    (model,) = trained
    fitted, scores = ImageScores(test.labels), ImageScores(test.labels)
    model.predict(validation, fitted)
    model.predict(test, scores)
    classes = class_predictions(test.records, scores)
    numbers = target_predictions(test.records, scores)
    if not (scores.has_finite_logits and numbers["predicted"].is_finite().all()):
        raise DataError(
            "the network's outputs for test pictures are not finite. Turn amp off, or train with a lower learning_rate."
        )
    model.log("test", scores.compute())

    def write() -> None:
        write_json(paths.training_checkpoints(STAGE) / LABELS, asdict(calibrated(test.labels, fitted, scores)))
        tables.write_table(classes, tables.IMAGE_PREDICTIONS, paths.image_predictions)
        tables.write_table(numbers, tables.TARGET_PREDICTIONS, paths.target_predictions)

    return Finished({"": TrainingRecord(**model.record())}, write)


def require_backbone(config: RunConfig) -> None:
    """Check backbone, weights and image size before the corpus is indexed.

    Raises:
        UsageError: backbone or weights do not load, the backbone rejects the image size, or it does not support
            ``gradient_checkpointing``.
    """
    weights, size = Path(config.backbone_weights) if config.backbone_weights else None, config.image_size
    with forked_random_state(config.seed, torch.device("cpu")):
        backbone = build_backbone(config.backbone, weights, size, pretrained=weights is not None)
        with torch.no_grad():
            backbone.eval()(torch.zeros(1, 1, 3, size, size, dtype=torch.uint8))
    if config.gradient_checkpointing:
        recomputable_blocks_of(backbone)


def class_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table IMAGE_PREDICTIONS, one row per picture that has a class.

    A row has the true class and its rank among the logits, the predicted class and the probability of the latter.

    Args:
        records: the pictures of a part.
        scores: the outputs for these pictures, in the same order.
    """
    rows, class_indices, logits = scores.classes()
    if not rows.size:
        return tables.frame_of(None, tables.IMAGE_PREDICTIONS)
    names = np.array(scores.labels.classes, dtype=object)
    columns = {
        "class_label": names[class_indices],
        "predicted_label": names[logits.argmax(axis=1)],  # the first of equal ones
        "probability": torch.softmax(torch.from_numpy(logits), dim=1).amax(1).numpy(),
        "rank_of_class": ranks_of_class(logits, class_indices),
    }
    return tables.frame_of(records.table[rows].to_dict() | columns, tables.IMAGE_PREDICTIONS)


def target_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table TARGET_PREDICTIONS, with the true and the predicted value of targets of the pictures.

    It has one row per known value: all rows of the first target, then all rows of the next.

    Args:
        records: the pictures of a part.
        scores: the outputs for these pictures, in the same order.
    """
    parts = [tables.frame_of(None, tables.TARGET_PREDICTIONS)]
    for place, (name, unit) in enumerate(zip(scores.labels.targets, scores.labels.units, strict=True)):
        rows, _, predicted = scores.target(name)
        facts = {"target": name, "unit": unit, "value": records.values[rows, place], "predicted": predicted}
        parts.append(records.table[rows].with_columns(**{key: pl.lit(fact) for key, fact in facts.items()}))
    return pl.concat(parts)
