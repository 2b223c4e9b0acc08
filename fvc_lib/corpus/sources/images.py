"""List corpora of images: Food-101, Nutrition5k, manifests, and folders of classes.

- Food-101 (Bossard et al., "Food-101 - Mining discriminative components with random forests", ECCV 2014):
  ``images/<class>/<number>.jpg`` and ``meta/{classes,train,test}.txt``, with lines such as ``apple_pie/1005649``.
- Nutrition5k (Thames et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021):
  ``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, grams of mass, fat,
  carbohydrate and protein, then ingredients, which are not read. ``dish_ids/splits`` has the official parts.
  ``imagery`` has the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fvc_lib.corpus import label_table
from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, is_named_as, parts_below, some_of
from fvc_lib.corpus.label_table import PART_NAMES, cell_text
from fvc_lib.corpus.listing import CorpusLoader, recognised
from fvc_lib.corpus.sources.published import folders_in, read_lines
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.registry import IMAGE_LAYOUTS


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. Text is table text (``atomic_files.path_to_text``)."""

    path: str  # relative to the corpus root, with '/'
    class_label: str | None = None
    stated_group: str | None = None
    part: str | None = None  # part of the official split
    row: int | None = None  # 1-based row of the table that listed it
    targets: Mapping[str, float] = field(default_factory=dict)  # the known numbers by name


@dataclass
class ImageListing:
    """The images of a corpus, as listed by the reader of its layout."""

    images: list[ListedImage] = field(default_factory=list)  # none was opened
    rejections: Rejections = field(default_factory=Rejections)
    units: dict[str, str] = field(default_factory=dict)  # unit by numeric target; empty text: no unit
    notes: list[str] = field(default_factory=list)


def list_images(corpus: AnyPath, *, allow_outside: bool = False) -> tuple[CorpusFiles, str, ImageListing]:
    """List a corpus of images without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        allow_outside: take files outside the corpus folder, and follow links.

    Returns:
        The access to the files, the name of the layout, and the listing.

    Raises:
        UsageError: the corpus has none of the layouts.
        DataError: a list of the corpus is missing.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    corpus = Path(corpus)
    loader = recognised(IMAGE_LAYOUTS, corpus)
    files = CorpusFiles(corpus.parent if corpus.is_file() else corpus, "image", allow_outside)
    return files, loader.name, loader.read(files, corpus)


# --- Food-101.

_FOOD_LISTS = {"test": "test.txt", "train": "train.txt"}  # test first: an image in both lists is tested on


def list_food101(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of Food-101, with their official parts.

    Images of a class that ``classes.txt`` lacks, images in neither list, and lines without a file are rejected.

    Raises:
        DataError: one of the three lists is missing.
    """
    found, meta, listed = ImageListing(), corpus / "meta", set[str]()
    classes = set(filter(None, read_lines(meta / "classes.txt")))
    for part, name in _FOOD_LISTS.items():
        for row, key in enumerate(read_lines(meta / name), start=1):
            if not key:
                continue
            path, label = f"images/{key}.jpg", key.partition("/")[0]
            refusal = files.check(path)
            if files.normalized(path) != path or "/" not in key:  # pie/../soup/1 is no picture of a pie
                refusal = Refusal("malformed_row", f"got {key!r}, wanted a line like apple_pie/1005649.")
            elif label not in classes:
                refusal = Refusal("unknown_class", f"the class {label!r} is not in classes.txt. Add it.")
            elif path in listed:
                refusal = Refusal("duplicate_path", f"{key!r} is listed already. Drop one of the lines.")
            listed.add(path)
            if refusal is None:
                found.images.append(ListedImage(path_to_text(path), escape_text(label), part=part, row=row))
            else:
                where = Refusal(refusal.reason, f"{name} row {row}: {refusal.detail}")
                found.rejections.add_file(path_to_text(path), where, escape_text(label), row)
    for path in files.walk("images", found.rejections):
        if path not in listed:
            refusal = Refusal("not_listed", f"{path!r} is in no list of meta. Add it, or move it away.")
            found.rejections.add_file(path_to_text(path), refusal)
    found.notes.append(f"Food-101: {len(classes):,} classes, {len(found.images):,} usable images; its split is kept.")
    return found


def _is_food101(folder: Path) -> bool:
    """Return whether the folder has the layout, even if one of its lists is missing."""
    lists = ("classes.txt", *_FOOD_LISTS.values())
    return (folder / "images").is_dir() and any((folder / "meta" / name).is_file() for name in lists)


# --- Nutrition5k.

_DISH_TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
_DISH_LISTS = {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}
_DISH_UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}  # as the columns


@dataclass(frozen=True)
class _Dish:
    targets: Mapping[str, float]
    row: int  # 1-based row of the first table that has the dish
    pictures: list[str] = field(default_factory=list)  # paths


def list_nutrition5k(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the pictures of the dishes of Nutrition5k; the pictures of a dish are a group.

    Depth images and videos are skipped. Dishes without a picture or outside the official lists are rejected.

    Raises:
        DataError: no table, or one of the two official lists is missing.
        LeakageError: the official lists share dishes.
    """
    found = ImageListing(units=dict(_DISH_UNITS))
    dishes, parts = _read_dishes(corpus / "metadata", found.rejections), _read_parts(corpus / "dish_ids" / "splits")
    for path, is_link in files.walk_all("imagery"):
        owner = next((part for part in parts_below(path, "imagery")[:-1] if part in dishes), None)
        if not is_link and (not is_named_as("image", path) or PurePosixPath(path).name.startswith("depth")):
            continue
        refusal = files.link_refusal(path) if is_link else files.check(path)
        if refusal is None and owner is None:
            refusal = Refusal("not_listed", f"{path!r} lies in no folder of a usable dish.")
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
        elif owner is not None:
            dishes[owner].pictures.append(path_to_text(path))
    for name, dish in dishes.items():
        if parts and name not in parts:
            refusal = Refusal("not_listed", f"row {dish.row}: {name!r} is in no official list.")
        elif not dish.pictures:
            refusal = Refusal("no_picture", f"row {dish.row}: no picture of {name!r} below imagery. Fetch it.")
        else:
            found.images += [
                ListedImage(path, None, escape_text(name), parts.get(name), dish.row, dish.targets)
                for path in dish.pictures
            ]
            continue
        found.rejections.add_file("metadata", refusal, row=dish.row)
    found.notes.append(
        f"Nutrition5k: {len(found.images):,} pictures, without classes. Videos of side angles are not read: extract "
        "frames into the dishes' folders to use them (ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg)."
    )
    return found


def _read_dishes(folder: Path, rejections: Rejections) -> dict[str, _Dish]:
    """Return the dishes by name.

    Dishes that are listed twice with different numbers are left out and rejected, as are malformed rows.

    Raises:
        DataError: there is no table.
    """
    dishes, disputed = dict[str, _Dish](), set[str]()
    tables = [name for name in _DISH_TABLES if (folder / name).is_file()]
    if not tables:
        raise DataError(f"{str(folder)!r}: has none of {', '.join(_DISH_TABLES)}. Restore them.")
    for table in tables:
        for row, line in enumerate(read_lines(folder / table), start=1):
            name, *cells = (cell.strip() for cell in line.split(","))
            numbers = [_number(cell) for cell in cells[: len(_DISH_UNITS)]]
            values = {unit: number for unit, number in zip(_DISH_UNITS, numbers, strict=False) if number is not None}
            refusal = None
            if not name or len(values) < len(_DISH_UNITS) or min(values.values()) < 0:
                detail = f"got {line[:80]!r}, wanted a dish id and {len(_DISH_UNITS)} numbers of at least 0."
                refusal = Refusal("malformed_row", f"{table} row {row}: {detail}")
            elif dishes.setdefault(name, _Dish(values, row)).targets != values:
                disputed.add(name)
                detail = f"{name!r} is described again with other numbers. Keep one row; both are left out."
                refusal = Refusal("conflicting_targets", f"{table} row {row}: {detail}")
            if line and refusal is not None:
                rejections.add_file(f"metadata/{table}", refusal, row=row)
    return {name: dish for name, dish in dishes.items() if name not in disputed}


def _read_parts(folder: Path) -> dict[str, str]:
    """Return the official part of each dish, train or test; empty if there are no lists.

    Raises:
        DataError: one of the two lists is missing.
        LeakageError: a dish is in both lists.
    """
    if not any((folder / name).is_file() for name in _DISH_LISTS.values()):
        return {}
    names = {part: set(filter(None, read_lines(folder / name))) for part, name in _DISH_LISTS.items()}
    if both := sorted(names["train"] & names["test"]):
        raise LeakageError(
            f"leakage: {len(both)} dishes are in {' and in '.join(_DISH_LISTS.values())}: {some_of(both)}. "
            "Remove them from one."
        )
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
    path = table.require(("path", "image_path", "image"))
    label = table.optional(("class", "label", "class_label"))
    group, split = table.optional(label_table.GROUP_COLUMNS), table.optional(label_table.SPLIT_COLUMNS)
    table.refuse_misspelt((path, label or "class", *label_table.GROUP_COLUMNS, *label_table.SPLIT_COLUMNS))
    others = [name for name in table.columns if name and name not in {path, label, group, split}]
    target_of = _targets_of(table, others, found.notes)
    found.units = dict(target_of.values())
    for row in label_table.file_rows(table, files, found.rejections, path, [label, group, split, *target_of]):
        class_label, (part, no_part) = cell_text(row.cells, label), label_table.stated_part(row.cells, split)
        refusal = row.why_not(no_part)
        if refusal is not None:
            found.rejections.add_file(row.path, refusal, class_label, row.number)
            continue
        values = {name: _number(row.cells[column]) for column, (name, _) in target_of.items()}
        known = {name: value for name, value in values.items() if value is not None}
        found.images.append(
            ListedImage(row.path, class_label, cell_text(row.cells, group), part, row.number, known)
        )  # fmt: skip
    numbers = ", ".join(f"{name} ({unit})" if unit else name for name, unit in found.units.items()) or "none"
    found.notes.insert(
        0, f"{table.name}: {len(table.rows):,} rows, {len(found.images):,} usable images; numbers: {numbers}."
    )
    return found


def _targets_of(
    table: label_table.LabelTable, columns: Iterable[str], notes: list[str]
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Map the columns that hold numbers to (name of the target, unit); add notes on cells without numbers."""
    units = dict[str, str]()
    for column in columns:
        filled = [cell for _, cells in table.records([column], Rejections()) if (cell := cell_text(cells, column))]
        strange = [cell for cell in filled if _number(cell) is None]
        if filled and 2 * len(strange) <= len(filled):
            unit = column.rpartition("_")[2]
            units[column] = unit if unit != column and unit.lower() in UNITS else ""
        if strange:
            unread = "" if column in units else " The column is not read."
            notes.append(f"{table.name}: {len(strange):,} cells of {column!r} hold no number.{unread}")
    stems = {column: column.removesuffix(f"_{unit}") or column for column, unit in units.items()}
    # mass_g next to mass_kg keeps its full name.
    return {
        column: (stem if list(stems.values()).count(stem) == 1 else column, units[column])
        for column, stem in stems.items()
    }


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_manifest(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in label_table.SUFFIXES
    return any((path / name).is_file() for name in label_table.PREFERRED_NAMES)


# --- Folders of images, one per class, possibly below folders of parts.


def list_folder(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of a corpus with one folder per class.

    If all folders in it are named like parts (train, val, test), the classes are the folders inside these. Images
    outside the folders of classes are rejected.
    """
    found, folders = ImageListing(), folders_in(corpus)
    depth = int(all(name.lower() in PART_NAMES for name in folders))
    for path in files.walk("", found.rejections):
        names, refusal = PurePosixPath(path).parts, files.check(path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
            continue
        part = PART_NAMES[names[0].lower()] if depth else None
        found.images.append(ListedImage(path_to_text(path), escape_text(names[depth]), part=part))
    found.notes.append(f"{len(found.images):,} images in folders of classes.")
    return found


def _lacks_folders(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    tables = label_table.tables_in(folder)
    hint = f" Did you mean {str(folder / tables[0])!r}?" if tables else ""
    return (
        f"a folder without folders, so no image has a class or a number to learn.{hint} Sort the images into one "
        "folder per class, or list their classes or numbers in a manifest."
    )


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="food101", accepted="Food-101's folder with images/ and meta/", recognises=_is_food101, read=list_food101
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="nutrition5k",
        accepted="Nutrition5k's with metadata/, dish_ids/ and imagery/",
        recognises=lambda path: (
            any((path / "metadata" / name).is_file() for name in _DISH_TABLES) or (path / "imagery").is_dir()
        ),
        read=list_nutrition5k,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="manifest",
        accepted=_MANIFEST,
        recognises=_is_manifest,
        read=list_manifest,
        lacks=lambda path: "" if path.is_dir() else "a file that is no table.",
        rank=1,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: bool(folders_in(path)),
        read=list_folder,
        lacks=_lacks_folders,
        rank=2,
    )
)
