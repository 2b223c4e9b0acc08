"""The loss of classes that tasks image and video share."""

import torch
from torch import Tensor
from torch.nn import functional as F


def class_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, focal_gamma: float = 0.0) -> Tensor:
    """Label-smoothed cross-entropy (B,) of soft ``targets``, well-classified samples weighed down by the focal factor.

    Of a sample (a picture or clip) of class t, with probabilities p and smoothing s over C classes::

        (1 - p_t) ** gamma * ((1 - s) * -log p_t + s * mean over k of -log p_k)

    The factor is one for the whole sample and of the probability itself, not of ``exp(-loss)``, which with smoothing
    never comes near 1. (Keras puts a factor on each class's term. Those of the wrong classes are then hardly weighed
    down, and what is left of a well-classified sample is the pull to equal probabilities.) Of a mixed sample it is
    the sum of this over its classes, each weighed by its target, as mixup takes any loss.

    A target's sum is what its sample weighs: 0 where no class is known, which gives a loss and a gradient of exactly
    0. Smoothing: C. Szegedy et al., "Rethinking the Inception architecture" (CVPR 2016); focal: T.-Y. Lin et al.,
    "Focal loss for dense object detection" (ICCV 2017); mixup: H. Zhang et al. (ICLR 2018).

    Args:
        logits: float (B, C); C may be 0.
        targets: float (B, C), not negative.
        label_smoothing: in [0, 1).
        focal_gamma: 0 is the cross-entropy.
    """
    if not logits.shape[1]:
        return logits.new_zeros(len(logits), dtype=torch.float32)
    weights = targets.sum(1, keepdim=True)
    # Where nothing is known not even an infinite logit may reach the sum: 0 times infinity is no number.
    log_probabilities = F.log_softmax(torch.where(weights > 0, logits.float(), 0.0), dim=1)
    if focal_gamma:
        # Clamped, as the power's slope at 0 is infinite for exponents below 1.
        targets = targets * (1 - log_probabilities.exp()).clamp_min(1e-6) ** focal_gamma
        weights = targets.sum(1, keepdim=True)
    smoothed = (1 - label_smoothing) * targets + label_smoothing * weights / logits.shape[1]
    return -(smoothed * log_probabilities).sum(1)
