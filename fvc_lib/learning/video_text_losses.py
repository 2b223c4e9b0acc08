"""Losses that compare all videos of a batch with all of its texts, several of which may belong together.

All are sums over the samples; ``samples`` below are pairs of a video and a text, and positives are found from numbers
that are equal for equal videos and equal texts.

Both are computed some rows at a time, each rank its own against the candidates of all: the softmax loss as
open_clip's with ``local_loss`` (G. Ilharco et al., 2021), its own videos among all texts and its own texts among all
videos; the sigmoid loss as SigLIP's in chunks, its own videos with all texts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# CLIP's: a temperature between 1 and 1/100, beginning at 0.07.
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))
SOFTMAX_LOG_SCALE = math.log(1 / 0.07)
SIGMOID_LOG_SCALE = math.log(10.0)  # SigLIP's


def positive_pairs(video_index: Tensor, text_index: Tensor, rows: range | None = None) -> Tensor:
    """Bool (R, B): whether video i of ``rows`` and text j belong together, as far as the batch says.

    They do where a sample has just this video and this text: their own pair, equal texts' videos, equal videos' texts,
    and what these together imply. With the two arguments exchanged, texts by videos.

    Args:
        video_index: int64 (B,), equal for equal videos.
        text_index: int64 (B,), equal for equal texts.
        rows: whose videos; None: all.
    """
    asked = video_index if rows is None else video_index[rows.start : rows.stop]
    same_video = asked[:, None] == video_index
    texts, text_of = torch.unique(text_index, return_inverse=True)
    # How many samples show this video with each text: whole numbers, so the order of adding does not matter.
    shown = same_video.new_zeros((len(asked), len(texts)), dtype=torch.float32)
    return shown.index_add_(1, text_of, same_video.float())[:, text_of] > 0


def softmax_contrastive(similarities: Tensor, positives: Tensor) -> Tensor:
    """Cross-entropy over texts for each video and over videos for each text, halved, summed over samples; scalar.

    Args:
        similarities: float (B, B), videos by texts, already multiplied by the scale.
        positives: bool (B, B), at least one in each row and column.
    """
    return 0.5 * (softmax_of_queries(similarities, positives) + softmax_of_queries(similarities.T, positives.T))


def softmax_of_queries(similarities: Tensor, positives: Tensor) -> Tensor:
    """Cross-entropy over candidates for each query, summed over the queries; scalar.

    After A. Radford et al., "Learning transferable visual models from natural language supervision" (CLIP, 2021). Where
    a sample has several positives each is as right as the others: the target is spread evenly over them, as in J. Yang
    et al., "Unified contrastive learning in image-text-label space" (CVPR 2022).

    Args:
        similarities: float (Q, C), queries by candidates, already multiplied by the scale.
        positives: bool (Q, C), at least one in each row.
    """
    wanted = positives.to(similarities.dtype)
    return -(similarities.log_softmax(1) * (wanted / wanted.sum(1, keepdim=True))).sum()


def sigmoid_contrastive(similarities: Tensor, positives: Tensor) -> Tensor:
    """Every video with every text is a yes or no of its own; summed over all of them; scalar.

    After X. Zhai et al., "Sigmoid loss for language image pre-training" (SigLIP, ICCV 2023).

    Args:
        similarities: float (V, T), videos by texts, already multiplied by the scale and with the bias added.
        positives: bool (V, T).
    """
    return -F.logsigmoid(torch.where(positives, similarities, -similarities)).sum()


class SimilarityScale(nn.Module):
    """The learned factor on cosine similarities, and for the sigmoid loss the bias.

    The bias begins where every pair is as likely right as it is: SigLIP's -10 does so for its batch of 32,768.

    Args:
        loss: softmax or sigmoid.
        num_together: samples of an effective batch.
    """

    def __init__(self, loss: str, num_together: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(SOFTMAX_LOG_SCALE if loss == "softmax" else SIGMOID_LOG_SCALE))
        if loss == "sigmoid":
            self.bias = nn.Parameter(torch.tensor(-math.log(max(num_together, 2))))
        self._loss = loss

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        """(V, T) from unit vectors (V, E) and (T, E)."""
        scale: Tensor = _Bounded.apply(self.log_scale).exp()  # type: ignore[no-untyped-call]
        similarities = video @ text.T * scale
        return similarities + self.bias if self._loss == "sigmoid" else similarities

    def bound_gradients(self) -> None:
        """Beyond a bound of the scale keep only a gradient that leads back inside.

        Of the whole effective batch: some rows may lead out where all of them lead back.
        """
        value, gradient = self.log_scale.detach(), self.log_scale.grad
        if gradient is not None:
            low, high = LOG_SCALE_BOUNDS
            gradient.masked_fill_(((value <= low) & (gradient > 0)) | ((value >= high) & (gradient < 0)), 0.0)

    def contrastive(
        self, video: Tensor, text: Tensor, video_index: Tensor, text_index: Tensor, rows: range | None = None
    ) -> Tensor:
        """The share of ``rows`` in the loss of this kind over all samples, scalar.

        Args:
            video: unit vectors (B, E), and
            text: (B, E), of all samples.
            video_index: (B,) and
            text_index: (B,), as ``positive_pairs`` takes them.
            rows: whose share; None: of all.
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
    """Clamp to ``LOG_SCALE_BOUNDS`` that lets every gradient pass; ``clamp``'s own lets none from outside."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clamp(*LOG_SCALE_BOUNDS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
