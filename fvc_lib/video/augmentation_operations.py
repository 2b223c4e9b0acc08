"""The operations an augmented clip may receive, each a frozen set of parameters that were drawn once for the clip.

Plain numpy instead of torch or kornia: every operation is elementwise IEEE arithmetic in a fixed order on one thread,
so a clip has the same bytes whatever the number of threads, and making clips does not need torch in memory. torch
splits its kernels by thread, and the vectorised and the left-over part of a split need not round alike.

An operation maps pixels float32 (T, 3, H, W) in grey levels 0 to 255 to the same shape and may exceed that range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]

# ITU-R BT.601 luma, the weights grey-level saturation is usually defined with.
_LUMA = (0.299, 0.587, 0.114)


class Operation(Protocol):
    """Parameters of one operation; ``name`` is how configuration and tables call it."""

    name: ClassVar[str]

    def apply(self, pixels: Float) -> Float:
        """The changed pixels; ``pixels`` itself may be reused."""


@dataclass(frozen=True)
class Flip:
    """Mirrored left to right."""

    name: ClassVar[str] = "flip"

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        return pixels[..., ::-1]


@dataclass(frozen=True)
class Affine:
    """Turned, scaled and shifted about the centre; what comes from outside is black."""

    name: ClassVar[str] = "affine"
    rotation_degrees: float
    scale: float
    shift_x: float  # share of the width
    shift_y: float  # share of the height

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``. Bilinear, sampled backwards from the output."""
        height, width = pixels.shape[-2:]
        y, x = np.mgrid[:height, :width].astype(np.float64)
        x -= (width - 1) / 2 + self.shift_x * width
        y -= (height - 1) / 2 + self.shift_y * height
        cosine = math.cos(math.radians(self.rotation_degrees)) / self.scale
        sine = math.sin(math.radians(self.rotation_degrees)) / self.scale
        source_x = cosine * x + sine * y + (width - 1) / 2
        source_y = cosine * y - sine * x + (height - 1) / 2
        return _sample_bilinear(pixels, source_x, source_y)


@dataclass(frozen=True)
class Color:
    """Brightness and contrast (about the clip's mean) as factors, then saturation (about each pixel's luma)."""

    name: ClassVar[str] = "color"
    brightness: float
    contrast: float
    saturation: float

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``. One mean for the whole clip: a mean per frame would make it flicker."""
        pixels = pixels * np.float32(self.brightness)
        mean = np.float32(pixels.mean(dtype=np.float64))
        pixels = (pixels - mean) * np.float32(self.contrast) + mean
        red, green, blue = (np.float32(weight) for weight in _LUMA)
        luma = (pixels[:, :1] * red + pixels[:, 1:2] * green) + pixels[:, 2:] * blue
        pixels -= luma
        pixels *= np.float32(self.saturation)
        pixels += luma
        return pixels


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of one strength for the clip and, like a sensor's, of another pattern in every frame."""

    name: ClassVar[str] = "noise"
    sigma: float  # grey levels
    seed: int

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        for number, frame in enumerate(pixels):
            generator = np.random.default_rng([self.seed, number])
            frame += np.float32(self.sigma) * generator.standard_normal(frame.shape, dtype=np.float32)
        return pixels


@dataclass(frozen=True)
class Blur:
    """Gaussian blur."""

    name: ClassVar[str] = "blur"
    sigma: float  # pixels

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``. Separable, cut off at three sigma, mirrored at the border."""
        if self.sigma <= 0:
            return pixels
        radius = math.ceil(3 * self.sigma)
        weights = [math.exp(-0.5 * (offset / self.sigma) ** 2) for offset in range(-radius, radius + 1)]
        kernel = [np.float32(weight / sum(weights)) for weight in weights]
        return _filter_axis(_filter_axis(pixels, kernel, -1), kernel, -2)


@dataclass(frozen=True)
class Cutout:
    """One rectangle in all frames shows the clip's mean colour. DeVries and Taylor, arXiv:1708.04552."""

    name: ClassVar[str] = "cutout"
    left: float  # all four as a share of the picture's width or height
    top: float
    width: float
    height: float

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        rows, columns = pixels.shape[-2:]
        left, right = round(self.left * columns), round((self.left + self.width) * columns)
        top, bottom = round(self.top * rows), round((self.top + self.height) * rows)
        mean = pixels.mean(axis=(0, 2, 3), dtype=np.float64).astype(np.float32)
        pixels[:, :, top:bottom, left:right] = mean[:, None, None]
        return pixels


@dataclass(frozen=True)
class FrameDrop:
    """Some frames are left out and the others spread over the same length."""

    name: ClassVar[str] = "frame_drop"
    order: tuple[int, ...]  # for each frame of the result the frame it shows

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        return pixels[list(self.order)]


@dataclass(frozen=True)
class FrameDuplicate:
    """Some frames are shown twice and the end is cut to the same length."""

    name: ClassVar[str] = "frame_duplicate"
    order: tuple[int, ...]

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        return pixels[list(self.order)]


@dataclass(frozen=True)
class FrameReverse:
    """Played backwards."""

    name: ClassVar[str] = "frame_reverse"

    def apply(self, pixels: Float) -> Float:
        """See ``Operation``."""
        return pixels[::-1]


def _sample_bilinear(pixels: Float, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> Float:
    height, width = pixels.shape[-2:]
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    result = np.zeros_like(pixels)
    for row, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = np.where(inside, weight_y * weight_x, 0).astype(np.float32)
            result += weight * pixels[..., row.clip(0, height - 1), column.clip(0, width - 1)]
    return result


def _filter_axis(pixels: Float, kernel: list[np.float32], axis: int) -> Float:
    radius, length = len(kernel) // 2, pixels.shape[axis]
    padding = [(0, 0)] * pixels.ndim
    padding[axis] = (radius, radius)
    padded = np.moveaxis(np.pad(pixels, padding, mode="symmetric"), axis, 0)
    result = np.zeros_like(padded[:length])
    for offset, weight in enumerate(kernel):
        result += weight * padded[offset : offset + length]
    return np.moveaxis(result, 0, axis)
