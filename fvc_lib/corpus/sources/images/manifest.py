"""A CSV or Parquet manifest of images: one row per file, with classes, numbers, groups and parts as far as known."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fvc_lib.corpus import label_table
from fvc_lib.corpus.corpus_files import CorpusFiles, Rejections, counts_text, joined, some_of
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.label_table import LabelTable, cell_text
from fvc_lib.corpus.listing import CorpusLoader
from fvc_lib.services.atomic_files import escape_text
from fvc_lib.services.registry import IMAGE_LAYOUTS

# A column called calories_kcal is the target calories, in kcal.
UNITS = frozenset({"kcal", "kj", "g", "mg", "kg", "ml", "l", "mm", "cm", "m", "s", "percent", "celsius", "eur", "usd"})
_ACCEPTED = (
    "a CSV or Parquet manifest with the column 'path' and a 'class' or columns of numbers, or a folder with a "
    "manifest.csv in it"
)


def list_manifest(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of the manifest ``below`` the root of ``files``, or of the only one in that folder.

    Paths are relative to the manifest's folder. Optional columns are ``class`` (or ``label``), ``group`` and ``split``.
    Each other column of numbers is a target; a suffix such as ``_kcal`` is its unit. Cells without a number are
    unknown values.

    Raises:
        UsageError: not a table, without a path column, or with two columns of one meaning.
    """
    manifest = label_table.find_table(files.root / below, f"Wanted {_ACCEPTED}.")
    table = label_table.read_label_table(manifest)
    path = table.require(("path", "image_path", "image"))
    label = table.optional(("class", "label", "class_label"))
    group, split = table.optional(label_table.GROUP_COLUMNS), table.optional(label_table.SPLIT_COLUMNS)
    table.refuse_misspelt((path, label or "class", *label_table.GROUP_COLUMNS, *label_table.SPLIT_COLUMNS))
    listed = ImageListing()
    columns = _target_columns(table, {path, label, group, split}, listed)
    names = _target_names(columns)
    listed.units.update({names[column]: _split_unit(column)[1] for column in columns})
    folder = joined(*manifest.relative_to(files.root).parts[:-1])
    for row in label_table.file_rows(table, files, listed.rejections, path, [label, group, split, *columns], folder):
        class_label, (part, no_part) = cell_text(row.cells, label), label_table.stated_part(row.cells, split)
        refusal = row.why_not(no_part)
        if refusal is not None:
            listed.rejections.add_file(row.path, refusal, class_label, row.number)
            continue
        values = {names[column]: _number(row.cells[column]) for column in columns}
        known = tuple(sorted((name, value) for name, value in values.items() if value is not None))
        stated = cell_text(row.cells, group)
        listed.images.append(ListedImage(row.path, "manifest", class_label, stated, part, known, row.number))
    numbers = ", ".join(f"{name} ({unit})" if unit else name for name, unit in listed.units.items()) or "none"
    with_class = sum(image.class_label is not None for image in listed.images)
    listed.notes.insert(
        0,
        f"{table.name}: {len(table.rows):,} rows, {with_class:,} usable with a class; numbers: {numbers}.",
    )
    return listed


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _target_columns(table: LabelTable, known: Iterable[str | None], listed: ImageListing) -> list[str]:
    """Return the columns of which at least half the filled cells are numbers; note the other cells and columns."""
    found, ignored = [], []
    for column in (name for name in table.columns if name and name not in known):
        filled = [cell for _, cells in table.records([column], Rejections()) if (cell := cell_text(cells, column))]
        strange = [cell for cell in filled if _number(cell) is None]
        if not filled or 2 * len(strange) > len(filled):
            ignored.append(escape_text(column))
            continue
        found.append(column)
        if strange:
            shown = counts_text(strange, 4)
            listed.notes.append(f"{table.name}: {len(strange)} cells of {column!r} hold no number: {shown}.")
    if ignored:
        listed.notes.append(f"{table.name}: columns without numbers are not read: {some_of(ignored, 8)}.")
    return found


def _target_names(columns: Sequence[str]) -> dict[str, str]:
    """Drop the units; ``mass_g`` next to ``mass_kg`` keeps its full name."""
    stems = [_split_unit(column)[0] for column in columns]
    return {column: stem if stems.count(stem) == 1 else column for column, stem in zip(columns, stems, strict=True)}


def _split_unit(column: str) -> tuple[str, str]:
    stem, underscore, suffix = column.rpartition("_")
    return (stem, suffix) if underscore and stem and suffix.lower() in UNITS else (column, "")


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
