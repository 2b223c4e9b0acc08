"""The project's own video networks: small, with group norm, from uint8 clips to features of frames or one logit.

Group norm, because it does not look across samples: a batch may be split into micro-batches, down to one clip, without
changing the result.

A trunk gives features of every frame; the video task's networks are trunks that see forensic maps, with a head on top.
The task video_text takes the same trunks with the picture itself in place of those maps (``build_content_trunk``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.services.errors import UsageError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# A fixed front end that shows manipulation traces beside the picture, as cell averages small enough to learn on a CPU.
#
# High-pass residuals suppress content and keep sensor noise, interpolation and compression traces. The filters are the
# second-order ones of the Spatial Rich Model (Fridrich and Kodovsky, "Rich models for steganalysis of digital images",
# IEEE TIFS 2012) used by Zhou et al. ("Learning rich features for image manipulation detection", CVPR 2018):
# horizontal,
# vertical, and their product. Bayar and Stamm (2016) learn such filters; fifty clips cannot, so ours are fixed.
# Differences between neighbouring frames show what stands still and what jumps.
#


NUM_CHANNELS = 8
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
# Where zero lies matters, because zero is also what convolutions see beyond the border and what the group norm relates
# levels to. With residuals' zero at a strong edge (11 grey levels) the sample corpus is learned to AUC 0.99; with their
# zero at the typical level (2.5), the one change, only to 0.85.
_RESIDUAL_ZERO, _RESIDUAL_SPREAD = 2.5, 0.8
_MOTION_ZERO, _MOTION_SPREAD = 1.5, 1.1
_PICTURE_ZERO, _PICTURE_SPREAD = 115.0, 120.0
_TRUNCATION = 24.0  # grey levels: beyond it a residual is a content edge (the Spatial Rich Model truncates likewise)
_MOTION_TRUNCATION = 40.0


@torch.no_grad()
def forensic_maps(frames: Tensor, cell: int) -> Tensor:
    """Maps of picture, residual energy and frame difference, averaged over cells of ``cell`` x ``cell`` pixels.

    Magnitudes are taken per pixel, before averaging, because an average would cancel noise; and on a log scale,
    because a halved noise level matters as much at any level.

    Args:
        frames: uint8 (B, T, 3, H, W), H and W at least ``cell``.
        cell: side in pixels.

    Returns:
        float32 (B, 8, T, H // cell, W // cell): R, G, B; horizontal, vertical and mixed residual; difference to the
        previous and to the next frame (where there is none, to the other neighbour; zero for a single frame).
    """
    pixels = frames.float()
    luma = pixels[:, :, 0] * _LUMA[0]
    luma.add_(pixels[:, :, 1], alpha=_LUMA[1]).add_(pixels[:, :, 2], alpha=_LUMA[2])
    horizontal, vertical = _second_difference(luma, 3), _second_difference(luma, 2)
    residuals = (
        horizontal.abs().clamp_(max=_TRUNCATION),
        vertical.abs().clamp_(max=_TRUNCATION),
        _second_difference(horizontal, 2).abs_().clamp_(max=2 * _TRUNCATION),
    )
    picture = (_cells(pixels, cell) - _PICTURE_ZERO) / _PICTURE_SPREAD
    levels = torch.stack([torch.log1p(_cells(residual, cell)) for residual in residuals], dim=2)
    energy = (levels - _RESIDUAL_ZERO) / _RESIDUAL_SPREAD
    return torch.cat([picture, energy, _motion(luma, cell)], dim=2).transpose(1, 2).contiguous()


def _motion(luma: Tensor, cell: int) -> Tensor:
    """(B, T, 2, h, w) log magnitudes of the differences to the previous and the next frame."""
    if luma.shape[1] == 1:
        steps = torch.zeros_like(_cells(luma, cell))
        return torch.stack([steps, steps], dim=2)
    differences = (luma[:, 1:] - luma[:, :-1]).abs_().clamp_(max=_MOTION_TRUNCATION)
    steps = (torch.log1p(_cells(differences, cell)) - _MOTION_ZERO) / _MOTION_SPREAD
    previous, following = torch.cat([steps[:, :1], steps], 1), torch.cat([steps, steps[:, -1:]], 1)
    return torch.stack([previous, following], dim=2)


def _second_difference(image: Tensor, dim: int) -> Tensor:
    """2x[i] - x[i-1] - x[i+1] along ``dim``; zero at both ends."""
    inner = image.shape[dim] - 2
    result = torch.zeros_like(image)
    middle = result.narrow(dim, 1, inner)
    middle.copy_(image.narrow(dim, 1, inner)).mul_(2)
    middle.sub_(image.narrow(dim, 0, inner)).sub_(image.narrow(dim, 2, inner))
    return result


def _cells(maps: Tensor, cell: int) -> Tensor:
    """(..., H, W) averaged over cells; a remainder at the right and bottom is left out.

    Rows first, which is one pass over contiguous memory: three times as fast as ``avg_pool2d``.
    """
    height, width = maps.shape[-2] // cell, maps.shape[-1] // cell
    maps = maps[..., : height * cell, : width * cell]
    rows = maps.reshape(*maps.shape[:-2], height, cell, -1).sum(-2)
    return rows.reshape(*rows.shape[:-1], width, cell).sum(-1) / cell**2


# ----------------------------------------------------------------------------------------------------
# What a content encoder sees of a frame: the picture itself, how it changed, and where in it each place lies.
#
# The forensic stem (``forensic_stem``) was made to show traces of manipulation: it puts magnitudes of residuals and of
# motion beside the picture, which say that something moves and not which way. What a clip shows, and where that goes,
# needs colours and signed changes, whose order at an edge tells the direction; and to every cell its own
# coordinates are
# given (R. Liu et al., "An intriguing failing of convolutional neural networks and the CoordConv solution", NeurIPS
# 2018), so that features that are pooled over the picture can still say where something was.
#


_PIXEL_ZERO, _PIXEL_SPREAD = 115.0, 60.0
_CHANGE_SPREAD = 30.0


@torch.no_grad()
def pixel_maps(frames: Tensor, cell: int) -> Tensor:
    """Colours averaged over cells of ``cell`` x ``cell`` pixels, their changes, and the cells' coordinates.

    Args:
        frames: uint8 (B, T, 3, H, W), H and W at least ``cell``.
        cell: side in pixels; a remainder at the right and bottom is left out.

    Returns:
        float32 (B, 8, T, H // cell, W // cell): R, G, B around zero; how much each has changed since the previous
        frame, zero in the first; row and column of the cell, inside (-1, 1).
    """
    colours = frames.float()
    batch, num_frames = colours.shape[:2]
    if cell > 1:
        averages = F.avg_pool2d(colours.flatten(0, 1), cell)
        colours = averages.view(batch, num_frames, *averages.shape[1:])
    changes = torch.zeros_like(colours)
    torch.sub(colours[:, 1:], colours[:, :-1], out=changes[:, 1:])
    seen = torch.cat([(colours - _PIXEL_ZERO) / _PIXEL_SPREAD, changes / _CHANGE_SPREAD], dim=2).transpose(1, 2)
    height, width = seen.shape[-2:]
    rows, columns = _places(height, seen.device)[:, None], _places(width, seen.device)[None, :]
    places = torch.stack([rows.expand(height, width), columns.expand(height, width)])
    return torch.cat([seen, places[None, :, None].expand(batch, -1, num_frames, -1, -1)], dim=1).contiguous()


def _places(size: int, device: torch.device) -> Tensor:
    """(size,) centres of cells, inside (-1, 1)."""
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2 / size) - 1


_GROUPS = 8


@dataclass(frozen=True)
class Stem:
    """What a trunk is shown of a clip.

    Attributes:
        maps: from frames uint8 (B, T, 3, H, W) and the side of a cell in pixels to float32 (B, C, T, h, w); of each
            clip by itself, without parameters.
        num_channels: C.
        cell: side in pixels.
    """

    maps: Callable[[Tensor, int], Tensor]
    num_channels: int
    cell: int

    def clip_by_clip(self, frames: Tensor) -> Tensor:
        """``maps`` of a batch, bit-equal, with the working memory of one clip.

        The forensic stem's intermediate maps are as large as the pictures in float32: of eight clips of 16 x 224 x 224
        they took 237 MB, more than the network itself, against 26-48 MB like this, in a third of the time.
        """
        return torch.cat([self.maps(clip, self.cell) for clip in torch.split(frames, 1)])


FORENSIC = Stem(forensic_maps, NUM_CHANNELS, cell=4)
# Finer cells than forensic maps have: those are averages of what was measured per pixel, these are all that is seen.
PIXELS = Stem(pixel_maps, NUM_CHANNELS, cell=2)


class FrameTrunk(nn.Module):
    """A CNN on single frames; its norm sees the whole clip, so that a frozen or foreign frame stays different.

    Args:
        widths: channels of the first two convolutions, and of further ones; the first of those halves the picture.
        stem: what is seen.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 32), stem: Stem = FORENSIC) -> None:
        super().__init__()
        self._stem = stem
        self.first = _ConvNorm(stem.num_channels, widths[0], (1, 3, 3), (1, 2, 2))
        self.second = _ConvNorm(widths[0], widths[1], (1, 3, 3))
        pairs = pairwise(widths[1:])
        strides = (2, *[1] * len(widths))
        blocks = [_ConvNorm(a, b, (1, 3, 3), (1, s, s)) for (a, b), s in zip(pairs, strides, strict=False)]
        self.further = nn.Sequential(*blocks)
        self.frame_feature_size = 3 * widths[-1]

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        return self.first, self.second, *self.further

    def frame_features(self, frames: Tensor) -> Tensor:
        """Float (B, T, 3 * widths[-1]), from frames uint8 (B, T, 3, H, W)."""
        return self._pooled_frames(frames).transpose(1, 2)

    def _pooled_frames(self, frames: Tensor) -> Tensor:
        """(B, F, T): mean, maximum and deviation over space (a manipulated region is local)."""
        features = self.further(self.second(self.first(self._stem.clip_by_clip(frames))))
        deviation = (features.var((3, 4), correction=0) + 1e-4).sqrt()
        return torch.cat([features.mean((3, 4)), features.amax((3, 4)), deviation], dim=1)


class FrameCnn(FrameTrunk):
    """A CNN on each frame's forensic maps, pooled over space and then over time.

    Over time mean, maximum and minimum are kept: a splice is one jump, a freeze one lack of motion.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 32), stem: Stem = FORENSIC) -> None:
        super().__init__(widths, stem)
        self.head = nn.Linear(3 * self.frame_feature_size, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits float (B,), positive for fake, from frames uint8 (B, T, 3, H, W)."""
        features = self._pooled_frames(frames)
        logits: Tensor = self.head(torch.cat([features.mean(2), features.amax(2), features.amin(2)], dim=1))
        return logits.squeeze(1)


class R2Plus1dTrunk(nn.Module):
    """A small R(2+1)D: each 3-D convolution is a spatial one followed by a temporal one.

    After Tran et al., "A closer look at spatiotemporal convolutions for action recognition" (CVPR 2018), with group
    norm and far fewer channels. A frame's features have seen its neighbours.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), stem: Stem = FORENSIC) -> None:
        super().__init__()
        self._stem = stem
        self.spatial_stem = _ConvNorm(stem.num_channels, widths[0], (1, 3, 3))
        self.temporal_stem = _ConvNorm(widths[0], widths[0], (3, 1, 1))
        inputs = (widths[0], *widths[:-1])
        strides = (1, *[2] * (len(widths) - 1))
        blocks = [_Residual2Plus1d(a, b, stride) for a, b, stride in zip(inputs, widths, strides, strict=True)]
        self.blocks = nn.Sequential(*blocks)
        self.frame_feature_size = 2 * widths[-1]

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        return self.spatial_stem, self.temporal_stem, *(block for block in self.blocks)

    def frame_features(self, frames: Tensor) -> Tensor:
        """Float (B, T, 2 * widths[-1]), mean and maximum over space, from frames uint8 (B, T, 3, H, W)."""
        features = self._features(frames)
        return torch.cat([features.mean((3, 4)), features.amax((3, 4))], dim=1).transpose(1, 2)

    def _features(self, frames: Tensor) -> Tensor:
        """(B, C, T, h, w)."""
        features: Tensor = self.blocks(self.temporal_stem(self.spatial_stem(self._stem.clip_by_clip(frames))))
        return features


class R2Plus1d(R2Plus1dTrunk):
    """R(2+1)D on forensic maps in place of pixels, pooled over space and time at once.

    From pixels alone, fifty clips taught it their scenes and nothing that held for others (sample corpus: AUC below 0.4
    instead of 0.95).
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), stem: Stem = FORENSIC) -> None:
        super().__init__(widths, stem)
        self.head = nn.Linear(2 * widths[-1], 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits float (B,), positive for fake, from frames uint8 (B, T, 3, H, W)."""
        features = self._features(frames)
        pooled = torch.cat([features.mean((2, 3, 4)), features.amax((2, 3, 4))], dim=1)
        logits: Tensor = self.head(pooled)
        return logits.squeeze(1)


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
    build_content_trunk: Callable[[], FrameTrunk | R2Plus1dTrunk]
    micro_batch: int


# For content the frame network is deeper: a thing shows over a quarter of the picture, a trace over a few cells.
_ARCHITECTURES = {
    "frame_cnn": _Architecture(FrameCnn, lambda: FrameTrunk((32, 48, 64, 96), PIXELS), micro_batch=8),
    "r2plus1d": _Architecture(R2Plus1d, lambda: R2Plus1dTrunk((16, 32, 64), PIXELS), micro_batch=4),
}


def build_model(name: str) -> nn.Module:
    """The named network, initialised from torch's current random state (``random_state.forked_random_state``).

    Raises:
        UsageError: unknown name.
    """
    return _architecture(name).build()


def build_content_trunk(name: str) -> FrameTrunk | R2Plus1dTrunk:
    """The named network's kind of trunk for what a clip shows: on the picture itself, freshly initialised.

    Raises:
        UsageError: unknown name.
    """
    return _architecture(name).build_content_trunk()


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
