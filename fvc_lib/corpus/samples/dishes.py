"""Generate the sample corpus of task image: photographs of drawn dishes, with their foods and nutrients.

The photographs of the same dish form a group, which a split does not divide. All pieces of a food have the same mass
and composition. So mass and energy follow from what the picture shows: the food, and the numbers of pieces and berries.
As in real corpora, values are missing: some dishes have a mass only, some have no numbers, and a few have no class.

Only the shape of the pieces tells the food. Colours, plate, table, light and camera are drawn in the same way for all
foods, and pieces of all foods cover the same area. Arithmetic is element-wise only, as in ``scenes``, so equal versions
of the code give equal bytes on every machine.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from PIL import Image

from fvc_lib.corpus.samples.files import generate
from fvc_lib.corpus.samples.scenes import generator_for
from fvc_lib.services.atomic_files import AnyPath

Field = npt.NDArray[np.floating]  # float32 (H, W) or (H, W, 3); stays float32 in arithmetic with Python's numbers

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
DISHES_PER_FOOD = 40
PHOTOGRAPHS_PER_DISH = 3
SIDE_PIXELS = 96
TARGETS = ("calories_kcal", "protein_g", "carbohydrate_g", "fat_g", "mass_g")

# (SIDE_PIXELS,), the middles of the pixels along a side of the picture, from -1 to 1.
_STEPS: Field = (np.arange(SIDE_PIXELS, dtype=np.float32) + 0.5) * np.float32(2 / SIDE_PIXELS) - 1
# By the number of pieces on a plate: (least, largest) distance of pieces from the middle, in radii of the plate.
_RADII = {1: (0.0, 0.5), 2: (0.38, 0.55), 3: (0.45, 0.58), 4: (0.52, 0.6)}
_PIECE = 1.5  # scale of the pieces
_RIM = 0.9  # distance of the berries from the middle, in radii of the plate
# Red, green, blue of 0 to 255.
_FOOD_COLOURS = ((150, 92, 40), (110, 60, 34), (176, 110, 30), (136, 70, 60))
_PLATE_COLOURS = ((246, 244, 238), (206, 222, 236), (222, 232, 204), (240, 226, 214))
_TABLE_COLOURS = ((120, 84, 54), (90, 96, 100), (160, 60, 60), (70, 100, 84), (60, 80, 120), (150, 150, 140))
_BERRY_COLOURS = ((200, 20, 60), (60, 40, 150))
_NOTICE_TEXT = """This corpus is synthetic.

Every picture was drawn by FVC's generator (version {version}): no dish in it was ever cooked. manifest.csv says what
lies on each plate. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real
food.
"""


def _length(x: Field, y: Field) -> Field:
    length: Field = np.sqrt(x * x + y * y)
    return length


# Functions that return the distance of points (x, y) to the edge of a piece at the origin, negative inside the piece.
# Every piece covers an area of 0.09.
SHAPES: dict[str, Callable[[Field, Field], Field]] = {
    "cookies": lambda x, y: _length(x, y) - 0.17,
    "doughnuts": lambda x, y: np.abs(_length(x, y) - 0.157) - 0.046,
    "dumplings": lambda x, y: np.maximum(_length(x, y + 0.1) - 0.24, -(y + 0.1)),
    "sausages": lambda x, y: _length(np.maximum(np.abs(x) - 0.205, 0), y) - 0.085,
    "toast": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.15,
    "samosas": lambda x, y: np.maximum(math.sqrt(3) / 2 * np.abs(x) + 0.5 * y, -y) - 0.132,
}
# (mass, protein, carbohydrate, fat) of one piece, in grams.
_COMPOSITIONS = {
    "cookies": (18.0, 1.1, 11.6, 4.3),
    "doughnuts": (52.0, 3.0, 25.0, 12.0),
    "dumplings": (28.0, 2.4, 8.2, 1.6),
    "sausages": (45.0, 6.2, 1.1, 11.5),
    "toast": (30.0, 2.7, 15.0, 1.0),
    "samosas": (40.0, 2.2, 13.5, 7.0),
    "berries": (6.0, 0.1, 1.2, 0.0),
}


# Amounts in one piece, in the order of ``TARGETS``. Protein, carbohydrate and fat have 4, 4 and 9 kcal per gram
# (Atwater).
_AMOUNTS = {
    food: np.array([4 * protein + 4 * carbohydrate + 9 * fat, protein, carbohydrate, fat, mass])
    for food, (mass, protein, carbohydrate, fat) in _COMPOSITIONS.items()
}


@dataclass(frozen=True)
class Dish:
    """Contents of the plate in all photographs of a dish, and the facts about the dish that the manifest states."""

    name: str  # seeds everything else about the pictures of the dish
    food: str  # a key of ``SHAPES``
    num_pieces: int  # pieces of the food, 1 to 4
    num_berries: int  # berries at the rim, 0 to 5
    class_label: str | None = None  # the food in the manifest, or None if the manifest does not state it
    known: Sequence[str] = ()  # the ``TARGETS`` that the manifest states

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the dish's photographs, relative to the corpus folder, with '/'."""
        return tuple(f"images/{self.name}_{number}.jpg" for number in range(PHOTOGRAPHS_PER_DISH))

    @property
    def amounts(self) -> dict[str, float]:
        """The true amounts in the whole dish, by the names in ``TARGETS``, including those that the manifest omits."""
        total = self.num_pieces * _AMOUNTS[self.food] + self.num_berries * _AMOUNTS["berries"]
        return {name: round(amount, 3) for name, amount in zip(TARGETS, total.tolist(), strict=True)}


def photograph(dish: Dish, number: int) -> bytes:
    """Return photograph ``number`` of ``dish`` as the bytes of a square JPEG with sides of ``SIDE_PIXELS``.

    Camera, light and noise differ between the photographs of a dish.
    """
    picture = _draw(dish, generator_for("photograph", dish.name, number))
    quality = int(generator_for("quality", dish.name, number).integers(72, 95))
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _draw(dish: Dish, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a picture of ``dish``, RGB, uint8 (H, W, 3), H = W = ``SIDE_PIXELS``; ``rng`` decides camera and light."""
    look = generator_for("dish", dish.name)  # decides what all photographs of the dish share
    pieces, berries = _scattered(dish.num_pieces, look), _at_rim(dish.num_berries, look)
    palettes = (_FOOD_COLOURS, _PLATE_COLOURS, _TABLE_COLOURS, _BERRY_COLOURS)
    food, plate, table, berry = (look.choice(palette) for palette in palettes)
    is_round = look.random() < 0.5
    x, y, pixel = _plate_coordinates(rng)
    canvas: Field = table.astype(np.float32) * _grain(x, y, rng)[..., None]
    edge = _length(x, y) - 1 if is_round else np.maximum(np.abs(x), np.abs(y)) - 0.92
    _paint(canvas, edge - 0.05, (30, 26, 24), pixel * 6, 0.5)
    _paint(canvas, edge, plate, pixel)
    _paint(canvas, np.abs(edge + 0.16) - 0.01, 0.8 * plate, pixel, 0.6)
    for place_x, place_y, angle in pieces:
        right, down = _turned(x - place_x, y - place_y, -angle)
        distance = SHAPES[dish.food](right * (1 / _PIECE), down * (1 / _PIECE)) * _PIECE
        colour = np.minimum(255.0, rng.uniform(0.88, 1.1) * food)
        _paint(canvas, distance - 0.03, (20, 16, 14), pixel * 5, 0.35)
        _paint(canvas, distance, 0.72 * colour, pixel)
        _paint(canvas, distance + 0.025, colour, pixel * 2)
    for place_x, place_y in berries:
        distance = _length(x - place_x, y - place_y)
        _paint(canvas, distance - 0.065, berry, pixel)
        _paint(canvas, distance - 0.02, (250, 250, 250), pixel, 0.5)
    slope_x, slope_y = rng.uniform(-0.2, 0.2, 2).tolist()
    light = rng.uniform(0.7, 1.1) * (1 + slope_x * _STEPS[None, :] + slope_y * _STEPS[:, None])
    warmth = np.float32(rng.uniform(-0.08, 0.08))
    tint = np.array([1 + warmth, 1, 1 - warmth], dtype=np.float32)
    noise = rng.normal(0, rng.uniform(2, 7), canvas.shape).astype(np.float32)
    return np.asarray(np.clip(np.rint(canvas * light[..., None] * tint + noise), 0, 255), np.uint8)


def _scattered(count: int, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """Return (x, y, angle) of ``count`` pieces around the middle of the plate, in radii of the plate and radians.

    Every piece is in a different sector of the plate, so that pieces hardly touch.
    """
    first, places = rng.uniform(0, 2 * math.pi), []
    for number in range(count):
        radius = rng.uniform(*_RADII[count])
        angle = first + (number + rng.uniform(-0.1, 0.1)) * 2 * math.pi / count
        places.append((radius * math.cos(angle), radius * math.sin(angle), rng.uniform(0, 2 * math.pi)))
    return places


def _at_rim(count: int, rng: np.random.Generator) -> list[tuple[float, float]]:
    angles = (rng.permutation(12)[:count] + rng.uniform(0.2, 0.8, count)) * (2 * math.pi / 12)
    return [(_RIM * math.cos(angle), _RIM * math.sin(angle)) for angle in angles.tolist()]


def _plate_coordinates(rng: np.random.Generator) -> tuple[Field, Field, np.float32]:
    """Return (x, y, pixel): the coordinates of all pixels, both (H, W), and the width of a pixel.

    All three are in radii of the plate. The middle of the plate is the origin. ``rng`` decides the view of the camera.
    """
    angle, scale, tilt = rng.uniform((0, 1.02, 1.0), (2 * math.pi, 1.16, 1.12)).tolist()
    across = (_STEPS[None, :] - rng.uniform(-0.1, 0.1)) * scale
    down = (_STEPS[:, None] - rng.uniform(-0.1, 0.1)) * (scale * tilt)
    return *_turned(across, down, angle), np.float32(2 * scale / SIDE_PIXELS)


def _turned(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    """Return (x, y): the coordinates, rotated about the origin by ``angle`` in radians."""
    cosine, sine = math.cos(angle), math.sin(angle)
    return cosine * x - sine * y, cosine * y + sine * x


def _grain(x: Field, y: Field, rng: np.random.Generator) -> Field:
    """Return the pattern of the table, boards or checks, as factors of brightness, (H, W).

    ``x`` and ``y`` are the coordinates of the pixels, (H, W), in radii of the plate. ``rng`` decides the pattern.
    """
    period, strength = rng.uniform((0.2, 0.05), (0.5, 0.18)).tolist()
    boards = np.abs((x / period) % 1 - 0.5) > 0.25
    if rng.random() < 0.5:
        boards = boards ^ (np.abs((y / period) % 1 - 0.5) > 0.25)
    return np.asarray(1 - strength * boards.astype(np.float32))


def _paint(canvas: Field, distance: Field, colour: npt.ArrayLike, blur: np.float32, opacity: float = 1.0) -> None:
    """Paint ``colour`` (3,) into ``canvas`` (H, W, 3), in place, where ``distance`` (H, W) is negative.

    ``blur`` is the width of the soft edge, in the unit of ``distance``. ``opacity`` is from 0 to 1.
    """
    cover = np.clip(0.5 - distance / blur, 0, 1) * opacity
    canvas += cover[..., None] * (np.asarray(colour, np.float32) - canvas)


def plan_dishes() -> tuple[Dish, ...]:
    """Return all dishes in the order of their names; the result is the same on every call."""
    foods = [food for food in SHAPES for _ in range(DISHES_PER_FOOD)]
    order = generator_for("dishes", CORPUS_VERSION).permutation(len(foods))
    return tuple(_plan(f"dish_{number:03d}", foods[place]) for number, place in enumerate(order))


def _plan(name: str, food: str) -> Dish:
    rng = generator_for("plan", CORPUS_VERSION, name)
    contents, fate = (int(rng.integers(1, 5)), int(rng.integers(0, 6))), rng.random()
    if fate < 0.04:  # the manifest states all targets, but no class
        return Dish(name, food, *contents, None, TARGETS)
    return Dish(name, food, *contents, food, () if fate < 0.1 else TARGETS if fate > 0.22 else ("mass_g",))


def generate_sample_dishes(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the missing files of the corpus to ``folder``; see ``files.generate``.

    Equal versions of this code, numpy and Pillow write equal bytes.

    Returns:
        The path of ``manifest.csv``: columns path, class, group and ``TARGETS``. Empty cells are unknown values.
    """
    dishes = plan_dishes()
    plan = {dish.paths: partial(_photographs, dish) for dish in dishes}
    rows = [
        (path, dish.class_label, dish.name, *(dish.amounts[name] if name in dish.known else None for name in TARGETS))
        for dish in dishes
        for path in dish.paths
    ]
    texts = {"path": pl.String, "class": pl.String, "group": pl.String}
    manifest = pl.DataFrame(rows, schema={**texts, **dict.fromkeys(TARGETS, pl.Float64)}, orient="row")
    return generate(Path(folder), _NOTICE_TEXT.format(version=CORPUS_VERSION), plan, manifest, progress)


def _photographs(dish: Dish) -> list[bytes]:
    return [photograph(dish, number) for number in range(PHOTOGRAPHS_PER_DISH)]
