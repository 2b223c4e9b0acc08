"""The generated corpus of task image: photographs of drawn dishes, with their contents and nutrients.

Several photographs show one dish: they are its group. Pieces of one kind have one mass and one composition, so what a
dish weighs and how much energy it has follow from what can be seen: which food it is, and how many pieces and berries.
Some dishes were weighed only, some not at all, and of a few nobody wrote down the food, as in real corpora.
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

from fvc_lib.corpus.samples.files import PlannedFiles, csv_text, generate
from fvc_lib.corpus.samples.scenes import generator_for
from fvc_lib.services.atomic_files import AnyPath

# Drawn photographs of dishes. A food is told by the shape of its pieces alone: colours, plate, table, light and camera
# are drawn alike for all foods, and the pieces cover one area. Arithmetic is element-wise only, as in ``scenes``.

SIDE_PIXELS = 96
# (S,), the middles of the pixels along a side of the picture, from -1 to 1.
_STEPS = (np.arange(SIDE_PIXELS, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / SIDE_PIXELS) - 1

Field = npt.NDArray[np.float32]  # (H, W)
Colour = tuple[float, float, float]

# In radii of the plate: how far pieces lie from its middle by their number, their scale, and where the berries lie.
_RADII = {1: (0.0, 0.5), 2: (0.38, 0.55), 3: (0.45, 0.58), 4: (0.52, 0.6)}
_PIECE = 1.5
_RIM = 0.9

_FOOD_COLOURS: tuple[Colour, ...] = ((150, 92, 40), (110, 60, 34), (176, 110, 30), (136, 70, 60))
_PLATE_COLOURS: tuple[Colour, ...] = ((246, 244, 238), (206, 222, 236), (222, 232, 204), (240, 226, 214))
_TABLE_COLOURS: tuple[Colour, ...] = (
    (120, 84, 54), (90, 96, 100), (160, 60, 60), (70, 100, 84), (60, 80, 120), (150, 150, 140),
)  # fmt: skip
_BERRY_COLOURS: tuple[Colour, ...] = ((200, 20, 60), (60, 40, 150))


@dataclass(frozen=True)
class Dish:
    """Contents of a plate, the same in all its photographs."""

    name: str  # seeds everything that is drawn of it
    food: str  # a key of ``SHAPES``
    num_pieces: int  # of the food
    num_berries: int  # at the rim


@dataclass(frozen=True)
class _Look:
    """The looks of a dish: places and shape of its pieces, and its colours."""

    shape: Callable[[Field, Field], Field]
    pieces: tuple[tuple[float, float, float], ...]  # x, y, angle; in radii of the plate
    berries: tuple[tuple[float, float], ...]
    food: Colour
    plate: Colour
    table: Colour
    berry: Colour
    is_round: bool


def photograph(dish: Dish, number: int) -> bytes:
    """Return photograph ``number`` of ``dish`` as JPEG of ``SIDE_PIXELS`` a side, with its own camera and light."""
    picture = _draw(_look(dish), generator_for("photograph", dish.name, number))
    quality = int(generator_for("quality", dish.name, number).integers(72, 95))
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _length(x: Field, y: Field) -> Field:
    length: Field = np.sqrt(x * x + y * y)
    return length


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


def _look(dish: Dish) -> _Look:
    rng = generator_for("dish", dish.name)

    def one_of(colours: tuple[Colour, ...]) -> Colour:
        return colours[int(rng.integers(len(colours)))]

    return _Look(
        shape=SHAPES[dish.food],
        pieces=_scattered(dish.num_pieces, rng),
        berries=_at_rim(dish.num_berries, rng),
        food=one_of(_FOOD_COLOURS),
        plate=one_of(_PLATE_COLOURS),
        table=one_of(_TABLE_COLOURS),
        berry=one_of(_BERRY_COLOURS),
        is_round=bool(rng.random() < 0.5),
    )


def _scattered(count: int, rng: np.random.Generator) -> tuple[tuple[float, float, float], ...]:
    """Return places (x, y, angle) around the middle, each in its own sector so that pieces hardly touch."""
    first = rng.uniform(0, 2 * math.pi)
    places = []
    for number in range(count):
        radius = rng.uniform(*_RADII[count])
        angle = first + (number + rng.uniform(-0.1, 0.1)) * 2 * math.pi / count
        places.append((radius * math.cos(angle), radius * math.sin(angle), rng.uniform(0, 2 * math.pi)))
    return tuple(places)


def _at_rim(count: int, rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
    sectors = rng.permutation(12)[:count]
    angles = (sectors + rng.uniform(0.2, 0.8, count)) * (2 * math.pi / 12)
    return tuple((_RIM * math.cos(angle), _RIM * math.sin(angle)) for angle in angles.tolist())


def _draw(look: _Look, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Draw uint8 (H, W, 3): the scene from a turned and shifted camera, with its own light and noise."""
    x, y, pixel = _plate_coordinates(rng)
    canvas = np.empty((*x.shape, 3), dtype=np.float32)
    canvas[:] = look.table
    canvas *= _grain(x, y, rng)[..., None]
    edge = _length(x, y) - 1 if look.is_round else np.maximum(np.abs(x), np.abs(y)) - np.float32(0.92)
    _paint(canvas, edge - np.float32(0.05), (30, 26, 24), pixel * 6, 0.5)
    _paint(canvas, edge, look.plate, pixel)
    _paint(canvas, np.abs(edge + np.float32(0.16)) - np.float32(0.01), tuple(0.8 * c for c in look.plate), pixel, 0.6)
    for place_x, place_y, angle in look.pieces:
        _paint_piece(canvas, x - np.float32(place_x), y - np.float32(place_y), angle, look, pixel, rng)
    for place_x, place_y in look.berries:
        distance = _length(x - np.float32(place_x), y - np.float32(place_y))
        _paint(canvas, distance - np.float32(0.065), look.berry, pixel)
        _paint(canvas, distance - np.float32(0.02), (250, 250, 250), pixel, 0.5)
    return _exposed(canvas, rng)


def _plate_coordinates(rng: np.random.Generator) -> tuple[Field, Field, np.float32]:
    """Return coordinates (H, W) in radii of the plate, and the width of a pixel in radii."""
    angle, scale, tilt = rng.uniform(0, 2 * math.pi), rng.uniform(1.02, 1.16), rng.uniform(1.0, 1.12)
    across = (_STEPS[None, :] - np.float32(rng.uniform(-0.1, 0.1))) * np.float32(scale)
    down = (_STEPS[:, None] - np.float32(rng.uniform(-0.1, 0.1))) * np.float32(scale * tilt)
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    return cosine * across - sine * down, sine * across + cosine * down, np.float32(2 * scale / SIDE_PIXELS)


def _grain(x: Field, y: Field, rng: np.random.Generator) -> Field:
    """Return the table's pattern as a factor: boards or checks."""
    period, strength = np.float32(rng.uniform(0.2, 0.5)), np.float32(rng.uniform(0.05, 0.18))
    boards = np.abs((x / period) % 1 - np.float32(0.5)) > np.float32(0.25)
    if rng.random() < 0.5:
        boards = boards ^ (np.abs((y / period) % 1 - np.float32(0.5)) > np.float32(0.25))
    factor: Field = 1 - strength * boards.astype(np.float32)
    return factor


def _paint_piece(
    canvas: Field, x: Field, y: Field, angle: float, look: _Look, pixel: np.float32, rng: np.random.Generator
) -> None:
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    scale = np.float32(1 / _PIECE)
    distance = look.shape(scale * (cosine * x + sine * y), scale * (cosine * y - sine * x)) * np.float32(_PIECE)
    shade = float(rng.uniform(0.88, 1.1))
    colour = tuple(min(255.0, shade * channel) for channel in look.food)
    _paint(canvas, distance - np.float32(0.03), (20, 16, 14), pixel * 5, 0.35)
    _paint(canvas, distance, tuple(0.72 * channel for channel in colour), pixel)
    _paint(canvas, distance + np.float32(0.025), colour, pixel * 2)


def _paint(canvas: Field, distance: Field, colour: tuple[float, ...], blur: np.float32, opacity: float = 1.0) -> None:
    """Cover what is inside (negative ``distance``) by ``colour``, with an edge ``blur`` wide."""
    cover = np.clip(np.float32(0.5) - distance / blur, 0, 1) * np.float32(opacity)
    canvas += cover[..., None] * (np.array(colour, dtype=np.float32) - canvas)


def _exposed(canvas: Field, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    slope_x, slope_y = rng.uniform(-0.2, 0.2, 2).astype(np.float32)
    light = np.float32(rng.uniform(0.7, 1.1)) * (1 + slope_x * _STEPS[None, :] + slope_y * _STEPS[:, None])
    warmth = np.float32(rng.uniform(-0.08, 0.08))
    tint = np.array([1 + warmth, 1, 1 - warmth], dtype=np.float32)
    noise = rng.normal(0, rng.uniform(2, 7), canvas.shape).astype(np.float32)
    exposed: npt.NDArray[np.uint8] = np.clip(np.rint(canvas * light[..., None] * tint + noise), 0, 255).astype(np.uint8)
    return exposed


# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
DISHES_PER_FOOD = 40
PHOTOGRAPHS_PER_DISH = 3
MOST_PIECES = 4
MOST_BERRIES = 5
TARGETS = ("calories_kcal", "protein_g", "carbohydrate_g", "fat_g", "mass_g")
_NOTICE_TEXT = """This corpus is synthetic.

Every picture was drawn by FVC's generator (version {version}): no dish in it was ever cooked. manifest.csv says what
lies on each plate. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real
food.
"""


@dataclass(frozen=True)
class Composition:
    """Grams of one piece, and of what is in it."""

    mass: float
    protein: float
    carbohydrate: float
    fat: float

    @property
    def energy(self) -> float:
        """kcal, by Atwater's general factors: 4 per gram of protein and carbohydrate, 9 of fat."""
        return 4 * self.protein + 4 * self.carbohydrate + 9 * self.fat

    @property
    def amounts(self) -> tuple[float, ...]:
        """In the order of ``TARGETS``."""
        return self.energy, self.protein, self.carbohydrate, self.fat, self.mass


COMPOSITIONS = {
    "cookies": Composition(18.0, 1.1, 11.6, 4.3),
    "doughnuts": Composition(52.0, 3.0, 25.0, 12.0),
    "dumplings": Composition(28.0, 2.4, 8.2, 1.6),
    "sausages": Composition(45.0, 6.2, 1.1, 11.5),
    "toast": Composition(30.0, 2.7, 15.0, 1.0),
    "samosas": Composition(40.0, 2.2, 13.5, 7.0),
}
BERRY = Composition(6.0, 0.1, 1.2, 0.0)


@dataclass(frozen=True)
class PlannedDish:
    """A dish and what is known of it."""

    dish: Dish  # what is drawn
    class_label: str  # the food, or the empty text where nobody wrote it down
    known: frozenset[str]  # which of ``TARGETS`` were measured

    @property
    def paths(self) -> tuple[str, ...]:
        """Its photographs, relative to the corpus folder, with '/'."""
        return tuple(f"images/{self.dish.name}_{number}.jpg" for number in range(PHOTOGRAPHS_PER_DISH))

    @property
    def amounts(self) -> dict[str, float]:
        """Amount of each of ``TARGETS`` in the whole dish, known or not."""
        piece, berry = COMPOSITIONS[self.dish.food].amounts, BERRY.amounts
        total = (self.dish.num_pieces * p + self.dish.num_berries * b for p, b in zip(piece, berry, strict=True))
        return {name: round(amount, 3) for name, amount in zip(TARGETS, total, strict=True)}


def plan_dishes() -> tuple[PlannedDish, ...]:
    """Return all dishes in the order of their names; the same on every call."""
    foods = [food for food in SHAPES for _ in range(DISHES_PER_FOOD)]
    order = generator_for("dishes", CORPUS_VERSION).permutation(len(foods))
    return tuple(_plan(f"dish_{number:03d}", foods[place]) for number, place in enumerate(order))


def _plan(name: str, food: str) -> PlannedDish:
    rng = generator_for("plan", CORPUS_VERSION, name)
    dish = Dish(name, food, int(rng.integers(1, MOST_PIECES + 1)), int(rng.integers(0, MOST_BERRIES + 1)))
    fate = rng.random()
    if fate < 0.04:  # unnamed, but measured
        return PlannedDish(dish, "", frozenset(TARGETS))
    if fate < 0.1:
        return PlannedDish(dish, food, frozenset())
    return PlannedDish(dish, food, frozenset(TARGETS if fate > 0.22 else ("mass_g",)))


def generate_sample_dishes(
    folder: AnyPath, *, progress: Callable[[int, int], None] | None = None, stop: Callable[[], bool] | None = None
) -> Path:
    """Write the corpus to ``folder``, or what is missing of it; see ``files.generate``.

    Equal versions of this code, numpy and Pillow write equal bytes.

    Returns:
        The path of ``manifest.csv``: columns path, class, group and ``TARGETS``; an empty cell is not known.
    """
    plan = plan_dishes()
    files = [PlannedFiles(planned.paths, partial(_photographs, planned.dish)) for planned in plan]
    manifest = manifest_text(plan)
    return generate(Path(folder), "sample_dishes", CORPUS_VERSION, files, _NOTICE_TEXT, manifest, progress, stop)


def _photographs(dish: Dish) -> list[bytes]:
    return [photograph(dish, number) for number in range(PHOTOGRAPHS_PER_DISH)]


def manifest_text(plan: Sequence[PlannedDish]) -> str:
    """Return the manifest's CSV text, one row per photograph."""
    rows: list[Sequence[object]] = [("path", "class", "group", *TARGETS)]
    for planned in plan:
        amounts = planned.amounts
        cells = [amounts[name] if name in planned.known else "" for name in TARGETS]
        rows += [(path, planned.class_label, planned.dish.name, *cells) for path in planned.paths]
    return csv_text(rows)
