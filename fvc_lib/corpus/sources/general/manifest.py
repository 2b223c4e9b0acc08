"""Read corpora from a CSV or Parquet manifest: one row per video, with paths relative to the manifest's folder."""

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, counts_text
from fvc_lib.corpus.label_table import (
    GROUP_COLUMNS,
    PART_NAMES,
    SOURCE_COLUMNS,
    SPLIT_COLUMNS,
    SUFFIXES,
    LabelTable,
    cell_text,
    entry_of,
    file_rows,
    join_frames,
    read_label_table,
    stated_part,
)
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS

_PATHS = ("path", "video_path")
_KINDS = ("manipulation", "platform", "generator")


def read_manifest(manifest: AnyPath) -> Listing:
    """List the rows of a manifest with ``path`` or ``video_path``, and ``label``.

    Optional columns are ``group`` (or ``group_id``), ``manipulation``, ``platform``, ``generator``, ``real_source`` (or
    ``source``) and the official ``split`` (or ``part``). Every other column is stored as an attribute, and results
    are also reported per value of it. Case and surrounding space of labels are ignored. Rows with labels other than
    real and fake are rejected.

    A row may name a folder of pictures, which is a video. Rows that name pictures in one folder are joined to one row
    for their video (``label_table.join_frames``).

    Raises:
        UsageError: not a table, a needed column is missing, one is misspelt, or the split has an unknown part.
        DataError: no row has a usable label.
    """
    manifest = Path(manifest)
    table = read_label_table(manifest)
    path, label = table.require(_PATHS), table.require(("label",))
    group, source = table.optional(GROUP_COLUMNS), table.optional(SOURCE_COLUMNS)
    split = table.optional([name for name in table.columns if name.lower() in SPLIT_COLUMNS])
    words = _checked_labels(table, label, split)
    files, rejections = CorpusFiles(manifest.parent), Rejections()
    named = {path, label, *_KINDS, group, source, split}
    others = [name for name in table.columns if name and name not in named]
    rows, places = list[Entry](), list[str | Refusal]()
    for row in file_rows(table, files, rejections, path, table.columns):
        cells = {**row.cells, "split": row.cells[split]} if split else row.cells
        entry, _ = entry_of(cells, row.path, listing.stated_label(row.cells[label]), row.number, table.name)
        known = {name: text for name in others if (text := cell_text(row.cells, name)) is not None}
        rows.append(replace(entry, attributes=listing.attributes_text(known)))
        places.append(row.why_not() or row.path)
    rows, places, notes = join_frames(files, rows, places, words, rejections)
    return listing.listing_of_rows(files, "manifest", rows, places, rejections, notes)


def _checked_labels(table: LabelTable, label: str, split: str | None) -> list[str]:
    """Check the columns, parts and labels of a manifest; return the cells of the label column.

    Raises:
        UsageError: a column is misspelt, or the column ``split`` has a cell that names no part.
        DataError: no row is labelled real or fake.
    """
    table.refuse_misspelt(
        (*_PATHS, "label", split or "split", *SPLIT_COLUMNS, *GROUP_COLUMNS, *_KINDS, *SOURCE_COLUMNS)
    )
    records = [cells for _, cells in table.records([label, split], Rejections())]
    unknown = [cell_text(cells, split) or "" for cells in records if stated_part(cells, split)[1] is not None]
    if unknown:  # left out, those videos would be tested or trained on
        raise UsageError(
            f"{table.name}: the column {split!r} has {counts_text(unknown)}; wanted one of {', '.join(PART_NAMES)}, or "
            f"nothing. Write these, or, if it is no split, rename the column, such as to 'my_{split}'."
        )
    words = [cells[label] for cells in records]
    listing.refuse_unused_labels(table.name, words)
    labels = [listing.stated_label(word) or "" for word in words]
    if not labels:
        raise DataError(f"{table.name}: has no data row that can be read; wanted one per video: its path and label.")
    if not set(LABELS) & set(labels):
        raise DataError(
            f"{table.name}: no row is labelled real or fake; got {counts_text(labels)}. Fill the column "
            f"'label'. (In a params file, put the names of label_map into quotes; with audit it is --label-map.) "
            f"{listing.label_map_hint(labels)}"
        )
    return words


CORPORA.register(
    CorpusLoader(
        name="manifest",
        accepted="a CSV or Parquet manifest with the columns 'path' and 'label' (real, fake)",
        recognises=lambda path: path.is_file() and path.suffix.lower() in SUFFIXES,
        read=read_manifest,
        lacks=lambda path: "" if path.is_dir() else f"a file that is none of {', '.join(SUFFIXES)}.",
        rank=1,
    )
)
