"""Pseudo-fakes: clips whose face is blended with a changed copy of itself, as in a face swap.

A model that is trained on pseudo-fakes learns traces of blending rather than the traces of one generator. The method
is that of K. Shiohara and T. Yamasaki, "Detecting Deepfakes with Self-Blended Images", CVPR 2022, with two differences.
The mask is an ellipse around five points of the face instead of the convex hull of 68 points. Only the copy is changed,
never the frame that it is blended into. So a pseudo-fake equals the source clip outside the mask.

Random parameters are drawn once per clip. The seed depends on the video's id, so the same pseudo-fake results in every
process and run.
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
    """An augmentation that adds a constant in grey levels to each colour channel; channels have different constants."""

    levels: tuple[float, ...]  # of red, green and blue

    def apply(self, pixels: Float) -> Float:
        """Return the pixels plus the constant of their colour channel, float32 (T, 3, H, W).

        Results may lie outside 0 to 255.
        """
        return pixels + np.array(self.levels, np.float32)[:, None, None]


@dataclass(frozen=True)
class Sharpen(Operation, name="sharpen", probability=0):
    """An augmentation that sharpens frames by an unsharp mask.

    It adds to every frame ``amount`` times the difference between the frame and its blurred copy.
    """

    amount: float

    def apply(self, pixels: Float) -> Float:
        """Return the sharpened pixels, float32 (T, 3, H, W); they may lie outside 0 to 255."""
        return pixels + np.float32(self.amount) * (pixels - Blur(0.8).apply(pixels))


@dataclass(frozen=True)
class SelfBlend:
    """The random parameters of one pseudo-fake, a clip whose face is blended with a changed copy of itself.

    All frames of the clip use the same parameters. The blending mask is a deformed ellipse around the face.

    Attributes:
        changes: the operations that are applied to the copy.
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
        """Return the parameters as JSON text: a list with one object, whose ``name`` is ``self_blend``.

        It is a list because ``AugmentationPlan.to_json`` returns one, too.
        """
        return json.dumps([{"name": "self_blend", **asdict(self), "changes": json.loads(self.changes.to_json())}])


def draw_self_blend(video_id: str, number: int) -> SelfBlend:
    """Draw the random parameters of one pseudo-fake of a video; equal arguments give equal parameters.

    ``number`` tells the pseudo-fakes of a video apart.
    """
    generator = generator_of("self_blend", _VERSION, video_id, number)
    drawn = [round(value, 6) for value in generator.uniform(*np.transpose(_RANGES)).tolist()]
    scale, shift_x, shift_y, width, height, *waves, edge = drawn
    opacity = float(generator.choice([0.25, 0.5, 0.75, 1, 1, 1]))
    changes = AugmentationPlan(_changes(generator))
    pairs = tuple(zip(waves[::2], waves[1::2], strict=True))
    return SelfBlend(changes, scale, shift_x, shift_y, width, height, pairs, edge, opacity)


def _changes(generator: np.random.Generator) -> tuple[Operation, ...]:
    """Draw the operations that change the copy of the frames before it is blended in, and return them.

    Probabilities and ranges are those of the paper.
    """
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
    """An ellipse around a face, in pixels; positions and directions are complex numbers, x + iy.

    Attributes:
        centre: position of the centre.
        down: direction from the eyes to the mouth, of length 1.
        width: half the length of the axis at right angles to ``down``.
        height: half the length of the axis along ``down``.
    """

    centre: complex
    down: complex
    width: float
    height: float

    @classmethod
    def around(cls, face: npt.NDArray[np.floating], blend: SelfBlend) -> "_Ellipse":
        """Return the ellipse around a face, scaled by the factors ``width`` and ``height`` of ``blend``.

        ``face`` is float (5, 2): x and y in pixels of both eyes, the nose and both corners of the mouth.
        """
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
        """Return the blending mask of a frame, float64 (rows, columns): the weight of the copy in every pixel.

        The weight is ``blend.opacity`` inside the ellipse, falls smoothly towards the outline, and is 0 outside. The
        outline is deformed by ``blend.waves``.
        """
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
    """Scale a frame about the centre of ``ellipse``, and shift it, by the parameters in ``blend``.

    Returns:
        A tuple: the new frame, uint8 (3, H, W), and a mask, bool (H, W). The mask is false for
        pixels that the moved picture does not cover.
    """
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
