"""The loss of classes that tasks image and video share."""

import torch
from torch import Tensor
from torch.nn import functional as F


def class_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the label-smoothed cross-entropy (B,) of soft ``targets``.

    A sample of class t with probabilities p and smoothing s over C classes has the loss::

        (1 - s) * -log p_t + s * mean over k of -log p_k

    A mixed sample (mixup or cutmix) has the sum of these losses over its classes, each times its entry of ``targets``.
    A sample without a known class has a row of zeros, and so a loss and a gradient of exactly 0.

    Smoothing: C. Szegedy et al., "Rethinking the Inception architecture" (CVPR 2016). Mixup: H. Zhang et al. (ICLR
    2018).

    Args:
        logits: float (B, C); C may be 0.
        targets: float (B, C), the weight of each class in the sample, at least 0.
        label_smoothing: in [0, 1).
    """
    if not logits.shape[1]:
        return logits.new_zeros(len(logits), dtype=torch.float32)
    weights = targets.sum(1, keepdim=True)
    # Where nothing is known not even an infinite logit may reach the sum: 0 times infinity is no number.
    log_probabilities = F.log_softmax(torch.where(weights > 0, logits.float(), 0.0), dim=1)
    smoothed = (1 - label_smoothing) * targets + label_smoothing * weights / logits.shape[1]
    return -(smoothed * log_probabilities).sum(1)
