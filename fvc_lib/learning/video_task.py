"""Telling real from fake clips: what the video task adds to the engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.data import ClipDataset
from fvc_lib.learning.models import build_model
from fvc_lib.learning.task import Batch, LossSum, Outputs


class VideoTask:
    """Binary cross-entropy on clips, weighted by class.

    Args:
        weights: of (real, fake) in the loss; (1, 1) weighs all clips alike.
    """

    def __init__(
        self, training: ClipDataset, validation: ClipDataset, *, model: str, weights: tuple[float, float]
    ) -> None:
        self.training_data = training
        self.validation_data = validation
        self._model = model
        self._weights = weights

    def build_model(self) -> nn.Module:
        """The named network, initialised from torch's current random state."""
        return build_model(self._model)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """``logits`` (B,); positive means fake."""
        return {"logits": model(batch.tensors["frames"])}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Class-weighted binary cross-entropy."""
        labels = batch.tensors["label"]
        real, fake = self._weights
        weights = torch.where(labels > 0.5, fake, real)
        loss = F.binary_cross_entropy_with_logits(outputs["logits"].float(), labels, weights, reduction="sum")
        return LossSum(loss, weights.sum())

    def new_accumulator(self) -> BinaryScores:
        """Scores and labels of a pass."""
        return BinaryScores()
