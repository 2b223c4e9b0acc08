"""Deterministic augmentation of whole clips.

Parameters are drawn once per clip, so that the picture does not flicker. The random generator is seeded by the video's
id, the index of the augmented copy and the settings. So an augmented clip is the same in every process, fold and run.

NumPy is used rather than torch: its elementwise arithmetic gives the same bytes with any number of threads. Codecs run
on one thread, and pixels are converted for them in integers.
"""

import hashlib
import io
import json
import math
from abc import abstractmethod
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Self

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.registry import AUGMENTATIONS

Float = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

# Part of the settings' hash: raise it when the same settings give other pixels.
_VERSION = 1
# Weights of red, green and blue in luma (ITU-R BT.601), relative to which saturation is usually defined.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Operation:
    """An augmentation, such as a blur, with the parameters that were drawn for one clip.

    Attributes:
        name: name of the operation in the configuration and in tables.
        probability: chance that the operation is applied to a clip.
        fewest_frames: least number of frames of a clip to which the operation can be applied.
    """

    name: ClassVar[str]
    probability: ClassVar[float]
    fewest_frames: ClassVar[int]

    def __init_subclass__(cls, *, name: str, probability: float, fewest_frames: int = 1) -> None:
        cls.name, cls.probability, cls.fewest_frames = name, probability, fewest_frames

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        """Return the operation with random parameters for a clip of ``num_frames`` frames."""
        return cls()

    @abstractmethod
    def apply(self, pixels: Float) -> Float:
        """Return the changed pixels, float32 (T, 3, H, W); values may lie outside 0 to 255.

        Args:
            pixels: float32 (T, 3, H, W) in grey levels 0 to 255; may be overwritten.
        """


# Operations are applied in the order of this file: time, geometry, light, lens and sensor, occlusion. The random draws
# depend on the order, so add a new operation at the end.


@dataclass(frozen=True)
class _Reordered(Operation, name="", probability=0):
    order: tuple[int, ...]  # for each frame of the result, the index of the source frame

    def apply(self, pixels: Float) -> Float:
        return pixels[list(self.order)]


@AUGMENTATIONS.register
@dataclass(frozen=True)
class FrameDrop(_Reordered, name="frame_drop", probability=0.3, fewest_frames=2):
    """Drop some frames and repeat other frames, so that the number of frames stays the same."""

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        kept = np.delete(np.arange(num_frames), _some_frames(generator, num_frames, num_frames))
        places = np.round(np.linspace(0, len(kept) - 1, num_frames)).astype(int)
        return cls(tuple(kept[places].tolist()))


@AUGMENTATIONS.register
@dataclass(frozen=True)
class FrameDuplicate(_Reordered, name="frame_duplicate", probability=0.3, fewest_frames=2):
    """Show some frames twice, and cut off the end, so that the number of frames stays the same."""

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        # Not the last frame: its duplicate would be cut off again.
        shown = sorted([*range(num_frames), *_some_frames(generator, num_frames, num_frames - 1)])
        return cls(tuple(shown[:num_frames]))


@AUGMENTATIONS.register
@dataclass(frozen=True)
class FrameReverse(Operation, name="frame_reverse", probability=0.2, fewest_frames=2):
    """Play the clip backwards."""

    def apply(self, pixels: Float) -> Float:
        return pixels[::-1]


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Flip(Operation, name="flip", probability=0.5):
    """Mirror frames left to right."""

    def apply(self, pixels: Float) -> Float:
        return pixels[..., ::-1]


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Affine(Operation, name="affine", probability=0.5):
    """Rotate and scale frames about their centre, and shift them. Uncovered areas become black."""

    rotation_degrees: float
    scale: float
    shift_x: float  # share of the width
    shift_y: float  # share of the height

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(
            rotation_degrees=_between(generator, -8, 8),
            scale=_factor(generator, 0.1),
            shift_x=_between(generator, -0.05, 0.05),
            shift_y=_between(generator, -0.05, 0.05),
        )

    def apply(self, pixels: Float) -> Float:
        height, width = pixels.shape[-2:]
        y, x = np.mgrid[:height, :width].astype(np.float64)
        x -= (width - 1) / 2 + self.shift_x * width
        y -= (height - 1) / 2 + self.shift_y * height
        cosine = math.cos(math.radians(self.rotation_degrees)) / self.scale
        sine = math.sin(math.radians(self.rotation_degrees)) / self.scale
        source_x = cosine * x + sine * y + (width - 1) / 2
        source_y = cosine * y - sine * x + (height - 1) / 2
        left = np.floor(source_x).astype(np.int64)
        top = np.floor(source_y).astype(np.int64)
        result = np.zeros_like(pixels)
        for row, weight_y in ((top, 1 - (source_y - top)), (top + 1, source_y - top)):
            for column, weight_x in ((left, 1 - (source_x - left)), (left + 1, source_x - left)):
                inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                weight = np.where(inside, weight_y * weight_x, 0).astype(np.float32)
                result += weight * pixels[..., row.clip(0, height - 1), column.clip(0, width - 1)]
        return result


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Color(Operation, name="color", probability=0.7):
    """Scale the brightness, the contrast (about the clip's mean) and the saturation (about every pixel's luma)."""

    brightness: float  # factor on pixel values
    contrast: float  # factor on the distance from the mean
    saturation: float  # factor on the distance from the luma

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(*(_factor(generator, reach) for reach in (0.2, 0.2, 0.3)))

    def apply(self, pixels: Float) -> Float:
        pixels = pixels * np.float32(self.brightness)
        # One mean for the clip: a mean per frame would make it flicker.
        mean = np.float32(pixels.mean(dtype=np.float64))
        pixels = (pixels - mean) * np.float32(self.contrast) + mean
        red, green, blue = (np.float32(weight) for weight in _LUMA)
        luma = (pixels[:, :1] * red + pixels[:, 1:2] * green) + pixels[:, 2:] * blue
        pixels -= luma
        pixels *= np.float32(self.saturation)
        pixels += luma
        return pixels


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Blur(Operation, name="blur", probability=0.3):
    """Blur frames with a Gaussian of standard deviation ``sigma``, in pixels."""

    sigma: float  # pixels

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(_between(generator, 0.4, 1))

    def apply(self, pixels: Float) -> Float:
        radius = math.ceil(3 * self.sigma)
        weights = [math.exp(-0.5 * (offset / self.sigma) ** 2) for offset in range(-radius, radius + 1)]
        kernel = [np.float32(weight / sum(weights)) for weight in weights]
        return _filter_axis(_filter_axis(pixels, kernel, -1), kernel, -2)


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Noise(Operation, name="noise", probability=0.5):
    """Add Gaussian noise of the same sigma to all frames, with a new pattern in every frame, like sensor noise."""

    sigma: float  # grey levels
    seed: int

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(_between(generator, 2, 8), int(generator.integers(1 << 62)))

    def apply(self, pixels: Float) -> Float:
        for number, frame in enumerate(pixels):
            generator = np.random.default_rng([self.seed, number])
            frame += np.float32(self.sigma) * generator.standard_normal(frame.shape, dtype=np.float32)
        return pixels


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Cutout(Operation, name="cutout", probability=0.3):
    """Fill the same rectangle of all frames with the clip's mean colour (DeVries and Taylor, arXiv:1708.04552)."""

    left: float  # all four are shares of the frame's width or height
    top: float
    width: float
    height: float

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        width, height = (_between(generator, 0.15, 0.35) for _ in range(2))
        left = _between(generator, 0, 1 - width)
        top = _between(generator, 0, 1 - height)
        return cls(left, top, width, height)

    def apply(self, pixels: Float) -> Float:
        rows, columns = pixels.shape[-2:]
        left, right = (round(share * columns) for share in (self.left, self.left + self.width))
        top, bottom = (round(share * rows) for share in (self.top, self.top + self.height))
        mean = pixels.mean(axis=(0, 2, 3), dtype=np.float64).astype(np.float32)
        pixels[:, :, top:bottom, left:right] = mean[:, None, None]
        return pixels


# Operations that imitate what video platforms do. They change the frames of a clip; ``video/reencode.py`` changes
# files, for the robustness sweep.


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Downscale(Operation, name="downscale", probability=0.3):
    """Shrink frames and enlarge them again, bilinearly with antialiasing."""

    scale: float  # factor on width and height of the smaller frames

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(round(2 ** -_between(generator, 0.5, 2), 6))

    def apply(self, pixels: Float) -> Float:
        height, width = pixels.shape[-2:]
        small = max(1, round(width * self.scale)), max(1, round(height * self.scale))
        result = np.empty_like(pixels)
        for frame in np.ndindex(pixels.shape[:2]):
            plane = Image.fromarray(pixels[frame])
            resized = plane.resize(small, Image.Resampling.BILINEAR).resize((width, height), Image.Resampling.BILINEAR)
            result[frame] = np.asarray(resized)
        return result


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Recompress(Operation, name="recompress", probability=0.4):
    """Encode the clip as H.264 (8 bit, 4:2:0) with the constant rate factor ``crf``, and decode it again."""

    crf: int

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(round(_between(generator, 23, 37)))

    def apply(self, pixels: Float) -> Float:
        height, width = pixels.shape[-2:]
        frames = _encoded_and_decoded(_to_planes(_as_uint8(pixels)), self.crf)
        return _from_planes(frames)[..., :height, :width].astype(np.float32)


@AUGMENTATIONS.register
@dataclass(frozen=True)
class Jpeg(Operation, name="jpeg", probability=0.3):
    """Encode every frame as JPEG with ``quality`` (Pillow's scale, colour at half the resolution), and decode it."""

    quality: int

    @classmethod
    def draw(cls, generator: np.random.Generator, num_frames: int) -> Self:
        return cls(round(_between(generator, 45, 90)))

    def apply(self, pixels: Float) -> Float:
        frames = [through_jpeg(frame, self.quality) for frame in _as_uint8(pixels)]
        return np.stack(frames).astype(np.float32)


def _as_uint8(pixels: Float) -> Pixels:
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def through_jpeg(frame: Pixels, quality: int) -> Pixels:
    """Compress an RGB frame as JPEG and return the decoded pixels.

    Args:
        frame: uint8 (3, H, W).
        quality: Pillow's scale, 1 to 100. Colour is stored at half the resolution.

    Returns:
        uint8 (3, H, W).
    """
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(np.moveaxis(frame, 0, -1))).save(stream, "JPEG", quality=quality)
    return np.moveaxis(np.asarray(Image.open(stream)), -1, 0)


def _to_planes(frames: Pixels) -> Pixels:
    """Convert RGB frames, uint8 (T, 3, H, W), to packed yuv420p, uint8 (T, 3 H' / 2, W').

    H' and W' are H and W rounded up to even numbers; the last row or column is repeated. In every packed frame, the
    first H' rows hold the luma. The other rows hold two chroma planes of half the height and half the width. Pillow
    converts in integers, so the result is the same on every machine.
    """
    height, width = (side + side % 2 for side in frames.shape[-2:])
    packed = np.empty((len(frames), height * 3 // 2, width), np.uint8)
    for frame, planes in zip(frames, packed, strict=True):
        row, column = height - frame.shape[1], width - frame.shape[2]  # 1 if it is repeated, else 0
        whole = np.pad(frame, ((0, 0), (0, row), (0, column)), mode="edge")
        coded = Image.fromarray(np.ascontiguousarray(np.moveaxis(whole, 0, -1))).convert("YCbCr")
        planes[:height] = np.asarray(coded)[..., 0]
        colors = np.asarray(coded.reduce(2))[..., 1:]
        planes[height:] = np.moveaxis(colors, -1, 0).reshape(height // 2, width)
    return packed


def _from_planes(packed: Pixels) -> Pixels:
    """Convert packed yuv420p frames, uint8 (T, 3 H / 2, W), to RGB frames, uint8 (T, 3, H, W).

    ``_to_planes`` describes the packed layout. Every 2 x 2 pixels share their chroma.
    """
    height = packed.shape[1] * 2 // 3
    width = packed.shape[2]
    frames = np.empty((len(packed), 3, height, width), np.uint8)
    for planes, frame in zip(packed, frames, strict=True):
        colors = planes[height:].reshape(2, height // 2, width // 2).repeat(2, 1).repeat(2, 2)
        coded = np.moveaxis(np.concatenate([planes[None, :height], colors]), 0, -1)
        frame[:] = np.moveaxis(np.asarray(Image.fromarray(coded, "YCbCr").convert("RGB")), -1, 0)
    return frames


# Without macroblock trees, since with them x264 does not give the same bytes every time (``reencode.py``).
_X264 = {"preset": "medium", "mbtree": "0", "threads": "1", "flags": "+bitexact"}


def _encoded_and_decoded(packed: Pixels, crf: int) -> Pixels:
    """Compress frames as H.264 in memory, and return the decoded frames, with visible losses of compression.

    Args:
        packed: uint8 (T, 3 H / 2, W), frames in the packed yuv420p layout that ``_to_planes`` describes.
        crf: constant rate factor of the encoder; larger means stronger compression.

    Returns:
        The decoded frames, with the layout and shape of ``packed``.
    """
    encoder = av.CodecContext.create("libx264", "w")
    encoder.height, encoder.width = packed.shape[1] * 2 // 3, packed.shape[2]
    encoder.pix_fmt, encoder.time_base, encoder.thread_count = "yuv420p", Fraction(1, 25), 1
    encoder.options = {**_X264, "crf": str(crf)}
    decoder = av.CodecContext.create("h264", "r")
    decoder.thread_count = 1
    frames = [av.VideoFrame.from_ndarray(planes, format="yuv420p") for planes in packed]
    for number, frame in enumerate(frames):
        frame.pts = number
    packets = [packet for frame in [*frames, None] for packet in encoder.encode(frame)]
    decoded = [frame for packet in [*packets, None] for frame in decoder.decode(packet)]
    return np.stack([frame.to_ndarray() for frame in decoded]).astype(np.uint8, copy=False)


def _between(generator: np.random.Generator, low: float, high: float) -> float:
    return round(float(generator.uniform(low, high)), 6)  # readable in tables


def _factor(generator: np.random.Generator, reach: float) -> float:
    """Return a random factor whose natural logarithm is uniform between ``-reach`` and ``reach``."""
    return round(math.exp(_between(generator, -reach, reach)), 6)


def _some_frames(generator: np.random.Generator, num_frames: int, before: int) -> list[int]:
    """Return distinct random frame indices from 0 to ``before - 1``, in ascending order.

    The number of indices is a fifth of ``num_frames``, rounded, but at least 1 and at most half of ``num_frames``.
    """
    count = min(max(1, round(0.2 * num_frames)), num_frames // 2)
    return sorted(generator.choice(before, count, replace=False).tolist())


def _filter_axis(pixels: Float, kernel: list[np.float32], axis: int) -> Float:
    radius = len(kernel) // 2
    lines = np.moveaxis(pixels, axis, 0)
    padded = np.pad(lines, ((radius, radius), (0, 0), (0, 0), (0, 0)), mode="symmetric")
    terms = (weight * padded[offset : offset + len(lines)] for offset, weight in enumerate(kernel))
    return np.moveaxis(sum(terms, start=np.zeros_like(lines)), 0, axis)


@dataclass(frozen=True)
class AugmentationSettings:
    """The settings of augmentation: the names of the operations that may be drawn for a clip.

    Raises:
        UsageError: a name is unknown.
    """

    names: tuple[str, ...]  # in ``AUGMENTATIONS``, in any order

    def __post_init__(self) -> None:
        for name in self.names:
            AUGMENTATIONS.get(name)

    @cached_property
    def settings_hash(self) -> str:
        """Return the hexadecimal SHA-256 of the settings, which does not depend on the order of the names."""
        # The random draws depend on this hash, so the constant ``strength`` stays in it.
        return sha256_of_json({"version": _VERSION, "names": sorted(set(self.names)), "strength": 1.0})


@dataclass(frozen=True)
class AugmentationPlan:
    """The operations to apply to one clip, with their drawn parameters, in the order of application."""

    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """Return a JSON list with one object per operation: its name and its parameters."""
        return json.dumps([{"name": operation.name, **asdict(operation)} for operation in self.operations])

    def applied(self, frames: Pixels) -> Pixels:
        """Apply all operations to a copy of ``frames``, and return it; both are uint8 (T, 3, H, W).

        Between operations the values are float32. They are rounded once, at the end.
        """
        content: Float = frames.astype(np.float32)
        for operation in self.operations:
            content = operation.apply(content)
        return _as_uint8(content)


def generator_of(*key: object) -> np.random.Generator:
    """Return a NumPy random generator whose seed is a hash of ``key``; equal keys give equal random numbers.

    ``key`` consists of values that JSON can hold, such as texts and numbers.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def draw_augmentation(
    video_id: str, augmentation_index: int, settings: AugmentationSettings, num_frames: int
) -> AugmentationPlan:
    """Return the plan of one augmented clip: randomly drawn operations with their parameters.

    Every operation of ``settings`` is included with its own probability. If none is included, one is chosen at random.
    Operations that need more frames than the clip has are ignored (``Operation.fewest_frames``). Equal arguments give
    equal plans.

    Args:
        video_id: id of the video.
        augmentation_index: index of the augmented copy, from 1; 0 is the original clip, whose plan is empty.
        settings: the operations to draw from.
        num_frames: number of frames of the clip.
    """
    kinds = [kind for name, kind in AUGMENTATIONS.items() if name in settings.names]
    usable = [kind for kind in kinds if num_frames >= kind.fewest_frames]
    if augmentation_index == 0 or not usable:
        return AugmentationPlan()
    generator = generator_of(video_id, augmentation_index, settings.settings_hash)
    taken = [kind for kind in usable if generator.random() < kind.probability]
    taken = taken or [usable[int(generator.integers(len(usable)))]]
    return AugmentationPlan(tuple(kind.draw(generator, num_frames) for kind in taken))


def apply_augmentation(frames: Pixels, plan: AugmentationPlan) -> Pixels:
    """Return a clip with the operations of ``plan`` applied.

    Operations do not see the letterbox bars, which stay black. Values are rounded once, at the end.

    Args:
        frames: uint8 (T, 3, H, W); not changed.
        plan: the operations.

    Returns:
        uint8 (T, 3, H, W), a new array.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1] != 3:
        raise ValueError(f"frames: got {frames.dtype} {frames.shape}, wanted uint8 (T, 3, H, W)")
    result = np.array(frames)
    bright = frames.max(axis=(0, 1)) > 0
    if not plan.operations or not bright.any():
        return result
    rows = np.flatnonzero(bright.any(axis=1))
    columns = np.flatnonzero(bright.any(axis=0))
    picture = np.s_[:, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]  # without the bars
    result[picture] = plan.applied(result[picture])
    return result
