"""A CSV or Parquet manifest of images: one row per file, with classes, numbers, groups and parts as far as known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.corpus import image_listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.label_table import LabelTable, optional_cell, read_label_table
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal, counts_text
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

PATH_COLUMNS = ("path", "image_path", "image")
CLASS_COLUMNS = ("class", "label", "class_label")
GROUP_COLUMNS = ("group", "group_id")
SPLIT_COLUMNS = ("split", "part")
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
    normalized = files.normalized(raw if raw.startswith("/") or not raw else image_listing.joined(below, raw))
    if isinstance(normalized, Refusal):
        return escape_text(raw), normalized
    path = path_to_text(normalized)
    refusal = image_listing.image_refusal(files, normalized)
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
        image_listing.targets_of({name: value for name, value in values.items() if value is not None}),
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


def _list(files: CorpusFiles, below: str) -> ImageListing:
    """The images of the manifest ``below``, or of the only one in that folder."""
    if (files.root / below).is_file():
        return list_manifest(files, below)
    names = image_listing.manifests_in(files.root / below)
    if len(names) != 1:
        got = ", ".join(repr(name) for name in names) or "none"
        raise UsageError(
            f"corpus {str(files.root / below)!r}: wanted one manifest in it, found {got}. Give the path of the "
            "manifest itself as corpus."
        )
    return list_manifest(files, image_listing.joined(below, names[0]))


def _recognises(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in (".csv", ".parquet")
    return any((path / name).is_file() for name in image_listing.MANIFEST_NAMES)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="manifest",
        accepted=(
            "a CSV or Parquet manifest with the column 'path' and a 'class' or columns of numbers, or a folder with a "
            "manifest.csv in it"
        ),
        recognises=_recognises,
        read=_list,
        lacks=lambda path: "" if path.is_dir() else "a file that is no table.",
        rank=1,
    )
)
