"""Generate the sample corpus of task video_text: clips of moving drawn things, with captions.

Training, validation and test show different combinations of colour, shape, motion and ground. No test caption occurs in
training, but any two words of a test caption occur together in a training caption. So a model that finds the right
caption of a test clip has learned what the words mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.corpus.samples.files import Encoding, encode_frames, generate
from fvc_lib.corpus.samples.scenes import Plane, Planes, generator_for, texture
from fvc_lib.services.atomic_files import AnyPath

# In every clip, one drawn thing moves over a ground. Colours differ so much in chroma that they survive encoding.
# Grounds have light and shade. Arithmetic is element-wise only: equal drawings give equal bytes on every machine.

Distances = npt.NDArray[np.floating]
SIDE_PIXELS = 64
NUM_FRAMES = 12
FRAMES_PER_SECOND = 8
_BITS_PER_PIXEL = 1.2

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
SHAPES: dict[str, Callable[[Distances, Distances], npt.NDArray[np.bool_]]] = {
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
    """Description of a clip; equal descriptions give files with equal bytes.

    ``name`` seeds everything that the caption does not say, such as size, position and encoding. The other fields are
    keys of ``COLOURS``, ``SHAPES``, ``MOTIONS`` and ``GROUNDS``, and the part of the split.
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
        return Encoding(codec, suffix, FRAMES_PER_SECOND, _BITS_PER_PIXEL)

    @property
    def path(self) -> str:
        """The path of the clip's file, relative to the corpus folder, with '/'."""
        return f"videos/{self.name}.{self.encoding.suffix}"


def make_clip(drawing: Drawing) -> bytes:
    """Return the bytes of the video file of ``drawing``."""
    frames = draw(drawing)
    return encode_frames(frames, drawing.encoding, drawing.encoding.bits_per_second(frames))


def draw(drawing: Drawing) -> Planes:
    """Return the T frames of ``drawing``, planar yuv420p in video range, uint8 (T, 3*H/2, W)."""
    rng = generator_for("caption drawing", drawing.name)
    ground, thing = _levels(GROUNDS[drawing.ground]), _levels(COLOURS[drawing.colour])
    shade = texture(rng, SIDE_PIXELS, SIDE_PIXELS, (32, 16, 16, 7), 26.0)
    shine = rng.uniform(-8, 8)
    radius = float(rng.uniform(9.0, 12.0))
    path, pixels = _path(rng, MOTIONS[drawing.motion], radius), np.arange(SIDE_PIXELS) + 0.5
    frames = np.empty((NUM_FRAMES, SIDE_PIXELS * 3 // 2, SIDE_PIXELS), np.uint8)
    for frame, (row, column) in zip(frames, path, strict=True):
        inside = np.asarray(SHAPES[drawing.shape]((pixels - column) / radius, (pixels[:, None] - row) / radius))
        luma = np.where(inside, thing[0] + shine, ground[0] + shade)
        chroma = np.where(inside[::2, ::2], thing[1:, None, None], ground[1:, None, None])
        frame[:SIDE_PIXELS] = np.clip(np.rint(luma), 16, 235)
        frame[SIDE_PIXELS:] = np.rint(chroma).reshape(SIDE_PIXELS // 2, SIDE_PIXELS)
    return frames


def _path(rng: np.random.Generator, direction: tuple[int, int], radius: float) -> npt.NDArray[np.float64]:
    """Return the centres (row, column) of a thing in all T frames, (T, 2), in pixels.

    The thing moves straight at constant speed and stays inside the picture. Its start is drawn at random, so that a
    single frame does not reveal the direction.

    Args:
        rng: decides start and length of the path.
        direction: signs of the motion (down, right), such as (0, -1) for left.
        radius: radius of the thing in pixels.
    """
    low, high = radius + 1, SIDE_PIXELS - radius - 1
    length = rng.uniform(0.6, 0.85) * (high - low)
    first = rng.uniform(low, high - length)
    along = np.linspace(first, first + length, NUM_FRAMES)
    across = np.full(NUM_FRAMES, rng.uniform(low, high))
    if sum(direction) < 0:
        along = along[::-1]
    return np.stack([along, across] if direction[0] else [across, along], axis=1)


def _levels(colour: tuple[int, int, int]) -> Plane:
    """Return (luma, blue chroma, red chroma) of an RGB colour of 0 to 255, float32 (3,), in BT.601 video range."""
    red, green, blue = (value / 255 for value in colour)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return np.array([16 + 219 * luma, 128 + 224 * (blue - luma) / 1.772, 128 + 224 * (red - luma) / 1.402], np.float32)


# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
_PARTS = (("test", 64, 8), ("validation", 40, 0), ("train", 280, 40))  # part, captions, captions with a second clip
_NOTICE_TEXT = """This corpus is synthetic.

Every clip was drawn by FVC's generator (version {version}): no place or thing in it exists. manifest.csv says what is
seen in each. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real videos.
"""


def plan_clips() -> tuple[Drawing, ...]:
    """Return the descriptions of all clips in the order of their names; the result is the same on every call."""
    combinations = list(product(COLOURS, SHAPES, MOTIONS, GROUNDS))
    dealt = [combinations[i] for i in generator_for("captions", CORPUS_VERSION).permutation(len(combinations))]
    shown: list[tuple[str, ...]] = []
    for part, num_captions, num_repeated in _PARTS:
        chosen, dealt = dealt[:num_captions], dealt[num_captions:]
        shown.extend((*combination, part) for combination in [*chosen, *chosen[:num_repeated]])
    order = generator_for("caption order", CORPUS_VERSION).permutation(len(shown))
    return tuple(Drawing(f"drawing_{number:03d}", *shown[place]) for number, place in enumerate(order))


def generate_sample_captions(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the missing files of the corpus to ``folder``; see ``files.generate``.

    Equal versions of this code, numpy and PyAV write equal bytes.

    Returns:
        The path of ``manifest.csv``: columns path, text, split (train, validation, test), group.
    """
    clips = plan_clips()
    plan = {(clip.path,): partial(lambda clip: [make_clip(clip)], clip) for clip in clips}
    rows = [(clip.path, clip.caption, clip.part, clip.name) for clip in clips]
    manifest = pl.DataFrame(rows, schema=["path", "text", "split", "group"], orient="row")
    return generate(Path(folder), _NOTICE_TEXT.format(version=CORPUS_VERSION), plan, manifest, progress)
