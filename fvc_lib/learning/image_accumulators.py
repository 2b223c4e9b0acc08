"""What the metrics of task image need of a pass: a few numbers per picture, not its scores for all classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fvc_lib.learning.accumulators import require_detached
from fvc_lib.learning.image_labels import ImageLabels
from fvc_lib.learning.task import Batch, Outputs
from fvc_lib.metrics.multiclass import macro_f1, ranks_of_class, top_k_accuracy
from fvc_lib.metrics.regression import regression_scores
from fvc_lib.metrics.weighting import FloatArray, IntArray

_UNRANKED = 0  # of a picture without a class, or with scores that are not finite


@dataclass(frozen=True)
class ScoredClasses:
    """Of the N pictures that have a class.

    Attributes:
        rows: int64 (N,), their places among all pictures of the pass.
        class_indices: int64 (N,), what they are.
        predicted: int64 (N,), the class with the highest score, the first of equal ones.
        probabilities: float64 (N,) of the predicted class; NaN where the scores were not finite.
        ranks: int64 (N,), the place of the true class among all, ties against the model; 0 likewise.
    """

    rows: IntArray
    class_indices: IntArray
    predicted: IntArray
    probabilities: FloatArray
    ranks: IntArray


@dataclass(frozen=True)
class ScoredTarget:
    """Of the N pictures of which one target is known: their places, the true values and the predicted, in its unit."""

    rows: IntArray
    values: FloatArray
    predicted: FloatArray


class ImageScores:
    """Per picture: the class, the predicted one with its probability, the rank of the true one, and the numbers.

    Reads ``class_logits`` (B, C) and ``values`` (B, T), and of the batch ``class_index``, ``values`` and ``known``.
    """

    def __init__(self, labels: ImageLabels) -> None:
        self.labels = labels
        self._ids: list[str] = []
        self._columns: dict[str, list[Tensor]] = {name: [] for name in _empty_columns(labels)}

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch.

        Raises:
            ValueError: the outputs still require grad.
        """
        logits = require_detached(outputs["class_logits"], "class_logits").double()
        predicted = require_detached(outputs["values"], "values").double()
        class_index = batch.tensors["class_index"].cpu()
        tops, probabilities = _tops(logits)
        self._add(
            list(batch.sample_ids),
            {
                "class_index": class_index,
                "top": tops,
                "probability": probabilities,
                "rank": _ranks(logits, class_index),
                "predicted": predicted,
                "value": batch.tensors["values"].cpu().double(),
                "known": batch.tensors["known"].cpu() > 0,
            },
        )

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The pictures, in the order they came."""
        return tuple(self._ids)

    def classes(self) -> ScoredClasses:
        """What was found of those with a class."""
        columns = self._joined()
        rows = np.flatnonzero(columns["class_index"].numpy() >= 0)
        names = ("class_index", "top", "probability", "rank")
        return ScoredClasses(rows, *(columns[name].numpy()[rows] for name in names))

    def target(self, name: str) -> ScoredTarget:
        """What was found of those of which target ``name`` is known."""
        columns, place = self._joined(), self.labels.targets.index(name)
        rows = np.flatnonzero(columns["known"][:, place].numpy())
        values, predicted = (self.labels.in_units(columns[c].numpy())[rows, place] for c in ("value", "predicted"))
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
                metrics[f"mae_{name}"] = scores.mean_absolute_error if scores else math.nan
                metrics[f"r2_{name}"] = scores.r_squared if scores else math.nan
        return metrics

    def to_document(self) -> dict[str, Any]:
        """The ids and a tensor per column, (N,) or (N, T)."""
        return {"ids": list(self._ids), **self._joined()}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Append what another one gathered."""
        self._add(list(document["ids"]), {name: document[name] for name in self._columns})

    def _add(self, ids: list[str], columns: Mapping[str, Tensor]) -> None:
        self._ids.extend(ids)
        for name, column in columns.items():
            self._columns[name].append(column)

    def _joined(self) -> dict[str, Tensor]:
        empty = _empty_columns(self.labels)
        return {name: torch.cat([empty[name], *parts]) for name, parts in self._columns.items()}


def _empty_columns(labels: ImageLabels) -> dict[str, Tensor]:
    """No rows, but the types and widths that all parts have."""
    num_targets = len(labels.targets)
    whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    numbers = torch.empty(0, num_targets, dtype=torch.float64)
    return {
        "class_index": whole, "top": whole, "probability": real, "rank": whole,
        "predicted": numbers, "value": numbers, "known": torch.empty(0, num_targets, dtype=torch.bool),
    }  # fmt: skip


def _tops(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best class (B,) and its probability (B,) of logits float64 (B, C); C may be 0."""
    if not logits.shape[1]:
        return torch.zeros(len(logits), dtype=torch.int64), logits.new_full((len(logits),), math.nan)
    tops = logits.argmax(1)
    probabilities = torch.softmax(logits, dim=1).gather(1, tops[:, None]).squeeze(1)
    return tops, torch.where(torch.isfinite(logits).all(1), probabilities, math.nan)


def _ranks(logits: Tensor, class_index: Tensor) -> Tensor:
    """(B,); 0 without a class, or with a score that is not finite."""
    ranks = torch.full_like(class_index, _UNRANKED)
    rows = torch.nonzero((class_index >= 0) & torch.isfinite(logits).all(1)).squeeze(1)
    if len(rows):
        ranks[rows] = torch.from_numpy(ranks_of_class(logits[rows].numpy(), class_index[rows].numpy()))
    return ranks


def _class_metrics(classes: ScoredClasses) -> dict[str, float]:
    if (classes.ranks == _UNRANKED).any():
        return dict.fromkeys(("top1", "top5", "macro_f1"), math.nan)
    return {
        "top1": float(top_k_accuracy(classes.ranks, 1)),
        "top5": float(top_k_accuracy(classes.ranks, 5)),
        "macro_f1": float(macro_f1(classes.class_indices, classes.predicted)),
    }
