"""Mixup and cutmix: two pictures as one, and all that is known of them mixed alike.

A number is mixed where both pictures have it, and is unknown otherwise: half a known sum says nothing. A class that
only one picture has counts with that picture's share, and the rest of the example teaches no class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MixSettings:
    """How often and how pictures are mixed.

    Attributes:
        share: of the training pictures.
        mixup_alpha: of the Beta distribution that the first picture's share is drawn from; 0: no mixup.
        cutmix_alpha: likewise of its area; 0: no cutmix. With both, half of the mixed pictures each.
    """

    share: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0


@dataclass(frozen=True)
class Mix:
    """One drawn mixture.

    Attributes:
        partner: number of the other picture.
        box: ``(top, bottom, left, right)``, half-open, which shows the partner (cutmix); None: both shine through.
        share: of the first picture; with a box exactly what that leaves of it.
    """

    partner: int
    box: tuple[int, int, int, int] | None
    share: float


def draw_mix(settings: MixSettings, num_images: int, size: int, generator: np.random.Generator) -> Mix | None:
    """What becomes of one training picture, of ``num_images`` that are ``size`` pixels a side; None: it stays alone."""
    kinds = [kind for kind, alpha in (("mixup", settings.mixup_alpha), ("cutmix", settings.cutmix_alpha)) if alpha]
    if not kinds or num_images < 2 or generator.uniform() >= settings.share:
        return None
    kind = kinds[int(generator.integers(len(kinds)))]
    partner = int(generator.integers(num_images))
    if kind == "mixup":
        return Mix(partner, None, float(generator.beta(settings.mixup_alpha, settings.mixup_alpha)))
    box = _draw_box(size, float(generator.beta(settings.cutmix_alpha, settings.cutmix_alpha)), generator)
    top, bottom, left, right = box
    return Mix(partner, box, 1 - (bottom - top) * (right - left) / size**2)


def _draw_box(size: int, share: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """A square of area 1 - ``share`` around a random point, cut at the edges (Yun et al., "CutMix", ICCV 2019)."""
    half = size * np.sqrt(1 - share) / 2
    down, across = generator.uniform(0, size, size=2)
    edges = np.clip(np.rint([down - half, down + half, across - half, across + half]), 0, size).astype(int)
    top, bottom, left, right = edges.tolist()
    return top, bottom, left, right


def mixed_image(image: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Both as one, all uint8 (3, S, S). After Zhang et al., "mixup" (ICLR 2018), where there is no box."""
    if mix.box is None:
        blend = torch.lerp(partner.float(), image.float(), mix.share)
        return blend.round_().clamp_(0, 255).to(torch.uint8)
    top, bottom, left, right = mix.box
    mixed = image.clone()
    mixed[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
    return mixed


def mixed_class_target(target: Tensor, partner: Tensor, mix: Mix) -> Tensor:
    """Soft class targets (C,): each picture's own, times its share; zero rows are pictures without a class."""
    return mix.share * target + (1 - mix.share) * partner


def mixed_values(
    values: Tensor, known: Tensor, partner_values: Tensor, partner_known: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Numbers (T,) and which are known (T,): those that both pictures have."""
    both = known * partner_known
    return both * (mix.share * values + (1 - mix.share) * partner_values), both
