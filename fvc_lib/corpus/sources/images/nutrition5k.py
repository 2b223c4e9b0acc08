"""Nutrition5k's layout: dishes with their energy, mass and macronutrients, each with one or many pictures.

``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, and grams of mass,
fat, carbohydrate and protein, then what is known of each ingredient, which is not read. ``dish_ids/splits`` has the
official parts, ``imagery`` the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``.
Source: Q. Thames et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021.
"""

import csv
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fvc_lib.corpus import listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal
from fvc_lib.corpus.sources.published import read_lines
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
SPLITS = {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}
# In the order of the columns.
UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}


@dataclass(frozen=True)
class _Dish:
    targets: tuple[tuple[str, float], ...]
    row: int
    table: str


def is_nutrition5k(folder: Path) -> bool:
    """Whether ``folder`` has the layout, be it that its tables are missing."""
    return any((folder / "metadata" / name).is_file() for name in TABLES) or (folder / "imagery").is_dir()


def list_nutrition5k(files: CorpusFiles, below: str = "") -> ImageListing:
    """The pictures of every dish that the tables describe; frames of one dish have the dish as their group.

    Depth images are no pictures of food. Dishes without any picture, and dishes that the official lists do not name,
    are reported and left out.

    Raises:
        UsageError: no table can be read, or one of the two official lists is missing.
    """
    pictured = ImageListing(units=dict(UNITS))
    folder = files.root / below
    dishes = _read_dishes(folder / "metadata", below, pictured)
    parts = _read_parts(folder / "dish_ids" / "splits")
    pictures, num_videos = _pictures(files, listing.joined(below, "imagery"), dishes, pictured)
    listed = {name: dish for name, dish in dishes.items() if not parts or name in parts}
    for name, dish in dishes.items():
        where = listing.joined(below, "metadata", dish.table)
        if name not in listed:
            detail = f"{dish.table} row {dish.row}: {name!r} is in none of {' and '.join(SPLITS.values())}."
            pictured.rejections.add_file(where, Refusal("not_listed", detail), row=dish.row)
        elif not pictures.get(name):
            detail = f"{dish.table} row {dish.row}: no picture of {name!r} below imagery. Fetch it, or leave it."
            pictured.rejections.add_file(where, Refusal("no_picture", detail), row=dish.row)
        else:
            part = min(parts.get(name, ()), default=None)
            for path in pictures[name]:
                text, refusal = path_to_text(path), files.check(path)
                if refusal is not None:
                    pictured.rejections.add_file(text, refusal)
                    continue
                group = escape_text(name)
                image = ListedImage(text, "nutrition5k", None, group, part, targets=dish.targets, row=dish.row)
                pictured.images.append(image)
    both = sorted(name for name in listed if len(parts.get(name, ())) > 1)
    if both:
        where = " and in ".join(SPLITS.values())
        raise LeakageError(
            f"leakage: {len(both)} dishes are in {where}: {listing.some_of(both)}. Remove them from one."
        )
    pictured.notes.extend(_notes(pictured, parts, num_videos, sorted(set(parts) - set(dishes))))
    return pictured


def _read_dishes(folder: Path, below: str, pictured: ImageListing) -> dict[str, _Dish]:
    """Every dish that is described once, or alike each time."""
    found: defaultdict[str, list[_Dish]] = defaultdict(list)
    present = [name for name in TABLES if (folder / name).is_file()]
    if not present:
        raise UsageError(f"{str(folder)!r}: has none of {', '.join(TABLES)}. Restore them, or choose an image_layout.")
    for table in present:
        where = listing.joined(below, "metadata", table)
        for row, line in enumerate(read_lines(folder / table), start=1):
            # Line by line: a quote that is not closed must not swallow the dishes below it.
            cells = next(csv.reader([line]), [])
            if not cells:
                continue
            values = _numbers(cells)
            if isinstance(values, Refusal):
                pictured.rejections.add_file(
                    where, Refusal(values.reason, f"{table} row {row}: {values.detail}"), row=row
                )
            else:
                found[cells[0].strip()].append(_Dish(values, row, table))
    dishes = {}
    for name, described in found.items():
        first, *others = described
        differing = any(dish.targets != first.targets for dish in others)
        if not differing:
            dishes[name] = first
        for dish in described if differing else others:
            how = "with other numbers" if differing else "in the same words"
            detail = f"{dish.table} row {dish.row}: {name!r} is described {len(described)} times, {how}. Keep one row."
            reason = "conflicting_targets" if differing else "duplicate_row"
            pictured.rejections.add_file(
                listing.joined(below, "metadata", dish.table), Refusal(reason, detail), row=dish.row
            )
    return dishes


def _numbers(cells: list[str]) -> tuple[tuple[str, float], ...] | Refusal:
    """The dish's totals. How many columns its ingredients take does not matter here."""
    if len(cells) <= len(UNITS) or not cells[0].strip():
        return Refusal("malformed_row", f"got {len(cells)} cells, wanted a dish id and {len(UNITS)} numbers at least.")
    values = {}
    for name, cell in zip(UNITS, cells[1:], strict=False):
        try:
            values[name] = float(cell)
        except ValueError:
            return Refusal("bad_number", f"{name}: got {cell!r}, wanted a number.")
        if not (math.isfinite(values[name]) and values[name] >= 0):
            return Refusal("bad_number", f"{name}: got {cell.strip()}, wanted a number of at least 0.")
    return tuple(sorted(values.items()))


def _read_parts(folder: Path) -> dict[str, set[str]]:
    """Dish to its official parts; empty where there are no lists at all."""
    present = [part for part, name in SPLITS.items() if (folder / name).is_file()]
    parts: defaultdict[str, set[str]] = defaultdict(set)
    if present:
        for part, name in SPLITS.items():
            for line in read_lines(folder / name):
                if line:
                    parts[line].add(part)
    return dict(parts)


def _pictures(
    files: CorpusFiles, top: str, dishes: dict[str, _Dish], pictured: ImageListing
) -> tuple[dict[str, list[str]], int]:
    """Dish to paths of its pictures, and how many videos there are, which nothing is read from."""
    pictures: defaultdict[str, list[str]] = defaultdict(list)
    num_videos = 0
    for path, is_folder in files.walk_all(top):
        below = listing.parts_below(path, top)
        dish = next((name for name in below[:-1] if name in dishes), None)
        if is_folder:
            pictured.rejections.add_file(path_to_text(path), files.link_refusal(path))
        elif not listing.is_named_as("image", path):
            num_videos += PurePosixPath(path).suffix in (".h264", ".mp4")
        elif PurePosixPath(path).name.startswith("depth"):
            continue
        elif dish is None:
            detail = f"{path!r} lies in no folder of a dish that can be used. See what was rejected of the tables."
            pictured.rejections.add_file(path_to_text(path), Refusal("not_listed", detail))
        else:
            pictures[dish].append(path)
    return dict(pictures), num_videos


def _notes(pictured: ImageListing, parts: dict[str, set[str]], num_videos: int, unknown: list[str]) -> list[str]:
    num_dishes = len({image.stated_group for image in pictured.images})
    kept = "its own split is kept" if parts else "it has no lists of its split here, so one is made"
    notes = [f"Nutrition5k: {len(pictured.images):,} pictures of {num_dishes:,} dishes, without classes; {kept}."]
    if num_videos:
        notes.append(
            f"Nutrition5k: {num_videos:,} videos of side angles are not read. Extract frames into the dishes' folders "
            "to use them (ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg)."
        )
    if unknown:
        notes.append(
            f"Nutrition5k: {len(unknown):,} dishes of the official lists have no row that can be used, such as "
            f"{escape_text(unknown[0])!r}: the parts are so much smaller than the official ones."
        )
    return notes


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="nutrition5k",
        accepted="Nutrition5k's with metadata/, dish_ids/ and imagery/",
        recognises=is_nutrition5k,
        read=list_nutrition5k,
    )
)
