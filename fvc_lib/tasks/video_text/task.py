"""Videos and the texts that describe them: what the task video_text adds to the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fvc_lib.detectors.own.video_text import JointSpace, NetworkPlan, VideoTextNetwork
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleSet, require_detached
from fvc_lib.metrics.retrieval import RetrievalMetrics, retrieval_metrics

# What a pass over pairs of videos and texts leaves on the CPU: losses, and embeddings to measure retrieval on.


_LOSSES = ("caption_loss", "token_accuracy", "masked_loss")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")
_TOKENS = "caption_tokens"


@dataclass(frozen=True)
class RetrievalSet:
    """The different videos and the different texts that are to find one another.

    Attributes:
        video_embeddings: float32 (N, E), unit vectors.
        text_embeddings: float32 (M, E), unit vectors.
        pairs: int64 (P, 2), rows of a video and a text that belong together; each pair once.
        video_places: int64 (N,), an accumulated pair that each video stands in.
        text_places: int64 (M,), likewise for texts.
    """

    video_embeddings: Tensor
    text_embeddings: Tensor
    pairs: npt.NDArray[np.int64]
    video_places: npt.NDArray[np.int64]
    text_places: npt.NDArray[np.int64]

    @property
    def is_finite(self) -> bool:
        """Whether all embeddings are numbers."""
        return bool(self.video_embeddings.isfinite().all() and self.text_embeddings.isfinite().all())


@dataclass(frozen=True)
class RetrievalSettings:
    """How retrieval is measured: ``recall_at`` are the k of recall@k; ``memory_bytes`` are what it may take beside."""

    recall_at: tuple[int, ...]
    memory_bytes: int

    def metrics(self, retrieval: RetrievalSet, log: Callable[[str], None] | None = None) -> RetrievalMetrics:
        """Of both directions, over cosine similarities; ``log`` is told how they were streamed."""
        return retrieval_metrics(
            retrieval.video_embeddings,
            retrieval.text_embeddings,
            retrieval.pairs,
            ks=self.recall_at,
            memory_bytes=self.memory_bytes,
            log=log,
        )


class VideoTextOutputs:
    """Per pair, in the order they came: embeddings, losses, numbers of video and text, and written captions.

    Reads of the outputs what ``VideoTextNetwork.forward`` gives, as far as it is there, and of the batch
    ``video_index`` and ``text_index``.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self._settings = settings
        self._ids: list[str] = []
        self._columns: dict[str, list[Tensor]] = {}

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch.

        Raises:
            ValueError: the outputs still require grad.
        """
        self._ids.extend(batch.sample_ids)
        found = {name: outputs[name].float() for name in (*_LOSSES, *_EMBEDDINGS) if name in outputs}
        found |= {name: batch.tensors[name] for name in _INDICES}
        if _TOKENS in outputs:
            found[_TOKENS] = outputs[_TOKENS].to(torch.int32)  # the engine hands outputs on as floats
        self._add({name: require_detached(values, name) for name, values in found.items()})

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The pairs, in order."""
        return tuple(self._ids)

    @property
    def caption_tokens(self) -> Tensor | None:
        """Int32 (P, L), as ``CaptionDecoder.write`` gives them; None where none were written."""
        return self._column(_TOKENS)

    def to_document(self) -> dict[str, Any]:
        """Ids and columns (P, ...)."""
        return {"ids": list(self._ids), "columns": {name: torch.cat(parts) for name, parts in self._columns.items()}}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Append what another one gathered."""
        self._ids.extend(document["ids"])
        self._add(document["columns"])

    def retrieval_set(self) -> RetrievalSet | None:
        """What retrieval is measured on; None without embeddings."""
        videos, texts = (self._column(name) for name in _EMBEDDINGS)
        video_index, text_index = (self._column(name) for name in _INDICES)
        if videos is None or texts is None or video_index is None or text_index is None:
            return None
        _, video_places, video_rows = np.unique(video_index.numpy(), return_index=True, return_inverse=True)
        _, text_places, text_rows = np.unique(text_index.numpy(), return_index=True, return_inverse=True)
        pairs = np.unique(np.stack([video_rows.reshape(-1), text_rows.reshape(-1)], axis=1), axis=0)
        return RetrievalSet(videos[video_places], texts[text_places], pairs, video_places, text_places)

    def compute(self) -> dict[str, float]:
        """Means of the losses over pairs; recall@k and MRR in both directions, NaN where an embedding is not finite."""
        metrics = {name: _mean(column) for name in _LOSSES if (column := self._column(name)) is not None}
        retrieval = self.retrieval_set()
        return metrics if retrieval is None else metrics | self._retrieval(retrieval)

    def _retrieval(self, retrieval: RetrievalSet) -> dict[str, float]:
        found = self._settings.metrics(retrieval).as_metrics() if retrieval.is_finite else {}
        names = [*(f"recall@{k}" for k in self._settings.recall_at), "mrr"]
        return {
            f"{direction}/{name}": found.get(f"{direction}/{name}", math.nan)
            for direction in ("video_to_text", "text_to_video")
            for name in names
        }

    def _add(self, columns: Mapping[str, Tensor]) -> None:
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def _column(self, name: str) -> Tensor | None:
        return torch.cat(self._columns[name]) if name in self._columns else None


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


@dataclass(frozen=True)
class LossWeights:
    """Of each loss in their sum; what has none is not built."""

    contrastive: float
    caption: float
    masked: float


class VideoTextTask:
    """Contrastive learning, captioning and masked modelling of clips and texts, each by its weight.

    Every sample weighs the same: a caption's loss is the mean over its tokens, whatever its length. The contrastive
    part compares the whole effective batch and is the engine's joint loss.

    Args:
        training: samples with what ``VideoTextNetwork.forward`` reads, ``video_index`` and ``text_index``.
        validation: the same.
        plan: what is built.
        weights: of the losses; above zero for what ``plan`` builds, and only for that.
        retrieval: how retrieval is measured.
        beam_width: of captions, where they are written.

    Raises:
        ValueError: weights that do not fit the plan.
    """

    joint_tensors = ("video_index", "text_index")

    def __init__(
        self,
        training: SampleSet,
        validation: SampleSet,
        *,
        plan: NetworkPlan,
        weights: LossWeights,
        retrieval: RetrievalSettings,
        beam_width: int = 1,
    ) -> None:
        built = (plan.contrastive is not None, plan.captions, plan.masked)
        if built != (weights.contrastive > 0, weights.caption > 0, weights.masked > 0):
            raise ValueError(f"weights: got {weights}, wanted some above 0 for just what is built of {built}.")
        self.training_data = training
        self.validation_data = validation
        self._plan = plan
        self._weights = weights
        self._retrieval = retrieval
        self._beam_width = beam_width
        self._writing = False

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """The embeddings, where they are compared."""
        return ("video_embedding", "text_embedding") if self._plan.contrastive else ()

    def build_model(self) -> nn.Module:
        """The network, initialised from torch's current random state."""
        return VideoTextNetwork(self._plan)

    @contextmanager
    def writing_captions(self) -> Iterator[None]:
        """In this context ``forward`` also writes captions, where there is a decoder: ``caption_tokens`` (B, L)."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """See ``VideoTextNetwork.forward``."""
        outputs: Outputs = model(batch.tensors, self._beam_width if self._writing else 0)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Captioning and masked modelling, weighted; every sample weighs 1."""
        any_output = next(iter(outputs.values()))
        total = torch.zeros((), device=any_output.device)
        if self._plan.captions:
            total = total + self._weights.caption * outputs["caption_loss"].float().sum()
        if self._plan.masked:
            total = total + self._weights.masked * outputs["masked_loss"].float().sum()
        return LossSum(total, torch.tensor(float(len(batch)), device=any_output.device))

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range) -> Tensor:
        """The share of ``rows`` in the contrastive loss of the whole effective batch, weighted."""
        space = model.joint
        if not isinstance(space, JointSpace):
            raise TypeError(f"model: got a {type(model).__name__} without a joint space, wanted the task's own")
        video, text = outputs["video_embedding"].float(), outputs["text_embedding"].float()
        indices = tensors["video_index"], tensors["text_index"]
        return self._weights.contrastive * space.scale.contrastive(video, text, *indices, rows)

    def new_accumulator(self) -> VideoTextOutputs:
        """Embeddings and losses of a pass."""
        return VideoTextOutputs(self._retrieval)
