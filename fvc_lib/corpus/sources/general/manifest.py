"""A CSV or Parquet manifest as label source: one row per video, paths relative to the manifest's folder."""

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Rejections, counts_text
from fvc_lib.corpus.label_table import (
    GROUP_COLUMNS,
    PART_NAMES,
    SPLIT_COLUMNS,
    SUFFIXES,
    LabelTable,
    cell_text,
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
_OPTIONAL = ("manipulation", "platform", "generator", "real_source", "source")


def read_manifest(manifest: AnyPath) -> Listing:
    """The listing of a manifest with ``path`` or ``video_path``, ``label`` and optional columns.

    Optional are ``group`` (or ``group_id``), ``manipulation``, ``platform``, ``generator``, ``real_source`` (or
    ``source``) and ``split`` (or ``part``), the official one; every other column is kept as an attribute by which
    results are sliced, unless it is named nearly like one of these. Labels are compared without case and surrounding
    space; those outside real and fake are counted exclusions.

    A row may name a folder of pictures, which is a video; rows that name the pictures in it are that video, too
    (``label_table.join_frames``).

    Raises:
        UsageError: not a table, a needed column is missing, one is misspelt, or a split has parts that are not known.
        DataError: no row has a usable label.
    """
    manifest = Path(manifest)
    table = _usable_table(manifest)
    files, rejections = CorpusFiles(manifest.parent), Rejections()
    named = _columns(table)
    path, label, *_, split = named
    others = [name for name in table.columns if name and name not in named]
    rows, places = [], []
    for row in file_rows(table, files, rejections, path, [*named[1:], *others]):
        stated = listing.stated_label(row.cells[label])
        group_name, manipulation, platform, generator, real_source = (cell_text(row.cells, each) for each in named[2:7])
        entry = Entry(
            row.path, stated, row.path, group_name, manipulation or generator, platform, row.number, table.name
        )
        known = {name: text for name in others if (text := cell_text(row.cells, name)) is not None}
        rows.append(
            replace(
                entry,
                generator=generator,
                real_source=real_source,
                official_split=stated_part(row.cells, split)[0],
                attributes=listing.attributes_text(known),
            )
        )
        places.append(row.why_not() or row.path)
    rows, places, notes = join_frames(
        files, rows, places, (cells[label] for _, cells in table.records([label], Rejections())), rejections
    )
    return replace(listing.listing_of_rows(files, "manifest", rows, places, rejections), notes=notes)


def _usable_table(manifest: Path) -> LabelTable:
    """The table, where its columns, splits and labels can be used; no file that it names is looked at."""
    table = read_label_table(manifest)
    _, label, *_, split = _columns(table)
    _refuse_unknown_parts(table, split)
    table.refuse_misspelt((*_PATHS, "label", split or "split", *SPLIT_COLUMNS, *GROUP_COLUMNS, *_OPTIONAL))
    cells = [row[label] for _, row in table.records([label], Rejections())]
    listing.refuse_unused_labels(table.name, cells)
    labels = [listing.stated_label(cell) or "" for cell in cells]
    if not labels:
        raise DataError(f"{manifest.name}: has no data row that can be read; wanted one per video: its path and label.")
    if not set(LABELS) & set(labels):
        raise DataError(
            f"{manifest.name}: no row is labelled real or fake; got {counts_text(labels)}. Fill the column "
            f"'label'. (In a params file, put the names of label_map into quotes; with audit it is --label-map.) "
            f"{listing.label_map_hint(labels)}"
        )
    return table


def _columns(table: LabelTable) -> tuple[str, str, str | None, str, str, str, str | None, str | None]:
    """What a manifest's columns are called: path, label, group, the kinds of fake, the real's source, split."""
    path, label, group = table.require(_PATHS), table.require(("label",)), table.optional(GROUP_COLUMNS)
    split = table.optional([name for name in table.columns if name.lower() in SPLIT_COLUMNS])
    return path, label, group, "manipulation", "platform", "generator", table.optional(("real_source", "source")), split


def _refuse_unknown_parts(table: LabelTable, split: str | None) -> None:
    """Stop where the column ``split`` holds what is no part: left out, those videos would be tested or trained on."""
    cells = (cells for _, cells in table.records([split], Rejections()))
    unknown = [cell_text(each, split) or "" for each in cells if stated_part(each, split)[1] is not None]
    if unknown:
        parts = ", ".join(PART_NAMES)
        raise UsageError(
            f"{table.name}: the column {split!r} has {counts_text(unknown)}; wanted one of {parts}, or nothing."
            f" Write these, or, where it is no split, rename the column, such as to 'my_{split}'."
        )


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
