"""List corpora of images: Food-101, Nutrition5k, manifests, and folders of classes.

- Food-101 (Bossard et al., "Food-101 - Mining discriminative components with random forests", ECCV 2014):
  ``images/<class>/<number>.jpg`` and ``meta/{train,test}.txt``, with lines such as ``apple_pie/1005649``.
- Nutrition5k (Thames et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021):
  ``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, grams of mass, fat,
  carbohydrate and protein, then ingredients, which are not read. ``dish_ids/splits`` has the official parts.
  ``imagery`` has the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from fvc_lib.corpus import label_table
from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, parts_below, some_of
from fvc_lib.corpus.label_table import PART_NAMES, cell_text
from fvc_lib.corpus.listing import CorpusLoader, recognised
from fvc_lib.corpus.sources.published import folders_in, holds, read_lines
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.registry import IMAGE_LAYOUTS


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. All texts are table text (``atomic_files.path_to_text``)."""

    path: str  # relative to the corpus root, with '/'
    class_label: str | None = None
    stated_group: str | None = None  # leakage group in the list of the corpus, if any
    part: str | None = None  # official part: train, validation or test
    row: int | None = None  # 1-based row of the table that lists the image
    targets: Mapping[str, float] = field(default_factory=dict)  # known values of targets (numbers to predict) by name


@dataclass
class ImageListing:
    """The images that the reader of a layout found in a corpus."""

    images: list[ListedImage] = field(default_factory=list)  # images that may be usable; none was opened
    rejections: Rejections = field(default_factory=Rejections)  # images and rows that are not used
    units: dict[str, str] = field(default_factory=dict)  # unit of each target by its name; empty text: no unit
    notes: list[str] = field(default_factory=list)  # sentences for the user

    def add(self, image: ListedImage, refusal: Refusal | None) -> None:
        """Add an image, or reject it if there is a refusal."""
        if refusal is None:
            self.images.append(image)
        else:
            self.rejections.add_file(image.path, refusal, image.class_label, image.row)


def list_images(corpus: AnyPath, *, allow_outside: bool = False) -> tuple[CorpusFiles, str, ImageListing]:
    """List a corpus of images without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        allow_outside: accept files outside the corpus folder, and follow links.

    Returns:
        (files, layout, listing): access to the files, the name of the layout, and the listed images.

    Raises:
        UsageError: the corpus has no known layout.
        DataError: a list of the corpus is missing.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    corpus = Path(corpus)
    loader = recognised(IMAGE_LAYOUTS, corpus)
    files = CorpusFiles(corpus.parent if corpus.is_file() else corpus, "image", allow_outside)
    return files, loader.name, loader.read(files, corpus)


# --- Food-101.

_FOOD_LISTS = {"test": "test.txt", "train": "train.txt"}  # test first: an image in both lists is a test image


def list_food101(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of Food-101, with their official parts.

    Images in neither of the two official lists, and lines without a file, are rejected.

    Raises:
        DataError: one of the two lists is missing.
    """
    found, listed = ImageListing(), set[str]()
    for part, name in _FOOD_LISTS.items():
        for row, key in enumerate(read_lines(corpus / "meta" / name), start=1):
            if not key:
                continue
            path, label, where = f"images/{key}.jpg", key.partition("/")[0], f"{name} row {row}: "
            refusal = files.check(path)
            if files.normalized(path) != path or "/" not in key:  # pie/../soup/1 is no picture of a pie
                refusal = Refusal("malformed_row", f"{where}got {key!r}, wanted a line like apple_pie/1005649.")
            elif path in listed:
                refusal = Refusal("duplicate_path", f"{where}{key!r} is listed already. Drop one of the lines.")
            listed.add(path)
            found.add(ListedImage(path_to_text(path), escape_text(label), part=part, row=row), refusal)
    for path in files.walk("images", found.rejections):
        if path not in listed:
            refusal = Refusal("not_listed", f"{path!r} is in no list of meta. Add it, or move it away.")
            found.add(ListedImage(path_to_text(path)), refusal)
    found.notes.append(f"Food-101: {len(found.images):,} usable images, its official split.")
    return found


# --- Nutrition5k.

_DISH_TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
_DISH_LISTS = {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}
# Units of the targets, in the order of the columns.
_DISH_UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}


def list_nutrition5k(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the pictures of the dishes of Nutrition5k; the pictures of a dish are a group.

    Depth images and videos are skipped. Dishes without a picture and pictures of dishes outside the official lists are
    rejected.

    Raises:
        DataError: there is no table of dishes, or one of the two official lists is missing.
        LeakageError: a dish is in both official lists.
    """
    found, others, shown = ImageListing(units=dict(_DISH_UNITS)), Rejections(), set[str]()
    dishes, parts = _read_dishes(corpus / "metadata", found.rejections), _read_parts(corpus / "dish_ids" / "splits")
    for path in files.walk("imagery", others):
        *folders, name = parts_below(path, "imagery")
        if name.startswith("depth"):
            continue
        owner = next((folder for folder in folders if folder in dishes), "")
        shown.add(owner)
        dish = replace(dishes.get(owner, ListedImage("")), path=path_to_text(path), part=parts.get(owner))
        refusal = files.check(path)
        if not owner or (parts and owner not in parts):
            refusal = Refusal("not_listed", f"{path!r} lies in no folder of a usable dish of the official lists.")
        found.add(dish, refusal)
    for name in dishes.keys() - shown:
        found.add(dishes[name], Refusal("no_picture", f"no picture of {name!r} below imagery. Fetch it."))
    found.rejections.rows.extend(row for row in others.rows if row[4] != "unknown_extension")
    found.notes.append(
        f"Nutrition5k: {len(found.images):,} pictures, without classes. Videos of side angles are not read: extract "
        "frames into the dishes' folders to use them (ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg)."
    )
    return found


def _read_dishes(folder: Path, rejections: Rejections) -> dict[str, ListedImage]:
    """Return the dishes by name, as ``ListedImage`` with the path of their table instead of a picture.

    Malformed rows are rejected, and so are rows of a dish that was described before.

    Raises:
        DataError: there is no table.
    """
    dishes = dict[str, ListedImage]()
    tables = [name for name in _DISH_TABLES if (folder / name).is_file()]
    if not tables:
        raise DataError(f"{str(folder)!r}: has none of {', '.join(_DISH_TABLES)}. Restore them.")
    for table in tables:
        for row, line in enumerate(filter(None, read_lines(folder / table)), start=1):
            name, *cells = (cell.strip() for cell in line.split(","))
            path, numbers = f"metadata/{table}", [_number(cell) for cell in cells[: len(_DISH_UNITS)]]
            known = {unit: number for unit, number in zip(_DISH_UNITS, numbers, strict=False) if number is not None}
            if not name or len(known) < len(_DISH_UNITS) or min(known.values()) < 0:
                detail = f"got {line[:80]!r}, wanted a dish id and {len(_DISH_UNITS)} numbers of at least 0."
                rejections.add_file(path, Refusal("malformed_row", f"{table} row {row}: {detail}"), row=row)
            elif name in dishes:
                detail = f"{table} row {row}: {name!r} is described already, and that row counts. Keep one."
                rejections.add_file(path, Refusal("duplicate_path", detail), row=row)
            else:
                dishes[name] = ListedImage(path, stated_group=escape_text(name), row=row, targets=known)
    return dishes


def _read_parts(folder: Path) -> dict[str, str]:
    """Return the official part of each dish, train or test, by dish; empty if ``folder`` does not exist.

    Raises:
        DataError: one of the two lists is missing.
        LeakageError: a dish is in both lists.
    """
    if not folder.is_dir():
        return {}
    names = {part: set(filter(None, read_lines(folder / name))) for part, name in _DISH_LISTS.items()}
    if both := sorted(names["train"] & names["test"]):
        lists = " and in ".join(_DISH_LISTS.values())
        raise LeakageError(f"leakage: {len(both)} dishes are in {lists}: {some_of(both)}. Remove them from one.")
    return {dish: part for part, dishes in names.items() for dish in dishes}


# --- A manifest: one row per file, with classes, numbers, groups and parts as far as known.

# A column called calories_kcal is the target calories, in kcal.
UNITS = frozenset({"kcal", "kj", "g", "mg", "kg", "ml", "l", "mm", "cm", "m", "s", "percent", "celsius", "eur", "usd"})
_MANIFEST = (
    "a CSV or Parquet manifest with the column 'path' and a 'class' or columns of numbers, or a folder with a "
    "manifest.csv in it"
)


def list_manifest(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of a manifest: the file ``corpus``, or the only table in that folder.

    Paths are relative to the manifest's folder. Optional columns are ``class`` (or ``label``), ``group`` and ``split``.
    Every other column of numbers is a target; a suffix such as ``_kcal`` is its unit. A cell that is no number is an
    unknown value. A column is not read if more than half of its filled cells are no numbers.

    Raises:
        UsageError: the file is no table, has no path column, or has two columns of the same meaning.
    """
    manifest = label_table.find_table(corpus, f"Wanted {_MANIFEST}.")
    table, found = label_table.read_label_table(manifest), ImageListing()
    paths, labels = ("path", "image_path", "image"), ("class", "label", "class_label")
    others = table.further_columns([paths], [labels, label_table.GROUP_COLUMNS, label_table.SPLIT_COLUMNS])
    column_of = _target_columns(table, others, found)
    for row in label_table.file_rows(table, files, found.rejections, paths):
        part, no_part = label_table.stated_part(row.cells)
        values = {target: _number(row.cells[column.lower()]) for target, column in column_of.items()}
        known = {target: value for target, value in values.items() if value is not None}
        label, group = cell_text(row.cells, *labels), cell_text(row.cells, *label_table.GROUP_COLUMNS)
        found.add(ListedImage(row.path, label, group, part, row.number, known), row.refused(no_part))
    numbers = ", ".join(f"{name} ({unit})" if unit else name for name, unit in found.units.items()) or "none"
    usable = f"{table.name}: {len(table.rows):,} rows, {len(found.images):,} usable images; numbers: {numbers}."
    found.notes.insert(0, usable)
    return found


def _target_columns(table: label_table.LabelTable, columns: Iterable[str], found: ImageListing) -> dict[str, str]:
    """Map the name of each target to its column among ``columns``.

    Units of the targets are added to ``found``, and notes on cells that hold no number.
    """
    column_of, rows = dict[str, str](), [cells for _, cells in table.records(Rejections())]
    for column in columns:
        filled = [cell for cells in rows if (cell := cell_text(cells, column.lower()))]
        strange = sum(_number(cell) is None for cell in filled)
        is_read = 2 * strange <= len(filled) > 0
        if strange:
            unread = "" if is_read else " The column is not read."
            found.notes.append(f"{table.name}: {strange:,} cells of {column!r} hold no number.{unread}")
        if is_read:
            name, _, unit = column.rpartition("_")
            if not name or unit.lower() not in UNITS:
                name, unit = column, ""
            target = column if name in column_of else name  # mass_kg next to mass_g keeps its full name
            column_of[target], found.units[target] = column, unit
    return column_of


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_manifest(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in label_table.SUFFIXES
    return holds(*label_table.PREFERRED_NAMES)(path)


# --- Folders of images, one per class, possibly below folders of parts.


def list_folder(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of a corpus with one folder per class.

    If all folders in it are named like parts (train, val, test), the classes are the folders inside these. Images
    outside the folders of classes are rejected.
    """
    found = ImageListing()
    depth = int(all(name.lower() in PART_NAMES for name in folders_in(corpus)))
    for path in files.walk("", found.rejections):
        names, refusal = PurePosixPath(path).parts, files.check(path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        label = escape_text(names[depth]) if len(names) > depth + 1 else None
        part = PART_NAMES[names[0].lower()] if depth and label else None
        found.add(ListedImage(path_to_text(path), label, part=part), refusal)
    found.notes.append(f"{len(found.images):,} images in folders of classes.")
    return found


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="food101",
        accepted="Food-101's folder with images/ and meta/",
        recognises=lambda path: (path / "images").is_dir() and holds(*_FOOD_LISTS.values())(path / "meta"),
        read=list_food101,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="nutrition5k",
        accepted="Nutrition5k's with metadata/, dish_ids/ and imagery/",
        recognises=holds("imagery", *(f"metadata/{name}" for name in _DISH_TABLES)),
        read=list_nutrition5k,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="manifest",
        accepted=_MANIFEST,
        recognises=_is_manifest,
        read=list_manifest,
        rank=1,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: bool(folders_in(path)),
        read=list_folder,
        rank=2,
    )
)
