"""A CSV or Parquet manifest as label source: one row per video, paths relative to the manifest's folder."""

from __future__ import annotations

from pathlib import Path

from fvc_lib.corpus.label_table import GROUP_COLUMNS, cell_text, file_rows, read_label_table
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Entry, Listing, Rejections, counts_text, listing_of_rows
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS


def read_manifest(manifest: AnyPath) -> Listing:
    """The listing of a manifest with ``path`` or ``video_path``, ``label`` and optional columns.

    Optional are ``group`` (or ``group_id``), ``manipulation`` and ``platform``; others are ignored. Labels are
    compared without case and surrounding space; those outside real and fake are counted exclusions.

    Raises:
        UsageError: not a table, or a needed column is missing.
        DataError: no row has a usable label.
    """
    manifest = Path(manifest)
    table, files, rejections = read_label_table(manifest), CorpusFiles(manifest.parent), Rejections()
    path, label, group = table.require(("path", "video_path")), table.require(("label",)), table.optional(GROUP_COLUMNS)
    rows, places = [], []
    for row in file_rows(table, files, rejections, path, [label, group, "manipulation", "platform"]):
        stated = escape_text(row.cells[label].strip().lower()) or None
        told = [cell_text(row.cells, column) for column in (group, "manipulation", "platform")]
        rows.append(Entry(row.path, stated, row.path, told[0], told[1], told[2], row.number, table.name))
        places.append(row.why_not() or row.path)
    if not any(row.label in LABELS for row in rows):
        got = counts_text(row.label or "" for row in rows) or "no data row"
        raise DataError(f"{manifest.name}: no row is labelled real or fake; got {got}. Fill the column 'label'.")
    return listing_of_rows(files, "manifest", rows, places, rejections)


CORPORA.register(
    CorpusLoader(
        name="manifest",
        accepted="a CSV or Parquet manifest with the columns 'path' and 'label' (real, fake)",
        recognises=lambda path: path.is_file() and path.suffix.lower() in {".csv", ".parquet"},
        read=read_manifest,
        lacks=lambda path: "" if path.is_dir() else "a file that is neither .csv nor .parquet.",
        rank=1,
    )
)
