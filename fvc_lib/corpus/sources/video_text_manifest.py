"""A manifest of videos and the texts that describe them: any separator, one row per pair."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.corpus.label_table import LabelTable, optional_cell, read_label_table
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal, Rejections
from fvc_lib.services.atomic_files import escape_text, path_from_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import PAIR_LAYOUTS

PATH_COLUMNS = ("path", "video_path", "video")
TEXT_COLUMNS = ("text", "caption")
GROUP_COLUMNS = ("group", "group_id")
SPLIT_COLUMNS = ("split", "part")
_PART_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
               "val": "validation", "dev": "validation", "test": "test", "testing": "test"}  # fmt: skip
_SUFFIXES = (".csv", ".tsv", ".parquet")
ACCEPTED = (
    "Wanted a manifest with the columns 'path' and 'text', if known also 'split' (train, validation, test) and "
    "'group': CSV, any other separated text (manifest_separator) or Parquet; or a folder with one such file in it."
)


@dataclass(frozen=True, slots=True)
class PairRow:
    """One usable row of the manifest: the file is there, the text is not empty."""

    row: int  # 1-based data row
    path: str  # table text, relative to the manifest's folder
    text: str  # normalised
    part: str | None  # as the manifest says
    stated_group: str | None


@dataclass(frozen=True)
class PairListing:
    """What a manifest lists.

    Attributes:
        root: absolute folder that every path is relative to.
        rows: usable rows in the manifest's order.
        rejections: the other rows, with reasons.
        memberships: distinct (path, stated group) of all rows whose path can be meant, also of files that are missing:
            they too prove that groups belong together.
        num_rows: data rows of the manifest.
    """

    root: Path
    rows: tuple[PairRow, ...]
    rejections: Rejections
    memberships: tuple[tuple[str, str], ...]
    num_rows: int


def normalised_text(text: str) -> str:
    """``text`` in Unicode's form NFC, without space around it and with single spaces inside; letters keep their case.

    Texts that are equal after this are one text.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def find_manifest(corpus: Path) -> Path:
    """The manifest that ``corpus`` is or, as a folder, holds.

    Raises:
        UsageError: there is none, or the folder holds several.
    """
    if not corpus.is_dir():
        if not corpus.exists():
            raise UsageError(f"corpus {str(corpus)!r}: no such file or folder. {ACCEPTED}")
        return corpus
    found = sorted(path for path in corpus.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())
    if len(found) == 1:
        return found[0]
    got = ", ".join(repr(path.name) for path in found[:10]) or f"no {', '.join(_SUFFIXES)} file"
    advice = "Name the one that is meant as corpus." if found else ACCEPTED
    raise UsageError(f"corpus {str(corpus)!r}: a folder with {got}, wanted one manifest in it. {advice}")


def read_pairs(manifest: Path, separator: str) -> PairListing:
    """Read ``path`` (or ``video_path``), ``text`` (or ``caption``) and, where there are, ``split`` and ``group``.

    Args:
        manifest: a .parquet file, or separated text in UTF-8 (a byte order mark is allowed).
        separator: between the columns; see ``read_label_table``. A .tsv file has tabs where it is the default.

    Raises:
        UsageError: not such a table, or a needed column is missing.
    """
    is_tsv = separator == "," and manifest.suffix.lower() == ".tsv"
    table = read_label_table(manifest, "\t" if is_tsv else separator)
    reader = _RowReader(table, CorpusFiles(manifest.parent))
    rows = tuple(reader.usable())
    memberships = tuple(sorted(reader.memberships))
    return PairListing(reader.files.root, rows, reader.rejections, memberships, len(table.rows))


class _RowReader:
    """Turns the rows of a table into pairs, and keeps what is wrong with the others."""

    def __init__(self, table: LabelTable, files: CorpusFiles) -> None:
        self.files = files
        self.rejections = Rejections()
        self.memberships: set[tuple[str, str]] = set()
        self._table = table
        self._path, self._text = table.require(PATH_COLUMNS), table.require(TEXT_COLUMNS)
        self._group, self._split = table.optional(GROUP_COLUMNS), table.optional(SPLIT_COLUMNS)
        self._located: dict[str, tuple[str, Refusal | None]] = {}

    def usable(self) -> Iterator[PairRow]:
        wanted = [name for name in (self._path, self._text, self._split, self._group) if name is not None]
        for number, cells in self._table.records(wanted):
            if cells is None:
                problem = "its number of cells is not the header's. Quote or repair it."
                self._refuse("", number, Refusal("malformed_row", problem))
                continue
            path, refusal = self._locate(cells[self._path])
            group = optional_cell(cells, self._group)
            group = None if group is None else escape_text(group)
            if group is not None and (refusal is None or refusal.reason == "missing_video"):
                self.memberships.add((path, group))
            text, part = normalised_text(cells[self._text]), (optional_cell(cells, self._split) or "").lower()
            refusal = refusal or _text_refusal(text) or _part_refusal(part)
            if refusal is None:
                yield PairRow(number, path, text, _PART_NAMES.get(part), group)
            else:
                self._refuse(path, number, refusal)

    def _locate(self, cell: str) -> tuple[str, Refusal | None]:
        """The path's table text, and why there is no such file; space around it counts only where it is part of it."""
        if cell not in self._located:
            found = self._look_up(cell)
            is_padded = found[1] is not None and cell != cell.strip()
            self._located[cell] = self._look_up(cell.strip()) if is_padded else found
        return self._located[cell]

    def _look_up(self, cell: str) -> tuple[str, Refusal | None]:
        normalized = self.files.normalized(cell)
        if isinstance(normalized, Refusal):
            return escape_text(cell), normalized
        path = escape_text(normalized)
        return path, self.files.check(str(path_from_text(path)))

    def _refuse(self, path: str, number: int, refusal: Refusal) -> None:
        detail = f"{self._table.name} row {number}: {refusal.detail}"
        self.rejections.add_file(path, Refusal(refusal.reason, detail), row=number)


def _text_refusal(text: str) -> Refusal | None:
    if not text:
        return Refusal("no_text", "has no text. Write what is seen, or drop the row.")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Refusal("malformed_row", "its text is not UTF-8. Save the manifest in UTF-8.")
    return None


def _part_refusal(part: str) -> Refusal | None:
    if not part or part in _PART_NAMES:
        return None
    return Refusal("unknown_split", f"its split is {part!r}; wanted train, validation, test or nothing.")


PAIR_LAYOUTS.register(
    CorpusLoader(
        name="pairs",
        accepted=(
            "a manifest with the columns 'path' and 'text', if known also 'split' (train, validation, test) and "
            "'group': CSV, any other separated text (manifest_separator) or Parquet; or a folder with one such file"
        ),
        recognises=lambda path: True,  # the most general one: what it lacks is said where it is read
        read=lambda path, separator: read_pairs(find_manifest(path), separator),
        rank=9,
    )
)
