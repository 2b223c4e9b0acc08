"""CSV and Parquet tables that users bring, read as text: their columns, their rows, and the files that these name."""

import csv
import difflib
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, joined
from fvc_lib.corpus.frame_names import LAYOUT, picture_folders
from fvc_lib.corpus.listing import attributes_text
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_from_text
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.video.decode.file_parts import picture_names

GROUP_COLUMNS = ("group", "group_id")
SPLIT_COLUMNS = ("split", "part")
# What parts of a split are called, in lower case.
PART_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
              "val": "validation", "dev": "validation", "test": "test", "testing": "test"}  # fmt: skip
SEPARATORS = (",", ";", "\t")
SUFFIXES = (".csv", ".tsv", ".parquet")
PREFERRED_NAMES = ("manifest.csv", "manifest.parquet")
# What programs write for "no value"; str(NaN) must not put all ungrouped rows into one group called "nan".
_MISSING = frozenset({"", "nan", "null", "none", "<na>"})


@dataclass(frozen=True)
class LabelTable:
    """A table of text cells."""

    name: str  # the file's name, for messages
    columns: tuple[str, ...]  # stripped column names
    # One tuple of cells per data row, or None where the number of cells is not the header's.
    rows: tuple[tuple[str, ...] | None, ...]
    separator: str = ""  # between its columns; empty: a Parquet table has none

    def records(self, wanted: Sequence[str | None], rejections: Rejections) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (1-based row number, cells of the ``wanted`` columns that exist); malformed rows are refused."""
        places = [(name, self.columns.index(name)) for name in wanted if name in self.columns]
        for number, row in enumerate(self.rows, start=1):
            if row is None:
                detail = f"{self.name} row {number}: its number of cells is not the header's. Quote or repair it."
                rejections.add_file("", Refusal("malformed_row", detail), row=number)
            else:
                yield number, {name: row[place] for name, place in places if name is not None}

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

    def refuse_misspelt(self, known: Iterable[str]) -> None:
        """Stop where a column that nobody reads is named nearly like one that is read, ``known``.

        A name that goes on behind a known one, such as ``label_basis``, is taken for another column.

        Raises:
            UsageError: the message names both.
        """
        known = tuple(known)
        for name in self.columns:
            if not name or name in known or name.lower().startswith(tuple(f"{each}_" for each in known)):
                continue
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
            if near:
                raise UsageError(
                    f"{self.name}: the column {name!r} is not known. Did you mean {near[0]!r}? Rename it to that, or, "
                    "to have it ignored, to something that looks less like it."
                )


@dataclass(frozen=True, slots=True)
class FileRow:
    """One data row of a manifest of files."""

    number: int  # 1-based
    path: str  # table text, relative to the root of the corpus
    refusal: Refusal | None  # why there is no such file, if there is none
    cells: Mapping[str, str]  # by column
    name: str  # of the row, for messages

    def why_not(self, *others: Refusal | None) -> Refusal | None:
        """Why the row is not used: its own refusal or the first of ``others``; the detail names the row."""
        refusal = next(filter(None, (self.refusal, *others)), None)
        return refusal and Refusal(refusal.reason, f"{self.name}: {refusal.detail}")


def file_rows(
    table: LabelTable,
    files: CorpusFiles,
    rejections: Rejections,
    path_column: str,
    others: Sequence[str | None] = (),
    below: str = "",
) -> Iterator[FileRow]:
    """The well-formed rows of a manifest, each with its file looked up.

    Args:
        table: the manifest.
        files: of the corpus.
        rejections: receives malformed rows.
        path_column: has paths relative to the folder ``below``. Space around one counts only where the file has it.
        others: further columns wanted in ``cells``, as far as they exist.
        below: the manifest's folder below the root.
    """
    for number, cells in table.records([path_column, *others], rejections):
        path, refusal = _located(files, cells[path_column], below)
        if refusal is not None:
            bare = cells[path_column].strip()
            if bare != cells[path_column]:
                path, refusal = _located(files, bare, below)
        yield FileRow(number, path, refusal, cells, f"{table.name} row {number}")


def _located(files: CorpusFiles, raw: str, below: str) -> tuple[str, Refusal | None]:
    normalized = files.normalized(joined(below, raw) if raw and not raw.startswith("/") else raw)
    if isinstance(normalized, Refusal):
        return escape_text(raw), normalized
    path = escape_text(normalized)
    return path, files.check(str(path_from_text(path)))


_JOINED = "that are frames: each folder of them is one video, of all pictures that lie in it."
_SINGLE = "of no folder of one video: each of them is a video of one frame, in the group that its row states."


def join_frames(
    files: CorpusFiles,
    rows: Sequence[Entry],
    places: Sequence[str | Refusal],
    words: Iterable[str],
    rejections: Rejections,
) -> tuple[list[Entry], list[str | Refusal], tuple[str, ...]]:
    """Make one row of those whose pictures share a folder: it is a video, and all pictures in it are its frames.

    Pictures that are not the frames of one video stay videos of one frame where their rows state a group, and are
    refused where they do not.

    Args:
        files: of the corpus.
        rows: of the label source.
        places: for each the path of its file as table text, or why there is none.
        words: what the label source calls its labels: folders of that name hold many videos.
        rejections: receives refused pictures, and missing ones of a video that has others.

    Returns:
        The rows that are left, their places, and sentences with counts.
    """
    left, found, counts = dict(enumerate(rows)), list(places), Counter[str]()
    for folder, numbers, problem in picture_folders(
        [row.path for row in rows],
        [replace(row, path="", source_id="", row=None, attributes=None, links=()) for row in rows],
        words,
        lambda folder: map(escape_text, picture_names(files.root / path_from_text(folder)) if folder else ()),
    ):
        first = next((number for number in numbers if isinstance(places[number], str)), numbers[0])
        kept = {number for number in numbers if rows[number].stated_group} if problem else {first}
        counts[_SINGLE if problem else _JOINED] += len(kept if problem else numbers)
        for number in set(numbers).difference(kept):
            row, refusal = left.pop(number), places[number]
            if problem and isinstance(refusal, str):
                refusal = Refusal(
                    "unassigned_picture",
                    f"{row.origin} row {row.row}: {problem}. {LAYOUT}; or name it in column 'group'.",
                )
            if isinstance(refusal, Refusal):
                rejections.add(row, refusal)
        if not problem:
            common = set.intersection(*(set(json.loads(rows[each].attributes or "{}").items()) for each in numbers))
            left[first] = replace(rows[first], path=folder, source_id=folder, attributes=attributes_text(dict(common)))
            found[first] = places[first] if isinstance(places[first], Refusal) else files.check(folder) or folder
    notes = tuple(f"{count:,} rows name pictures {what}" for what, count in counts.items() if count)
    return list(left.values()), [found[number] for number in left], notes


def cell_text(cells: Mapping[str, str], column: str | None) -> str | None:
    """The stripped cell as table text, or None where the column is absent or the cell means "no value"."""
    value = cells.get(column, "").strip() if column is not None else ""
    return None if value.lower() in _MISSING else escape_text(value)


def stated_part(cells: Mapping[str, str], column: str | None) -> tuple[str | None, Refusal | None]:
    """The part of the split that a cell states, if any, and why its text is no part."""
    said = cell_text(cells, column)
    if said is None or said.lower() in PART_NAMES:
        return said and PART_NAMES[said.lower()], None
    return None, Refusal("unknown_split", f"got the part {said!r}, wanted train, validation, test or nothing.")


def tables_in(folder: AnyPath) -> list[str]:
    """Names of the tables in ``folder``; only those called manifest where there are any."""
    names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    preferred = [name for name in names if name in PREFERRED_NAMES]
    return preferred or [name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]


def find_table(corpus: AnyPath, accepted: str) -> Path:
    """The manifest that ``corpus`` is or, as a folder, holds; ``accepted`` says what it has to look like.

    Raises:
        UsageError: there is none, or the folder holds several.
    """
    corpus = Path(corpus)
    if not corpus.is_dir():
        if not corpus.exists():
            raise UsageError(f"corpus {str(corpus)!r}: no such file or folder. {accepted}")
        return corpus
    found = tables_in(corpus)
    if len(found) == 1:
        return corpus / found[0]
    got = ", ".join(repr(name) for name in found[:10]) or f"no {', '.join(SUFFIXES)} file"
    advice = "Name the one that is meant as corpus." if found else accepted
    raise UsageError(f"corpus {str(corpus)!r}: a folder with {got}, wanted one manifest in it. {advice}")


def read_label_table(path: AnyPath, separator: str = ",") -> LabelTable:
    r"""Read text in UTF-8 (BOM allowed) or UTF-16, its columns separated by ``separator``, or a Parquet file, as text.

    The default stands for whichever of comma, semicolon and tab the header has most of.
    Bytes that are not UTF-8 are kept as surrogate escapes, so that they still name their file. With one character (any,
    also one like ``α``) cells are quoted as in CSV: RFC 4180, lines may break inside quotes. With several, as in
    ``a.mp4 ||| he said "go"``, a quote is a letter like any other, each line is a row, and space around a cell is
    dropped. ``\t``, as a command line gives it, is a tab.

    Raises:
        UsageError: unreadable, not of that format, without header, with a column named twice, or a separator that
            cannot be one.
    """
    path = Path(path)
    separator = separator.replace("\\t", "\t")
    if not separator or any(mark in separator for mark in '\r\n"'):
        raise UsageError(f"manifest_separator: got {separator!r}, wanted text without quotes and line breaks.")
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        columns, rows, found = _from_parquet(path) if is_parquet else _from_text(path, path.read_bytes(), separator)
    except OSError as error:
        raise UsageError(f"manifest {str(path)!r}: {error.strerror}. Give a readable CSV or Parquet file.") from error
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise UsageError(f"{path.name}: the column {twice[0]!r} exists twice. Keep one of them.")
    return LabelTable(path.name, columns, rows, found)


_Content = tuple[tuple[str, ...], tuple[tuple[str, ...] | None, ...], str]  # of ``LabelTable``


def _from_text(path: Path, content: bytes, separator: str) -> _Content:
    try:
        is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = content.decode("utf-16") if is_utf16 else content.decode("utf-8-sig", "surrogateescape")
    except UnicodeDecodeError as error:
        problem = f"begins as UTF-16 text and is none: {error.reason}"
        raise UsageError(f"{path.name}: {problem}. Save it in UTF-8.") from error
    # Spreadsheets are told the separator by a first line such as sep=;
    if separator == "," and (stated := re.match(r"sep=([^\r\n])\r?\n", text, re.IGNORECASE)):
        separator, text = stated[1], text[stated.end() :]
    elif separator == ",":
        header = next((line for line in text.splitlines() if line.strip()), "")
        separator = max(SEPARATORS, key=header.count)
    lines = list(_quoted_lines(path, text, separator) if len(separator) == 1 else _plain_lines(text, separator))
    if not lines or not any(lines[0]):
        raise UsageError(f"{path.name}: is empty. Wanted a header line with the names of the columns.")
    columns = tuple(name.strip() for name in lines[0])
    if len(columns) == 1 and (separator != "," or "|" in columns[0]):
        wanted = "comma, semicolon or tab" if separator == "," else repr(separator)
        raise UsageError(
            f"{path.name}: got the header {columns[0][:80]!r}, wanted columns separated by {wanted}. Separate "
            "them so, or, in task video_text, set manifest_separator to what separates them."
        )
    return columns, tuple(tuple(line) if len(line) == len(columns) else None for line in lines[1:]), separator


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


# Bytes of memory that the cells of a Parquet table may take: a small file can unpack to gigabytes.
_MOST_CELL_BYTES, _MOST_TIMES_THE_FILE = 256 << 20, 200


def parquet_problem(path_text: str) -> str:
    """Return why a Parquet table cannot be read into memory; empty if it can. Meant for a process of its own."""
    path, taken = Path(path_text), 0
    most = _MOST_CELL_BYTES + _MOST_TIMES_THE_FILE * path.stat().st_size
    try:
        for row in _parquet_frame(path).iter_rows():
            taken += sum(64 + len(_parquet_cell(value)) for value in row)
            if taken > most:
                return f"its cells take more than {most >> 20:,} MiB, too much for a file of its size"
    except (pl.exceptions.PolarsError, OSError) as error:
        return f"is not a Parquet table: {error}"
    return ""


def _from_parquet(path: Path) -> _Content:
    (answer,) = run_isolated(f"{__name__}:{parquet_problem.__name__}", [str(path.absolute())])
    problem = answer.value if answer.failure is None else f"cannot be unpacked: {answer.detail}"
    if problem:
        raise UsageError(f"{path.name}: {problem}. Give a CSV or Parquet file that holds what it says.")
    frame = _parquet_frame(path)
    columns = tuple(name.strip() for name in frame.columns)
    return columns, tuple(tuple(_parquet_cell(value) for value in row) for row in frame.iter_rows()), ""


def _parquet_frame(path: Path) -> pl.DataFrame:
    with path.open("rb") as stream:  # by its name, '[' and '*' in it would be a pattern
        return pl.read_parquet(stream)


def _parquet_cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
