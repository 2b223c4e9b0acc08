"""The training that every figure is a ratio to: torch's own calls and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.engine.loading import batches_per_epoch, effective_batches, epoch_order, load_batches
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.optimizer import build_optimizer, learning_rate_at, set_learning_rate
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.tasks.video.training import VideoTask


class BareLoop:
    """Forward, loss and backward in the engine's micro-batches, clipping, AdamW's step; the same samples in the same
    order through the same loader, the same schedule, a validation pass an epoch, and the best weights kept.

    It survives nothing, saves nothing and tells nobody, and serves only models that draw no random numbers in training.
    After the last turn ``best_model`` is what the engine's ``TrainingState.best_model`` is.

    Args:
        task: whose data and model are used; its loss is written out here.
        weights: of (real, fake) in the loss.
    """

    def __init__(self, task: VideoTask, settings: EngineSettings, weights: tuple[float, float]) -> None:
        self._task = task
        self._settings = settings
        self._weights = weights
        self.best_model: dict[str, Tensor] = {}
        self.best_loss = math.inf

    def turns(self) -> Iterator[None]:
        """Train; pauses where the engine asks whether to stop: with each window in hand, and after the last one."""
        settings, data = self._settings, self._task.training_data
        with forked_random_state(stable_seed("engine", settings.seed), torch.device("cpu")):
            model = self._task.build_model()
        optimizer = build_optimizer(model, settings.learning_rate, settings.weight_decay)
        step, total = 0, settings.epochs * batches_per_epoch(len(data), settings.effective_batch_size)
        for epoch in range(settings.epochs):
            model.train()
            order = effective_batches(epoch_order(len(data), epoch, settings.seed), settings.effective_batch_size)
            for window in load_batches(data, order, num_workers=settings.num_workers):
                yield
                rate = learning_rate_at(step, total, settings.learning_rate, settings.warmup_share)
                set_learning_rate(optimizer, rate)
                self._train(model, optimizer, window.tensors["frames"], window.tensors["label"])
                step += 1
            yield
            self._validate(model)

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, frames: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        weights = self._weights_of(labels)
        total = weights.sum()
        for start in range(0, len(labels), self._settings.micro_batch):
            part = slice(start, start + self._settings.micro_batch)
            (_loss(model(frames[part]), labels[part], weights[part]) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), self._settings.max_gradient_norm)
        optimizer.step()

    def _validate(self, model: nn.Module) -> None:
        data, settings = self._task.validation_data, self._settings
        model.eval()
        loss, weight, scores, truth = 0.0, 0.0, [], []
        order = effective_batches(torch.arange(len(data)).numpy(), settings.effective_batch_size)
        for batch in load_batches(data, order, num_workers=settings.num_workers):
            frames, labels = batch.tensors["frames"], batch.tensors["label"]
            weights = self._weights_of(labels)
            with torch.inference_mode():
                logits = torch.cat([model(part) for part in frames.split(settings.micro_batch)])
            loss += float(_loss(logits, labels, weights))
            weight += float(weights.sum())
            scores.append(torch.sigmoid(logits))
            truth.append(labels)
        roc_auc(torch.cat(truth).numpy(), torch.cat(scores).numpy())
        if loss / weight < self.best_loss:
            self.best_loss = loss / weight
            self.best_model = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def _weights_of(self, labels: Tensor) -> Tensor:
        real, fake = self._weights
        return torch.where(labels > 0.5, fake, real)


def _loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
