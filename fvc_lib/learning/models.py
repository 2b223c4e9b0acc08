"""The video task's own networks: small, with group norm, from uint8 clips to one logit per clip.

Group norm, because it does not look across samples: a batch may be split into micro-batches, down to one clip, without
changing the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.learning.forensic_stem import NUM_CHANNELS, forensic_maps
from fvc_lib.services.errors import UsageError, did_you_mean

_GROUPS = 8


class FrameCnn(nn.Module):
    """A CNN on each frame's forensic maps, pooled over space and then over time.

    Convolutions see single frames; the norm sees the whole clip, so that a frozen or foreign frame stays different from
    its neighbours. Pooling keeps mean, maximum and deviation over space (a manipulated region is local) and mean,
    maximum and minimum over time (a splice is one jump, a freeze one lack of motion).
    """

    def __init__(self, widths: tuple[int, int] = (32, 32), cell: int = 4) -> None:
        super().__init__()
        self._cell = cell
        self.first = _ConvNorm(NUM_CHANNELS, widths[0], (1, 3, 3), (1, 2, 2))
        self.second = _ConvNorm(widths[0], widths[1], (1, 3, 3))
        self.head = nn.Linear(9 * widths[1], 1)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        return self.first, self.second

    def forward(self, frames: Tensor) -> Tensor:
        """Logits float (B,), positive for fake, from frames uint8 (B, T, 3, H, W)."""
        features = self.second(self.first(_maps_clip_by_clip(frames, self._cell)))
        deviation = (features.var((3, 4), correction=0) + 1e-4).sqrt()
        frame_features = torch.cat([features.mean((3, 4)), features.amax((3, 4)), deviation], dim=1)
        clip_features = [frame_features.mean(2), frame_features.amax(2), frame_features.amin(2)]
        logits: Tensor = self.head(torch.cat(clip_features, dim=1))
        return logits.squeeze(1)


class R2Plus1d(nn.Module):
    """A small R(2+1)D: each 3-D convolution is a spatial one followed by a temporal one.

    After Tran et al., "A closer look at spatiotemporal convolutions for action recognition" (CVPR 2018), with group
    norm, far fewer channels, and the forensic maps in place of pixels: from pixels alone, fifty clips taught it their
    scenes and nothing that held for others (sample corpus: AUC below 0.4 instead of 0.95).
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), cell: int = 4) -> None:
        super().__init__()
        self._cell = cell
        self.spatial_stem = _ConvNorm(NUM_CHANNELS, widths[0], (1, 3, 3))
        self.temporal_stem = _ConvNorm(widths[0], widths[0], (3, 1, 1))
        inputs = (widths[0], *widths[:-1])
        strides = (1, *[2] * (len(widths) - 1))
        blocks = [_Residual2Plus1d(a, b, stride) for a, b, stride in zip(inputs, widths, strides, strict=True)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2 * widths[-1], 1)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        return self.spatial_stem, self.temporal_stem, *(block for block in self.blocks)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits float (B,), positive for fake, from frames uint8 (B, T, 3, H, W)."""
        maps = _maps_clip_by_clip(frames, self._cell)
        features = self.blocks(self.temporal_stem(self.spatial_stem(maps)))
        pooled = torch.cat([features.mean((2, 3, 4)), features.amax((2, 3, 4))], dim=1)
        logits: Tensor = self.head(pooled)
        return logits.squeeze(1)


def _maps_clip_by_clip(frames: Tensor, cell: int) -> Tensor:
    """``forensic_maps`` of a batch, bit-equal, with the working memory of one clip.

    Its intermediate maps are as large as the pictures in float32: of eight clips of 16 x 224 x 224 they took 237 MB,
    more than the network itself, against 26-48 MB like this, in a third of the time.
    """
    return torch.cat([forensic_maps(clip, cell) for clip in torch.split(frames, 1)])


class _ConvNorm(nn.Module):
    """3-D convolution, group norm, ReLU; stride in space only where the kernel has extent there."""

    def __init__(
        self, inputs: int, outputs: int, kernel: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        self.convolution = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(features)))


class _Residual2Plus1d(nn.Module):
    """Spatial then temporal convolution beside a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.spatial = _ConvNorm(inputs, outputs, (1, 3, 3), (1, stride, stride))
        self.temporal = nn.Conv3d(outputs, outputs, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm = nn.GroupNorm(_GROUPS, outputs)
        self.shortcut = (
            nn.Conv3d(inputs, outputs, 1, (1, stride, stride), bias=False)
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.norm(self.temporal(self.spatial(features))) + self.shortcut(features))


@dataclass(frozen=True)
class _Architecture:
    build: Callable[[], nn.Module]
    micro_batch: int


_ARCHITECTURES = {
    "frame_cnn": _Architecture(FrameCnn, micro_batch=8),
    "r2plus1d": _Architecture(R2Plus1d, micro_batch=4),
}


def build_model(name: str) -> nn.Module:
    """The named network, initialised from torch's current random state (``random_state.forked_random_state``).

    Raises:
        UsageError: unknown name.
    """
    return _architecture(name).build()


def default_micro_batch(name: str) -> int:
    """How many clips the named network takes at once unless told otherwise: 1 to 8, safe on a small machine.

    Raises:
        UsageError: unknown name.
    """
    return _architecture(name).micro_batch


def num_parameters(name: str) -> int:
    """How many trainable numbers the named network has. Builds it without memory or random draws.

    Raises:
        UsageError: unknown name.
    """
    with torch.device("meta"):
        model = _architecture(name).build()
    return sum(p.numel() for p in model.parameters())


def _architecture(name: str) -> _Architecture:
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UsageError(f"model {name!r}: unknown.{did_you_mean(name, _ARCHITECTURES)} Known: {known}.")
    return _ARCHITECTURES[name]


class ShiftedLogits(nn.Module):
    """``network`` with ``shift`` added to its logits (B,): a trained one with its ``data.prior_logit``."""

    def __init__(self, network: nn.Module, shift: float) -> None:
        super().__init__()
        self.network = network
        self.shift = shift

    def forward(self, clips: Tensor) -> Tensor:
        """As the network's own, shifted."""
        logits: Tensor = self.network(clips)
        return logits + self.shift
