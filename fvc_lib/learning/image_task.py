"""Recognising pictures: class and numbers from one network. What task image adds to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.learning.image_accumulators import ImageScores
from fvc_lib.learning.image_backbones import build_backbone
from fvc_lib.learning.image_data import ImageDataset
from fvc_lib.learning.image_networks import ImageModel, num_trained_stages
from fvc_lib.learning.task import Batch, LossSum, Outputs


@dataclass(frozen=True)
class ImageTaskSettings:
    """What is trained, and for which loss.

    Attributes:
        backbone: see ``image_backbones.build_backbone``.
        backbone_weights: file; None: from scratch.
        freeze_epochs: train only the heads for so many epochs first.
        stage_epochs: then one more stage after every so many; 0: all at once.
        label_smoothing: share of a class target that is spread over all classes.
        focal_gamma: of ``class_losses``.
        regression_weight: of the numbers' loss beside the class's 1.
    """

    backbone: str = "small_resnet"
    backbone_weights: Path | None = None
    freeze_epochs: int = 0
    stage_epochs: int = 0
    label_smoothing: float = 0.1
    focal_gamma: float = 0.0
    regression_weight: float = 1.0


class ImageTask:
    """Label-smoothed cross-entropy on classes beside a Huber loss on numbers, either only where it is known.

    A picture's loss is a function of the picture alone and weighs 1, so that a batch's is the mean over its pictures
    however it is split.
    """

    def __init__(self, training: ImageDataset, validation: ImageDataset, settings: ImageTaskSettings) -> None:
        self.training_data = training
        self.validation_data = validation
        self.settings = settings

    def build_model(self) -> ImageModel:
        """The backbone with new heads, initialised from torch's current random state."""
        labels = self.training_data.labels
        backbone = build_backbone(self.settings.backbone, self.settings.backbone_weights)
        return ImageModel(backbone, len(labels.classes), len(labels.targets))

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze and free the backbone's stages."""
        if not isinstance(model, ImageModel):
            raise TypeError(f"got a {type(model).__name__}, wanted the ImageModel that build_model gives.")
        freeze, each = self.settings.freeze_epochs, self.settings.stage_epochs
        num_stages = len(model.backbone.stages())
        model.train_stages(num_trained_stages(epoch, num_stages, freeze_epochs=freeze, stage_epochs=each))

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """``class_logits`` (B, C) and ``values`` (B, T), the latter scaled as ``ImageLabels`` says."""
        outputs: Outputs = model(batch.tensors["image"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """The sum over the pictures; each weighs 1."""
        settings, tensors = self.settings, batch.tensors
        classes = class_losses(
            outputs["class_logits"], tensors["class_target"],
            label_smoothing=settings.label_smoothing, focal_gamma=settings.focal_gamma,
        )  # fmt: skip
        numbers = value_losses(outputs["values"], tensors["values"], tensors["known"])
        losses = classes + settings.regression_weight * numbers
        return LossSum(losses.sum(), losses.new_tensor(float(len(losses))))

    def new_accumulator(self) -> ImageScores:
        """What the test tables and the metrics need of a pass."""
        return ImageScores(self.training_data.labels)


def class_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, focal_gamma: float = 0.0) -> Tensor:
    """Label-smoothed cross-entropy (B,) of soft ``targets``, well-classified pictures weighed down by the focal factor.

    Of a picture of class t, with probabilities p and smoothing s over C classes::

        (1 - p_t) ** gamma * ((1 - s) * -log p_t + s * mean over k of -log p_k)

    The factor is one for the whole picture and of the probability itself, not of ``exp(-loss)``, which with smoothing
    never comes near 1. (Keras puts a factor on each class's term. Those of the wrong classes are then hardly weighed
    down, and what is left of a well-classified picture is the pull to equal probabilities.) Of a mixed picture it is
    the sum of this over its classes, each weighed by its target, as mixup takes any loss.

    A target's sum is what its picture weighs: 0 where no class is known, which gives a loss and a gradient of exactly
    0. Smoothing: C. Szegedy et al., "Rethinking the Inception architecture" (CVPR 2016); focal: T.-Y. Lin et al.,
    "Focal loss for dense object detection" (ICCV 2017); mixup: H. Zhang et al. (ICLR 2018).

    Args:
        logits: float (B, C); C may be 0.
        targets: float (B, C), not negative.
        label_smoothing: in [0, 1).
        focal_gamma: 0 is the cross-entropy.
    """
    if not logits.shape[1]:
        return logits.new_zeros(len(logits), dtype=torch.float32)
    weights = targets.sum(1, keepdim=True)
    # Where nothing is known not even an infinite logit may reach the sum: 0 times infinity is no number.
    log_probabilities = F.log_softmax(torch.where(weights > 0, logits.float(), 0.0), dim=1)
    if focal_gamma:
        # Clamped, as the power's slope at 0 is infinite for exponents below 1.
        targets = targets * (1 - log_probabilities.exp()).clamp_min(1e-6) ** focal_gamma
        weights = targets.sum(1, keepdim=True)
    smoothed = (1 - label_smoothing) * targets + label_smoothing * weights / logits.shape[1]
    return -(smoothed * log_probabilities).sum(1)


def value_losses(predicted: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Huber loss (B,) with delta 1, the mean over the numbers that are known of a picture; exactly 0 without any.

    Args:
        predicted: float (B, T), scaled; T may be 0.
        values: float (B, T), scaled; anything where not known.
        known: float (B, T) of 0 and 1.
    """
    present = known > 0
    errors = torch.where(present, predicted.float() - values, 0.0)
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return losses.sum(1) / present.sum(1).clamp_min(1)
