"""Inputs of the project's own video networks: fixed maps of a clip without parameters, and a shared layer.

- ``FORENSIC``: traces of manipulation next to the picture, as cell averages small enough to learn on a CPU. High-pass
  residuals suppress content and keep sensor noise, interpolation and compression traces. The filters are second-order
  ones of the Spatial Rich Model (Fridrich and Kodovsky, "Rich models for steganalysis of digital images", IEEE TIFS
  2012) used by Zhou et al. ("Learning rich features for image manipulation detection", CVPR 2018): horizontal,
  vertical, and their product. Bayar and Stamm (2016) learn such filters; fifty clips cannot, so ours are fixed.
  Differences between neighbouring frames show what stands still and what jumps.
- ``PIXELS``: content. Colours, their signed changes, whose order at an edge tells the direction of a movement, and
  each cell's coordinates (R. Liu et al., "An intriguing failing of convolutional neural networks and the CoordConv
  solution", NeurIPS 2018), so that features pooled over the picture can still say where something was.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def forensic_maps(frames: Tensor, cell: int) -> Tensor:
    """Return maps of picture, residual energy and frame difference, averaged over cells of ``cell`` x ``cell`` pixels.

    Absolute values are taken before averaging, because averages of signed noise cancel. Levels are on a log scale, so
    that a factor on the noise has the same effect at any level. The maps are differentiable for float pixels.

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
    """Return (B, T, 2, h, w) log magnitudes of the differences to the previous and the next frame."""
    if luma.shape[1] == 1:
        steps = torch.zeros_like(_cells(luma, cell))
        return torch.stack([steps, steps], dim=2)
    differences = (luma[:, 1:] - luma[:, :-1]).abs_().clamp_(max=_MOTION_TRUNCATION)
    steps = (torch.log1p(_cells(differences, cell)) - _MOTION_ZERO) / _MOTION_SPREAD
    previous, following = torch.cat([steps[:, :1], steps], 1), torch.cat([steps, steps[:, -1:]], 1)
    return torch.stack([previous, following], dim=2)


def _second_difference(image: Tensor, dim: int) -> Tensor:
    """Return 2x[i] - x[i-1] - x[i+1] along ``dim``; zero at both ends."""
    inner = image.shape[dim] - 2
    result = torch.zeros_like(image)
    middle = result.narrow(dim, 1, inner)
    middle.copy_(image.narrow(dim, 1, inner)).mul_(2)
    middle.sub_(image.narrow(dim, 0, inner)).sub_(image.narrow(dim, 2, inner))
    return result


def _cells(maps: Tensor, cell: int) -> Tensor:
    """Return the means of maps (..., H, W) over cells; a remainder at the right and bottom is left out.

    Rows are summed first, in one pass over contiguous memory. This is three times as fast as ``avg_pool2d``.
    """
    height, width = maps.shape[-2] // cell, maps.shape[-1] // cell
    maps = maps[..., : height * cell, : width * cell]
    rows = maps.reshape(*maps.shape[:-2], height, cell, -1).sum(-2)
    return rows.reshape(*rows.shape[:-1], width, cell).sum(-1) / cell**2


_PIXEL_ZERO, _PIXEL_SPREAD = 115.0, 60.0
_CHANGE_SPREAD = 30.0


def pixel_maps(frames: Tensor, cell: int) -> Tensor:
    """Return colours averaged over cells of ``cell`` x ``cell`` pixels, their changes, and the cells' coordinates.

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
    changes = torch.cat([torch.zeros_like(colours[:, :1]), colours[:, 1:] - colours[:, :-1]], dim=1)
    seen = torch.cat([(colours - _PIXEL_ZERO) / _PIXEL_SPREAD, changes / _CHANGE_SPREAD], dim=2).transpose(1, 2)
    height, width = seen.shape[-2:]
    rows, columns = _places(height, seen.device)[:, None], _places(width, seen.device)[None, :]
    places = torch.stack([rows.expand(height, width), columns.expand(height, width)])
    return torch.cat([seen, places[None, :, None].expand(batch, -1, num_frames, -1, -1)], dim=1).contiguous()


def _places(size: int, device: torch.device) -> Tensor:
    """Return float32 (size,), the coordinates of the cells' centres, scaled to lie inside (-1, 1)."""
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2 / size) - 1


@dataclass(frozen=True)
class Stem:
    """The input of a trunk, made from a clip."""

    # From frames uint8 (B, T, 3, H, W) and the side of a cell in pixels to float32 (B, C, T, h, w); of each clip
    # by itself, without parameters.
    maps: Callable[[Tensor, int], Tensor]
    num_channels: int  # C
    cell: int  # side in pixels
    clips_at_once: int = 1

    def clip_by_clip(self, frames: Tensor) -> Tensor:
        """Return ``maps`` of a batch of frames uint8 (B, T, 3, H, W), computed for ``clips_at_once`` clips at a time.

        This saves memory: intermediate maps are as large as the pictures in float32. On a CPU the result is identical.
        Eight clips of 16 x 224 x 224 took 237 MB together; clip by clip they took 26 to 48 MB and a third of the time.
        On a GPU several clips at a time may be faster.
        """
        return torch.cat([self.maps(clip, self.cell) for clip in torch.split(frames, self.clips_at_once)])


FORENSIC = Stem(forensic_maps, NUM_CHANNELS, cell=4)
# Cells are finer than those of forensic maps, which are averages of measurements per pixel.
PIXELS = Stem(pixel_maps, NUM_CHANNELS, cell=2)

GROUPS = 8  # of every group norm


class ConvNorm(nn.Module):
    """A 3-D convolution without bias, padded to keep the size at stride 1, then group norm and ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        self.convolution = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.GroupNorm(GROUPS, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Return (B, outputs, T, h, w) of (B, inputs, T, H, W)."""
        return F.relu(self.norm(self.convolution(features)))
