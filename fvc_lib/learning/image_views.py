"""The square that a network sees of a picture: all of its middle, or in training a slightly different one each time.

Crops are mild (at least 0.7 of the area). Where calories or grams are to be read off a picture, what is cut off is part
of the answer, and a strong zoom makes a small portion a large one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_LEAST_AREA = 0.7
_WIDEST = 1.15  # width over height
_COLOUR = 0.15  # brightness, contrast and saturation between 1 - this and 1 + this


def decoded_side(size: int, *, training: bool) -> int:
    """How many pixels the shorter side of a picture must have at least, for a view of ``size`` that loses nothing."""
    return math.ceil(size / math.sqrt(_LEAST_AREA / _WIDEST)) if training else size


def middle_view(pixels: Tensor, size: int) -> Tensor:
    """The largest centred square of uint8 (3, H, W), as uint8 (3, size, size).

    Not a part of it, as is usual after training on strong crops: the network was trained on nearly whole pictures, and
    a number is a number of all that is there.
    """
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return resized(pixels[:, top : top + side, left : left + side], size)


def training_view(pixels: Tensor, size: int, generator: np.random.Generator) -> Tensor:
    """A random crop of uint8 (3, H, W) in or out of mirror, with slightly other colours, as uint8 (3, size, size).

    It always takes as many draws from ``generator``, whatever the picture.
    """
    area, shape, across, down = generator.uniform(size=4)
    flips = generator.uniform() < 0.5
    brightness, contrast, saturation = 1 + _COLOUR * generator.uniform(-1, 1, size=3)
    view = resized(_cropped(pixels, area, shape, across, down), size)
    if flips:
        view = view.flip(2)
    return _coloured(view, brightness, contrast, saturation)


def _cropped(pixels: Tensor, area: float, shape: float, across: float, down: float) -> Tensor:
    """A part of the picture: its area, width over height and place by draws in [0, 1)."""
    height, width = pixels.shape[1:]
    side = min(height, width)  # of the square that evaluation sees
    scale = math.sqrt(_LEAST_AREA + (1 - _LEAST_AREA) * area)
    stretch = math.exp((2 * shape - 1) * math.log(_WIDEST) / 2)
    crop_height = max(1, min(height, round(side * scale / stretch)))
    crop_width = max(1, min(width, round(side * scale * stretch)))
    # Around the middle square, not all over a wide picture: what training sees evaluation sees too.
    top = _start(height, crop_height, side, down)
    left = _start(width, crop_width, side, across)
    return pixels[:, top : top + crop_height, left : left + crop_width]


def _start(length: int, crop: int, side: int, draw: float) -> int:
    room = max(side, crop) - crop
    first = (length - max(side, crop)) // 2 + math.floor(draw * (room + 1))
    return min(max(0, first), length - crop)


def _coloured(view: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    colours = view.float() * brightness
    # NumPy's sum: torch's is split among threads, of which a loader process has another number.
    mean = float(_grey(colours).numpy().mean(dtype=np.float64))
    colours = mean + contrast * (colours - mean)
    grey = _grey(colours)
    colours = grey + saturation * (colours - grey)
    return _as_bytes(colours)


def _grey(colours: Tensor) -> Tensor:
    """Luma (H, W) of float (3, H, W), by ITU-R BT.601."""
    red, green, blue = colours
    grey: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return grey


def _as_bytes(colours: Tensor) -> Tensor:
    return colours.round().clamp(0, 255).to(torch.uint8)


def resized(pixels: Tensor, size: int) -> Tensor:
    """uint8 (3, H, W) as uint8 (3, size, size), bilinear, without aliasing where it becomes smaller."""
    if pixels.shape[1:] == (size, size):
        return pixels
    scaled = F.interpolate(pixels[None].float(), size=(size, size), mode="bilinear", antialias=True)
    return _as_bytes(scaled[0])
