"""Generate the sample corpus of task image: photographs of drawn dishes, with their foods and nutrients.

The photographs of one dish form a group, which a split does not divide. All pieces of a food have the same mass and
composition. So mass and energy follow from what the picture shows: the food, and the numbers of pieces and berries. As
in real corpora, some dishes were only weighed, some have no numbers, and a few have no class.

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
from PIL import Image

from fvc_lib.corpus.samples.files import csv_text, generate
from fvc_lib.corpus.samples.scenes import generator_for
from fvc_lib.services.atomic_files import AnyPath

Field = npt.NDArray[np.float32]  # (H, W)
Colour = tuple[float, float, float]

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
DISHES_PER_FOOD = 40
PHOTOGRAPHS_PER_DISH = 3
SIDE_PIXELS = 96
TARGETS = ("calories_kcal", "protein_g", "carbohydrate_g", "fat_g", "mass_g")

# (S,), the middles of the pixels along a side of the picture, from -1 to 1.
_STEPS = (np.arange(SIDE_PIXELS, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / SIDE_PIXELS) - 1
# In radii of the plate: the distances of pieces from its middle by their number, their scale, and that of berries.
_RADII = {1: (0.0, 0.5), 2: (0.38, 0.55), 3: (0.45, 0.58), 4: (0.52, 0.6)}
_PIECE = 1.5
_RIM = 0.9
_FOOD_COLOURS: tuple[Colour, ...] = ((150, 92, 40), (110, 60, 34), (176, 110, 30), (136, 70, 60))
_PLATE_COLOURS: tuple[Colour, ...] = ((246, 244, 238), (206, 222, 236), (222, 232, 204), (240, 226, 214))
_TABLE_COLOURS: tuple[Colour, ...] = (
    (120, 84, 54), (90, 96, 100), (160, 60, 60), (70, 100, 84), (60, 80, 120), (150, 150, 140),
)  # fmt: skip
_BERRY_COLOURS: tuple[Colour, ...] = ((200, 20, 60), (60, 40, 150))
_NOTICE_TEXT = """This corpus is synthetic.

Every picture was drawn by FVC's generator (version {version}): no dish in it was ever cooked. manifest.csv says what
lies on each plate. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real
food.
"""


def _length(x: Field, y: Field) -> Field:
    return np.asarray(np.sqrt(x * x + y * y), np.float32)


# Distance to the edge of a piece at the origin, negative inside; each covers an area of 0.09.
SHAPES: dict[str, Callable[[Field, Field], Field]] = {
    "cookies": lambda x, y: _length(x, y) - np.float32(0.17),
    "doughnuts": lambda x, y: np.abs(_length(x, y) - np.float32(0.157)) - np.float32(0.046),
    "dumplings": lambda x, y: np.maximum(_length(x, y + np.float32(0.1)) - np.float32(0.24), -(y + np.float32(0.1))),
    "sausages": lambda x, y: _length(np.maximum(np.abs(x) - np.float32(0.205), 0), y) - np.float32(0.085),
    "toast": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - np.float32(0.15),
    "samosas": lambda x, y: (
        np.maximum(np.float32(math.sqrt(3) / 2) * np.abs(x) + np.float32(0.5) * y, -y) - np.float32(0.132)
    ),
}
# Grams of one piece, and of protein, carbohydrate and fat in it.
_COMPOSITIONS = {
    "cookies": (18.0, 1.1, 11.6, 4.3),
    "doughnuts": (52.0, 3.0, 25.0, 12.0),
    "dumplings": (28.0, 2.4, 8.2, 1.6),
    "sausages": (45.0, 6.2, 1.1, 11.5),
    "toast": (30.0, 2.7, 15.0, 1.0),
    "samosas": (40.0, 2.2, 13.5, 7.0),
    "berries": (6.0, 0.1, 1.2, 0.0),
}


@dataclass(frozen=True)
class Dish:
    """What lies on a plate in all photographs of a dish, and which facts about it the manifest states."""

    name: str  # seeds everything that is drawn of it
    food: str  # a key of ``SHAPES``
    num_pieces: int  # pieces of the food, 1 to 4
    num_berries: int  # at the rim, 0 to 5
    class_label: str = ""  # the food, or the empty text if it is not known
    known: frozenset[str] = frozenset()  # the ``TARGETS`` that were measured

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the dish's photographs, relative to the corpus folder, with '/'."""
        return tuple(f"images/{self.name}_{number}.jpg" for number in range(PHOTOGRAPHS_PER_DISH))

    @property
    def amounts(self) -> dict[str, float]:
        """The true amounts in the whole dish by the names in ``TARGETS``, whether the manifest states them or not."""
        piece, berry = _amounts(self.food), _amounts("berries")
        total = (self.num_pieces * p + self.num_berries * b for p, b in zip(piece, berry, strict=True))
        return {name: round(amount, 3) for name, amount in zip(TARGETS, total, strict=True)}


def _amounts(food: str) -> tuple[float, ...]:
    """Return the amounts in one piece of ``food`` in the order of ``TARGETS``.

    Energy is computed by Atwater's factors: 4, 4 and 9 kcal per gram of protein, carbohydrate and fat.
    """
    mass, protein, carbohydrate, fat = _COMPOSITIONS[food]
    return 4 * protein + 4 * carbohydrate + 9 * fat, protein, carbohydrate, fat, mass


def photograph(dish: Dish, number: int) -> bytes:
    """Return photograph ``number`` of ``dish`` as the bytes of a square JPEG with ``SIDE_PIXELS`` a side.

    Camera, light and noise differ between the photographs of a dish.
    """
    picture = _draw(dish, generator_for("photograph", dish.name, number))
    quality = int(generator_for("quality", dish.name, number).integers(72, 95))
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _draw(dish: Dish, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a picture of ``dish``, RGB, uint8 (H, W, 3); ``rng`` decides camera, light and noise."""
    look = generator_for("dish", dish.name)  # decides what all photographs of the dish share
    pieces, berries = _scattered(dish.num_pieces, look), _at_rim(dish.num_berries, look)
    food, plate, table, berry = (
        colours[int(look.integers(len(colours)))]
        for colours in (_FOOD_COLOURS, _PLATE_COLOURS, _TABLE_COLOURS, _BERRY_COLOURS)
    )
    is_round = look.random() < 0.5
    x, y, pixel = _plate_coordinates(rng)
    canvas = np.empty((*x.shape, 3), dtype=np.float32)
    canvas[:] = table
    canvas *= _grain(x, y, rng)[..., None]
    edge = _length(x, y) - 1 if is_round else np.maximum(np.abs(x), np.abs(y)) - np.float32(0.92)
    _paint(canvas, edge - np.float32(0.05), (30, 26, 24), pixel * 6, 0.5)
    _paint(canvas, edge, plate, pixel)
    _paint(canvas, np.abs(edge + np.float32(0.16)) - np.float32(0.01), tuple(0.8 * c for c in plate), pixel, 0.6)
    for place_x, place_y, angle in pieces:
        right, down = x - np.float32(place_x), y - np.float32(place_y)
        cosine, sine, scale = np.float32(math.cos(angle)), np.float32(math.sin(angle)), np.float32(1 / _PIECE)
        distance = SHAPES[dish.food](scale * (cosine * right + sine * down), scale * (cosine * down - sine * right))
        distance *= np.float32(_PIECE)
        shade = float(rng.uniform(0.88, 1.1))
        colour = tuple(min(255.0, shade * channel) for channel in food)
        _paint(canvas, distance - np.float32(0.03), (20, 16, 14), pixel * 5, 0.35)
        _paint(canvas, distance, tuple(0.72 * channel for channel in colour), pixel)
        _paint(canvas, distance + np.float32(0.025), colour, pixel * 2)
    for place_x, place_y in berries:
        distance = _length(x - np.float32(place_x), y - np.float32(place_y))
        _paint(canvas, distance - np.float32(0.065), berry, pixel)
        _paint(canvas, distance - np.float32(0.02), (250, 250, 250), pixel, 0.5)
    slope_x, slope_y = rng.uniform(-0.2, 0.2, 2).astype(np.float32)
    light: Field = np.float32(rng.uniform(0.7, 1.1)) * (1 + slope_x * _STEPS[None, :] + slope_y * _STEPS[:, None])
    warmth = np.float32(rng.uniform(-0.08, 0.08))
    tint = np.array([1 + warmth, 1, 1 - warmth], dtype=np.float32)
    noise = np.asarray(rng.normal(0, rng.uniform(2, 7), canvas.shape), np.float32)
    return np.asarray(np.clip(np.rint(canvas * light[..., None] * tint + noise), 0, 255).astype(np.uint8))


def _scattered(count: int, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """Return (x, y, angle) of ``count`` pieces around the middle of the plate, in radii of the plate and radians.

    Every piece lies in a sector of the plate of its own, so that pieces hardly touch.
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

    All are in radii of the plate, whose middle is the origin.
    """
    angle, scale, tilt = rng.uniform(0, 2 * math.pi), rng.uniform(1.02, 1.16), rng.uniform(1.0, 1.12)
    across = (_STEPS[None, :] - np.float32(rng.uniform(-0.1, 0.1))) * np.float32(scale)
    down = (_STEPS[:, None] - np.float32(rng.uniform(-0.1, 0.1))) * np.float32(scale * tilt)
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    return cosine * across - sine * down, sine * across + cosine * down, np.float32(2 * scale / SIDE_PIXELS)


def _grain(x: Field, y: Field, rng: np.random.Generator) -> Field:
    """Return the pattern of the table, boards or checks, as factors of brightness (H, W)."""
    period, strength = np.float32(rng.uniform(0.2, 0.5)), np.float32(rng.uniform(0.05, 0.18))
    boards = np.abs((x / period) % 1 - np.float32(0.5)) > np.float32(0.25)
    if rng.random() < 0.5:
        boards = boards ^ (np.abs((y / period) % 1 - np.float32(0.5)) > np.float32(0.25))
    return np.asarray(1 - strength * boards.astype(np.float32), np.float32)


def _paint(canvas: Field, distance: Field, colour: tuple[float, ...], blur: np.float32, opacity: float = 1.0) -> None:
    """Paint ``colour`` into ``canvas`` (H, W, 3), in place, where ``distance`` (H, W) is negative.

    The edge is ``blur`` wide, in the unit of ``distance``.
    """
    cover = np.clip(np.float32(0.5) - distance / blur, 0, 1) * np.float32(opacity)
    canvas += cover[..., None] * (np.array(colour, dtype=np.float32) - canvas)


def plan_dishes() -> tuple[Dish, ...]:
    """Return all dishes in the order of their names; the same on every call."""
    foods = [food for food in SHAPES for _ in range(DISHES_PER_FOOD)]
    order = generator_for("dishes", CORPUS_VERSION).permutation(len(foods))
    return tuple(_plan(f"dish_{number:03d}", foods[place]) for number, place in enumerate(order))


def _plan(name: str, food: str) -> Dish:
    rng = generator_for("plan", CORPUS_VERSION, name)
    contents, fate = (int(rng.integers(1, 5)), int(rng.integers(0, 6))), rng.random()
    if fate < 0.04:  # without a class, but measured
        return Dish(name, food, *contents, "", frozenset(TARGETS))
    known = () if fate < 0.1 else TARGETS if fate > 0.22 else ("mass_g",)
    return Dish(name, food, *contents, food, frozenset(known))


def generate_sample_dishes(
    folder: AnyPath, *, progress: Callable[[int, int], None] | None = None, stop: Callable[[], bool] | None = None
) -> Path:
    """Write the missing files of the corpus to ``folder``; see ``files.generate``.

    Equal versions of this code, numpy and Pillow write equal bytes.

    Returns:
        The path of ``manifest.csv``: columns path, class, group and ``TARGETS``. Empty cells are unknown values.
    """
    dishes = plan_dishes()
    plan = {dish.paths: partial(_photographs, dish) for dish in dishes}
    notice = _NOTICE_TEXT.format(version=CORPUS_VERSION)
    return generate(Path(folder), notice, plan, manifest_text(dishes), progress, stop)


def _photographs(dish: Dish) -> list[bytes]:
    return [photograph(dish, number) for number in range(PHOTOGRAPHS_PER_DISH)]


def manifest_text(dishes: Sequence[Dish]) -> str:
    """Return the manifest's CSV text, one row per photograph."""
    rows: list[Sequence[object]] = [("path", "class", "group", *TARGETS)]
    for dish in dishes:
        cells = [amount if name in dish.known else "" for name, amount in dish.amounts.items()]
        rows += [(path, dish.class_label, dish.name, *cells) for path in dish.paths]
    return csv_text(rows)
