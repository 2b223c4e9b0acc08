"""The training task ``video``: the network, its loss and its scores for real and fake clips."""

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
from fvc_lib.tasks.mixing import class_losses
from fvc_lib.tasks.shared_training import settings_of
from fvc_lib.tasks.video.data import ClipDataset


class VideoTask:
    """Train a network on real and fake clips with a class-weighted binary cross-entropy.

    Args:
        training: the clips that the network is trained on.
        validation: the clips whose loss chooses the epoch.
        config: gives the network, the epochs in which its stages (blocks of layers) are frozen, and the label
            smoothing.
        weights: loss weights of (real, fake); (1, 1) weighs all clips alike.
    """

    def __init__(
        self, training: ClipDataset, validation: ClipDataset, *, config: RunConfig, weights: tuple[float, float]
    ) -> None:
        self.training_data, self.validation_data = training, validation
        self._config, self._weights = config, weights
        self._trained: frozenset[str] = frozenset()  # names of the parameters that ``tune`` trains

    def build_model(self) -> nn.Module:
        """Return a new network; weights that are not pretrained come from torch's current random state."""
        model = build_detector(self._config)
        self._trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        return model

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze or unfreeze the stages below the head for ``epoch``; parameters that ``tune`` excludes stay frozen."""
        freeze_epochs, stage_epochs = self._config.freeze_backbone_epochs, self._config.unfreeze_stage_epochs
        if not (freeze_epochs or stage_epochs):
            return
        trained = {parameter for name, parameter in model.named_parameters() if name in self._trained}
        stages = [part for stage in trunk_stages(model) if (part := trained.intersection(stage))]
        number = num_trained_stages(epoch, len(stages), freeze_epochs=freeze_epochs, stage_epochs=stage_epochs)
        for place, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(place >= len(stages) - number)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return ``logits`` (B,), positive for fake; in training with ``tune effort`` also ``penalty`` (B,).

        The penalty depends on the network alone (``effort.penalty``), so all its entries are equal.

        Raises:
            UsageError: the network does not return one logit per clip.
        """
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
        penalty = effort.penalty(model) if model.training else None
        return {"logits": logits} if penalty is None else {"logits": logits, "penalty": penalty.expand(len(batch))}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the class-weighted sum of cross-entropy and penalty over the batch, and the sum of the weights."""
        mixed, logits, smoothing = batch.tensors.get("target"), outputs["logits"].float(), self._config.label_smoothing
        labels = batch.tensors["label"] if mixed is None else mixed
        real, fake = self._weights
        weights = real * (1 - labels) + fake * labels
        # With the weights of the clips the penalty counts once in the mean, however the batch is split.
        penalty = (outputs["penalty"] * weights).sum() if "penalty" in outputs else 0.0
        if mixed is None and not smoothing:
            loss = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
            return LossSum(loss + penalty, weights.sum())
        # A sigmoid is a softmax over the logit and 0.
        targets = torch.stack([real * (1 - labels), fake * labels], dim=1)
        both = torch.stack([torch.zeros_like(logits), logits], dim=1)
        losses = class_losses(both, targets, label_smoothing=smoothing)
        return LossSum(losses.sum() + penalty, weights.sum())

    def new_accumulator(self) -> "BinaryScores":
        """Return an empty ``BinaryScores``."""
        return BinaryScores(self._config.clips_per_video)


class BinaryScores(SampleColumns):
    """Collect logits and labels of N videos; the logit of a video is the mean over its ``clips`` consecutive samples.

    Reads ``outputs["logits"]`` (B,) and ``batch.tensors["label"]`` (B,) of 0 and 1.
    """

    def __init__(self, clips: int = 1) -> None:
        super().__init__()
        self._clips = clips
        self.add([], {"logits": torch.zeros(0, dtype=torch.float64), "labels": torch.zeros(0, dtype=torch.int64)})

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch of outputs and labels.

        Raises:
            ValueError: the outputs still require grad.
        """
        labels = batch.tensors["label"].to(torch.int64)
        self.add(batch.sample_ids, {"logits": outputs["logits"].double(), "labels": labels})

    @property
    def logits(self) -> FloatArray:
        """Logits, float64 (N,), averaged over each video's clips; positive means fake."""
        return self._of_videos().numpy()

    @property
    def scores(self) -> FloatArray:
        """Uncalibrated probabilities of fake, float64 (N,)."""
        return torch.sigmoid(self._of_videos()).numpy()  # one call for all: calls on parts may round differently

    @property
    def labels(self) -> IntArray:
        """Labels, int64 (N,): 0 is real, 1 is fake."""
        return self.column("labels")[:: self._clips].numpy()

    def _of_videos(self) -> torch.Tensor:
        return self.column("logits").reshape(-1, self._clips).mean(1)

    def compute(self) -> dict[str, float]:
        """Return the ROC AUC and the balanced accuracy at a score of 0.5.

        Both are NaN if only one class is present or a score is not finite.
        """
        scores = self.scores
        if not np.isfinite(scores).all():
            return {"roc_auc": math.nan, "balanced_accuracy": math.nan}
        accuracy = balanced_accuracy(self.labels, (scores >= 0.5).astype(np.float64))
        return {"roc_auc": float(roc_auc(self.labels, scores)), "balanced_accuracy": float(accuracy)}


def engine_settings(config: RunConfig, fold: int | None) -> EngineSettings:
    """Return the engine's settings for the training of ``fold``; None means the network of all groups."""
    seed = stable_seed("fold", config.seed, "final" if fold is None else fold)
    micro_batch = DETECTORS.get(config.model).micro_batch
    return settings_of(config, seed, micro_batch, balance_classes=config.class_balance == "sampler")
