"""Accumulators over batches: on the CPU, without gradient, nothing but what the metrics need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fvc_lib.engine.task import Batch, LossSum, Outputs
from fvc_lib.metrics.classification import FloatArray, IntArray, balanced_accuracy, roc_auc


def require_detached(values: Tensor, name: str) -> Tensor:
    """``values`` on the CPU.

    Raises:
        ValueError: they still require grad, so keeping them would keep a whole graph in memory.
    """
    if values.requires_grad:
        raise ValueError(
            f"{name}: got a tensor {tuple(values.shape)} that requires grad, wanted a detached one; call .detach() "
            "first, or the accumulator would hold every batch's graph."
        )
    return values.cpu()


class LossMean:
    """The weighted mean of losses over everything seen; NaN before anything was."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def update(self, loss: LossSum) -> None:
        """Add one batch.

        Raises:
            ValueError: the loss still requires grad.
        """
        self.total += float(require_detached(loss.total, "loss total"))
        self.weight += float(require_detached(loss.weight, "loss weight"))

    def add(self, other: LossMean) -> None:
        """Add everything ``other`` has seen."""
        self.total += other.total
        self.weight += other.weight

    def mean(self) -> float:
        """Sum over weight."""
        return self.total / self.weight if self.weight else math.nan


class BinaryScores:
    """Logits, probabilities of fake and labels, per sample, in the order they came.

    Reads ``outputs["logits"]`` (B,) and ``batch.tensors["label"]`` (B,) of 0 and 1.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch.

        Raises:
            ValueError: the outputs still require grad.
        """
        logits = require_detached(outputs["logits"], "logits")
        self._ids.extend(batch.sample_ids)
        self._logits.append(logits.double())
        self._labels.append(require_detached(batch.tensors["label"], "label").to(torch.int64))

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The samples, in the order of the scores."""
        return tuple(self._ids)

    @property
    def logits(self) -> FloatArray:
        """float64 (N,), the network's output; positive means fake."""
        return torch.cat(self._logits).numpy() if self._logits else np.zeros(0)

    @property
    def scores(self) -> FloatArray:
        """float64 (N,) in [0, 1]: the logits' sigmoid, before any calibration."""
        return torch.sigmoid(torch.from_numpy(self.logits)).numpy()  # of all at once: parts may round otherwise

    @property
    def labels(self) -> IntArray:
        """int64 (N,) of 0 (real) and 1 (fake)."""
        return torch.cat(self._labels).numpy() if self._labels else np.zeros(0, dtype=np.int64)

    def to_document(self) -> dict[str, Any]:
        """Ids, float64 logits (N,) and int64 labels (N,)."""
        logits, labels = torch.from_numpy(self.logits), torch.from_numpy(self.labels)
        return {"ids": list(self._ids), "logits": logits, "labels": labels}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Append what another one gathered."""
        self._ids.extend(document["ids"])
        self._logits.append(document["logits"])
        self._labels.append(document["labels"])

    def compute(self) -> dict[str, float]:
        """ROC-AUC, and balanced accuracy at the threshold 0.5; NaN with one class, or a score that is not finite."""
        if not np.isfinite(self.scores).all():
            return {"roc_auc": math.nan, "balanced_accuracy": math.nan}
        decisions = (self.scores >= 0.5).astype(np.float64)
        return {
            "roc_auc": float(roc_auc(self.labels, self.scores)),
            "balanced_accuracy": float(balanced_accuracy(self.labels, decisions)),
        }
