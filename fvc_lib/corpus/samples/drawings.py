"""Generate the drawn sample corpora: photographs of dishes (task image), and clips with captions (task video_text).

Dishes: the photographs of the same dish form a group, which a split does not divide. All pieces of a food have the same
mass and composition. So mass and energy follow from what the picture shows: the food, and the numbers of pieces and
berries. As in real corpora, values are missing: some dishes have a mass only, some have no numbers, and a few have no
class. Only the shape of the pieces tells the food. Colours, plate, table, light and camera are drawn in the same way
for all foods, and pieces of all foods cover the same area.

Captions: training, validation and test show different combinations of colour, shape, motion and ground. No test caption
occurs in training, but any two words of a test caption occur together in a training caption. So a model that finds the
right caption of a test clip has learned what the words mean.

Arithmetic is element-wise only, as in ``footage``, so equal versions of the code give equal bytes on every machine.
"""

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from PIL import Image

from fvc_lib.corpus.samples.footage import Encoding, Plane, Planes, encode_frames, generate, generator_for, texture
from fvc_lib.services.atomic_files import AnyPath

# Any change that alters a byte of a corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"

# --- Photographs of dishes.

DISHES_PER_FOOD = 40
PHOTOGRAPHS_PER_DISH = 3
PHOTOGRAPH_PIXELS = 96
TARGETS = ("calories_kcal", "protein_g", "carbohydrate_g", "fat_g", "mass_g")

# (PHOTOGRAPH_PIXELS,), the middles of the pixels along a side of the picture, from -1 to 1.
_STEPS: Plane = (np.arange(PHOTOGRAPH_PIXELS, dtype=np.float32) + 0.5) * np.float32(2 / PHOTOGRAPH_PIXELS) - 1
# By the number of pieces on a plate: (least, largest) distance of pieces from the middle, in radii of the plate.
_RADII = {1: (0.0, 0.5), 2: (0.38, 0.55), 3: (0.45, 0.58), 4: (0.52, 0.6)}
_PIECE = 1.5  # scale of the pieces
# Red, green, blue of 0 to 255.
_FOOD_COLOURS = ((150, 92, 40), (110, 60, 34), (176, 110, 30), (136, 70, 60))
_PLATE_COLOURS = ((246, 244, 238), (206, 222, 236), (222, 232, 204), (240, 226, 214))
_TABLE_COLOURS = ((120, 84, 54), (90, 96, 100), (160, 60, 60), (70, 100, 84), (60, 80, 120), (150, 150, 140))
_BERRY_COLOURS = ((200, 20, 60), (60, 40, 150))
_DISH_NOTICE = """This corpus is synthetic.

Every picture was drawn by FVC's generator (version {version}): no dish in it was ever cooked. manifest.csv says what
lies on each plate. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real
food.
"""


def _length(x: Plane, y: Plane) -> Plane:
    return np.asarray(np.sqrt(x * x + y * y))


# Functions that return the distance of points (x, y) to the edge of a piece at the origin, negative inside the piece.
# Every piece covers an area of 0.09.
FOODS: dict[str, Callable[[Plane, Plane], Plane]] = {
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
    """Description of a dish: the food on its plate, and the facts that the manifest states about it.

    All photographs of the dish show the same plate.
    """

    name: str  # seeds everything else about the pictures of the dish
    food: str  # a key of ``FOODS``
    num_pieces: int  # pieces of the food, 1 to 4
    num_berries: int  # berries at the rim, 0 to 5
    # What the manifest states: the food as ``class``, and known amounts by the names in ``TARGETS``.
    stated: Mapping[str, str | float | None] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the dish's photographs, relative to the corpus folder, with '/'."""
        return tuple(f"images/{self.name}_{number}.jpg" for number in range(PHOTOGRAPHS_PER_DISH))


def photograph(dish: Dish, number: int) -> bytes:
    """Return photograph ``number`` of ``dish`` as the bytes of a square JPEG with sides of ``PHOTOGRAPH_PIXELS``.

    Camera, light and noise differ between the photographs of a dish.
    """
    picture = _draw(dish, generator_for("photograph", dish.name, number))
    quality = int(generator_for("quality", dish.name, number).integers(72, 95))
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _draw(dish: Dish, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a picture of ``dish``, RGB, uint8 (96, 96, 3); ``rng`` decides camera and light."""
    look = generator_for("dish", dish.name)  # decides what all photographs of the dish share
    pieces = _scattered(dish.num_pieces, look)
    angles = (look.permutation(12)[: dish.num_berries] + look.uniform(0.2, 0.8, dish.num_berries)) * (math.pi / 6)
    berries = [(0.9 * math.cos(angle), 0.9 * math.sin(angle)) for angle in angles.tolist()]  # in radii of the plate
    palettes = (_FOOD_COLOURS, _PLATE_COLOURS, _TABLE_COLOURS, _BERRY_COLOURS)
    food, plate, table, berry = (look.choice(palette) for palette in palettes)
    is_round = look.random() < 0.5
    x, y, pixel = _plate_coordinates(rng)
    canvas: Plane = table.astype(np.float32) * _grain(x, y, rng)[..., None]
    edge = _length(x, y) - 1 if is_round else np.maximum(np.abs(x), np.abs(y)) - 0.92
    _paint(canvas, edge - 0.05, (30, 26, 24), pixel * 6, 0.5)
    _paint(canvas, edge, plate, pixel)
    _paint(canvas, np.abs(edge + 0.16) - 0.01, 0.8 * plate, pixel, 0.6)
    for place_x, place_y, angle in pieces:
        right, down = _turned(x - place_x, y - place_y, -angle)
        distance = FOODS[dish.food](right * (1 / _PIECE), down * (1 / _PIECE)) * _PIECE
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
    """Return the positions (x, y, angle) of ``count`` pieces of food on the plate.

    x and y are measured from the middle of the plate, in radii of the plate. The angle is the rotation of the piece in
    radians. Every piece is in a different sector of the plate, so that pieces hardly touch.
    """
    first, places = rng.uniform(0, 2 * math.pi), []
    for number in range(count):
        radius = rng.uniform(*_RADII[count])
        angle = first + (number + rng.uniform(-0.1, 0.1)) * 2 * math.pi / count
        places.append((radius * math.cos(angle), radius * math.sin(angle), rng.uniform(0, 2 * math.pi)))
    return places


def _plate_coordinates(rng: np.random.Generator) -> tuple[Plane, Plane, np.float32]:
    """Return (x, y, pixel): the coordinates of all pixels of a picture, both (H, W), and the width of a pixel.

    All three are in radii of the plate. The middle of the plate is the origin. ``rng`` decides how the camera sees the
    plate: rotation, shift, scale and tilt.
    """
    angle, scale, tilt = rng.uniform((0, 1.02, 1.0), (2 * math.pi, 1.16, 1.12)).tolist()
    across = (_STEPS[None, :] - rng.uniform(-0.1, 0.1)) * scale
    down = (_STEPS[:, None] - rng.uniform(-0.1, 0.1)) * (scale * tilt)
    return *_turned(across, down, angle), np.float32(2 * scale / PHOTOGRAPH_PIXELS)


def _turned(x: Plane, y: Plane, angle: float) -> tuple[Plane, Plane]:
    """Return the coordinates (x, y), rotated about the origin by ``angle`` in radians."""
    cosine, sine = math.cos(angle), math.sin(angle)
    return cosine * x - sine * y, cosine * y + sine * x


def _grain(x: Plane, y: Plane, rng: np.random.Generator) -> Plane:
    """Return the pattern of the table under the plate, (H, W): a factor of brightness for each pixel.

    The pattern consists of boards (stripes) or checks; ``rng`` decides which. ``x`` and ``y`` are the coordinates of
    the pixels, (H, W), in radii of the plate.
    """
    period, strength = rng.uniform((0.2, 0.05), (0.5, 0.18)).tolist()
    boards = np.abs((x / period) % 1 - 0.5) > 0.25
    if rng.random() < 0.5:
        boards = boards ^ (np.abs((y / period) % 1 - 0.5) > 0.25)
    return np.asarray(1 - strength * boards.astype(np.float32))


def _paint(canvas: Plane, distance: Plane, colour: npt.ArrayLike, blur: np.float32, opacity: float = 1.0) -> None:
    """Paint ``colour`` (3,) into ``canvas`` (H, W, 3), in place, where ``distance`` (H, W) is negative.

    ``blur`` is the width of the soft edge, in the unit of ``distance``. ``opacity`` is from 0 to 1.
    """
    cover = np.clip(0.5 - distance / blur, 0, 1) * opacity
    canvas += cover[..., None] * (np.asarray(colour, np.float32) - canvas)


def plan_dishes() -> tuple[Dish, ...]:
    """Return all dishes of the sample corpus in the order of their names, with the facts that the manifest states.

    The result is the same on every call.
    """
    foods, dishes = [food for food in FOODS for _ in range(DISHES_PER_FOOD)], list[Dish]()
    for number, place in enumerate(generator_for("dishes", CORPUS_VERSION).permutation(len(foods))):
        name, food = f"dish_{number:03d}", foods[place]
        rng = generator_for("plan", CORPUS_VERSION, name)
        contents, fate = (int(rng.integers(1, 5)), int(rng.integers(0, 6))), rng.random()
        # A few dishes have all numbers and no class, some have no number, and some have a mass only.
        known = TARGETS if fate < 0.04 or fate > 0.22 else () if fate < 0.1 else ("mass_g",)
        total = contents[0] * _AMOUNTS[food] + contents[1] * _AMOUNTS["berries"]
        amounts = {target: round(amount, 3) for target, amount in zip(TARGETS, total.tolist(), strict=True)}
        stated = {"class": food if fate >= 0.04 else None, **{target: amounts[target] for target in known}}
        dishes.append(Dish(name, food, *contents, stated))
    return tuple(dishes)


def generate_sample_dishes(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the missing files of the sample corpus of dishes to ``folder``: photographs and a manifest.

    Existing files of the same version of the corpus are not changed. Equal versions of this code, numpy and Pillow
    write equal bytes. ``progress`` is called with (files done, files in all).

    Returns:
        The path of ``manifest.csv``: columns path, class, group and ``TARGETS``. Empty cells are unknown values.
    """
    dishes = plan_dishes()
    numbers = range(PHOTOGRAPHS_PER_DISH)
    plan = {dish.paths: partial(lambda dish: [photograph(dish, number) for number in numbers], dish) for dish in dishes}
    texts = dict.fromkeys(("path", "class", "group"), pl.String)
    rows = [{"path": path, "group": dish.name, **dish.stated} for dish in dishes for path in dish.paths]
    manifest = pl.DataFrame(rows, schema={**texts, **dict.fromkeys(TARGETS, pl.Float64)})
    return generate(Path(folder), _DISH_NOTICE.format(version=CORPUS_VERSION), plan, manifest, progress)


# --- Clips with captions. In every clip, one drawn thing moves over a ground with light and shade. Colours differ so
# much in chroma that they survive encoding.

CLIP_PIXELS = 64
NUM_FRAMES = 12

# Red, green, blue of 0 to 255.
COLOURS = {
    "red": (215, 30, 30),
    "yellow": (235, 215, 40),
    "cyan": (40, 205, 215),
    "blue": (40, 60, 240),
    "purple": (185, 40, 200),
    "white": (225, 225, 225),
}
# Functions that return whether points are inside a shape. Arguments: distances of the points to the right of the middle
# and below it, in radii of the shape.
SHAPES: dict[str, Callable[[Plane, Plane], npt.NDArray[np.bool_]]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) <= 0.85,
    "triangle": lambda x, y: (np.abs(y) <= 0.95) & (np.abs(x) <= (y + 0.95) * 0.55),
    "cross": lambda x, y: (np.minimum(np.abs(x), np.abs(y)) <= 0.3) & (np.maximum(np.abs(x), np.abs(y)) <= 1),
    "ring": lambda x, y: (x * x + y * y <= 1) & (x * x + y * y >= 0.3),
}
MOTIONS = {"moves left": (0, -1), "moves right": (0, 1), "moves up": (-1, 0), "moves down": (1, 0)}  # (rows, columns)
GROUNDS = {
    "green field": (45, 120, 50),
    "grey road": (105, 105, 105),
    "brown desert": (145, 105, 60),
    "night sky": (35, 40, 95),
}
_ENCODINGS = (("libx264", "mp4"), ("mpeg4", "avi"), ("libx264", "mkv"), ("mpeg4", "mp4"))


@dataclass(frozen=True)
class Drawing:
    """Description of a clip with a caption; equal descriptions give files with equal bytes.

    ``name`` is the file name without extension. It seeds everything that the caption does not say, such as size,
    position and encoding. ``colour``, ``shape``, ``motion`` and ``ground`` are keys of ``COLOURS``, ``SHAPES``,
    ``MOTIONS`` and ``GROUNDS``. ``part`` is train, validation or test.
    """

    name: str
    colour: str
    shape: str
    motion: str
    ground: str
    part: str = "train"

    @property
    def caption(self) -> str:
        """The caption of the clip, such as ``a red ring moves up over a grey road``."""
        return f"a {self.colour} {self.shape} {self.motion} over a {self.ground}"

    @property
    def encoding(self) -> Encoding:
        """The encoding of the clip; ``name`` decides codec and container, independently of the picture."""
        codec, suffix = _ENCODINGS[int(generator_for("caption encoding", self.name).integers(len(_ENCODINGS)))]
        return Encoding(codec, suffix, frames_per_second=8, bits_per_pixel=1.2)

    @property
    def path(self) -> str:
        """The path of the clip's file, relative to the corpus folder, with '/'."""
        return f"videos/{self.name}.{self.encoding.suffix}"


def make_clip(drawing: Drawing) -> bytes:
    """Draw and encode the clip that ``drawing`` describes; return the bytes of the video file."""
    frames = draw(drawing)
    return encode_frames(frames, drawing.encoding, drawing.encoding.bits_per_second(frames))


def draw(drawing: Drawing) -> Planes:
    """Draw the T frames of a clip: a coloured shape that moves over a ground.

    The result is planar yuv420p in video range, uint8 (T, 3*H/2, W).
    """
    rng = generator_for("caption drawing", drawing.name)
    ground, thing = _levels(GROUNDS[drawing.ground]), _levels(COLOURS[drawing.colour])
    shade = texture(rng, CLIP_PIXELS, CLIP_PIXELS, (32, 16, 16, 7), 26.0)
    shine = rng.uniform(-8, 8)
    radius = float(rng.uniform(9.0, 12.0))
    path, pixels = _path(rng, MOTIONS[drawing.motion], radius), np.arange(CLIP_PIXELS) + 0.5
    frames = np.empty((NUM_FRAMES, CLIP_PIXELS * 3 // 2, CLIP_PIXELS), np.uint8)
    for frame, (row, column) in zip(frames, path, strict=True):
        inside = np.asarray(SHAPES[drawing.shape]((pixels - column) / radius, (pixels[:, None] - row) / radius))
        luma = np.where(inside, thing[0] + shine, ground[0] + shade)
        chroma = np.where(inside[::2, ::2], thing[1:, None, None], ground[1:, None, None])
        frame[:CLIP_PIXELS] = np.clip(np.rint(luma), 16, 235)
        frame[CLIP_PIXELS:] = np.rint(chroma).reshape(CLIP_PIXELS // 2, CLIP_PIXELS)
    return frames


def _path(rng: np.random.Generator, direction: tuple[int, int], radius: float) -> npt.NDArray[np.float64]:
    """Return the centre (row, column) of the moving shape in each of T frames, (T, 2), in pixels.

    The shape moves straight at constant speed and stays inside the picture. Its start is drawn at random, so that a
    single frame does not reveal the direction.

    Args:
        rng: decides start and length of the path.
        direction: signs of the motion (down, right), such as (0, -1) for left.
        radius: radius of the shape in pixels.
    """
    low, high = radius + 1, CLIP_PIXELS - radius - 1
    length = rng.uniform(0.6, 0.85) * (high - low)
    first = rng.uniform(low, high - length)
    along = np.linspace(first, first + length, NUM_FRAMES)[:: sum(direction)]
    across = np.full(NUM_FRAMES, rng.uniform(low, high))
    return np.stack([along, across] if direction[0] else [across, along], axis=1)


def _levels(colour: tuple[int, int, int]) -> Plane:
    """Return (luma, blue chroma, red chroma) of an RGB colour of 0 to 255, float32 (3,), in BT.601 video range."""
    red, green, blue = (value / 255 for value in colour)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return np.array([16 + 219 * luma, 128 + 224 * (blue - luma) / 1.772, 128 + 224 * (red - luma) / 1.402], np.float32)


_PARTS = (("test", 64, 8), ("validation", 40, 0), ("train", 280, 40))  # part, captions, captions with a second clip
_CLIP_NOTICE = """This corpus is synthetic.

Every clip was drawn by FVC's generator (version {version}): no place or thing in it exists. manifest.csv says what is
seen in each. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real videos.
"""


def plan_clips() -> tuple[Drawing, ...]:
    """Return the descriptions of all clips with captions in the sample corpus, in the order of their names.

    Each part (train, validation, test) gets different captions. The result is the same on every call.
    """
    combinations = list(product(COLOURS, SHAPES, MOTIONS, GROUNDS))
    dealt = [combinations[i] for i in generator_for("captions", CORPUS_VERSION).permutation(len(combinations))]
    shown: list[tuple[str, ...]] = []
    for part, num_captions, num_repeated in _PARTS:
        chosen, dealt = dealt[:num_captions], dealt[num_captions:]
        shown.extend((*combination, part) for combination in [*chosen, *chosen[:num_repeated]])
    order = generator_for("caption order", CORPUS_VERSION).permutation(len(shown))
    return tuple(Drawing(f"drawing_{number:03d}", *shown[place]) for number, place in enumerate(order))


def generate_sample_captions(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the missing files of the sample corpus of clips with captions to ``folder``: videos and a manifest.

    Existing files of the same version of the corpus are not changed. Equal versions of this code, numpy and PyAV write
    equal bytes. ``progress`` is called with (files done, files in all).

    Returns:
        The path of ``manifest.csv``: columns path, text, split (train, validation, test), group.
    """
    clips = plan_clips()
    plan = {(clip.path,): partial(lambda clip: [make_clip(clip)], clip) for clip in clips}
    rows = [(clip.path, clip.caption, clip.part, clip.name) for clip in clips]
    manifest = pl.DataFrame(rows, schema=["path", "text", "split", "group"], orient="row")
    return generate(Path(folder), _CLIP_NOTICE.format(version=CORPUS_VERSION), plan, manifest, progress)
