"""The network of task video_text: a video encoder, and what of texts, captions and masked frames its losses need.

What no loss asks for is not built, so every parameter there is receives a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.learning.models import build_content_trunk
from fvc_lib.learning.task import Outputs
from fvc_lib.learning.video_text_adapters import TransformersEncoder
from fvc_lib.learning.video_text_decoder import CaptionDecoder, TokenNumbers
from fvc_lib.learning.video_text_losses import SimilarityScale
from fvc_lib.learning.video_text_transformer import Transformer, token_embedding

_TEMPORAL_LAYERS = 1  # above the trunk; frames are few


@dataclass(frozen=True)
class NetworkPlan:
    """What is built.

    Attributes:
        trunk: name of the video network, see ``models.build_content_trunk``.
        num_frames: of a clip.
        vocabulary_size: tokens of the texts.
        max_tokens: of a text, with its beginning and end.
        numbers: of the special tokens.
        embedding_size: numbers in the space that videos and texts share.
        width: numbers per frame and token in the transformers.
        layers: of the text transformer and of the decoder.
        heads: of attention.
        text_encoder: folder of a transformers model; empty: the own text transformer.
        contrastive: the kind of that loss; None: no texts are compared.
        num_together: samples of an effective batch.
        captions: whether captions are written.
        masked: whether hidden frames are foretold.
    """

    trunk: str
    num_frames: int
    vocabulary_size: int
    max_tokens: int
    numbers: TokenNumbers
    embedding_size: int
    width: int
    layers: int
    heads: int
    text_encoder: str
    contrastive: Literal["softmax", "sigmoid"] | None
    num_together: int
    captions: bool
    masked: bool


class VideoEncoder(nn.Module):
    """The trunk that the video task has, and a transformer over its frames."""

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__()
        self.trunk = build_content_trunk(plan.trunk)
        self.norm = nn.LayerNorm(self.trunk.frame_feature_size)
        self.narrow = nn.Linear(self.trunk.frame_feature_size, plan.width)
        self.transformer = Transformer(plan.width, plan.heads, _TEMPORAL_LAYERS, plan.num_frames)

    def frame_features(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Of frames uint8 (B, T, 3, H, W): the trunk's features (B, T, F), and the transformer's input (B, T, W)."""
        features = self.trunk.frame_features(frames)
        return features, self.narrow(self.norm(features))

    def forward(self, narrowed: Tensor) -> Tensor:
        """Features (B, T, W) of frames that know each other."""
        result: Tensor = self.transformer(narrowed)
        return result


class TextEncoder(nn.Module):
    """A small transformer over a text's tokens; the text is the mean of what it makes of them."""

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__()
        self._padding = plan.numbers.padding
        self.output_size = plan.width
        self.embedding = token_embedding(plan.vocabulary_size, plan.width)
        self.transformer = Transformer(plan.width, plan.heads, plan.layers, plan.max_tokens)

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, W) from ``tokens`` int64 (B, L); padding is not seen."""
        tokens = tensors["tokens"]
        padding = tokens == self._padding
        states = self.transformer(self.embedding(tokens), padding[:, None, :])
        there = (~padding).to(states.dtype)[:, :, None]
        result: Tensor = (states * there).sum(1) / there.sum(1)
        return result


class JointSpace(nn.Module):
    """Where videos and texts are compared: the text encoder, both projections, and the scale of similarities."""

    def __init__(self, plan: NetworkPlan, kind: Literal["softmax", "sigmoid"]) -> None:
        super().__init__()
        self.text = TransformersEncoder(plan.text_encoder) if plan.text_encoder else TextEncoder(plan)
        self.video_projection = nn.Linear(plan.width, plan.embedding_size, bias=False)
        self.text_projection = nn.Linear(self.text.output_size, plan.embedding_size, bias=False)
        self.scale = SimilarityScale(kind, plan.num_together)

    def forward(self, memory: Tensor, tensors: Mapping[str, Tensor]) -> Outputs:
        """Unit vectors float32 (B, E) of clips, from their frames' features (B, T, W), and of texts."""
        video, text = self.video_projection(memory.mean(1)), self.text_projection(self.text(tensors))
        return {
            "video_embedding": F.normalize(video.float(), dim=1),
            "text_embedding": F.normalize(text.float(), dim=1),
        }


class MaskedFrames(nn.Module):
    """Foretells hidden frames' features from the other frames, as masked language models do with words.

    After J. Devlin et al., "BERT" (2019), on frames as in C. Sun et al., "VideoBERT" (ICCV 2019), with the features as
    targets. Targets carry no gradient: otherwise all features being equal would be the best answer.
    """

    def __init__(self, plan: NetworkPlan, feature_size: int) -> None:
        super().__init__()
        self.hidden_frame = nn.Parameter(torch.zeros(plan.width))
        self.foretell = nn.Linear(plan.width, feature_size)

    def forward(self, video: VideoEncoder, features: Tensor, narrowed: Tensor, hidden: Tensor) -> Tensor:
        """Float32 (B,): mean squared error over the hidden frames' features, each frame's brought to norm 1.

        Args:
            video: whose transformer looks at the frames left.
            features: (B, T, F) of the trunk.
            narrowed: (B, T, W) of the same.
            hidden: bool (B, T), true where a frame is hidden.
        """
        left = torch.where(hidden[:, :, None], self.hidden_frame.to(narrowed.dtype), narrowed)
        foretold = self.foretell(video(left)).float()
        target = F.layer_norm(features.detach().float(), features.shape[2:])
        errors: Tensor = (foretold - target).square().mean(2) * hidden
        return errors.sum(1) / hidden.sum(1).clamp_min(1)


class VideoTextNetwork(nn.Module):
    """Videos and texts in one space, captions, and masked frames: each where the plan asks for it."""

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
        self.masked = MaskedFrames(plan, self.video.trunk.frame_feature_size) if plan.masked else None

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        transformers = [module for module in self.modules() if isinstance(module, Transformer)]
        return *self.video.trunk.recomputable_blocks(), *(layer for each in transformers for layer in each.layers)

    def forward(self, tensors: Mapping[str, Tensor], beam_width: int = 0) -> Outputs:
        """What the losses and metrics need, per sample.

        Args:
            tensors: ``frames`` uint8 (B, T, 3, S, S), ``tokens`` int64 (B, L), for masked modelling ``hidden`` bool
                (B, T), and for an encoder of transformers what that reads.
            beam_width: so many beams write captions; 0: none are written.

        Returns:
            As far as each was asked for: ``video_embedding`` and ``text_embedding`` float32 (B, E), unit vectors;
            ``caption_loss``, ``token_accuracy`` and ``masked_loss`` float32 (B,); ``caption_tokens`` int64 (B, L).
        """
        features, narrowed = self.video.frame_features(tensors["frames"])
        memory, outputs = self.video(narrowed), Outputs()
        if self.joint is not None:
            outputs |= self.joint(memory, tensors)
        if self.captions is not None:
            score = self.captions.score(tensors["tokens"], memory)
            outputs |= {"caption_loss": score.loss, "token_accuracy": score.token_accuracy}
            if beam_width:
                outputs["caption_tokens"] = self.captions.write(memory, beam_width)
        if self.masked is not None:
            outputs["masked_loss"] = self.masked(self.video, features, narrowed, tensors["hidden"])
        return outputs
