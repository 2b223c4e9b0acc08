"""CSV and Parquet tables that users bring: read as text, with errors that say which column or row is wrong."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from fvc_lib.services.errors import UsageError, did_you_mean

# What programs write for "no value"; str(NaN) must not put all ungrouped rows into one group called "nan".
_MISSING = frozenset({"", "nan", "null", "none", "<na>"})


@dataclass(frozen=True)
class LabelTable:
    """A table of text cells.

    Attributes:
        name: the file's name, for messages.
        columns: stripped column names.
        rows: one tuple of cells per data row, or None where the number of cells is not the header's.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...] | None, ...]

    def records(self, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | None]]:
        """Yield (1-based row number, cells of the ``wanted`` columns that exist), or None for a malformed row."""
        places = [(name, self.columns.index(name)) for name in wanted if name in self.columns]
        for number, row in enumerate(self.rows, start=1):
            yield number, None if row is None else {name: row[place] for name, place in places}

    def require(self, alternatives: Sequence[str]) -> str:
        """The one column of ``alternatives`` that the table has.

        Raises:
            UsageError: none or several of them exist; the message names the columns found.
        """
        present = self.optional(alternatives)
        if present is not None:
            return present
        wanted = " or ".join(repr(name) for name in alternatives)
        found = ", ".join(repr(name) for name in self.columns) or "none"
        near = did_you_mean(alternatives[0], self.columns) or did_you_mean(alternatives[-1], self.columns)
        hint = f"{near} Rename that column." if near else ""
        raise UsageError(f"{self.name}: wanted a column {wanted}, found {found}.{hint}")

    def optional(self, alternatives: Sequence[str]) -> str | None:
        """The column of ``alternatives`` that the table has, or None.

        Raises:
            UsageError: it has several of them, so that it is not clear which one is meant.
        """
        present = [name for name in alternatives if name in self.columns]
        if len(present) > 1:
            both = " and ".join(repr(name) for name in present)
            raise UsageError(f"{self.name}: has the columns {both}, which mean the same. Keep one of them.")
        return present[0] if present else None


def read_label_table(path: Path, separator: str = ",") -> LabelTable:
    r"""Read text in UTF-8 (BOM allowed), its columns separated by ``separator``, or a Parquet file, as text.

    Bytes that are not UTF-8 are kept as surrogate escapes, so that they still name their file. With one character (any,
    also one like ``α``) cells are quoted as in CSV: RFC 4180, lines may break inside quotes. With several, as in
    ``a.mp4 ||| he said "go"``, a quote is a letter like any other, each line is a row, and space around a cell is
    dropped. ``\t``, as a command line gives it, is a tab.

    Raises:
        UsageError: unreadable, not of that format, without header, with a column named twice, or a separator that
            cannot be one.
    """
    separator = separator.replace("\\t", "\t")
    if not separator or any(mark in separator for mark in '\r\n"'):
        raise UsageError(f"manifest_separator: got {separator!r}, wanted text without quotes and line breaks.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"manifest {str(path)!r}: {error.strerror}. Give a readable CSV or Parquet file.") from error
    is_parquet = path.suffix.lower() == ".parquet"
    columns, rows = _from_parquet(path, content) if is_parquet else _from_text(path, content, separator)
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise UsageError(f"{path.name}: the column {twice[0]!r} exists twice. Keep one of them.")
    return LabelTable(path.name, columns, rows)


def optional_cell(cells: Mapping[str, str], column: str | None) -> str | None:
    """The stripped cell, or None where the column is absent or the cell means "no value"."""
    value = cells.get(column, "").strip() if column is not None else ""
    return None if value.lower() in _MISSING else value


def _from_text(
    path: Path, content: bytes, separator: str
) -> tuple[tuple[str, ...], tuple[tuple[str, ...] | None, ...]]:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path.name}: is UTF-16 text. Save it in UTF-8.")
    text = content.decode("utf-8-sig", "surrogateescape")
    lines = list(_quoted_lines(path, text, separator) if len(separator) == 1 else _plain_lines(text, separator))
    if not lines or not any(lines[0]):
        raise UsageError(f"{path.name}: is empty. Wanted a header line with the names of the columns.")
    columns = tuple(name.strip() for name in lines[0])
    if len(columns) == 1 and (separator != "," or any(mark in columns[0] for mark in ";\t|")):
        raise UsageError(
            f"{path.name}: got the header {columns[0][:80]!r}, wanted columns separated by {separator!r}. Separate "
            "them so, or, in task video_text, set manifest_separator to what separates them."
        )
    return columns, tuple(tuple(line) if len(line) == len(columns) else None for line in lines[1:])


def _quoted_lines(path: Path, text: str, separator: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        yield from (line for line in reader if line)
    except csv.Error as error:
        raise UsageError(
            f"{path.name}: line {reader.line_num} is not as in CSV: {error}. Quote cells as RFC 4180 says, or separate "
            "them by several characters, between which quotes are letters."
        ) from error


def _plain_lines(text: str, separator: str) -> Iterator[list[str]]:
    for line in text.replace("\r\n", "\n").split("\n"):
        if line.strip():
            yield [cell.strip() for cell in line.split(separator)]


def _from_parquet(path: Path, content: bytes) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    try:
        frame = pl.read_parquet(io.BytesIO(content))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UsageError(f"{path.name}: is not a Parquet table: {error}. Give a CSV or Parquet file.") from error
    columns = tuple(name.strip() for name in frame.columns)
    return columns, tuple(tuple(_cell_text(value) for value in row) for row in frame.iter_rows())


def _cell_text(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
