"""A CSV or Parquet manifest of images: one row per file, with classes, numbers, groups and parts as far as known."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fvc_lib.corpus import label_table, listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.label_table import LabelTable, cell_text
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Rejections
from fvc_lib.services.atomic_files import escape_text
from fvc_lib.services.registry import IMAGE_LAYOUTS

# A column called calories_kcal is the target calories, in kcal.
UNITS = frozenset({"kcal", "kj", "g", "mg", "kg", "ml", "l", "mm", "cm", "m", "s", "percent", "celsius", "eur", "usd"})
_ACCEPTED = (
    "a CSV or Parquet manifest with the column 'path' and a 'class' or columns of numbers, or a folder with a "
    "manifest.csv in it"
)


class _TargetColumn(NamedTuple):
    column: str
    name: str
    unit: str


def list_manifest(files: CorpusFiles, below: str = "") -> ImageListing:
    """The images of the manifest ``below`` the root of ``files``, or of the only one in that folder.

    Paths are relative to the manifest's folder. Columns: ``path``; optional ``class`` (or ``label``), ``group`` and
    ``split`` (train, validation, test). Every other column that holds numbers is a target, and a suffix such as
    ``_kcal`` or ``_g`` its unit; cells that hold none are values that are not known.

    Raises:
        UsageError: not a table, or without a path column, or with two columns that mean the same.
    """
    manifest = label_table.find_table(files.root / below, f"Wanted {_ACCEPTED}.")
    table = label_table.read_label_table(manifest)
    path = table.require(("path", "image_path", "image"))
    label = table.optional(("class", "label", "class_label"))
    group, split = table.optional(label_table.GROUP_COLUMNS), table.optional(label_table.SPLIT_COLUMNS)
    table.refuse_misspelt((path, label or "class", *label_table.GROUP_COLUMNS, *label_table.SPLIT_COLUMNS))
    listed = ImageListing()
    targets = _target_columns(table, {path, label, group, split}, listed)
    listed.units.update({target.name: target.unit for target in targets})
    folder = listing.joined(*manifest.relative_to(files.root).parts[:-1])
    others = [label, group, split, *(target.column for target in targets)]
    for row in label_table.file_rows(table, files, listed.rejections, path, others, folder):
        class_label, (part, no_part) = cell_text(row.cells, label), label_table.stated_part(row.cells, split)
        refusal = row.why_not(no_part)
        if refusal is not None:
            listed.rejections.add_file(row.path, refusal, class_label, row.number)
            continue
        values = {target.name: _number(row.cells[target.column]) for target in targets}
        known = tuple(sorted((name, value) for name, value in values.items() if value is not None))
        stated = cell_text(row.cells, group)
        listed.images.append(ListedImage(row.path, "manifest", class_label, stated, part, known, row.number))
    listed.notes.insert(0, _what_was_read(table, listed))
    return listed


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _target_columns(table: LabelTable, known: Iterable[str | None], listed: ImageListing) -> list[_TargetColumn]:
    """Columns of which at least half the filled cells are numbers; notes on what the others of their cells were."""
    wanted = [name for name in table.columns if name and name not in known]
    ignored, split_names = [], [_split_unit(name) for name in wanted]
    stems = [stem for stem, _ in split_names]
    found = []
    for column, (stem, unit) in zip(wanted, split_names, strict=True):
        filled = [cell for _, cells in table.records([column], Rejections()) if (cell := cell_text(cells, column))]
        strange = [cell for cell in filled if _number(cell) is None]
        if not filled or 2 * len(strange) > len(filled):
            ignored.append(column)
            continue
        if strange:
            listed.notes.append(
                f"{table.name}: {len(strange)} cells of {column!r} hold no number and count as not known: "
                f"{listing.counts_text(strange, 4)}."
            )
        # mass_g beside mass_kg: both keep their full names.
        found.append(_TargetColumn(column, stem if stems.count(stem) == 1 else column, unit))
    if ignored:
        shown = listing.some_of([escape_text(name) for name in ignored], 8)
        listed.notes.append(f"{table.name}: columns without numbers are not read: {shown}.")
    return found


def _split_unit(column: str) -> tuple[str, str]:
    stem, underscore, suffix = column.rpartition("_")
    return (stem, suffix) if underscore and stem and suffix.lower() in UNITS else (column, "")


def _what_was_read(table: LabelTable, listed: ImageListing) -> str:
    units = [f"{name} ({unit})" if unit else name for name, unit in listed.units.items()]
    numbers = f"; numbers: {', '.join(units)}" if units else "; no column of numbers"
    with_class = sum(image.class_label is not None for image in listed.images)
    return f"{table.name}: {len(table.rows):,} rows, {with_class:,} of the usable ones with a class{numbers}."


def _recognises(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in label_table.SUFFIXES
    return any((path / name).is_file() for name in label_table.PREFERRED_NAMES)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="manifest",
        accepted=_ACCEPTED,
        recognises=_recognises,
        read=list_manifest,
        lacks=lambda path: "" if path.is_dir() else "a file that is no table.",
        rank=1,
    )
)
