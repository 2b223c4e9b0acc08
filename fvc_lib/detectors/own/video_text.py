"""The network of task video_text (retrieval and captions): a video encoder, and parts for texts and captions.

Only the parts that the configured losses need are built, so every parameter receives a gradient.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.network import built_trunk, recomputable_blocks_of
from fvc_lib.detectors.own.transformer import CaptionDecoder, TokenNumbers, Transformer, token_embedding
from fvc_lib.detectors.texts.transformers_encoders import TransformersEncoder
from fvc_lib.engine.task import Outputs
from fvc_lib.services.registry import DETECTORS, TrunkOptions

# Contrastive losses compare all videos of a batch with all of its texts, several of which may belong together. They are
# sums over samples (pairs of a video and a text). Every process (rank) computes the rows of its own samples against the
# candidates of all ranks, as open_clip's ``local_loss`` (G. Ilharco et al., 2021) and as SigLIP's loss in chunks.

# As in CLIP: a temperature between 1/100 and 1 that begins at 0.07. The scale is its inverse.
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))
SOFTMAX_LOG_SCALE = math.log(1 / 0.07)
SIGMOID_LOG_SCALE = math.log(10.0)  # as in SigLIP


def positive_pairs(video_index: Tensor, text_index: Tensor, rows: range | None = None) -> Tensor:
    """Return which videos and texts of a batch belong together, bool (R, B).

    A sample is a pair of a video and a text; videos and texts may occur in several samples. Entry (i, j) is true if any
    sample has both the video of sample ``rows[i]`` and the text of sample j. Exchange the first two arguments to get
    texts by videos.

    Args:
        video_index: int64 (B,), equal for equal videos.
        text_index: int64 (B,), equal for equal texts.
        rows: indices of R samples of the batch; None: all B.
    """
    videos = video_index if rows is None else video_index[rows.start : rows.stop]
    same_video = videos[:, None] == video_index
    texts, text_of = torch.unique(text_index, return_inverse=True)
    # The number of samples with this video and each text: whole numbers, so the order of adding does not matter.
    shown = same_video.new_zeros((len(videos), len(texts)), dtype=torch.float32)
    return shown.index_add_(1, text_of, same_video.float())[:, text_of] > 0


def softmax_contrastive(similarities: Tensor, positives: Tensor) -> Tensor:
    """Return the softmax contrastive loss, summed over samples, a scalar.

    It is half of the sum of two cross-entropies: of every video over all texts, and of every text over all videos.

    Args:
        similarities: float (B, B), videos by texts, already multiplied by the scale.
        positives: bool (B, B), at least one true value in every row and column.
    """
    return 0.5 * (softmax_of_queries(similarities, positives) + softmax_of_queries(similarities.T, positives.T))


def softmax_of_queries(similarities: Tensor, positives: Tensor) -> Tensor:
    """Return the cross-entropy over candidates, summed over the queries, a scalar.

    After A. Radford et al., "Learning transferable visual models from natural language supervision" (CLIP, 2021). The
    target of a query with several positives is spread evenly over them, as in J. Yang et al., "Unified contrastive
    learning in image-text-label space" (CVPR 2022).

    Args:
        similarities: float (Q, C), queries by candidates, already multiplied by the scale.
        positives: bool (Q, C), at least one true value in every row.
    """
    wanted = positives.to(similarities.dtype)
    return -(similarities.log_softmax(1) * (wanted / wanted.sum(1, keepdim=True))).sum()


def sigmoid_contrastive(similarities: Tensor, positives: Tensor) -> Tensor:
    """Return the binary cross-entropy of whether a video and a text belong together, summed over all pairs, a scalar.

    After X. Zhai et al., "Sigmoid loss for language image pre-training" (SigLIP, ICCV 2023).

    Args:
        similarities: float (V, T), videos by texts, already multiplied by the scale, with the bias added.
        positives: bool (V, T), true for pairs that belong together.
    """
    return -F.logsigmoid(torch.where(positives, similarities, -similarities)).sum()


class SimilarityScale(nn.Module):
    """A layer for scaled cosine similarities of videos and texts, and the contrastive loss on them.

    Similarities are multiplied by a learned scale. For the sigmoid loss, a learned bias is added. The bias begins near
    the log odds that a random video and text of a batch belong together. (SigLIP begins at -10, for batches of 32,768.)

    Args:
        loss: ``softmax`` or ``sigmoid``.
        num_together: number of samples of an effective batch, over all micro-batches and ranks (processes).
    """

    def __init__(self, loss: str, num_together: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(SOFTMAX_LOG_SCALE if loss == "softmax" else SIGMOID_LOG_SCALE))
        if loss == "sigmoid":
            self.bias = nn.Parameter(torch.tensor(-math.log(max(num_together, 2))))
        self._loss = loss

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        """Return the scaled similarities (V, T) of unit vectors of videos (V, E) and texts (T, E)."""
        scale: Tensor = _Bounded.apply(self.log_scale).exp()  # type: ignore[no-untyped-call]
        similarities = video @ text.T * scale
        return similarities + self.bias if self._loss == "sigmoid" else similarities

    def bound_gradients(self) -> None:
        """Set the gradient of the log scale to 0 if a descent step would leave ``LOG_SCALE_BOUNDS``.

        Call it once per effective batch, before the optimiser's step.
        """
        value, gradient = self.log_scale.detach(), self.log_scale.grad
        if gradient is not None:
            low, high = LOG_SCALE_BOUNDS
            gradient.masked_fill_(((value <= low) & (gradient > 0)) | ((value >= high) & (gradient < 0)), 0.0)

    def contrastive(
        self, video: Tensor, text: Tensor, video_index: Tensor, text_index: Tensor, rows: range | None = None
    ) -> Tensor:
        """Return the contrastive loss of the samples ``rows`` against all B samples, a scalar.

        The sum over disjoint ``rows`` that cover the batch is the loss of the batch.

        Args:
            video: unit vectors (B, E) of the videos of all samples.
            text: unit vectors (B, E) of the texts of all samples.
            video_index: int64 (B,), equal for equal videos.
            text_index: int64 (B,), equal for equal texts.
            rows: indices of the samples; None: all B.
        """
        of_all = rows is None or len(rows) == len(video)
        own = slice(None) if rows is None else slice(rows.start, rows.stop)
        similarities, positives = self(video[own], text), positive_pairs(video_index, text_index, rows)
        if self._loss == "sigmoid":
            return sigmoid_contrastive(similarities, positives)
        if of_all:
            return softmax_contrastive(similarities, positives)
        by_text = softmax_of_queries(self(text[own], video), positive_pairs(text_index, video_index, rows))
        return 0.5 * (softmax_of_queries(similarities, positives) + by_text)


class _Bounded(torch.autograd.Function):
    """Clamp to ``LOG_SCALE_BOUNDS`` and pass gradients unchanged; ``clamp`` has gradient 0 outside the bounds."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clamp(*LOG_SCALE_BOUNDS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


_TEMPORAL_LAYERS = 1  # transformer layers above the trunk; a clip has few frames


@dataclass(frozen=True)
class NetworkPlan:
    """The settings from which a ``VideoTextNetwork`` is built: its sizes, and which parts it has."""

    trunk: str  # name of a detector with ``build_trunk``, for clips of ``num_frames``
    num_frames: int
    vocabulary_size: int
    max_tokens: int  # of a text, begin and end tokens included
    numbers: TokenNumbers  # ids of the special tokens
    embedding_size: int  # dimension of the space that videos and texts share
    width: int  # features per frame or token in the transformers
    layers: int
    heads: int
    text_encoder: str  # folder of a transformers model; empty: ``TextEncoder``
    contrastive: Literal["softmax", "sigmoid"] | None  # kind of contrastive loss; None: no such loss, no text encoder
    num_together: int  # number of samples of an effective batch
    captions: bool  # whether captions are written
    side: int = 112  # of the frames, in pixels
    weights: Path | None = None  # file or folder with the trunk's weights; None: installed ones, or random


class VideoEncoder(nn.Module):
    """A detector's trunk (its network without head), followed by a transformer over the features of the frames.

    A trunk on whole clips gives the transformer a single vector per clip.
    """

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__()
        spec = DETECTORS.get(plan.trunk)
        licence = spec.weights_licence or "unknown"
        trunk = built_trunk(spec, TrunkOptions(plan.trunk, plan.num_frames, plan.side, plan.weights, licence))
        per_frame = getattr(trunk, "per_frame", True)
        self.trunk = trunk
        feature_size = getattr(trunk, "frame_feature_size", None) or trunk.num_features
        self.norm = nn.LayerNorm(feature_size)
        self.narrow = nn.Linear(feature_size, plan.width)
        num_places = plan.num_frames if per_frame else 1
        self.transformer = Transformer(plan.width, plan.heads, _TEMPORAL_LAYERS, num_places)

    def forward(self, frames: Tensor) -> Tensor:
        """Return features (B, T', W) of frames uint8 (B, T, 3, H, W); T' is T, or 1 for a trunk on whole clips."""
        features = getattr(self.trunk, "frame_features", self.trunk)(frames)
        features = features.unsqueeze(1) if features.dim() == 2 else features
        return self.transformer(self.narrow(self.norm(features)))


class TextEncoder(nn.Module):
    """A small transformer over a text's tokens; the features of a text are the mean of its states over the tokens."""

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__()
        self._padding = plan.numbers.padding
        self.output_size = plan.width
        self.embedding = token_embedding(plan.vocabulary_size, plan.width)
        self.transformer = Transformer(plan.width, plan.heads, plan.layers, plan.max_tokens)

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return features (B, W) of the B texts whose token ids are ``tensors["tokens"]``, int64 (B, L).

        Padding is ignored.
        """
        tokens = tensors["tokens"]
        padding = tokens == self._padding
        states = self.transformer(self.embedding(tokens), padding[:, None, :])
        there = (~padding).to(states.dtype)[:, :, None]
        return (states * there).sum(1) / there.sum(1)


class JointSpace(nn.Module):
    """Maps videos and texts to vectors in a common space: a text encoder, two projections, and a similarity scale."""

    def __init__(self, plan: NetworkPlan, kind: Literal["softmax", "sigmoid"]) -> None:
        super().__init__()
        self.text = TransformersEncoder(plan.text_encoder) if plan.text_encoder else TextEncoder(plan)
        self.video_projection = nn.Linear(plan.width, plan.embedding_size, bias=False)
        self.text_projection = nn.Linear(self.text.output_size, plan.embedding_size, bias=False)
        self.scale = SimilarityScale(kind, plan.num_together)

    def of_videos(self, memory: Tensor) -> Tensor:
        """Return unit vectors float32 (B, E) of clips whose frames have the features ``memory`` (B, T, W)."""
        return F.normalize(self.video_projection(memory.mean(1)).float(), dim=1)

    def of_texts(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return unit vectors float32 (B, E) of texts; ``tensors`` are the inputs of the text encoder."""
        return F.normalize(self.text_projection(self.text(tensors)).float(), dim=1)

    def forward(self, memory: Tensor, tensors: Mapping[str, Tensor]) -> Outputs:
        """Return a mapping with ``video_embedding`` and ``text_embedding``, unit vectors float32 (B, E).

        Arguments are those of ``of_videos`` and ``of_texts``.
        """
        return {"video_embedding": self.of_videos(memory), "text_embedding": self.of_texts(tensors)}


class VideoTextNetwork(nn.Module):
    """A network for retrieval of videos by texts, and for captions.

    It has a video encoder. ``plan`` says whether it also has a joint space (vectors of videos and texts that can be
    compared) and a caption decoder.
    """

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__()
        self.video = VideoEncoder(plan)
        self.joint = JointSpace(plan, plan.contrastive) if plan.contrastive else None
        self.captions = (
            CaptionDecoder(
                plan.vocabulary_size, plan.max_tokens,
                width=plan.width, heads=plan.heads, layers=plan.layers, numbers=plan.numbers,
            )
            if plan.captions
            else None
        )  # fmt: skip

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the parts whose activations gradient checkpointing computes again."""
        transformers = [module for module in self.modules() if isinstance(module, Transformer)]
        return *recomputable_blocks_of(self.video.trunk), *(layer for each in transformers for layer in each.layers)

    def forward(self, tensors: Mapping[str, Tensor], write: bool = False) -> Outputs:
        """Return the outputs that losses and metrics need, B samples each.

        Args:
            tensors: ``frames`` uint8 (B, T, 3, S, S), ``tokens`` int64 (B, L), and for a pretrained text encoder
                the tensors of ``encoder_tensors``.
            write: whether to generate captions.

        Returns:
            With a contrastive loss, ``video_embedding`` and ``text_embedding`` float32 (B, E), unit vectors. With
            captions, ``caption_loss`` and ``token_accuracy`` float32 (B,); and if ``write``, ``caption_tokens`` int64
            (B, max_tokens).
        """
        memory, outputs = self.video(tensors["frames"]), Outputs()
        if self.joint is not None:
            outputs |= self.joint(memory, tensors)
        if self.captions is not None:
            outputs |= self.captions.score(tensors["tokens"], memory)
            if write:
                outputs["caption_tokens"] = self.captions.write(memory)
        return outputs
