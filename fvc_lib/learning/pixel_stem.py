"""What a content encoder sees of a frame: the picture itself, how it changed, and where in it each place lies.

The forensic stem (``forensic_stem``) was made to show traces of manipulation: it puts magnitudes of residuals and of
motion beside the picture, which say that something moves and not which way. What a clip shows, and where that goes,
needs colours and signed changes, whose order at an edge tells the direction; and to every cell its own coordinates are
given (R. Liu et al., "An intriguing failing of convolutional neural networks and the CoordConv solution", NeurIPS
2018), so that features that are pooled over the picture can still say where something was.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_CHANNELS = 8
_PICTURE_ZERO, _PICTURE_SPREAD = 115.0, 60.0
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
    seen = torch.cat([(colours - _PICTURE_ZERO) / _PICTURE_SPREAD, changes / _CHANGE_SPREAD], dim=2).transpose(1, 2)
    height, width = seen.shape[-2:]
    rows, columns = _places(height, seen.device)[:, None], _places(width, seen.device)[None, :]
    places = torch.stack([rows.expand(height, width), columns.expand(height, width)])
    return torch.cat([seen, places[None, :, None].expand(batch, -1, num_frames, -1, -1)], dim=1).contiguous()


def _places(size: int, device: torch.device) -> Tensor:
    """(size,) centres of cells, inside (-1, 1)."""
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2 / size) - 1
