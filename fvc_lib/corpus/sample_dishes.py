"""The generated corpus of task image: photographs of drawn dishes, with what lies on them and what that amounts to.

Several photographs show one dish: they are its group. Pieces of one kind have one mass and one composition, so what a
dish weighs and how much energy it has follow from what can be seen: which food it is, and how many pieces and berries.
Some dishes were weighed only, some not at all, and of a few nobody wrote down the food, as in real corpora.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fvc_lib.corpus.sample_dishes_drawing import SHAPES, Dish, photograph
from fvc_lib.corpus.sample_record import PlannedFile, make_missing, write_if_other
from fvc_lib.corpus.sample_scenes import generator_for

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
MANIFEST = "manifest.csv"
RECORD = "sample_dishes.json"
NOTICE = "NOTICE.txt"
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
    """A dish and what is known of it.

    Attributes:
        dish: what is drawn.
        class_label: the food, or the empty text where nobody wrote it down.
        known: which of ``TARGETS`` were measured.
    """

    dish: Dish
    class_label: str
    known: frozenset[str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Its photographs, relative to the corpus folder, with '/'."""
        return tuple(f"images/{self.dish.name}_{number}.jpg" for number in range(PHOTOGRAPHS_PER_DISH))

    @property
    def amounts(self) -> dict[str, float]:
        """What the whole dish has of each of ``TARGETS``, known or not."""
        piece, berry = COMPOSITIONS[self.dish.food].amounts, BERRY.amounts
        total = (self.dish.num_pieces * p + self.dish.num_berries * b for p, b in zip(piece, berry, strict=True))
        return {name: round(amount, 3) for name, amount in zip(TARGETS, total, strict=True)}


def plan_dishes() -> tuple[PlannedDish, ...]:
    """All dishes in the order of their names, which say nothing about them; the same on every call."""
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
    folder: Path, *, progress: Callable[[int, int], None] | None = None, stop: Callable[[], bool] | None = None
) -> Path:
    """Write the corpus to ``folder``, or what is missing of it.

    Pictures that an earlier call finished are recognised by their checksums and kept; damaged, missing or foreign ones
    are written again. Equal versions of this code, numpy and Pillow write equal bytes.

    Args:
        folder: created when missing; files in it that the corpus does not name are left alone.
        progress: called with (dishes done, dishes in all) after each dish.
        stop: asked after each dish.

    Returns:
        The path of ``manifest.csv``: columns path, class, group and ``TARGETS``; an empty cell is not known.

    Raises:
        StoppedError: ``stop`` said so; a later call goes on.
        OSError: as the file system gave it; a later call finishes what was begun.
    """
    plan = plan_dishes()
    files = [
        [PlannedFile(path, partial(photograph, planned.dish, number)) for number, path in enumerate(planned.paths)]
        for planned in plan
    ]
    make_missing(folder, folder / RECORD, CORPUS_VERSION, files, "dishes", progress, stop)
    write_if_other(folder / NOTICE, _NOTICE_TEXT.format(version=CORPUS_VERSION))
    write_if_other(folder / MANIFEST, manifest_text(plan))
    return folder / MANIFEST


def manifest_text(plan: Sequence[PlannedDish]) -> str:
    """The manifest's CSV text, one row per photograph."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "class", "group", *TARGETS])
    for planned in plan:
        amounts = planned.amounts
        cells = [amounts[name] if name in planned.known else "" for name in TARGETS]
        writer.writerows([path, planned.class_label, planned.dish.name, *cells] for path in planned.paths)
    return text.getvalue()
