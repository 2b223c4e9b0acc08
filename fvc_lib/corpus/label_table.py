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


def read_label_table(path: Path) -> LabelTable:
    """Read a CSV (UTF-8, comma, RFC 4180 quoting, BOM allowed) or a Parquet file as text.

    Bytes of a CSV that are not UTF-8 are kept as surrogate escapes, so that they still name their file.

    Raises:
        UsageError: unreadable, not of that format, without header, or with a column named twice.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"manifest {str(path)!r}: {error.strerror}. Give a readable CSV or Parquet file.") from error
    columns, rows = _from_parquet(path, content) if path.suffix.lower() == ".parquet" else _from_csv(path, content)
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise UsageError(f"{path.name}: the column {twice[0]!r} exists twice. Keep one of them.")
    return LabelTable(path.name, columns, rows)


def optional_cell(cells: Mapping[str, str], column: str | None) -> str | None:
    """The stripped cell, or None where the column is absent or the cell means "no value"."""
    value = cells.get(column, "").strip() if column is not None else ""
    return None if value.lower() in _MISSING else value


def _from_csv(path: Path, content: bytes) -> tuple[tuple[str, ...], tuple[tuple[str, ...] | None, ...]]:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path.name}: is UTF-16 text. Save it as CSV in UTF-8.")
    text = content.decode("utf-8-sig", "surrogateescape")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UsageError(f"{path.name}: is not a CSV table: {error}. Quote cells as RFC 4180 says.") from error
    if not lines or not any(lines[0]):
        raise UsageError(f"{path.name}: is empty. Wanted a header line with at least 'path' and 'label'.")
    columns = tuple(name.strip() for name in lines[0])
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        raise UsageError(f"{path.name}: the header has no comma: {lines[0][0]!r}. Separate the columns by commas.")
    width = len(columns)
    return columns, tuple(tuple(line) if len(line) == width else None for line in lines[1:] if line)


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
