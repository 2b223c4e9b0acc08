"""List corpora of images: Food-101, Nutrition5k, manifests, folders of classes, and folders of several corpora.

- Food-101 (Bossard et al., "Food-101 - Mining discriminative components with random forests", ECCV 2014):
  ``images/<class>/<number>.jpg`` and ``meta/{classes,train,test}.txt``, with lines such as ``apple_pie/1005649``.
- Nutrition5k (Thames et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021):
  ``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, grams of mass, fat,
  carbohydrate and protein, then ingredients, which are not read. ``dish_ids/splits`` has the official parts.
  ``imagery`` has the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from fvc_lib.corpus import label_table
from fvc_lib.corpus.corpus_files import (
    CorpusFiles,
    Refusal,
    Rejections,
    counts_text,
    is_named_as,
    joined,
    parts_below,
    some_of,
)
from fvc_lib.corpus.label_table import PART_NAMES, cell_text
from fvc_lib.corpus.listing import CorpusLoader, by_rank, recognised
from fvc_lib.corpus.sources.published import folders_in, read_lines
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. Text is table text (``atomic_files.path_to_text``)."""

    path: str  # relative to the corpus root, with '/'
    source: str  # food101, nutrition5k, folder or manifest
    class_label: str | None = None
    stated_group: str | None = None
    part: str | None = None  # part of the official split
    targets: tuple[tuple[str, float], ...] = ()
    row: int | None = None  # 1-based row of the table that listed it
    corpus: str = ""  # folder of its corpus, if that belongs to a combined one


@dataclass
class ImageListing:
    """The images of one corpus, as listed by the reader of its layout."""

    images: list[ListedImage] = field(default_factory=list)  # none was opened
    rejections: Rejections = field(default_factory=Rejections)
    units: dict[str, str] = field(default_factory=dict)  # unit by numeric target; empty text: no unit
    notes: list[str] = field(default_factory=list)
    folder: str = ""  # folder of the corpus, if it belongs to a combined one

    def note_empty_classes(self, names: Iterable[str]) -> None:
        """Add a note that names those of the corpus's classes that have no image, if there are any."""
        empty = sorted(set(names) - {image.class_label for image in self.images})
        if empty:
            shown = some_of([escape_text(name) for name in empty], 8)
            self.notes.append(f"{len(empty):,} classes have no image and are not learned: {shown}.")


def list_images(
    corpus: AnyPath, layout: str = "auto", *, allow_outside: bool = False
) -> tuple[CorpusFiles, str, tuple[ImageListing, ...]]:
    """List a corpus of images without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        layout: one of ``IMAGE_LAYOUTS``, or auto.
        allow_outside: take files outside the corpus folder, and follow links.

    Returns:
        The access to the files, the name of the layout, and the listings. A combined corpus (a folder of several
        corpora) has one listing per folder, any other corpus has one.

    Raises:
        UsageError: the corpus has none of the layouts, or not the requested one.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    corpus = Path(corpus)
    if layout == "auto" or not corpus.exists():
        loader = recognised(IMAGE_LAYOUTS, corpus)
    else:
        loader = IMAGE_LAYOUTS.get(layout)
        if corpus.is_file() and not loader.recognises(corpus):
            raise UsageError(f"image_layout: got {layout!r}, but corpus {str(corpus)!r} is a file. Use auto.")
    folder, below = (corpus, "") if corpus.is_dir() else (corpus.parent, corpus.name)
    files = CorpusFiles(folder, "image", allow_outside)
    listed = loader.read(files, below)
    return files, loader.name, (listed,) if isinstance(listed, ImageListing) else tuple(listed)


# --- Food-101.

_FOOD_LISTS = {"test": "test.txt", "train": "train.txt"}  # test first: an image in both lists is tested on


def list_food101(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of Food-101, with their official parts. The corpus is in the folder ``below`` of ``files``.

    Images of a class that ``classes.txt`` lacks, images in neither list, and lines without a file are rejected.

    Raises:
        UsageError: one of the three lists is missing.
    """
    found, top, meta = ImageListing(), joined(below, "images"), files.root / below / "meta"
    classes = set(filter(None, read_lines(meta / "classes.txt")))
    listed, counts = set[str](), dict[str, int]()
    for part, name in _FOOD_LISTS.items():
        before = len(found.images)
        for row, key in enumerate(read_lines(meta / name), start=1):
            path, label = joined(top, f"{key}.jpg"), escape_text(key.partition("/")[0])
            normalized, refusal = files.normalized(path), None
            if not key:
                continue
            if isinstance(normalized, Refusal):
                refusal = normalized
            elif normalized != path or "/" not in key:  # pie/../soup/1 is no picture of a pie
                refusal = Refusal("malformed_row", f"got {key!r}, wanted a line like apple_pie/1005649.")
            elif key.partition("/")[0] not in classes:
                refusal = Refusal(
                    "unknown_class", f"the class {label!r} is not in classes.txt. Add it, or drop the line."
                )
            elif path in listed:
                refusal = Refusal("duplicate_path", f"{key!r} is listed already. Drop one of the lines.")
            refusal = refusal or files.check(path)
            listed.add(path)
            if refusal is None:
                found.images.append(ListedImage(path_to_text(path), "food101", label, part=part, row=row))
            else:
                detail = f"{name} row {row}: {refusal.detail}"
                found.rejections.add_file(path_to_text(path), Refusal(refusal.reason, detail), label, row)
        counts[part] = len(found.images) - before
    for path in files.walk(top, found.rejections):
        label = (*parts_below(path, top), "")[0]
        if path not in listed:
            reason = "not_listed" if label in classes else "unknown_class"
            detail = f"{path!r} is in no list of meta. Images are named NUMBER.jpg."
            found.rejections.add_file(path_to_text(path), Refusal(reason, detail), escape_text(label))
    found.notes.append(
        f"Food-101: {len(classes):,} classes, {counts['train']:,} images in train.txt and {counts['test']:,} in "
        "test.txt; its own split is kept."
    )
    found.note_empty_classes(classes)
    return found


def _is_food101(folder: Path) -> bool:
    """Return whether the folder has the layout, even if one of its lists is missing."""
    lists = ("classes.txt", *_FOOD_LISTS.values())
    return (folder / "images").is_dir() and any((folder / "meta" / name).is_file() for name in lists)


# --- Nutrition5k.

_DISH_TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
_DISH_LISTS = {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}
_DISH_UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}  # as the columns
_Targets = tuple[tuple[str, float], ...]


def list_nutrition5k(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the pictures of the dishes of Nutrition5k; the pictures of a dish are a group.

    The corpus is in the folder ``below`` of ``files``. Depth images and videos are skipped. Dishes without a
    picture or outside the official lists are rejected.

    Raises:
        UsageError: no table, or one of the two official lists is missing.
        LeakageError: the official lists share dishes.
    """
    found, folder, top = ImageListing(units=dict(_DISH_UNITS)), files.root / below, joined(below, "imagery")
    dishes = _read_dishes(folder / "metadata", joined(below, "metadata"), found.rejections)
    parts = _read_parts(folder / "dish_ids" / "splits")
    pictured = set[str]()
    for path, is_link in files.walk_all(top):
        dish = next((part for part in parts_below(path, top)[:-1] if part in dishes), "")
        if is_link:
            refusal: Refusal | None = files.link_refusal(path)
        elif not is_named_as("image", path) or PurePosixPath(path).name.startswith("depth"):
            continue
        elif not dish:
            refusal = Refusal("not_listed", f"{path!r} lies in no folder of a usable dish.")
        else:
            refusal = files.check(path)
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
            continue
        pictured.add(dish)
        if not parts or dish in parts:
            image = ListedImage(path_to_text(path), "nutrition5k", None, escape_text(dish), parts.get(dish))
            found.images.append(replace(image, targets=dishes[dish][0], row=dishes[dish][1]))
    for dish, (_, row) in dishes.items():
        refusal = None
        if parts and dish not in parts:
            refusal = Refusal("not_listed", f"row {row}: {dish!r} is in none of {' and '.join(_DISH_LISTS.values())}.")
        elif dish not in pictured:
            refusal = Refusal("no_picture", f"row {row}: no picture of {dish!r} below imagery. Fetch it.")
        if refusal is not None:
            found.rejections.add_file(joined(below, "metadata"), refusal, row=row)
    split = "its own split is kept" if parts else "it has no split here, so one is made"
    found.notes.append(
        f"Nutrition5k: {len(found.images):,} pictures of {len({image.stated_group for image in found.images}):,} "
        f"dishes, without classes; {split}. Videos of side angles are not read: extract frames into the dishes' "
        "folders to use them (ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg)."
    )
    if unknown := sorted(set(parts) - set(dishes)):
        names = some_of([escape_text(name) for name in unknown], 1)
        found.notes.append(f"Nutrition5k: {len(unknown):,} dishes of the official lists have no usable row: {names}.")
    return found


def _read_dishes(folder: Path, where: str, rejections: Rejections) -> dict[str, tuple[_Targets, int]]:
    """Return (numbers, row) for each dish: its named numbers, and the first row that has them.

    Dishes that are listed twice with different numbers are left out and rejected, as are malformed rows. ``where`` is
    the path of the tables' folder, for the rejections.

    Raises:
        UsageError: there is no table.
    """
    described: defaultdict[str, list[tuple[_Targets, int, str]]] = defaultdict(list)
    tables = [name for name in _DISH_TABLES if (folder / name).is_file()]
    if not tables:
        raise UsageError(
            f"{str(folder)!r}: has none of {', '.join(_DISH_TABLES)}. Restore them, or choose an image_layout."
        )

    def reject(table: str, row: int, reason: str, detail: str) -> None:
        rejections.add_file(f"{where}/{table}", Refusal(reason, f"{table} row {row}: {detail}"), row=row)

    for table in tables:
        for row, line in enumerate(read_lines(folder / table), start=1):
            # Parse line by line, so that an unclosed quote does not swallow the dishes below it.
            for dish, *cells in filter(None, csv.reader([line])):
                numbers = [_number(cell) for cell in cells[: len(_DISH_UNITS)]]
                if len(numbers) < len(_DISH_UNITS) or not dish.strip():
                    reject(table, row, "malformed_row", f"got {line[:80]!r}, wanted a dish id and 5 numbers at least.")
                elif bad := [cells[place] for place, value in enumerate(numbers) if value is None or value < 0]:
                    reject(table, row, "bad_number", f"got {bad[0].strip()!r}, wanted a number of at least 0.")
                else:
                    values = tuple(
                        sorted((name, value or 0.0) for name, value in zip(_DISH_UNITS, numbers, strict=True))
                    )
                    described[dish.strip()].append((values, row, table))
    for dish, rows in described.items():
        if len({values for values, *_ in rows}) > 1:
            for _, row, table in rows:
                reject(
                    table, row, "conflicting_targets", f"{dish!r} is described {len(rows)} times with other numbers."
                )
    return {dish: rows[0][:2] for dish, rows in described.items() if len({values for values, *_ in rows}) == 1}


def _read_parts(folder: Path) -> dict[str, str]:
    """Return the official part of each dish, train or test; empty if there are no lists.

    Raises:
        UsageError: one of the two lists is missing.
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


def list_manifest(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of a manifest: the file ``below`` in ``files``, or the only table in the folder ``below``.

    Paths are relative to the manifest's folder. Optional columns are ``class`` (or ``label``), ``group`` and ``split``.
    Every other column of numbers is a target; a suffix such as ``_kcal`` is its unit. A cell that is no number is an
    unknown value. A column is not read if more than half of its filled cells are no numbers.

    Raises:
        UsageError: the file is no table, has no path column, or has two columns of the same meaning.
    """
    manifest = label_table.find_table(files.root / below, f"Wanted {_MANIFEST}.")
    table, found = label_table.read_label_table(manifest), ImageListing()
    path = table.require(("path", "image_path", "image"))
    label = table.optional(("class", "label", "class_label"))
    group, split = table.optional(label_table.GROUP_COLUMNS), table.optional(label_table.SPLIT_COLUMNS)
    table.refuse_misspelt((path, label or "class", *label_table.GROUP_COLUMNS, *label_table.SPLIT_COLUMNS))
    columns, ignored = list[str](), list[str]()
    for column in (name for name in table.columns if name and name not in {path, label, group, split}):
        filled = [cell for _, cells in table.records([column], Rejections()) if (cell := cell_text(cells, column))]
        strange = [cell for cell in filled if _number(cell) is None]
        (columns if filled and 2 * len(strange) <= len(filled) else ignored).append(column)
        if strange and column in columns:
            shown = counts_text(strange, 4)
            found.notes.append(f"{table.name}: {len(strange)} cells of {column!r} hold no number: {shown}.")
    if ignored:
        shown = some_of([escape_text(column) for column in ignored], 8)
        found.notes.append(f"{table.name}: columns without numbers are not read: {shown}.")
    split_names = {column: _split_unit(column) for column in columns}
    stems = [stem for stem, _ in split_names.values()]
    # mass_g next to mass_kg keeps its full name.
    names = {column: stem if stems.count(stem) == 1 else column for column, (stem, _) in split_names.items()}
    found.units.update({names[column]: unit for column, (_, unit) in split_names.items()})
    folder = joined(*manifest.relative_to(files.root).parts[:-1])
    for row in label_table.file_rows(table, files, found.rejections, path, [label, group, split, *columns], folder):
        class_label, (part, no_part) = cell_text(row.cells, label), label_table.stated_part(row.cells, split)
        refusal = row.why_not(no_part)
        if refusal is not None:
            found.rejections.add_file(row.path, refusal, class_label, row.number)
            continue
        values = {names[column]: _number(row.cells[column]) for column in columns}
        known = tuple(sorted((name, value) for name, value in values.items() if value is not None))
        stated = cell_text(row.cells, group)
        found.images.append(ListedImage(row.path, "manifest", class_label, stated, part, known, row.number))
    numbers = ", ".join(f"{name} ({unit})" if unit else name for name, unit in found.units.items()) or "none"
    with_class = sum(image.class_label is not None for image in found.images)
    note = f"{table.name}: {len(table.rows):,} rows, {with_class:,} usable with a class; numbers: {numbers}."
    found.notes.insert(0, note)
    return found


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _split_unit(column: str) -> tuple[str, str]:
    stem, _, suffix = column.rpartition("_")
    return (stem, suffix) if stem and suffix.lower() in UNITS else (column, "")


def _is_manifest(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in label_table.SUFFIXES
    return any((path / name).is_file() for name in label_table.PREFERRED_NAMES)


# --- Folders of images, one per class, possibly below folders of parts; and folders of several corpora.


def list_folder(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of a corpus with one folder per class. The corpus is in the folder ``below`` of ``files``.

    If all folders in it are named like parts (train, val, test), the classes are the folders inside these. Images
    outside the folders of classes are rejected.
    """
    found, folders = ImageListing(), folders_in(files.root / below)
    depth = int(bool(folders) and all(name.lower() in PART_NAMES for name in folders))
    for path in files.walk(below, found.rejections):
        names, refusal = parts_below(path, below), files.check(path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
            continue
        part = PART_NAMES[names[0].lower()] if depth else None
        found.images.append(ListedImage(path_to_text(path), "folder", escape_text(names[depth]), part=part))
    num_classes = len({image.class_label for image in found.images})
    parts = f", in the parts {', '.join(folders)}" if depth else ""
    found.notes.append(f"folder {below}: {len(found.images):,} images in {num_classes:,} folders of classes{parts}.")
    if not depth:
        found.note_empty_classes(map(escape_text, folders))
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


def list_combined(files: CorpusFiles, below: str = "") -> tuple[ImageListing, ...]:
    """List the corpora of a combined corpus: every folder in the root of ``files`` is a corpus.

    Equal names of classes in two corpora mean the same class. Equal names of groups mean different groups.

    Raises:
        UsageError: there is no folder.
    """
    listings = []
    for name in folders_in(files.root):
        found = (_inner(files.root / name) or IMAGE_LAYOUTS.get("folder")).read(files, name)
        folder = escape_text(name)
        images = [
            replace(image, corpus=folder, stated_group=image.stated_group and joined(folder, image.stated_group))
            for image in found.images
        ]
        listings.append(replace(found, images=images, folder=folder))
    if not listings:
        raise UsageError(f"corpus {str(files.root)!r}: has no folders to combine. Put each corpus into one of its own.")
    return tuple(listings)


_COMBINED_RANK = 2


def _inner(folder: Path) -> CorpusLoader | None:
    """Return the loader for ``folder`` if it is a published corpus or has a manifest, else None."""
    loaders = (loader for loader in by_rank(IMAGE_LAYOUTS) if loader.rank < _COMBINED_RANK)
    return next((loader for loader in loaders if loader.recognises(folder)), None)


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
        name="combined",
        accepted="a folder that holds several such folders",
        recognises=lambda path: any(_inner(path / name) for name in folders_in(path)),
        read=list_combined,
        rank=_COMBINED_RANK,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: bool(folders_in(path)),
        read=list_folder,
        lacks=_lacks_folders,
        rank=3,
    )
)
