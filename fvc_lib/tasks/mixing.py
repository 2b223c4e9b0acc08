"""Mixup and cutmix, which combine two training samples (pictures or clips) and their labels, and the loss for them.

The label of a mixture is the mean of both labels, weighted by the shares of the samples. A sample without a class has
only zeros as its label. A random generator draws whether a sample is mixed, with which other sample, and how. It is
seeded with the sample's id and the epoch, so the result does not depend on the micro-batch, the rank or the loader
process.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MIX_SHARE = 0.3  # share of the training samples that are mixed, where mixing is on


@dataclass(frozen=True)
class MixSettings:
    """Settings of mixup and cutmix.

    Attributes:
        share: share of the training samples that are mixed, in [0, 1].
        mixup_alpha: the first sample's share of the mixture is drawn from Beta(alpha, alpha); 0: no mixup.
        cutmix_alpha: the first sample's share of the area is drawn from Beta(alpha, alpha); 0: no cutmix. If both
            alphas are above 0, mixup and cutmix are equally likely.
    """

    share: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether mixing is turned on: ``share`` and at least one of the alphas are above 0."""
        return self.share > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)


@dataclass(frozen=True)
class Mix:
    """The random draws that decide how one sample is mixed with a second one, its partner.

    Attributes:
        partner: index of the partner.
        box: rectangle ``(top, bottom, left, right)`` in pixels, half-open, that shows the partner (cutmix); None: both
            samples are blended (mixup).
        share: share of the first sample in the mixture, in [0, 1].
    """

    partner: int
    box: tuple[int, int, int, int] | None
    share: float


def draw_mix(settings: MixSettings, num_samples: int, size: int, generator: np.random.Generator) -> Mix | None:
    """Draw how a training sample is mixed with a second one, its partner; return None if it is not mixed.

    Args:
        settings: how many samples are mixed, and how.
        num_samples: number of samples that the partner is drawn from.
        size: side of the square frames, in pixels.
        generator: source of all random draws.
    """
    kinds = [kind for kind, alpha in (("mixup", settings.mixup_alpha), ("cutmix", settings.cutmix_alpha)) if alpha]
    if not kinds or num_samples < 2 or generator.uniform() >= settings.share:
        return None
    kind = kinds[int(generator.integers(len(kinds)))]
    partner = int(generator.integers(num_samples))
    if kind == "mixup":
        return Mix(partner, None, float(generator.beta(settings.mixup_alpha, settings.mixup_alpha)))
    # A square with 1 - share of the area lies around a random point and is cut at the edges, so it may be smaller (Yun
    # et al., CutMix, ICCV 2019).
    half = size * np.sqrt(1 - float(generator.beta(settings.cutmix_alpha, settings.cutmix_alpha))) / 2
    down, across = generator.uniform(0, size, size=2)
    edges = np.clip(np.rint([down - half, down + half, across - half, across + half]), 0, size).astype(int)
    top, bottom, left, right = edges.tolist()
    return Mix(partner, (top, bottom, left, right), 1 - (bottom - top) * (right - left) / size**2)


def mixed_pixels(pixels: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Return the mixture of the samples ``pixels`` and ``partner``, all uint8 (..., S, S).

    If ``mix`` has a box, the pixels of ``partner`` replace those in the box, in all frames of a clip (cutmix). Without
    a box, the two samples are blended: Zhang et al., "mixup" (ICLR 2018).
    """
    if mix.box is None:
        blend = torch.lerp(partner.float(), pixels.float(), mix.share)
        return blend.round_().clamp_(0, 255).to(torch.uint8)
    top, bottom, left, right = mix.box
    mixed = pixels.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed


def mixed_target(target: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Return the weighted mean of two targets of the same shape.

    A target holds the weights of the classes; a target without a class is all zeros.

    Args:
        target: target of the first sample.
        partner: target of the sample that it is mixed with.
        mix: gives the share of the first sample.
    """
    return mix.share * target + (1 - mix.share) * partner


def class_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the label-smoothed cross-entropy (B,) of soft ``targets``.

    A sample of class t with probabilities p and smoothing s over C classes has the loss::

        (1 - s) * -log p_t + s * mean over k of -log p_k

    The loss of a mixed sample (mixup or cutmix) is the sum of these losses over its classes, weighted by its row of
    ``targets``. A sample without a known class has a row of zeros, and so a loss and a gradient of exactly 0.

    Smoothing: C. Szegedy et al., "Rethinking the Inception architecture" (CVPR 2016). Mixup: H. Zhang et al. (ICLR
    2018).

    Args:
        logits: float (B, C); C may be 0.
        targets: float (B, C), the weight of each class in the sample, at least 0.
        label_smoothing: the smoothing s, in [0, 1).
    """
    weights = targets.sum(1, keepdim=True)
    # Without a known class the logits must not count, even if one is infinite: 0 times infinity is NaN.
    log_probabilities = F.log_softmax(torch.where(weights > 0, logits.float(), 0.0), dim=1)
    smoothed = (1 - label_smoothing) * targets + label_smoothing * weights / logits.shape[1]
    return -(smoothed * log_probabilities).sum(1)
