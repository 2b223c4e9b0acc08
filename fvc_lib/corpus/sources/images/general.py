"""A plain folder of images: one folder per class, or one per part with the classes in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fvc_lib.corpus.image_listing import (
    ImageListing,
    ListedImage,
    classes_without_images,
    folders_of,
    image_refusal,
    joined,
    parts_below,
    targets_of,
    walk_images,
)
from fvc_lib.corpus.label_table import LabelTable, optional_cell, read_label_table
from fvc_lib.corpus.listing import CorpusFiles, Refusal, counts_text
from fvc_lib.services.atomic_files import escape_text, path_to_text

_PART_FOLDERS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def list_folder(files: CorpusFiles, below: str = "") -> ImageListing:
    """The images in the folder ``below`` the root of ``files``; the first folder below it is the class.

    Where those folders are all called train, val, validation or test, they are parts, and the class is the next one.
    Images beside the class folders have no class and are left out.
    """
    listing = ImageListing()
    paths = list(walk_images(files, below, listing))
    folders = {parts[0] for path in paths if len(parts := parts_below(path, below)) > 1}
    has_parts = bool(folders) and all(name.lower() in _PART_FOLDERS for name in folders)
    for path in paths:
        names = parts_below(path, below)
        depth = 1 if has_parts else 0
        text, refusal = path_to_text(path), image_refusal(files, path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            listing.refuse(text, refusal)
            continue
        part = _PART_FOLDERS[names[0].lower()] if has_parts else None
        listing.images.append(ListedImage(text, "folder", class_label=escape_text(names[depth]), part=part))
    classes = {image.class_label for image in listing.images}
    named = set() if has_parts else {escape_text(name) for name in folders_of(files.root / below)}
    kept = f"; the folders {', '.join(sorted(folders))} are kept as parts" if has_parts else ""
    where = f" in {below!r}" if below else ""
    listing.notes.append(f"folder{where}: {len(listing.images):,} images in {len(classes):,} folders of classes{kept}.")
    listing.notes += classes_without_images(named - classes)
    return listing


# ----------------------------------------------------------------------------------------------------
# A CSV or Parquet manifest of images: one row per file, with classes, numbers, groups and parts as far as known.


PATH_COLUMNS = ("path", "image_path", "image")
CLASS_COLUMNS = ("class", "label", "class_label")
GROUP_COLUMNS = ("group", "group_id")
SPLIT_COLUMNS = ("split", "part")
MANIFEST_NAMES = ("manifest.csv", "manifest.parquet")
# A column called calories_kcal is the target calories, in kcal.
UNITS = frozenset({"kcal", "kj", "g", "mg", "kg", "ml", "l", "mm", "cm", "m", "s", "percent", "celsius", "eur", "usd"})
_PARTS = {
    "train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation",
    "dev": "validation", "test": "test", "testing": "test",
}  # fmt: skip
_MOST_SHOWN = 8


@dataclass(frozen=True)
class _TargetColumn:
    column: str
    name: str
    unit: str


def list_manifest(files: CorpusFiles, name: str) -> ImageListing:
    """The images of the manifest ``name`` (relative to the root of ``files``), their paths relative to its folder.

    Columns: ``path``; optional ``class`` (or ``label``), ``group`` and ``split`` (train, validation, test). Every other
    column that holds numbers is a target, and a suffix such as ``_kcal`` or ``_g`` its unit; cells that hold none are
    values that are not known.

    Raises:
        UsageError: not a table, or without a path column, or with two columns that mean the same.
    """
    table = read_label_table(files.root / name)
    below = name.rpartition("/")[0]
    columns = {
        "path": table.require(PATH_COLUMNS),
        "class": table.optional(CLASS_COLUMNS),
        "group": table.optional(GROUP_COLUMNS),
        "split": table.optional(SPLIT_COLUMNS),
    }
    listing = ImageListing()
    known = [column for column in columns.values() if column is not None]
    targets = _target_columns(table, known, listing)
    listing.units.update({target.name: target.unit for target in targets})
    for row, cells in table.records([*known, *(target.column for target in targets)]):
        if cells is None:
            detail = f"{table.name} row {row}: its number of cells is not the header's. Quote cells with commas."
            listing.refuse("", Refusal("malformed_row", detail), row=row)
            continue
        found = _image(files, below, row, cells, columns, targets)
        if isinstance(found, ListedImage):
            listing.images.append(found)
        else:
            path, refusal = found
            detail = f"{table.name} row {row}: {refusal.detail}"
            listing.refuse(path, Refusal(refusal.reason, detail), label=_text(cells, columns["class"]), row=row)
    listing.notes.insert(0, _what_was_read(table, listing))
    return listing


def _image(
    files: CorpusFiles,
    below: str,
    row: int,
    cells: dict[str, str],
    columns: dict[str, str | None],
    targets: Iterable[_TargetColumn],
) -> ListedImage | tuple[str, Refusal]:
    raw = cells[str(columns["path"])]
    normalized = files.normalized(raw if raw.startswith("/") or not raw else joined(below, raw))
    if isinstance(normalized, Refusal):
        return escape_text(raw), normalized
    path = path_to_text(normalized)
    refusal = image_refusal(files, normalized)
    if refusal is not None:
        return path, refusal
    split = optional_cell(cells, columns["split"])
    if split is not None and split.lower() not in _PARTS:
        return path, Refusal("unknown_split", f"got the part {escape_text(split)!r}, wanted train, validation or test.")
    values = {target.name: _number(cells[target.column]) for target in targets}
    return ListedImage(
        path,
        "manifest",
        _text(cells, columns["class"]),
        _text(cells, columns["group"]),
        None if split is None else _PARTS[split.lower()],
        targets_of({name: value for name, value in values.items() if value is not None}),
        row,
    )


def _text(cells: dict[str, str], column: str | None) -> str | None:
    cell = optional_cell(cells, column)
    return None if cell is None else escape_text(cell)


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _target_columns(table: LabelTable, known: Iterable[str], listing: ImageListing) -> list[_TargetColumn]:
    """Columns of which at least half the filled cells are numbers; notes on what the others of their cells were."""
    wanted = [name for name in table.columns if name and name not in set(known)]
    ignored, split_names = [], [_split_unit(name) for name in wanted]
    stems = [stem for stem, _ in split_names]
    found = []
    for column, (stem, unit) in zip(wanted, split_names, strict=True):
        filled = [cell for _, cells in table.records([column]) if cells and (cell := optional_cell(cells, column))]
        strange = [cell for cell in filled if _number(cell) is None]
        if not filled or 2 * len(strange) > len(filled):
            ignored.append(column)
            continue
        if strange:
            listing.notes.append(
                f"{table.name}: {len(strange)} cells of {column!r} hold no number and count as not known: "
                f"{counts_text((escape_text(cell) for cell in strange), 4)}."
            )
        # mass_g beside mass_kg: both keep their full names.
        found.append(_TargetColumn(column, stem if stems.count(stem) == 1 else column, unit))
    if ignored:
        shown = ", ".join(repr(escape_text(name)) for name in ignored[:_MOST_SHOWN])
        listing.notes.append(f"{table.name}: columns without numbers are not read: {shown}.")
    return found


def _split_unit(column: str) -> tuple[str, str]:
    stem, underscore, suffix = column.rpartition("_")
    return (stem, suffix) if underscore and stem and suffix.lower() in UNITS else (column, "")


def _what_was_read(table: LabelTable, listing: ImageListing) -> str:
    units = [f"{name} ({unit})" if unit else name for name, unit in listing.units.items()]
    numbers = f"; numbers: {', '.join(units)}" if units else "; no column of numbers"
    with_class = sum(image.class_label is not None for image in listing.images)
    return f"{table.name}: {len(table.rows):,} rows, {with_class:,} of the usable ones with a class{numbers}."
