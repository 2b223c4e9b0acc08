"""Videos and the texts that describe them: what the task video_text adds to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fvc_lib.learning.task import Batch, LossSum, Outputs, SampleSet
from fvc_lib.learning.video_text_accumulators import RetrievalSettings, VideoTextOutputs
from fvc_lib.learning.video_text_networks import JointSpace, NetworkPlan, VideoTextNetwork


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
