"""Read CSV and Parquet tables that users wrote: columns, rows, and the files that rows name. All cells are text.

A manifest is such a table with one row per file. Table text is text with escapes (``atomic_files.escape_text``).
"""

import csv
import difflib
import gzip
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

import polars as pl
from polars import selectors as cs

from fvc_lib.corpus.corpus_files import (
    LAYOUT,
    CorpusFiles,
    Entry,
    Refusal,
    Rejections,
    picture_folders,
    some_of,
)
from fvc_lib.corpus.listing import attributes_text
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_from_text
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.video.decode.file_parts import picture_names

GROUP_COLUMNS = ("group", "group_id")
SPLIT_COLUMNS = ("split", "part")
SOURCE_COLUMNS = ("real_source", "source")
# Names of the parts of a split, in lower case.
PART_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
              "val": "validation", "dev": "validation", "test": "test", "testing": "test"}  # fmt: skip
SUFFIXES = (".csv", ".tsv", ".parquet")
PREFERRED_NAMES = ("manifest.csv", "manifest.parquet")
# Texts that mean "no value". With str(NaN), else, all rows without a group would be in one group called "nan".
MISSING = ("", "nan", "null", "none", "<na>")
# Returns the facts of a row that must be equal for all frames of a video.
_FACTS_OF_A_VIDEO = attrgetter(
    "label", "stated_group", "manipulation", "platform", "generator", "real_source", "official_split"
)


@dataclass(frozen=True)
class LabelTable:
    """A user's table with a header, all cells as text; made by ``read_label_table``."""

    name: str  # file name, for messages
    columns: tuple[str, ...]  # stripped column names
    rows: tuple[tuple[str, ...] | None, ...]  # cells of each data row; None: its number of cells is not the header's
    label_column: str = "label"  # the name that the file has for the column ``label``

    def renamed(self, names: Mapping[str, str], known: Collection[str]) -> "LabelTable":
        """Return a copy of the table in which columns are renamed to the names that FVC reads.

        Another column of the file may already have such a name. It is renamed to ``NAME_of_file``.

        Args:
            names: maps new names of columns to their names in the file, in lower case: ``{"label": "target"}``.
            known: the names that the caller reads, in lower case.

        Raises:
            UsageError: a name is not known, the file has no such column, or a column is named twice.
        """
        lower = [column.lower() for column in self.columns]
        name_of = {column: name for name, column in names.items()}
        for name, column in names.items():
            if name not in known or column not in lower:
                near = did_you_mean(column, self.columns)
                raise UsageError(
                    f"{self.name}: no column {column!r} for {name!r}, or {name!r} is not read; found "
                    f"{some_of(self.columns)}.{near} Names that are read: {some_of(sorted(known))}."
                )
        if len(name_of) < len(names):
            raise UsageError(f"columns: got {dict(names)}, wanted another column of the file for each name.")
        aside = {name: f"{name}_of_file" for name in names}
        columns = tuple((aside | name_of).get(column.lower(), column) for column in self.columns)
        return replace(self, columns=columns, label_column=names.get("label", "label"))

    def records(self, rejections: Rejections) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (number, cells) for the well-formed rows; reject rows with a wrong number of cells.

        ``number`` is the 1-based number of the row. ``cells`` maps column names in lower case to texts.
        """
        names = [column.lower() for column in self.columns]
        for number, row in enumerate(self.rows, start=1):
            if row is not None:
                yield number, dict(zip(names, row, strict=True))
                continue
            detail = f"{self.name} row {number}: its number of cells is not the header's. Quote or repair it."
            rejections.add_file("", Refusal("malformed_row", detail), row=number)

    def further_columns(self, needed: Sequence[Sequence[str]], optional: Sequence[Sequence[str]] = ()) -> list[str]:
        """Check the columns of the table, and return the names of those that are neither needed nor optional.

        A column whose name nearly equals a known name is refused as misspelt. A known name with a suffix, such as
        ``label_basis``, is accepted.

        Args:
            needed: needed columns. Each item holds names with the same meaning, in lower case, such as ``("group",
                "group_id")``; the table needs one of them, in any case.
            optional: optional columns, likewise.

        Raises:
            UsageError: a needed column is missing, two columns mean the same, or a column looks like a misspelt name.
        """
        lower = [column.lower() for column in self.columns]
        known = tuple(chain(*needed, *optional))
        for names in (*needed, *optional):
            present = [name for name in lower if name in names]
            if len(present) > 1:
                raise UsageError(f"{self.name}: the columns {some_of(present)} mean the same. Keep one of them.")
            if not present and names in needed:
                wanted = " or ".join(map(repr, names))
                near = did_you_mean(names[0], self.columns)
                raise UsageError(
                    f"{self.name}: wanted a column {wanted}, found {some_of(self.columns)}.{near} Of videos, "
                    f"-p columns {names[0]}=NAME says which column it is. Separate columns by comma, semicolon or tab "
                    "(task video_text: as manifest_separator says)."
                )
        others = [column for column in self.columns if column and column.lower() not in known]
        for column in others:
            alike = difflib.get_close_matches(column.lower(), known, n=1, cutoff=0.8)
            if alike and not column.lower().startswith(tuple(f"{name}_" for name in known)):
                raise UsageError(
                    f"{self.name}: the column {column!r} is not known. Did you mean {alike[0]!r}? Rename it to that, "
                    "or to a name that looks less like it."
                )
        return others


@dataclass(frozen=True, slots=True)
class FileRow:
    """A data row of a manifest, whose file has been checked but not opened."""

    number: int  # 1-based
    path: str  # relative to the root of the corpus; escaped as in tables (``path_to_text``)
    refusal: Refusal | None  # why the file is unusable; None: it is usable
    cells: Mapping[str, str]  # maps the name of a column, in lower case, to the text of its cell
    name: str  # name of the row in messages, such as ``manifest.csv row 3``

    def refused(self, other: Refusal | None = None) -> Refusal | None:
        """Return why the row is not used: ``self.refusal``, or else ``other``; None if both are None.

        The detail of the refusal begins with the name of the row.
        """
        refusal = self.refusal or other
        return refusal and Refusal(refusal.reason, f"{self.name}: {refusal.detail}")


def file_rows(
    table: LabelTable, files: CorpusFiles, rejections: Rejections, path_columns: Sequence[str]
) -> Iterator[FileRow]:
    """Yield the rows of a manifest as ``FileRow``, each with a refusal if its file is unusable.

    Malformed rows are rejected and not yielded.

    Args:
        table: the manifest.
        files: access to the files of the corpus.
        rejections: receives malformed rows.
        path_columns: possible names of the column of paths, which are relative to the root of the corpus.
    """
    for number, cells in table.records(rejections):
        raw = next(cells[name] for name in path_columns if name in cells).strip()
        place, refusal = files.normalized(raw), None
        if isinstance(place, Refusal):
            path, refusal = escape_text(raw), place
        else:
            path = escape_text(place)
            refusal = files.check(str(path_from_text(path)))
        yield FileRow(number, path, refusal, cells, f"{table.name} row {number}")


def join_frames(
    files: CorpusFiles,
    rows: Sequence[Entry],
    places: Sequence[str | Refusal],
    words: Iterable[str],
    rejections: Rejections,
) -> tuple[list[Entry], list[str | Refusal], tuple[str, ...]]:
    """Join the rows that name pictures in the same folder to a single row: the video with these frames.

    The pictures in a folder may not be the frames of one video, for example if they have two labels. Then each row that
    states a group remains, as a video of one frame. Rows without a group are refused.

    Args:
        files: access to the files of the corpus.
        rows: rows of the label source.
        places: the path of each row's file, escaped as in tables (``path_to_text``), or a refusal.
        words: labels as the label source writes them. A folder named like a label holds many videos, not one.
        rejections: receives refused pictures, and missing pictures of a video.

    Returns:
        (rows, places, notes): the remaining rows, the path or refusal of each remaining row, and none or one sentence
        for the user.
    """

    def names_in(folder: str) -> Iterable[str]:
        return map(escape_text, picture_names(files.root / path_from_text(folder)) if folder else ())

    left = dict(enumerate(zip(rows, places, strict=True)))
    num_frames = 0
    paths = [row.path for row in rows]
    facts = [_FACTS_OF_A_VIDEO(row) for row in rows]
    for folder, numbers, problem in picture_folders(paths, facts, words, names_in):
        usable = [number for number in numbers if isinstance(places[number], str)]
        first = (usable or numbers)[0]
        stays = [number for number in numbers if rows[number].stated_group] if problem else [first]
        for number in sorted(set(numbers) - set(stays)):
            row, place = left.pop(number)
            if problem and isinstance(place, str):
                detail = f"{row.origin} row {row.row}: {problem}. {LAYOUT}; or name it in column 'group'."
                place = Refusal("unassigned_picture", detail)
            if isinstance(place, Refusal):
                rejections.add(row, place)
        if not problem:
            num_frames += len(numbers)
            stated = [json.loads(rows[number].attributes or "{}").items() for number in numbers]
            common = dict(set(stated[0]).intersection(*stated))
            video = replace(rows[first], path=folder, source_id=folder, attributes=attributes_text(common))
            left[first] = video, ((files.check(folder) or folder) if usable else places[first])
    notes = (f"{num_frames:,} rows name frames: each folder of them is one video.",) if num_frames else ()
    return [row for row, _ in left.values()], [place for _, place in left.values()], notes


def cell_text(cells: Mapping[str, str], *columns: str) -> str | None:
    """Return the stripped table text of the first cell that has a value; None if no cell has one.

    ``cells`` maps column names to texts; ``columns`` are the names to try, in this order. Texts such as ``nan`` or
    ``null`` do not count as values (``MISSING``).
    """
    values = (cells.get(column, "").strip() for column in columns)
    return next((escape_text(value) for value in values if value.lower() not in MISSING), None)


def stated_part(cells: Mapping[str, str]) -> tuple[str | None, Refusal | None]:
    """Return (part, refusal): the part of the split that a row states in its column ``split`` or ``part``.

    ``part`` is train, validation or test, or None if the row states no part. If the cell holds any other text, ``part``
    is None and ``refusal`` says why. In all other cases ``refusal`` is None. ``cells`` maps column names in lower case
    to texts.
    """
    text = cell_text(cells, *SPLIT_COLUMNS)
    if text is None or text.lower() in PART_NAMES:
        return text and PART_NAMES[text.lower()], None
    return None, Refusal("unknown_split", f"got the part {text!r}, wanted train, validation, test or nothing.")


def entry_of(
    cells: Mapping[str, str], path: str, label: str | None, row: int, origin: str
) -> tuple[Entry, Refusal | None]:
    """Return (entry, refusal) for a row of a table: ``entry`` is the labelled file that the row describes.

    ``refusal`` is None if the part of the split in the row is train, validation, test or empty. For any other text,
    ``refusal`` says so, and the entry has no part.

    Args:
        cells: text of each cell by column name in lower case; unknown columns are ignored.
        path: path of the file, escaped as in tables (``path_to_text``); also becomes the source id of the entry.
        label: label of the entry.
        row: 1-based number of the data row.
        origin: file name of the table.
    """
    part, no_part = stated_part(cells)
    generator = cell_text(cells, "generator")
    entry = Entry(
        path=path,
        label=label,
        source_id=path,
        stated_group=cell_text(cells, *GROUP_COLUMNS),
        manipulation=cell_text(cells, "manipulation") or generator,
        platform=cell_text(cells, "platform"),
        row=row,
        origin=origin,
        generator=generator,
        real_source=cell_text(cells, *SOURCE_COLUMNS),
        official_split=part,
    )
    return entry, no_part


def tables_in(folder: AnyPath) -> list[str]:
    """Return the sorted file names of the tables in ``folder``; empty if ``folder`` is no folder.

    If there is a table called ``manifest``, other tables are left out.
    """
    names = sorted(path.name for path in Path(folder).glob("[!.]*") if path.suffix.lower() in SUFFIXES)
    return [name for name in names if name in PREFERRED_NAMES] or names


def find_table(corpus: AnyPath, accepted: str) -> Path:
    """Return the path of the manifest: ``corpus`` itself if it is a file, else the only table in that folder.

    ``accepted`` is a sentence that describes a manifest; it ends the message of the error.

    Raises:
        UsageError: the folder holds no table, or several.
    """
    corpus = Path(corpus)
    tables = [corpus / name for name in tables_in(corpus)] if corpus.is_dir() else [corpus]
    if len(tables) != 1:
        got = some_of([table.name for table in tables], 10) or "no table"
        raise UsageError(f"corpus {str(corpus)!r}: {got} is there, wanted one manifest. Name it. {accepted}")
    return tables[0]


def read_label_table(path: AnyPath, separator: str = ",") -> LabelTable:
    r"""Read a table as text: UTF-8 (BOM allowed) or UTF-16 text, also compressed (``.gz``), or Parquet.

    Bytes that are not UTF-8 become surrogate escapes, so that a path with such bytes still names its file. With a
    ``separator`` of one character, cells are quoted as in CSV (RFC 4180). With a longer separator, as in
    ``a.mp4 ||| he said "go"``, quotes are ordinary characters, each line is a row, and space around cells is dropped.

    Args:
        path: path of the table.
        separator: text between columns. The default ``,`` means comma, semicolon or tab, whichever is most frequent in
            the header; ``\t`` is a tab.

    Raises:
        UsageError: the table is unreadable, has another format, no header or two columns of the same name, or the
            separator is unusable.
    """
    path, separator = Path(path), separator.replace("\\t", "\t")
    if not separator or any(mark in separator for mark in '\r\n"'):
        raise UsageError(f"manifest_separator: got {separator!r}, wanted text without quotes and line breaks.")
    try:
        lines = _parquet_lines(path) if path.suffix.lower() == ".parquet" else _text_lines(path, separator)
    except OSError as error:
        raise UsageError(f"{str(path)!r}: {error.strerror}. Give a readable CSV, TSV or Parquet table.") from error
    columns = tuple(name.strip() for name in lines[0]) if lines else ()
    if not any(columns):
        raise UsageError(f"{path.name}: is empty. Wanted a header line with the names of the columns.")
    names = [name.lower() for name in columns]
    for name in columns:
        if name and names.count(name.lower()) > 1:
            raise UsageError(f"{path.name}: the column {name!r} exists twice. Keep one of them.")
    rows = (tuple(line) if len(line) == len(columns) else None for line in lines[1:])
    return LabelTable(path.name, columns, tuple(rows))


def _text_lines(path: Path, separator: str) -> list[list[str]]:
    """Read a text table, such as CSV; return the cells of all lines that are not empty, header first.

    ``separator`` is the text between columns. The default ``,`` of ``read_label_table`` means comma, semicolon or tab.
    """
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = content.decode("utf-16", "replace") if is_utf16 else content.decode("utf-8-sig", "surrogateescape")
    if separator == ",":
        header = text.lstrip().partition("\n")[0]
        separator = max(",;\t", key=header.count)
    if len(separator) > 1:
        lines = (line for line in text.replace("\r\n", "\n").split("\n") if line.strip())
        return [[cell.strip() for cell in line.split(separator)] for line in lines]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        return [line for line in reader if line]
    except csv.Error as error:
        raise UsageError(
            f"{path.name}: line {reader.line_num} is not as in CSV: {error}. Quote cells as RFC 4180 says, or separate "
            "them by several characters, between which quotes are letters."
        ) from error


# A Parquet table may take this many bytes plus this many times the size of its file: small files can unpack to
# gigabytes.
_MOST_CELL_BYTES, _MOST_TIMES_THE_FILE = 64 << 20, 200


def _parquet_lines(path: Path) -> list[list[str]]:
    """Return the cells of a Parquet table as text: a list of column names, then a list per row.

    Raises:
        UsageError: the file is no Parquet table, or its cells take far more memory than the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # imported here, because only Parquet tables need it

    most = _MOST_CELL_BYTES + _MOST_TIMES_THE_FILE * path.stat().st_size
    too_large = UsageError(f"{path.name}: its cells take more than {most >> 20:,} MiB, too much for its size.")
    try:
        with path.open("rb") as stream:  # polars would take '[' and '*' in the name of a file for a pattern
            facts = pq.read_metadata(stream)
            if sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)) > most:
                raise too_large
            stream.seek(0)
            # Some writers store text as bytes; other bytes become empty cells.
            frame = pl.read_parquet(stream).with_columns(cs.binary().cast(pl.String, strict=False))
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise UsageError(f"{path.name}: is not a Parquet table: {error}. Give a CSV or Parquet file.") from error
    # Sizes are checked again, because the file holds repeated texts only once.
    if sum(frame[name].str.len_bytes().sum() for name in frame.columns if frame.schema[name] == pl.String) > most:
        raise too_large
    return [frame.columns, *(["" if value is None else str(value) for value in row] for row in frame.iter_rows())]
