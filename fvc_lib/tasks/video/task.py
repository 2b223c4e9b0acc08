"""Telling real from fake clips: what the video task adds to the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.engine.accumulators import BinaryScores
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, LossSum, Outputs
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.video.data import ClipDataset


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
        network: nn.Module = DETECTORS.get(self._model).build()
        return network

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


# ----------------------------------------------------------------------------------------------------
# What of a run's configuration a fold's training depends on, and what the engine gets of it.


def training_parameters(config: RunConfig, fold: int) -> dict[str, Any]:
    """The fold and the parameters that its weights depend on, as JSON values."""
    return {"fold": fold, **config.training_values()}


def engine_settings(config: RunConfig, fold: int) -> EngineSettings:
    """The engine's share of ``config`` for one fold."""
    return settings_of(
        config,
        seed=stable_seed("fold", config.seed, fold),
        micro_batch=DETECTORS.get(config.model).micro_batch,
        balance_classes=config.class_balance == "sampler",
    )


def settings_of(config: RunConfig, *, seed: int, micro_batch: int, balance_classes: bool) -> EngineSettings:
    """The engine's share of ``config`` for one training; ``micro_batch`` where ``batch_size`` says nothing."""
    return EngineSettings(
        epochs=config.epochs,
        effective_batch_size=config.effective_batch_size,
        micro_batch=config.batch_size or micro_batch,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_share=config.warmup_share,
        max_gradient_norm=config.max_gradient_norm,
        early_stopping_epochs=config.early_stopping_epochs,
        seed=seed,
        balance_classes=balance_classes,
        num_workers=config.num_workers,
        max_nonfinite_steps=config.max_nonfinite_steps,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        checkpoint_epochs=config.checkpoint_epochs,
        micro_batch_recovery_steps=config.micro_batch_recovery_steps,
        gradient_checkpointing=config.gradient_checkpointing,
    )
