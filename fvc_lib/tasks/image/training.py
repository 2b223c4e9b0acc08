"""Task image: predict a class and numbers from a picture with one network, trained on one split."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.corpus.images import image_root
from fvc_lib.detectors.frames.backbone import (
    ImageModel,
    build_backbone,
    refused_size,
)
from fvc_lib.detectors.network import num_trained_stages
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns, SampleSet
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.calibration import class_probabilities, expected_calibration_error, fit_class_temperature
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.recognition import macro_f1, ranks_of_class, regression_scores
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import content_digest, write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.image import data
from fvc_lib.tasks.image.data import Calibration, ImageDataset, ImageLabels, ImageParts, ImageRecords
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings, class_losses
from fvc_lib.tasks.shared_training import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome

DEFAULT_MICRO_BATCH = 8
LABELS = "labels.json"  # file of ``ImageLabels``


@dataclass(frozen=True)
class ScoredClasses:
    """Predictions for the N pictures that have a class.

    Attributes:
        rows: int64 (N,), row numbers of these pictures among all pictures.
        class_indices: int64 (N,), the true classes.
        logits: float64 (N, C); 0 in place of NaN.
        predicted: int64 (N,), the class with the highest logit; the first of equal ones.
        probabilities: float64 (N,), softmax of the predicted class.
        ranks: int64 (N,), rank of the true class from 1; ties count against the model.
    """

    rows: IntArray
    class_indices: IntArray
    logits: FloatArray
    predicted: IntArray
    probabilities: FloatArray
    ranks: IntArray


class ImageScores(SampleColumns):
    """Collect the class, the logits and the values of all pictures.

    Reads the outputs ``class_logits`` (B, C) and ``values`` (B, T) and the batch's ``class_index``, ``values`` and
    ``known``.
    """

    def __init__(self, labels: ImageLabels) -> None:
        super().__init__()
        self.labels = labels
        numbers = torch.empty(0, len(labels.targets), dtype=torch.float64)
        self.add([], {"class_index": torch.empty(0, dtype=torch.int64), "logits": torch.empty(0, len(labels.classes))})
        self.add([], {"predicted": numbers, "value": numbers, "known": numbers > 0})

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        columns = {
            "class_index": batch.tensors["class_index"].cpu(),
            "logits": outputs["class_logits"].detach().cpu().float(),
            "predicted": outputs["values"].double(),
            "value": batch.tensors["values"].double(),
            "known": batch.tensors["known"] > 0,
        }
        self.add(batch.sample_ids, columns)

    @property
    def has_finite_logits(self) -> bool:
        """Whether all logits are finite."""
        return bool(torch.isfinite(self.column("logits")).all())

    def classes(self) -> ScoredClasses:
        """Return the predictions for the pictures with a class."""
        rows = np.flatnonzero(self.column("class_index").numpy() >= 0)
        class_indices, logits = self.column("class_index").numpy()[rows], self.column("logits")[rows].double()
        if not rows.size:
            return ScoredClasses(rows, class_indices, logits.numpy(), rows, np.empty(0), rows)
        logits = torch.nan_to_num(logits)
        probabilities, ranks = torch.softmax(logits, dim=1).amax(1), ranks_of_class(logits.numpy(), class_indices)
        predicted = logits.argmax(1).numpy()
        return ScoredClasses(rows, class_indices, logits.numpy(), predicted, probabilities.numpy(), ranks)

    def target(self, name: str) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return true and predicted values of the N pictures that have a value of target ``name``.

        Returns:
            ``(rows, values, predicted)``: row numbers int64 (N,), true and predicted values float64 (N,) in the
            target's unit.
        """
        number = self.labels.targets.index(name)
        rows = np.flatnonzero(self.column("known")[:, number].numpy())
        values, predicted = (self.labels.in_units(self.column(c).numpy())[rows, number] for c in ("value", "predicted"))
        return rows, values, predicted

    def compute(self) -> dict[str, float]:
        """Return ``top1``, ``top5``, ``macro_f1``, and ``mae_NAME`` and ``r2_NAME`` for every target NAME.

        A metric is NaN if an output that it needs is not finite, and left out if no picture has its label.
        """
        metrics, classes = dict[str, float](), self.classes()
        if classes.rows.size:
            metrics = {
                "top1": float(np.mean(classes.ranks <= 1)),
                "top5": float(np.mean(classes.ranks <= 5)),
                "macro_f1": macro_f1(classes.class_indices, classes.predicted),
            }
        if not self.has_finite_logits:
            metrics = dict.fromkeys(metrics, math.nan)
        for name in self.labels.targets:
            rows, values, predicted = self.target(name)
            if rows.size:
                scores = regression_scores(values, predicted) if np.isfinite(predicted).all() else {}
                metrics |= {f"{error}_{name}": scores.get(error, math.nan) for error in ("mae", "r2")}
        return metrics


def calibration_of(validation: ImageScores, test: ImageScores) -> Calibration | None:
    """Fit a temperature on ``validation`` and measure the calibration error on ``test``.

    Return None if a part has no labelled picture, or a validation logit is not finite.
    """
    fitted, tested = validation.classes(), test.classes()
    if not fitted.rows.size or not tested.rows.size or not validation.has_finite_logits:
        return None
    temperature = fit_class_temperature(fitted.class_indices, fitted.logits)
    errors = []
    for divisor in (temperature, 1.0):
        probabilities = class_probabilities(tested.logits, divisor)
        right = (probabilities.argmax(axis=1) == tested.class_indices).astype(np.int64)
        errors.append(float(expected_calibration_error(right, probabilities.max(axis=1))))
    return Calibration(temperature, fitted.rows.size, tested.rows.size, *errors)


class ImageTask:
    """Train with a label-smoothed cross-entropy on the class plus a Huber loss on the values.

    A picture without a class, or without a value, adds nothing to that loss. Every picture weighs 1, so the loss of a
    batch is the mean over its pictures, however the batch is split.
    """

    def __init__(self, training: ImageDataset, validation: ImageDataset, config: RunConfig) -> None:
        self.training_data: SampleSet = training
        self.validation_data: SampleSet = validation
        self.labels = training.labels
        self.config = config

    def build_model(self) -> ImageModel:
        """Return the backbone with new heads, initialised from torch's current random state."""
        weights = self.config.backbone_weights
        backbone = build_backbone(self.config.backbone, Path(weights) if weights else None, self.config.image_size)
        return ImageModel(backbone, len(self.labels.classes), len(self.labels.targets))

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze or unfreeze the backbone's stages for ``epoch``."""
        assert isinstance(model, ImageModel)
        freeze, stage = self.config.freeze_backbone_epochs, self.config.unfreeze_stage_epochs
        num_stages = len(model.backbone.stages())
        model.train_stages(num_trained_stages(epoch, num_stages, freeze_epochs=freeze, stage_epochs=stage))

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return ``class_logits`` (B, C) and scaled ``values`` (B, T)."""
        outputs: Outputs = model(batch.tensors["image"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the sum of the pictures' losses; each picture weighs 1."""
        tensors, smoothing = batch.tensors, self.config.label_smoothing
        losses = class_losses(outputs["class_logits"], tensors["class_target"], label_smoothing=smoothing)
        losses = losses + value_losses(outputs["values"], tensors["values"], tensors["known"])
        return LossSum(losses.sum(), losses.new_tensor(float(len(losses))))

    def new_accumulator(self) -> ImageScores:
        """Return an empty ``ImageScores``."""
        return ImageScores(self.labels)


def value_losses(predicted: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Return the Huber loss (B,) with delta 1, averaged over a picture's known values; 0 without known values.

    Args:
        predicted: float (B, T), scaled; T may be 0.
        values: float (B, T), scaled; entries that are not known may have any value.
        known: float (B, T), 1 where a value is known, else 0.
    """
    present = known > 0
    errors = torch.where(present, predicted.float() - values, 0.0)
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return losses.sum(1) / present.sum(1).clamp_min(1)


def train_images(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choose the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/images.parquet`` and ``tables/image_targets.parquet``. Writes the checkpoints, next to them
    ``labels.json`` (classes, targets, their scaling and the calibration), and
    ``tables/image_predictions.parquet`` and ``tables/target_predictions.parquet``. Resumes an earlier attempt.

    Raises:
        StillImageError: a picture is missing or damaged.
        DataError: a part is empty, or an output for a test picture is not finite.
        UsageError: backbone or weights do not load, or balanced sampling is on while a picture has no class.
        FvcError: as ``shared_training.train``, which explains ``options``.
    """

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        root, parts = read_image_parts(paths, config)
        outputs = [paths.image_predictions, paths.target_predictions, paths.training_checkpoints(STAGE) / LABELS]
        finish = partial(_finish, paths, root, parts, config)
        return replace(image_split_training(root, parts, config), finish=finish, outputs=outputs)

    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, root: Path, parts: ImageParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    (model,) = trained
    scores, validation = ImageScores(parts.labels), ImageScores(parts.labels)
    model.predict(ImageDataset(root, parts.validation, parts.labels, config.image_size), validation)
    model.predict(ImageDataset(root, parts.test, parts.labels, config.image_size), scores)
    classes = class_predictions(parts.test, scores)
    numbers = target_predictions(parts.test, scores)
    if not (scores.has_finite_logits and numbers["predicted"].is_finite().all()):
        raise DataError(
            "the network's outputs for test pictures are not finite. Turn amp off, or train with a lower learning_rate."
        )
    model.log("test", scores.compute())
    labels = replace(parts.labels, calibration=calibration_of(validation, scores))

    def write() -> None:
        write_json(paths.training_checkpoints(STAGE) / LABELS, asdict(labels))
        tables.write_table(classes, tables.IMAGE_PREDICTIONS, paths.image_predictions)
        tables.write_table(numbers, tables.TARGET_PREDICTIONS, paths.target_predictions)

    return Finished([TrainingRecord(**model.record())], write)


def require_backbone(config: RunConfig) -> None:
    """Check backbone, weights and image size before the corpus is indexed.

    Raises:
        UsageError: backbone or weights do not load, the backbone rejects the image size, or it does not support
            ``gradient_checkpointing``.
    """
    weights, size = Path(config.backbone_weights) if config.backbone_weights else None, config.image_size
    with forked_random_state(config.seed, torch.device("cpu")):
        backbone = build_backbone(config.backbone, weights, size, pretrained=weights is not None)
        picture = torch.zeros(1, 3, size, size, dtype=torch.uint8)
        try:
            with torch.no_grad():
                backbone.eval()(picture)
        except RuntimeError as error:
            raise refused_size(backbone, picture, error) from error
    if config.gradient_checkpointing:
        backbone.recomputable_blocks()


def read_image_parts(paths: RunPaths, config: RunConfig) -> tuple[Path, ImageParts]:
    """Return the folder of the corpus, and its split into parts, which is read from the run's tables."""
    images = tables.read_table(paths.images, tables.IMAGES)
    targets = tables.read_table(paths.image_targets, tables.IMAGE_TARGETS)
    return image_root(config), data.image_parts(images, targets)


def image_split_training(root: Path, parts: ImageParts, config: RunConfig) -> Training[TrainingRecord]:
    """Return the training of ``parts`` that ``config`` describes, without scoring of the test part.

    Raises:
        UsageError: as ``train_images``.
    """
    balance = config.class_balance
    weights = data.balancing_weights(parts.train, len(parts.labels.classes)) if balance == "loss" else None
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha, balance == "sampler")
    validation = ImageDataset(root, parts.validation, parts.labels, config.image_size, weights)
    training = replace(validation, records=parts.train, mixing=mixing, seed=stable_seed("images", config.seed))
    if mixing.balanced and training.classes is None:
        raise UsageError(
            f"class_balance {balance}: some training pictures have no class, and would never be drawn. Take "
            "-p class_balance loss or none."
        )
    seed = stable_seed(STAGE, config.seed)
    settings = shared_training.settings_of(config, seed, DEFAULT_MICRO_BATCH, balance_classes=mixing.balanced)
    initial = content_digest(config.backbone_weights) if config.backbone_weights else ""
    return Training(
        stage=STAGE,
        model_name=config.backbone,
        settings=settings,
        parameters=config.training_values() | {"backbone_weights": initial},
        networks=[Network(ImageTask(training, validation, config), parts.fingerprint)],
        sizes={f"num_{part}": len(getattr(parts, part)) for part in tables.PARTS},
    )


def class_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table IMAGE_PREDICTIONS: one row per picture of ``records`` that has a class, in their order."""
    classes, names = scores.classes(), np.array(scores.labels.classes, dtype=object)
    table = records.table[classes.rows].with_columns(
        class_label=pl.Series(names[classes.class_indices].tolist(), dtype=pl.String),
        predicted_label=pl.Series(names[classes.predicted].tolist(), dtype=pl.String),
        probability=pl.Series(classes.probabilities),
        rank_of_class=pl.Series(classes.ranks),
    )
    return tables.frame_of(table.to_dict(), tables.IMAGE_PREDICTIONS)


def target_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table TARGET_PREDICTIONS: one row per known value of ``records``, target by target."""
    parts = [tables.frame_of(None, tables.TARGET_PREDICTIONS)]
    for place, (name, unit) in enumerate(zip(scores.labels.targets, scores.labels.units, strict=True)):
        rows, _, predicted = scores.target(name)
        table = records.table[rows].with_columns(
            target=pl.lit(name), unit=pl.lit(unit), value=records.values[rows, place], predicted=predicted
        )
        parts.append(tables.frame_of(table.to_dict(), tables.TARGET_PREDICTIONS))
    return pl.concat(parts)
