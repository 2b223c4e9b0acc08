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
from fvc_lib.metrics.multiclass import macro_f1, ranks_of_class, top_k_accuracy
from fvc_lib.metrics.regression import regression_scores
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.class_losses import class_losses
from fvc_lib.tasks.image.data import ImageDataset, ImageLabels

LABELS, CALIBRATION = "labels.json", "calibration.json"  # of ``ImageLabels`` and ``Calibration``
_UNRANKED = 0  # no class, or scores that are not finite


@dataclass(frozen=True)
class ScoredClasses:
    """Predictions for the N pictures that have a class; each field is (N,).

    ``rows`` are their places in the pass. ``predicted`` is the class with the highest score (the first of equal ones).
    ``ranks`` is the rank of the true class, with ties against the model. Scores that are not finite give the
    probability NaN and the rank 0.
    """

    rows: IntArray
    class_indices: IntArray
    predicted: IntArray
    probabilities: FloatArray
    ranks: IntArray


@dataclass(frozen=True)
class ScoredTarget:
    """The N pictures with a known value of one target: places in the pass, true and predicted values in its unit."""

    rows: IntArray
    values: FloatArray
    predicted: FloatArray


class ImageScores(SampleColumns):
    """Collect each picture's class, predicted class, probability, rank and values.

    Reads the outputs ``class_logits`` (B, C) and ``values`` (B, T) and the batch's ``class_index``, ``values`` and
    ``known``.
    """

    def __init__(self, labels: ImageLabels) -> None:
        super().__init__()
        self.labels = labels
        whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
        numbers = torch.empty(0, len(labels.targets), dtype=torch.float64)
        self.add([], {"class_index": whole, "top": whole, "probability": real, "rank": whole})
        self.add([], {"predicted": numbers, "value": numbers, "known": numbers > 0})

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        logits = require_detached(outputs["class_logits"], "class_logits").double()
        class_index = batch.tensors["class_index"].cpu()
        tops, probabilities = _tops(logits)
        columns = {
            "class_index": class_index,
            "top": tops,
            "probability": probabilities,
            "rank": _ranks(logits, class_index),
            "predicted": outputs["values"].double(),
            "value": batch.tensors["values"].double(),
            "known": batch.tensors["known"] > 0,
        }
        self.add(batch.sample_ids, columns)

    def classes(self) -> ScoredClasses:
        """Return the predictions for the pictures with a class."""
        rows = np.flatnonzero(self.column("class_index").numpy() >= 0)
        names = ("class_index", "top", "probability", "rank")
        return ScoredClasses(rows, *(self.column(name).numpy()[rows] for name in names))

    def target(self, name: str) -> ScoredTarget:
        """Return the predictions for the pictures with a known value of target ``name``."""
        number = self.labels.targets.index(name)
        rows = np.flatnonzero(self.column("known")[:, number].numpy())
        values, predicted = (self.labels.in_units(self.column(c).numpy())[rows, number] for c in ("value", "predicted"))
        return ScoredTarget(rows, values, predicted)

    def compute(self) -> dict[str, float]:
        """``top1``, ``top5``, ``macro_f1``, and ``mae_NAME`` and ``r2_NAME`` per target.

        NaN where a score is not finite. What no picture could show (no class is known, or a target of none) is left
        out.
        """
        metrics: dict[str, float] = {}
        classes = self.classes()
        if classes.rows.size:
            metrics |= _class_metrics(classes)
        for name in self.labels.targets:
            scored = self.target(name)
            if scored.rows.size:
                finite = bool(np.isfinite(scored.predicted).all())
                scores = regression_scores(scored.values, scored.predicted) if finite else None
                metrics[f"mae_{name}"] = scores.mae if scores else math.nan
                metrics[f"r2_{name}"] = scores.r2 if scores else math.nan
        return metrics


class ImageLogits(ImageScores):
    """Also collect ``class_logits`` float32 (N, C), for calibration."""

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        super().update(outputs, batch)
        self.add([], {"class_logits": outputs["class_logits"].float()})

    def known_logits(self) -> tuple[IntArray, FloatArray]:
        """Return the classes (M,) and logits (M, C) of the pictures that have a class."""
        classes = self.classes()
        return classes.class_indices, self.column("class_logits").double().numpy()[classes.rows]


@dataclass(frozen=True)
class Calibration:
    """The temperature of the class logits, and the calibration error on the test part.

    Attributes:
        temperature: divisor of the logits, fitted on the validation part, which also chose the epoch.
        num_validation: labelled pictures that it was fitted on.
        num_test: labelled test pictures that the errors were measured on.
        error, error_uncalibrated: expected calibration error of the predicted class's probability, with and without
            the temperature.
    """

    temperature: float
    num_validation: int
    num_test: int
    error: float
    error_uncalibrated: float


def calibration_of(validation: ImageLogits, test: ImageLogits) -> Calibration | None:
    """Return the calibration; None if a part has no labelled picture, or a validation logit is not finite."""
    (classes, logits), (tested, test_logits) = validation.known_logits(), test.known_logits()
    if not classes.size or not tested.size or not np.isfinite(logits).all():
        return None
    temperature = fit_class_temperature(classes, logits)
    errors = []
    for divisor in (temperature, 1.0):
        found = class_probabilities(test_logits, divisor)
        right = (found.argmax(axis=1) == tested).astype(np.int64)
        errors.append(float(expected_calibration_error(right, found.max(axis=1))))
    return Calibration(temperature, classes.size, tested.size, *errors)


def _tops(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best class (B,) and its probability (B,) for logits float64 (B, C); C may be 0."""
    if not logits.shape[1]:
        return torch.zeros(len(logits), dtype=torch.int64), logits.new_full((len(logits),), math.nan)
    tops = logits.argmax(1)
    probabilities = torch.softmax(logits, dim=1).gather(1, tops[:, None]).squeeze(1)
    return tops, torch.where(torch.isfinite(logits).all(1), probabilities, math.nan)


def _ranks(logits: Tensor, class_index: Tensor) -> Tensor:
    """Return the rank of each true class (B,); 0 without a class, or with a score that is not finite."""
    ranks = torch.full_like(class_index, _UNRANKED)
    rows = torch.nonzero((class_index >= 0) & torch.isfinite(logits).all(1)).squeeze(1)
    if len(rows):
        ranks[rows] = torch.from_numpy(ranks_of_class(logits[rows].numpy(), class_index[rows].numpy()))
    return ranks


def _class_metrics(classes: ScoredClasses) -> dict[str, float]:
    if (classes.ranks == _UNRANKED).any():
        return dict.fromkeys(("top1", "top5", "macro_f1"), math.nan)
    return {
        "top1": top_k_accuracy(classes.ranks, 1),
        "top5": top_k_accuracy(classes.ranks, 5),
        "macro_f1": macro_f1(classes.class_indices, classes.predicted),
    }


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
        if not isinstance(model, ImageModel):
            raise TypeError(f"got a {type(model).__name__}, wanted the ImageModel that build_model gives.")
        freeze, each = self.config.freeze_backbone_epochs, self.config.unfreeze_stage_epochs
        num_stages = len(model.backbone.stages())
        model.train_stages(num_trained_stages(epoch, num_stages, freeze_epochs=freeze, stage_epochs=each))

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return ``class_logits`` (B, C) and scaled ``values`` (B, T)."""
        outputs: Outputs = model(batch.tensors["image"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the sum of the pictures' losses; each picture weighs 1."""
        config, tensors = self.config, batch.tensors
        classes = class_losses(
            outputs["class_logits"], tensors["class_target"],
            label_smoothing=config.label_smoothing,
        )  # fmt: skip
        numbers = value_losses(outputs["values"], tensors["values"], tensors["known"])
        losses = classes + numbers
        return LossSum(losses.sum(), losses.new_tensor(float(len(losses))))

    def new_accumulator(self) -> ImageScores:
        """Return an empty ``ImageScores``."""
        return ImageScores(self.labels)


def value_losses(predicted: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Return the Huber loss (B,) with delta 1, averaged over a picture's known values; 0 without any.

    Args:
        predicted: float (B, T), scaled; T may be 0.
        values: float (B, T), scaled; anything where not known.
        known: float (B, T) of 0 and 1.
    """
    present = known > 0
    errors = torch.where(present, predicted.float() - values, 0.0)
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return losses.sum(1) / present.sum(1).clamp_min(1)
