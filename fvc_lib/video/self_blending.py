"""Pseudo-fakes: clips whose face is blended with a changed copy of itself, as in a face swap.

A model that learns them looks for traces of blending rather than for the traces of one generator. The method is that
of K. Shiohara and T. Yamasaki, "Detecting Deepfakes with Self-Blended Images", CVPR 2022. It differs in two ways. The
mask is an ellipse around five points of the face instead of the hull of 68. Only the copy is changed, never the frame
that it is blended into, so that a pseudo-fake equals its real outside the mask.

Parameters are drawn once per clip. Seeds and arithmetic are as in ``augmentations``.
"""

import json
import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from fvc_lib.video.augmentations import (
    AugmentationPlan,
    Blur,
    Color,
    Downscale,
    Float,
    Jpeg,
    Operation,
    Pixels,
    generator_of,
)

_VERSION = 1  # part of the seed: raise it when the same clip gives other pixels
_WAVES = (2, 3, 4)  # periods around the ellipse by which its outline is deformed
# From which numbers are drawn: scale, shift in x and y, width, height, height and phase of each wave, and edge.
_RANGES = (
    (0.95, 1 / 0.95), (-0.05, 0.05), (-0.025, 0.025), (0.85, 1.15), (0.85, 1.15),
    *((0, 0.08), (0, 2 * math.pi)) * len(_WAVES), (0.1, 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Tint(Operation, name="tint", probability=0):
    """Shift each colour channel by a number of grey levels of its own."""

    levels: tuple[float, ...]  # of red, green and blue

    def apply(self, pixels: Float) -> Float:
        """Return changed pixels, as ``Operation.apply``."""
        return pixels + np.array(self.levels, np.float32)[:, None, None]


@dataclass(frozen=True)
class Sharpen(Operation, name="sharpen", probability=0):
    """Add ``amount`` times the difference from the blurred frame."""

    amount: float

    def apply(self, pixels: Float) -> Float:
        """Return changed pixels, as ``Operation.apply``."""
        return pixels + np.float32(self.amount) * (pixels - Blur(0.8).apply(pixels))


@dataclass(frozen=True)
class SelfBlend:
    """The parameters of a pseudo-fake, which hold for all its frames.

    Attributes:
        changes: the operations that the copy receives.
        scale: factor by which the copy is enlarged about the centre of the ellipse.
        shift_x, shift_y: shift of the copy, as shares of the ellipse's width and height.
        width, height: factors on the usual width and height of the ellipse.
        waves: height and phase of the deformations of the outline, one for each number in ``_WAVES``.
        edge: share of the radius over which the mask rises from 0 to its highest value.
        opacity: highest value of the mask.
    """

    changes: AugmentationPlan
    scale: float
    shift_x: float
    shift_y: float
    width: float
    height: float
    waves: tuple[tuple[float, float], ...]
    edge: float
    opacity: float

    def to_json(self) -> str:
        """Return a JSON list with one object, in the form of ``AugmentationPlan.to_json``."""
        return json.dumps([{"name": "self_blend", **asdict(self), "changes": json.loads(self.changes.to_json())}])


def draw_self_blend(video_id: str, number: int) -> SelfBlend:
    """Return the random parameters of a video's pseudo-fake ``number``; equal arguments give equal parameters."""
    generator = generator_of("self_blend", _VERSION, video_id, number)
    drawn = [round(value, 6) for value in generator.uniform(*np.transpose(_RANGES)).tolist()]
    scale, shift_x, shift_y, width, height, *waves, edge = drawn
    opacity = float(generator.choice([0.25, 0.5, 0.75, 1, 1, 1]))
    changes = AugmentationPlan(_changes(generator))
    pairs = tuple(zip(waves[::2], waves[1::2], strict=True))
    return SelfBlend(changes, scale, shift_x, shift_y, width, height, pairs, edge, opacity)


def _changes(generator: np.random.Generator) -> tuple[Operation, ...]:
    """Return the operations that the copy receives, drawn with the probabilities and ranges of the paper."""
    brightness, contrast = np.round(generator.uniform(0.9, 1.1, 2), 6).tolist()
    saturation, amount = np.round(generator.uniform([0.7, 1.8], [1.3, 4.5]), 6).tolist()
    levels = np.round(generator.uniform(-20, 20, 3), 6).tolist()
    is_tinted, is_sharpened, is_compressed = (generator.random(3) < [0.3, 0.5, 0.5]).tolist()
    tinted = (Tint(tuple(levels)),) if is_tinted else ()
    detail = Sharpen(amount) if is_sharpened else Downscale(float(generator.choice([0.5, 0.25])))
    compressed = (Jpeg(int(generator.integers(40, 101))),) if is_compressed else ()
    return (Color(brightness, contrast, saturation), *tinted, detail, *compressed)


def self_blended(frames: Pixels, points: npt.NDArray[np.floating], blend: SelfBlend) -> Pixels:
    """Return a clip whose face is blended with a changed copy of itself.

    Args:
        frames: uint8 (T, 3, H, W); not changed.
        points: float (T, 5, 2), x and y in pixels of both eyes, the nose and both corners of the mouth.
        blend: the parameters.

    Returns:
        uint8 (T, 3, H, W), a new array. Outside the mask it equals ``frames``.
    """
    copies = blend.changes.applied(frames)
    result = np.array(frames)
    for frame, copy, face in zip(result, copies, points, strict=True):
        ellipse = _Ellipse.around(face, blend)
        moved, inside = _moved(copy, ellipse, blend)
        mask = ellipse.mask(blend, *copy.shape[1:])
        mask[~inside] = 0
        difference = moved.astype(np.float64) - frame
        frame[:] = np.rint(frame + mask * difference)
    return result


@dataclass(frozen=True)
class _Ellipse:
    """An ellipse around a face, in pixels; places and directions are complex numbers, x + iy.

    Attributes:
        centre: the centre.
        down: the direction from the eyes to the mouth, of length 1.
        width, height: half of the axes across and along this direction.
    """

    centre: complex
    down: complex
    width: float
    height: float

    @classmethod
    def around(cls, face: npt.NDArray[np.floating], blend: SelfBlend) -> "_Ellipse":
        """Return the ellipse around the five points of a face, float (5, 2)."""
        places = [complex(x, y) for x, y in face.tolist()]
        eyes = (places[0] + places[1]) / 2
        mouth = (places[3] + places[4]) / 2
        length = max(1.0, abs(mouth - eyes))
        down = (mouth - eyes) / length
        # The eyes of a face in profile are close together.
        width = max(0.7 * length, abs(places[1] - places[0]))
        centre = eyes + 0.65 * length * down
        return cls(centre, down, width * blend.width, length * blend.height)

    def mask(self, blend: SelfBlend, rows: int, columns: int) -> npt.NDArray[np.float64]:
        """Return the weight of the copy in every pixel, float64 (H, W) in [0, 1]."""
        y, x = np.mgrid[:rows, :columns]
        turned = (x + 1j * y - self.centre) / self.down
        place = turned.real / self.height + 1j * (turned.imag / self.width)
        angle = np.angle(place)
        deformed = (
            height * np.cos(period * angle + phase) for period, (height, phase) in zip(_WAVES, blend.waves, strict=True)
        )
        rim = sum(deformed, start=np.ones(angle.shape))
        share = np.clip((rim - np.abs(place)) / blend.edge, 0, 1)
        smooth = share * share * (3 - 2 * share)
        # Rounding keeps the last bits of sines, which differ between processors, out of the pixels.
        return np.asarray(np.round(blend.opacity * smooth, 6))


def _moved(copy: Pixels, ellipse: _Ellipse, blend: SelfBlend) -> tuple[Pixels, npt.NDArray[np.bool_]]:
    """Return a frame, uint8 (3, H, W), scaled and shifted, and where it has pixels, bool (H, W)."""
    shift = complex(2 * blend.shift_x * ellipse.width, 2 * blend.shift_y * ellipse.height)
    begin = ellipse.centre - (ellipse.centre + shift) / blend.scale
    data = (1 / blend.scale, 0.0, begin.real, 0.0, 1 / blend.scale, begin.imag)
    picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(copy, 0, -1)))
    white = Image.new("L", picture.size, 255)
    moved, inside = (
        np.asarray(image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR))
        for image in (picture, white)
    )
    return np.moveaxis(moved, -1, 0), inside > 0
