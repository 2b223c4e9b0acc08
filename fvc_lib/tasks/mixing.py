"""Mixup and cutmix: combine two training samples, pictures or clips, and their labels.

A class that only one of the two has counts with that sample's share; the rest of the example teaches no class. A
sample's own generator, made from its name and the epoch, draws whether it is mixed, its partner and the kind. No
micro-batch, rank or loader process changes that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIX_SHARE = 0.3  # of the training samples, where mixing is on


@dataclass(frozen=True)
class MixSettings:
    """How many training samples are mixed, and how.

    Attributes:
        share: of the training samples.
        mixup_alpha: of the Beta distribution of the first sample's share of the mixture; 0: no mixup.
        cutmix_alpha: of the Beta distribution of the first sample's share of the area; 0: no cutmix. With both kinds,
            half of the mixtures are of each.
        balanced: the partner's class is drawn evenly, as those of the batches are.
    """

    share: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    balanced: bool = False

    @property
    def mixes(self) -> bool:
        """Whether any sample is mixed."""
        return self.share > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)


@dataclass(frozen=True)
class Mix:
    """One drawn mixture.

    Attributes:
        partner: the other sample's number.
        box: half-open ``(top, bottom, left, right)`` that shows the partner (cutmix); None: both are blended (mixup).
        share: of the first sample.
    """

    partner: int
    box: tuple[int, int, int, int] | None
    share: float


def draw_mix(
    settings: MixSettings,
    num_samples: int,
    size: int,
    generator: np.random.Generator,
    rows_of_class: Sequence[np.ndarray] | None = None,
) -> Mix | None:
    """Draw the mixture of one of ``num_samples`` samples of ``size`` pixels a side; None: do not mix it.

    With ``rows_of_class`` (the rows of each class), draw the partner's class first, all classes equally often.
    """
    kinds = [kind for kind, alpha in (("mixup", settings.mixup_alpha), ("cutmix", settings.cutmix_alpha)) if alpha]
    if not kinds or num_samples < 2 or generator.uniform() >= settings.share:
        return None
    kind = kinds[int(generator.integers(len(kinds)))]
    if rows_of_class is None:
        partner = int(generator.integers(num_samples))
    else:
        partner = int(generator.choice(rows_of_class[int(generator.choice(len(rows_of_class)))]))
    if kind == "mixup":
        return Mix(partner, None, float(generator.beta(settings.mixup_alpha, settings.mixup_alpha)))
    box = _draw_box(size, float(generator.beta(settings.cutmix_alpha, settings.cutmix_alpha)), generator)
    top, bottom, left, right = box
    return Mix(partner, box, 1 - (bottom - top) * (right - left) / size**2)


def rows_of_classes(labels: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each class, int64, sorted by class; ``labels`` is (N,)."""
    return [np.flatnonzero(labels == each) for each in np.unique(labels)]


def _draw_box(size: int, share: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a square of area 1 - ``share`` around a random point, cut at the edges (Yun et al., CutMix, ICCV 2019)."""
    half = size * np.sqrt(1 - share) / 2
    down, across = generator.uniform(0, size, size=2)
    edges = np.clip(np.rint([down - half, down + half, across - half, across + half]), 0, size).astype(int)
    top, bottom, left, right = edges.tolist()
    return top, bottom, left, right


def mixed_pixels(pixels: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Return the mixture of two samples, all uint8 (..., S, S); a box is the same in all frames of a clip.

    Without a box after Zhang et al., "mixup" (ICLR 2018).
    """
    if mix.box is None:
        blend = torch.lerp(partner.float(), pixels.float(), mix.share)
        return blend.round_().clamp_(0, 255).to(torch.uint8)
    top, bottom, left, right = mix.box
    mixed = pixels.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed


def mixed_target(target: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Return soft targets of any shape: each sample's own, times its share; all zero where a sample has no class."""
    return mix.share * target + (1 - mix.share) * partner
