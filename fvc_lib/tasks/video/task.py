"""Telling real from fake clips: what the video task adds to the engine."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.detectors import effort
from fvc_lib.detectors.network import build_detector, num_trained_stages, trunk_stages
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns
from fvc_lib.metrics.classification import FloatArray, IntArray, balanced_accuracy, roc_auc
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.class_losses import class_losses
from fvc_lib.tasks.recipe import settings_of
from fvc_lib.tasks.video.data import ClipDataset


class VideoTask:
    """Binary cross-entropy on clips, weighted by class, smoothed and focal as the configuration says.

    Args:
        weights: of (real, fake) in the loss; (1, 1) weighs all clips alike.
    """

    def __init__(
        self,
        training: ClipDataset,
        validation: ClipDataset,
        *,
        config: RunConfig,
        weights: tuple[float, float],
    ) -> None:
        self.training_data = training
        self.validation_data = validation
        self._config = config
        self._weights = weights
        self._trained: frozenset[str] = frozenset()  # names of the parameters that ``tune`` lets be trained

    def build_model(self) -> nn.Module:
        """The network that is asked for, initialised from torch's current random state or with its weights."""
        model = build_detector(self._config)
        self._trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        return model

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze and free the stages below the head, of what ``tune`` lets be trained."""
        config = self._config
        freeze, each = config.freeze_backbone_epochs, config.unfreeze_stage_epochs
        if not (freeze or each):
            return
        trained = {parameter for name, parameter in model.named_parameters() if name in self._trained}
        stages = [part for stage in trunk_stages(model) if (part := trained.intersection(stage))]
        num_trained = num_trained_stages(epoch, len(stages), freeze_epochs=freeze, stage_epochs=each)
        for number, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(number >= len(stages) - num_trained)

    def rate_shares(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """``layer_decay`` to the power of a stage's number, 1 being the one next to the head, whose rate is whole."""
        config = self._config
        if config.layer_decay == 1:
            return {}
        from_above = enumerate(reversed(trunk_stages(model)), start=1)
        return {parameter: config.layer_decay**number for number, stage in from_above for parameter in stage}

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """``logits`` (B,); positive means fake. In training with ``tune effort`` its ``penalty``, for each clip."""
        if "features" in batch.tensors:
            logits = model.logits_of(batch.tensors["features"])  # type: ignore[operator]
        else:
            logits = model(batch.tensors["frames"])
        if logits.shape != (len(batch),):
            raise UsageError(
                f"model {self._config.model!r}: got an output of shape {tuple(logits.shape)} for {len(batch)} clips, "
                f"wanted logits ({len(batch)},), one per clip, positive for fake. Squeeze the last dimension, or give "
                "the class an attribute num_features to have a head added to its features."
            )
        held = effort.penalty(model) if model.training else None
        return {"logits": logits} if held is None else {"logits": logits, "penalty": held.expand(len(batch))}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Class-weighted binary cross-entropy, or what ``class_losses`` makes of it."""
        mixed, logits = batch.tensors.get("target"), outputs["logits"].float()
        labels = batch.tensors["label"] if mixed is None else mixed
        real, fake = self._weights
        weights = real * (1 - labels) + fake * labels
        # Of each clip by its weight: so it is whole in the batch's mean, however that is split.
        held = (outputs["penalty"] * weights).sum() if "penalty" in outputs else 0.0
        config = self._config
        smoothing, gamma = config.label_smoothing, config.focal_gamma
        if not (smoothing or gamma or mixed is not None):
            loss = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
            return LossSum(loss + held, weights.sum())
        # A sigmoid is a softmax over the logit and 0.
        targets = torch.stack([real * (1 - labels), fake * labels], dim=1)
        both = torch.stack([torch.zeros_like(logits), logits], dim=1)
        losses = class_losses(both, targets, label_smoothing=smoothing, focal_gamma=gamma)
        return LossSum(losses.sum() + held, weights.sum())

    def new_accumulator(self) -> "BinaryScores":
        """Scores and labels of a pass."""
        return BinaryScores(self._config.clips_per_video)


class BinaryScores(SampleColumns):
    """Logits, probabilities of fake and labels, per video, in the order they came.

    Reads ``outputs["logits"]`` (B,) and ``batch.tensors["label"]`` (B,) of 0 and 1. Of every so many samples in a row,
    the ``clips`` of one video, the logits are averaged.
    """

    def __init__(self, clips: int = 1) -> None:
        super().__init__()
        self._clips = clips
        self.add([], {"logits": torch.zeros(0, dtype=torch.float64), "labels": torch.zeros(0, dtype=torch.int64)})

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        labels = batch.tensors["label"].to(torch.int64)
        self.add(batch.sample_ids, {"logits": outputs["logits"].double(), "labels": labels})

    @property
    def logits(self) -> FloatArray:
        """float64 (N,), the network's output, mean over a video's clips; positive means fake."""
        return self._of_videos().numpy()

    @property
    def scores(self) -> FloatArray:
        """float64 (N,) in [0, 1]: the logits' sigmoid, before any calibration."""
        return torch.sigmoid(self._of_videos()).numpy()  # of all at once: parts may round otherwise

    @property
    def labels(self) -> IntArray:
        """int64 (N,) of 0 (real) and 1 (fake)."""
        return self.column("labels")[:: self._clips].numpy()

    def _of_videos(self) -> torch.Tensor:
        logits = self.column("logits")
        return logits if self._clips == 1 else logits.reshape(-1, self._clips).mean(1)

    def compute(self) -> dict[str, float]:
        """ROC-AUC, and balanced accuracy at the threshold 0.5; NaN with one class, or a score that is not finite."""
        if not np.isfinite(self.scores).all():
            return {"roc_auc": math.nan, "balanced_accuracy": math.nan}
        decisions = (self.scores >= 0.5).astype(np.float64)
        return {
            "roc_auc": float(roc_auc(self.labels, self.scores)),
            "balanced_accuracy": float(balanced_accuracy(self.labels, decisions)),
        }


def engine_settings(config: RunConfig, fold: int | None) -> EngineSettings:
    """The engine's share of ``config`` for one fold; None: for the network of all groups."""
    seed = stable_seed("fold", config.seed, "final" if fold is None else fold)
    balance = config.class_balance == "sampler"
    micro_batch, halves = DETECTORS.get(config.model).micro_batch, config.class_balance == "batch"
    return settings_of(config, seed, micro_batch, balance_classes=balance, balance_batches=halves)
