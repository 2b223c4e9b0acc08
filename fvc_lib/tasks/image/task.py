"""Task image: predict a class and numbers from a picture with one network."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.frames.backbone import ImageModel, build_backbone
from fvc_lib.detectors.network import num_trained_stages
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns, SampleSet, require_detached
from fvc_lib.metrics.calibration import class_probabilities, expected_calibration_error, fit_class_temperature
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.recognition import macro_f1, ranks_of_class, regression_scores
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.class_losses import class_losses
from fvc_lib.tasks.image.data import ImageDataset, ImageLabels

LABELS, CALIBRATION = "labels.json", "calibration.json"  # files of ``ImageLabels`` and ``Calibration``


@dataclass(frozen=True)
class ScoredClasses:
    """Predictions for the N pictures that have a class.

    Attributes:
        rows: int64 (N,), row numbers of these pictures among all pictures.
        class_indices: int64 (N,), the true classes.
        logits: float64 (N, C).
        predicted: int64 (N,), the class with the highest logit; the first of equal ones.
        probabilities: float64 (N,), softmax of the predicted class; NaN where a logit is not finite.
        ranks: int64 (N,), rank of the true class from 1, ties count against the model; 0 where a logit is not finite.
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
            "logits": require_detached(outputs["class_logits"], "class_logits").float(),
            "predicted": outputs["values"].double(),
            "value": batch.tensors["values"].double(),
            "known": batch.tensors["known"] > 0,
        }
        self.add(batch.sample_ids, columns)

    def classes(self) -> ScoredClasses:
        """Return the predictions for the pictures with a class."""
        rows = np.flatnonzero(self.column("class_index").numpy() >= 0)
        class_indices, logits = self.column("class_index").numpy()[rows], self.column("logits")[rows].double()
        if not rows.size:
            return ScoredClasses(rows, class_indices, logits.numpy(), rows, np.empty(0), rows)
        is_finite = torch.isfinite(logits).all(1)
        probabilities = torch.where(is_finite, torch.softmax(logits, dim=1).amax(1), math.nan)
        ranks = np.zeros(rows.size, dtype=np.int64)
        some = is_finite.numpy()
        if some.any():
            ranks[some] = ranks_of_class(logits.numpy()[some], class_indices[some])
        return ScoredClasses(
            rows, class_indices, logits.numpy(), logits.argmax(1).numpy(), probabilities.numpy(), ranks
        )  # fmt: skip

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
        """Return ``top1``, ``top5``, ``macro_f1``, and ``mae_NAME`` and ``r2_NAME`` per target.

        A metric is NaN where a network output is not finite, and left out where no picture has its label.
        """
        metrics, classes = dict[str, float](), self.classes()
        if classes.rows.size:
            metrics = dict.fromkeys(("top1", "top5", "macro_f1"), math.nan)
        if classes.rows.size and classes.ranks.min():
            metrics = {
                "top1": float(np.mean(classes.ranks <= 1)),
                "top5": float(np.mean(classes.ranks <= 5)),
                "macro_f1": macro_f1(classes.class_indices, classes.predicted),
            }
        for name in self.labels.targets:
            rows, values, predicted = self.target(name)
            if rows.size:
                scores = regression_scores(values, predicted) if np.isfinite(predicted).all() else {}
                metrics |= {f"{error}_{name}": scores.get(error, math.nan) for error in ("mae", "r2")}
        return metrics


@dataclass(frozen=True)
class Calibration:
    """The temperature of the class logits, and the calibration error on the test part.

    Attributes:
        temperature: divisor of the logits, fitted on the validation part, which also chose the epoch.
        num_validation: number of labelled validation pictures.
        num_test: number of labelled test pictures, on which the errors were measured.
        error, error_uncalibrated: expected calibration error of the predicted class's probability, with and without
            the temperature.
    """

    temperature: float
    num_validation: int
    num_test: int
    error: float
    error_uncalibrated: float


def calibration_of(validation: ImageScores, test: ImageScores) -> Calibration | None:
    """Fit a temperature on ``validation`` and measure the calibration error on ``test``.

    Returns None if a part has no labelled picture, or a validation logit is not finite.
    """
    fitted, tested = validation.classes(), test.classes()
    if not fitted.rows.size or not tested.rows.size or not np.isfinite(fitted.logits).all():
        return None
    temperature = fit_class_temperature(fitted.class_indices, fitted.logits)
    errors = []
    for divisor in (temperature, 1.0):
        probabilities = class_probabilities(tested.logits, divisor)
        right = (probabilities.argmax(axis=1) == tested.class_indices).astype(np.int64)
        errors.append(float(expected_calibration_error(right, probabilities.max(axis=1))))
    return Calibration(temperature, fitted.rows.size, tested.rows.size, *errors)


class ImageTask:
    """Label-smoothed cross-entropy on classes plus a Huber loss on values, each only where the label is known.

    Every picture weighs 1, so a batch's loss is the mean over its pictures, however it is split.
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
