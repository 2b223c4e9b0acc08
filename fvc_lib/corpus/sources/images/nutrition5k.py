"""Nutrition5k's layout: dishes with their energy, mass and macronutrients, each with one or many pictures.

``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, then grams of mass,
fat, carbohydrate and protein, then ingredients, which are not read. ``dish_ids/splits`` has the official parts.
``imagery`` has the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``. Source: Q. Thames
et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path, PurePosixPath

from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, is_named_as, joined, parts_below, some_of
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.listing import CorpusLoader
from fvc_lib.corpus.sources.published import read_lines
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
SPLITS = {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}
# In the order of the columns.
UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}
_Targets = tuple[tuple[str, float], ...]


def list_nutrition5k(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the pictures of each described dish; the dish is the group of its pictures.

    Depth images are skipped. Dishes without a picture or outside the official lists are rejected.

    Raises:
        UsageError: no table, or one of the two official lists is missing.
        LeakageError: the official lists share dishes.
    """
    found = ImageListing(units=dict(UNITS))
    folder, tables = files.root / below, joined(below, "metadata")
    dishes = _read_dishes(folder / "metadata", tables, found.rejections)
    parts = _read_parts(folder / "dish_ids" / "splits")
    pictured, num_videos, top = set[str](), 0, joined(below, "imagery")
    for path, is_link in files.walk_all(top):
        name = PurePosixPath(path)
        dish = next((part for part in parts_below(path, top)[:-1] if part in dishes), None)
        refusal = None
        if is_link:
            refusal = files.link_refusal(path)
        elif not is_named_as("image", path) or name.name.startswith("depth"):
            num_videos += name.suffix in (".h264", ".mp4")
            continue
        elif dish is None:
            refusal = Refusal("not_listed", f"{path!r} lies in no folder of a usable dish.")
        refusal = refusal or files.check(path)
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
        elif dish is not None:
            pictured.add(dish)
            if not parts or dish in parts:
                targets, row = dishes[dish]
                image = ListedImage(
                    path_to_text(path), "nutrition5k", None, escape_text(dish), parts.get(dish), targets, row
                )
                found.images.append(image)
    for dish, (_, row) in dishes.items():
        if parts and dish not in parts:
            refusal = Refusal("not_listed", f"row {row}: {dish!r} is in none of {' and '.join(SPLITS.values())}.")
        elif dish not in pictured:
            refusal = Refusal("no_picture", f"row {row}: no picture of {dish!r} below imagery. Fetch it.")
        else:
            continue
        found.rejections.add_file(tables, refusal, row=row)
    found.notes.append(
        f"Nutrition5k: {len(found.images):,} pictures of {len({image.stated_group for image in found.images}):,} "
        f"dishes, without classes; {'its own split is kept' if parts else 'it has no split here, so one is made'}."
    )
    if num_videos:
        found.notes.append(
            f"Nutrition5k: {num_videos:,} videos of side angles are not read. Extract frames into the dishes' folders "
            "to use them (ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg)."
        )
    if unknown := sorted(set(parts) - set(dishes)):
        names = some_of([escape_text(name) for name in unknown], 1)
        found.notes.append(f"Nutrition5k: {len(unknown):,} dishes of the official lists have no usable row: {names}.")
    return found


def _read_dishes(folder: Path, where: str, rejections: Rejections) -> dict[str, tuple[_Targets, int]]:
    """Return the numbers and first row of each dish that is described without contradiction."""
    found: defaultdict[str, list[tuple[_Targets, int, str]]] = defaultdict(list)
    present = [name for name in TABLES if (folder / name).is_file()]
    if not present:
        raise UsageError(f"{str(folder)!r}: has none of {', '.join(TABLES)}. Restore them, or choose an image_layout.")
    for table in present:
        for row, line in enumerate(read_lines(folder / table), start=1):
            # Parse line by line, so that an unclosed quote does not swallow the dishes below it.
            for cells in filter(None, csv.reader([line])):
                values = _numbers(cells)
                if isinstance(values, Refusal):
                    refusal = Refusal(values.reason, f"{table} row {row}: {values.detail}")
                    rejections.add_file(f"{where}/{table}", refusal, row=row)
                else:
                    found[cells[0].strip()].append((values, row, table))
    dishes = {}
    for dish, described in found.items():
        if len({values for values, *_ in described}) == 1:
            dishes[dish] = described[0][:2]
            continue
        for _, row, table in described:
            detail = f"{table} row {row}: {dish!r} is described {len(described)} times with other numbers."
            rejections.add_file(f"{where}/{table}", Refusal("conflicting_targets", detail), row=row)
    return dishes


def _numbers(cells: list[str]) -> _Targets | Refusal:
    """Return the dish's totals."""
    if len(cells) <= len(UNITS) or not cells[0].strip():
        return Refusal("malformed_row", f"got {len(cells)} cells, wanted a dish id and {len(UNITS)} numbers at least.")
    values = {}
    for name, cell in zip(UNITS, cells[1:], strict=False):
        try:
            values[name] = float(cell)
        except ValueError:
            values[name] = math.nan
        if not (math.isfinite(values[name]) and values[name] >= 0):
            return Refusal("bad_number", f"{name}: got {cell.strip()!r}, wanted a number of at least 0.")
    return tuple(sorted(values.items()))


def _read_parts(folder: Path) -> dict[str, str]:
    """Return the official part of each dish; empty without lists."""
    parts: dict[str, str] = {}
    if any((folder / name).is_file() for name in SPLITS.values()):
        for part, name in SPLITS.items():
            names = set(filter(None, read_lines(folder / name)))
            if both := sorted(names & parts.keys()):
                raise LeakageError(
                    f"leakage: {len(both)} dishes are in {' and in '.join(SPLITS.values())}: {some_of(both)}. "
                    "Remove them from one."
                )
            parts |= dict.fromkeys(names, part)
    return parts


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="nutrition5k",
        accepted="Nutrition5k's with metadata/, dish_ids/ and imagery/",
        recognises=lambda path: (
            any((path / "metadata" / name).is_file() for name in TABLES) or (path / "imagery").is_dir()
        ),
        read=list_nutrition5k,
    )
)
