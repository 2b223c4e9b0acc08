"""A CSV or Parquet manifest as label source: one row per video, paths relative to the manifest's folder."""

from __future__ import annotations

from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.label_table import LabelTable, optional_cell, read_label_table
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, LabelRow, Listing, Refusal, Rejections
from fvc_lib.services.atomic_files import escape_text, path_from_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS

PATH_COLUMNS = ("path", "video_path")
GROUP_COLUMNS = ("group", "group_id")


def read_manifest(manifest: Path) -> Listing:
    """The listing of a manifest with ``path`` or ``video_path``, ``label`` and optional columns.

    Optional are ``group`` (or ``group_id``), ``manipulation`` and ``platform``; others are ignored. Labels are
    compared without case and surrounding space; those outside real and fake are counted exclusions.

    Raises:
        UsageError: not a table, or a needed column is missing.
        DataError: no row has a usable label.
    """
    table = read_label_table(manifest)
    files = CorpusFiles(manifest.parent)
    rejections = Rejections()
    rows, refusals = _label_rows(table, files, rejections)
    if not any(row.label in LABELS for row in rows):
        got = listing.counts_text(row.label or "" for row in rows) or "no data row"
        raise DataError(f"{manifest.name}: no row is labelled real or fake; got {got}. Fill the column 'label'.")
    places = [refusals.get(row.row) or _located(row, files) for row in rows]
    entries = listing.settle_rows(rows, rejections, places)
    return Listing(files.root, "manifest", entries, rejections.frame(), listing.annotations_of(rows, places))


def _located(row: LabelRow, files: CorpusFiles) -> str | Refusal:
    return files.check(str(path_from_text(row.path))) or row.path


def _label_rows(
    table: LabelTable, files: CorpusFiles, rejections: Rejections
) -> tuple[list[LabelRow], dict[int, Refusal]]:
    """Well-formed rows, and why the path of some of them (by row number) is refused."""
    path_column = table.require(PATH_COLUMNS)
    label_column = table.require(("label",))
    group_column = table.optional(GROUP_COLUMNS)
    wanted = [path_column, label_column, "manipulation", "platform", *([group_column] if group_column else [])]
    rows: list[LabelRow] = []
    refusals: dict[int, Refusal] = {}
    for number, cells in table.records(wanted):
        if cells is None:
            detail = f"{table.name} row {number}: its number of cells is not the header's. Quote cells with commas."
            rejections.add_file("", Refusal("malformed_row", detail), row=number)
            continue
        normalized = files.normalized(cells[path_column])
        if isinstance(normalized, Refusal):
            refusals[number] = Refusal(normalized.reason, f"{table.name} row {number}: {normalized.detail}")
            path = escape_text(cells[path_column])
        else:
            path = escape_text(normalized)
        optional = {
            name: _escaped(optional_cell(cells, column))
            for name, column in (
                ("stated_group", group_column),
                ("manipulation", "manipulation"),
                ("platform", "platform"),
            )
        }
        label = cells[label_column].strip().lower()
        rows.append(LabelRow(number, path, path, escape_text(label) or None, **optional, origin=table.name))
    return rows, refusals


def _escaped(text: str | None) -> str | None:
    return None if text is None else escape_text(text)


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
