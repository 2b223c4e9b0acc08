"""Stems of the networks in this folder: fixed functions that compute input maps from a clip; and a shared layer.

Maps replace the pixels as input. They have no parameters. They are averages over cells (squares of a few pixels), so
that they are small enough to train on a CPU.

- ``FORENSIC`` shows traces of manipulation, and the colours. High-pass residuals suppress content and preserve sensor
  noise and the traces of interpolation and compression. The filters are second-order filters of the Spatial Rich Model
  (Fridrich and Kodovsky, "Rich models for steganalysis of digital images", IEEE TIFS 2012): horizontal, vertical, and
  their product. Zhou et al. ("Learning rich features for image manipulation detection", CVPR 2018) use them, too. Bayar
  and Stamm (2016) learn such filters; fifty clips are too few for that, so these are fixed. Differences between
  neighbouring frames show frozen frames and jumps.
- ``PIXELS`` shows content: colours, and their signed changes over time, which show the direction of a movement. It also
  holds the coordinates of every cell (R. Liu et al., "An intriguing failing of convolutional neural networks and the
  CoordConv solution", NeurIPS 2018), so that features pooled over the picture still show positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CHANNELS = 8
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
# A map is (log level - zero) / spread. The choice of the zero matters, because convolutions are padded with 0. With the
# zero of the residuals at a strong edge (log level 2.5, 11 grey levels) the AUC on the sample corpus is 0.99. With
# their zero at the typical level (2.5 grey levels) and no other change it is 0.85.
_RESIDUAL_ZERO, _RESIDUAL_SPREAD = 2.5, 0.8
_MOTION_ZERO, _MOTION_SPREAD = 1.5, 1.1
_PICTURE_ZERO, _PICTURE_SPREAD = 115.0, 120.0
_TRUNCATION = 24.0  # grey levels; larger residuals are edges of the content (the Spatial Rich Model truncates too)
_MOTION_TRUNCATION = 40.0


def forensic_maps(frames: Tensor, cell: int) -> Tensor:
    """Return maps of picture, residual energy and frame difference, averaged over cells of ``cell`` x ``cell`` pixels.

    Absolute values of residuals and differences are averaged, because signed noise would average to zero. The logarithm
    log(1 + x) of the averages is returned, shifted and scaled: doubling the noise then adds about the same amount to
    weak and strong noise. The maps are differentiable for float pixels.

    Args:
        frames: uint8 (B, T, 3, H, W), H and W at least ``cell``.
        cell: side in pixels.

    Returns:
        float32 (B, 8, T, H // cell, W // cell): R, G, B; horizontal, vertical and mixed residual; difference to the
        previous and to the next frame. For the first and the last frame, the difference to the only neighbour is used
        twice. For a single frame, differences are zero.
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
    """Return log magnitudes of the differences to the previous and the next frame, float (B, T, 2, h, w).

    They are averaged over cells, then shifted and scaled. ``luma`` is the brightness, float (B, T, H, W).
    """
    if luma.shape[1] == 1:
        steps = torch.zeros_like(_cells(luma, cell))
        return torch.stack([steps, steps], dim=2)
    differences = (luma[:, 1:] - luma[:, :-1]).abs_().clamp_(max=_MOTION_TRUNCATION)
    steps = (torch.log1p(_cells(differences, cell)) - _MOTION_ZERO) / _MOTION_SPREAD
    previous = torch.cat([steps[:, :1], steps], 1)
    following = torch.cat([steps, steps[:, -1:]], 1)
    return torch.stack([previous, following], dim=2)


def _second_difference(image: Tensor, dim: int) -> Tensor:
    """Return 2 x[i] - x[i - 1] - x[i + 1] along ``dim`` of ``image``, in the same shape; zero at both ends."""
    inner = image.shape[dim] - 2
    result = torch.zeros_like(image)
    middle = result.narrow(dim, 1, inner)
    middle.copy_(image.narrow(dim, 1, inner)).mul_(2)
    middle.sub_(image.narrow(dim, 0, inner)).sub_(image.narrow(dim, 2, inner))
    return result


def _cells(maps: Tensor, cell: int) -> Tensor:
    """Return the means of ``maps`` (..., H, W) over cells of ``cell`` x ``cell`` pixels, (..., H // cell, W // cell).

    Rows and columns beyond the last whole cell are left out.

    Rows are summed first, in one pass over contiguous memory. This is three times as fast as ``avg_pool2d``.
    """
    height = maps.shape[-2] // cell
    width = maps.shape[-1] // cell
    maps = maps[..., : height * cell, : width * cell]
    rows = maps.reshape(*maps.shape[:-2], height, cell, -1).sum(-2)
    return rows.reshape(*rows.shape[:-1], width, cell).sum(-1) / cell**2


_PIXEL_ZERO, _PIXEL_SPREAD = 115.0, 60.0
_CHANGE_SPREAD = 30.0


def pixel_maps(frames: Tensor, cell: int) -> Tensor:
    """Return colours averaged over cells of ``cell`` x ``cell`` pixels, their changes, and the cells' coordinates.

    Args:
        frames: uint8 (B, T, 3, H, W), H and W at least ``cell``.
        cell: side in pixels; rows and columns beyond the last whole cell are left out.

    Returns:
        float32 (B, 8, T, H // cell, W // cell): scaled R, G, B; their signed changes since the previous frame, zero in
        the first frame; row and column of the cell, scaled to lie inside (-1, 1).
    """
    colours = frames.float()
    batch, num_frames = colours.shape[:2]
    if cell > 1:
        averages = F.avg_pool2d(colours.flatten(0, 1), cell)
        colours = averages.view(batch, num_frames, *averages.shape[1:])
    changes = torch.cat([torch.zeros_like(colours[:, :1]), colours[:, 1:] - colours[:, :-1]], dim=1)
    seen = torch.cat([(colours - _PIXEL_ZERO) / _PIXEL_SPREAD, changes / _CHANGE_SPREAD], dim=2).transpose(1, 2)
    height, width = seen.shape[-2:]
    rows = _places(height, seen.device)[:, None]
    columns = _places(width, seen.device)[None, :]
    places = torch.stack([rows.expand(height, width), columns.expand(height, width)])
    of_frames = places[None, :, None].expand(batch, -1, num_frames, -1, -1)
    return torch.cat([seen, of_frames], dim=1).contiguous()


def _places(size: int, device: torch.device) -> Tensor:
    """Return the coordinates of the centres of ``size`` cells along one axis, float32 (size,), inside (-1, 1)."""
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2 / size) - 1


@dataclass(frozen=True)
class Stem:
    """A function that computes the input maps of a trunk from a clip, with its settings."""

    # Function from frames uint8 (B, T, 3, H, W) and the side of a cell in pixels to maps float32 (B, C, T, h, w). The
    # maps of a clip do not depend on the other clips.
    maps: Callable[[Tensor, int], Tensor]
    num_channels: int  # C
    cell: int  # side in pixels
    clips_at_once: int = 1  # number of clips whose maps are computed together

    def clip_by_clip(self, frames: Tensor) -> Tensor:
        """Return the maps of frames uint8 (B, T, 3, H, W), computed for ``clips_at_once`` clips at a time.

        The maps are float32 (B, C, T, h, w). Computing few clips at a time saves memory, since intermediate maps are as
        large as the pictures in float32. On a CPU the result is the same. Eight clips of 16 x 224 x 224 took 237 MB at
        once; one by one they took 26 to 48 MB and a third of the time. On a GPU several clips may be faster.
        """
        return torch.cat([self.maps(clip, self.cell) for clip in torch.split(frames, self.clips_at_once)])


FORENSIC = Stem(forensic_maps, NUM_CHANNELS, cell=4)
# Cells are finer than those of forensic maps, which are averages of measurements per pixel.
PIXELS = Stem(pixel_maps, NUM_CHANNELS, cell=2)

GROUPS = 8  # number of groups of every group norm
R2PLUS1D_BIBTEX = """@inproceedings{tran2018closer,
  author = {Tran, Du and Wang, Heng and Torresani, Lorenzo and Ray, Jamie and LeCun, Yann and Paluri, Manohar},
  title = {A Closer Look at Spatiotemporal Convolutions for Action Recognition},
  booktitle = {Proceedings of the IEEE Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {6450--6459},
  year = {2018}
}"""


class ConvNorm(nn.Module):
    """A 3-D convolution without bias, padded to keep the size at stride 1, then group norm and ReLU.

    Args:
        inputs: number of input channels.
        outputs: number of output channels.
        kernel: sizes of the kernel in time, height and width.
        stride: strides in time, height and width.
    """

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
