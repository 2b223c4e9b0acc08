"""What a corpus lists: files and rows that can be used, and those that cannot, with reasons.

Which layouts there are is said by the files of ``fvc_lib.corpus.sources.*``: each registers a ``CorpusLoader``.
"""

import json
import os
import re
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal

import polars as pl

from fvc_lib.corpus.frame_names import ENDINGS, LAYOUT, is_picture, part_families
from fvc_lib.services.atomic_files import AnyPath, escape_text, message_text, path_to_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CORPORA, Registry
from fvc_lib.services.tables import ANNOTATIONS, LABELS, REJECTED, column_types, frame_of, write_table
from fvc_lib.services.tar_patterns import fixed_folder, is_pattern
from fvc_lib.video.decode.file_parts import part_at, picture_names

# --- What cannot be used, and what to do about it.

# Exclusions that say nothing about the quality of the corpus: no labelled video was lost by them.
NOT_A_LOSS = frozenset((
    "label_not_used", "duplicate_path", "duplicate_content", "unknown_extension", "not_listed", "surplus_file",
    "not_opened", "not_in_trial",
))  # fmt: skip
_REPAIR = "Repair or fetch again the files that cannot be read."
# What to do about a reason, where it is not to repair the file.
_REMEDIES = {
    "missing_video": "Fetch the files that are missing, or drop their rows.",
    "missing_image": "Fetch the files that are missing, or drop their rows.",
    "no_video": "Leave out the files that hold no video.",
    "unsupported": "Convert the files whose format has no decoder here, or leave them out.",
    "outside_corpus": "Files outside the corpus folder are not read: copy them into it, put the manifest into "
    "the folder that holds them, or set allow_outside: true (-p allow_outside true).",
    "linked_folder": "Linked folders are not entered: move them into the corpus, or set allow_outside: true "
    "(-p allow_outside true).",
    "conflicting_labels": "Keep one label for each file that is listed with two.",
    "label_not_used": "Only videos labelled real or fake are used; label_map says what other labels mean.",
    "unknown_extension": "Give files the extension of their format, such as .mp4.",
    "not_listed": "List the files that no table names.",
    "no_path": "Fill the column 'path'.",
    "no_text": "Fill the column 'text'.",
    "malformed_row": "Give every row as many cells as the header, in UTF-8.",
    "unknown_url": "Give the URL of a YouTube, Facebook or Twitter video.",
    "unassigned_picture": f"{LAYOUT}. In a table, the column 'group' may say instead of which video a picture is.",
    "unknown_split": "Write train, validation or test into the column 'split', or nothing.",
}


@dataclass(frozen=True)
class Refusal:
    """Why a file or row is not used: a code of a small vocabulary, and what exactly with the remedy."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One labelled file of a corpus, or a row of its label table before the file was looked up.

    Text is table text (``atomic_files.path_to_text``).
    """

    path: str  # relative to the corpus root, with '/'
    label: str | None  # of a row stripped and in lower case; None: an empty cell
    source_id: str
    stated_group: str | None = None
    manipulation: str | None = None
    platform: str | None = None
    row: int | None = None  # 1-based data row of the table that listed it
    origin: str = ""  # file name of that table
    generator: str | None = None  # what made a fake
    real_source: str | None = None  # where a real video was taken from
    official_split: str | None = None  # train, validation or test, as the corpus's own lists have it
    attributes: str | None = None  # JSON object of text: whatever else the corpus says of it
    links: tuple[str, ...] = ()  # further groups that it belongs to, beside ``stated_group``
    corpus: str = ""  # what its corpus is called; ``read_corpus`` fills in what the loader leaves empty
    label_source: str = ""  # name of the loader, likewise


@dataclass
class Rejections:
    """Collects rows of the REJECTED table."""

    rows: list[tuple[str, str | None, int | None, str | None, str, str]] = field(default_factory=list)

    def add(self, entry: Entry, refusal: Refusal) -> None:
        """Record that a listed row is not used."""
        self.rows.append(
            (entry.path, entry.source_id, entry.row, entry.label, refusal.reason, message_text(refusal.detail))
        )

    def add_file(self, path: str, refusal: Refusal, label: str | None = None, row: int | None = None) -> None:
        """Record a file or row that no usable listing belongs to; ``path`` is table text."""
        self.rows.append((path, None, row, label, refusal.reason, message_text(refusal.detail)))

    def frame(self, before: pl.DataFrame | None = None) -> pl.DataFrame:
        """The REJECTED table, sorted by path and row; ``before`` is a table to add to."""
        new = frame_of(self.rows, REJECTED)
        both = new if before is None else pl.concat([before, new])
        return both.sort("path", "row", "reason", "detail", nulls_last=True)


@contextmanager
def written_when_refused(rejections: Rejections, path: AnyPath | None) -> Iterator[None]:
    """Write the REJECTED table to ``path`` where this ends in a ``DataError``, and name it in the error."""
    try:
        yield
    except DataError as error:
        if path is None or not rejections.rows:
            raise
        write_table(rejections.frame(), REJECTED, path)
        raise type(error)(f"{error} Why each of {len(rejections.rows):,} rows is not used stands in {path}.") from error


def refuse_lost(
    root: AnyPath, what: str, rejected: pl.DataFrame, num_used: int, max_rejected_share: float,
    no_loss: Iterable[str] = NOT_A_LOSS,
) -> None:  # fmt: skip
    """Raise ``DataError`` where nothing is left of what the corpus at ``root`` lists, or too little.

    ``what`` is one of what it lists, of which ``num_used`` are left; ``rejected`` (REJECTED) are the others. At most
    ``max_rejected_share`` may be lost, where reasons in ``no_loss`` lose nothing.
    """
    lost = rejected.filter(~pl.col("reason").is_in(sorted(no_loss)))
    share = lost.height / max(1, lost.height + num_used)
    if num_used and share <= max_rejected_share:
        return
    shown = lost if lost.height else rejected
    counts = counted(shown["reason"])
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in counts.items()) or "nothing rejected"
    remedies = " ".join(dict.fromkeys(_REMEDIES.get(reason, _REPAIR) for reason in counts))
    if not counts:
        remedies = f"The corpus lists none. Put {what}s into it."
    if num_used:
        found = f"{share:.0%} of the {what}s cannot be used, at most {max_rejected_share:.0%} are allowed"
        remedies += " Or raise max_rejected_share."
    else:
        found = f"no usable {what}"
    examples = "".join(f" For example: {detail}" for detail in shown["detail"].head(1))
    raise DataError(f"corpus {str(root)!r}: {found} ({reasons}). {remedies}{examples}")


def counted(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, the commonest first."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def some_of(names: Sequence[str], limit: int = 20) -> str:
    """The first of ``names``, quoted, and how many more there are."""
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def disputed(files: Sequence[tuple[str, str]]) -> str:
    """``'a.mp4' (real), 'b.mp4' (fake)``: path and label of files of one content; of more than 20 some of each.

    Each of them is rejected with this sentence, so what all of them take must not grow with their square.
    """
    if len(files) <= 20:
        return ", ".join(f"{path!r} ({label})" for path, label in files)
    by_label: defaultdict[str, list[str]] = defaultdict(list)
    for path, label in files:
        by_label[label].append(path)
    return "; ".join(f"{label}: {some_of(paths, 5)}" for label, paths in by_label.items())


def counts_text(values: Iterable[str], limit: int = 8) -> str:
    """``133 x 'unlabelled', 2 x 'parody'``: the commonest values first, at most ``limit`` of them."""
    counts = list(counted(values).items())
    more = f", and {len(counts) - limit} more" if len(counts) > limit else ""
    return ", ".join(f"{count} x {value!r}" for value, count in counts[:limit]) + more


# --- Files below the folder of a corpus.

Kind = Literal["video", "image"]


# What browsers and download programs put behind the name of a file until it is whole.
_UNFINISHED = re.compile(
    r"\.(part|partial|crdownload|opdownload|download|ytdl|aria2|!qb|!ut|tmp|temp)(-frag\d+)?$", re.I
)


def _dangling(path: Path) -> Path | None:
    """The first of ``path`` and the folders above it that is a link to nothing."""
    links = (each for each in (path, *path.parents) if os.path.islink(each))  # noqa: PTH114 - raises nothing, also below
    return next((each for each in links if not os.path.exists(each)), None)  # noqa: PTH110


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def is_named_as(kind: Kind, name: str) -> bool:
    """Whether the extension, in any case, is one of a video container or elementary stream, or of a picture."""
    return PurePath(name).suffix.lower() in ENDINGS[kind]


@dataclass(frozen=True)
class Reading:
    """How a corpus is read: ``allow_outside`` and ``label_map`` (lower-case labels to real or fake) as configured."""

    allow_outside: bool = False
    label_map: Mapping[str, str] = field(default_factory=dict)
    unused_labels: bool = False  # ``label_map`` may name labels that no row has
    looks: Iterator[int] | None = None  # one is taken for each file that is looked at; none: as many as there are


class LongCorpusError(Exception):
    """A corpus has more files than ``read_corpus`` was asked to look at."""


_PLAINLY = Reading()
# What holds while a loader reads: loaders take nothing but a path.
_READING = ContextVar("reading", default=_PLAINLY)


class CorpusFiles:
    """Finds listed files and refuses what lies outside the corpus, unless ``allow_outside`` is on.

    A path may be relative to ``root`` or absolute inside it. It may not leave the root by ``..``, even to come back:
    whether it comes back depends on what the folder is called. Symbolic links may point inside the root only.

    Args:
        root: folder of the corpus.
        kind: of the files in it.
        allow_outside: take files wherever they lie, and enter linked folders; none: as ``read_corpus`` was asked to.
    """

    def __init__(self, root: AnyPath, kind: Kind = "video", allow_outside: bool | None = None) -> None:
        self._allow_outside = _READING.get().allow_outside if allow_outside is None else allow_outside
        self._looks = _READING.get().looks
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.resolve would also follow symbolic links
        self.kind: Kind = kind
        self._root_prefix = f"{str(self.root).rstrip(os.sep)}{os.sep}"
        self._real_root = os.path.realpath(root)
        self._real_folders: dict[str, bool] = {}
        self._spellings: dict[str, Mapping[str, str]] = {}

    def look(self, files: int = 1) -> None:
        """Count files that are looked at; ``LongCorpusError`` where they are more than ``read_corpus`` may look at."""
        if self._looks is not None and sum(1 for _ in islice(self._looks, files)) < files:
            raise LongCorpusError

    def normalized(self, raw: str) -> str | Refusal:
        """The listed path relative to the root without ``.`` and ``..`` (not yet table text), or why not."""
        if not raw or "\0" in raw:
            return Refusal("no_path", f"got {raw!r} as path; wanted a file name relative to the corpus folder.")
        path = os.path.normpath(raw)
        if os.path.isabs(path):  # noqa: PTH117 - text, as in check
            roots = (self._root_prefix, f"{self._real_root}{os.sep}")
            inside = next((root for root in roots if path.startswith(root)), None)
            if inside is None:
                return path if self._allow_outside else self._outside(raw, "is absolute and not below it")
            path = path[len(inside) :]
        if not self._allow_outside and (path == os.pardir or path.startswith(f"{os.pardir}{os.sep}")):
            return self._outside(raw, "leaves it by '..'")
        return path

    def check(self, path: str) -> Refusal | None:
        """Say why the normalized ``path`` cannot be used; None for a file inside the corpus.

        A folder of PNG or JPEG pictures, also one in a tar, is a video.
        """
        self.look()
        # Text: a Path for each of 100,000 files would take longer than their stat.
        full = path if path.startswith("/") else f"{self._root_prefix}{path}"
        try:
            if not self._allow_outside and not self._is_inside(full) and os.path.exists(full):  # noqa: PTH110 - as below
                return self._outside(path, f"leads by a symbolic link to {os.path.realpath(full)!r}")
            mode = os.stat(full).st_mode  # noqa: PTH116
        except NotADirectoryError as error:
            if self.kind == "video":  # it may lead into a tar
                return None if picture_names(full) else self._check_member(path, full)
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name.")
        except OSError as error:
            if isinstance(error, FileNotFoundError) or _dangling(Path(full)):  # the latter of links in a circle
                return Refusal(f"missing_{self.kind}", self._why_missing(path, Path(full)))
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name or the permissions.")
        if stat.S_ISREG(mode):
            return None
        if self.kind == "video" and (names := picture_names(full)):
            links = (name for name in names if os.path.islink(f"{full}/{name}"))  # noqa: PTH114
            return next((refusal for name in links if (refusal := self.check(f"{path}/{name}"))), None)
        return Refusal("not_a_file", f"{path!r} is not a regular file. List {self.kind} files only.")

    def _why_missing(self, path: str, full: Path) -> str:
        """Return why there is no such file: a link to nothing, another spelling, or neither."""
        if link := _dangling(full):
            name = str(link).removeprefix(self._root_prefix)
            return (
                f"{path!r}: the link {name!r} leads to {str(link.readlink())!r}, where nothing is. Restore that, or "
                "put the file in place of the link."
            )
        found = ""
        for part in path.replace("\\", "/").split("/"):
            found = joined(found, self._spelling(found).get(_folded(part), "/"))
        if not found.endswith("/"):
            return (
                f"no file {path!r} in the corpus folder; {found!a} is there, which is spelt otherwise (case, '/', or "
                "Unicode form NFC or NFD). Write the name as the file has it."
            )
        windows = " Paths have '/' between folders, and begin in the corpus folder." if "\\" in path else ""
        return f"no file {path!r} in the corpus folder.{windows} Restore it, or drop its row."

    def _spelling(self, folder: str) -> Mapping[str, str]:
        """The names in ``folder`` by what they are in lower case and in Unicode's composed form."""
        if folder not in self._spellings:
            _, folders, names = next(os.walk(self.root / folder), ("", (), ()))
            self._spellings[folder] = {_folded(name): name for name in sorted((*folders, *names))}
        return self._spellings[folder]

    def _check_member(self, path: str, full: str) -> Refusal | None:
        try:
            part_at(Path(full))
        except FileNotFoundError as error:
            return Refusal(f"missing_{self.kind}", f"{path!r}: {error.strerror}. Restore it, or drop its row.")
        except OSError as error:
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name, or fetch the tar again.")
        return None

    def walk(
        self, top: str, rejections: Rejections, label: str | None = None, *, pictures: bool = False
    ) -> Iterator[str]:
        """Paths (not yet table text) below ``top`` that are named as files of the kind; others are refused.

        With ``pictures`` still pictures, which may be frames of a video, are among them.
        """
        for path, is_folder in self.walk_all(top):
            if is_folder:
                refusal = self.link_refusal(path)
            elif is_named_as(self.kind, path) or (pictures and is_picture(path)):
                yield path
                continue
            elif _UNFINISHED.search(path):
                detail = f"{path!r} is a download that has not finished. Finish it, or delete it."
                refusal = Refusal("unknown_extension", detail)
            elif _dangling(self.root / path):
                refusal = Refusal(f"missing_{self.kind}", self._why_missing(path, self.root / path))
            else:
                detail = f"{path!r} has no extension of {'an image' if self.kind == 'image' else 'a video'}."
                refusal = Refusal("unknown_extension", f"{detail} Rename it if it is one.")
            rejections.add_file(path_to_text(path), refusal, label)

    def walk_all(self, top: str) -> Iterator[tuple[str, bool]]:
        """Yield (path, whether it is a linked folder) of files and linked folders that are not hidden."""
        if (self.root / top).is_symlink() and not self._allow_outside:
            yield top, True
            return
        entered: set[str] = set()
        for folder, folders, names in os.walk(self.root / top, followlinks=self._allow_outside):
            real = os.path.realpath(folder)
            if real in entered:  # by another link, or in a circle
                folders[:] = []
                continue
            entered.add(real)
            # Hidden names (.DS_Store, ._clip.mp4) are never meant as part of a corpus.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            below = os.path.relpath(folder, self.root)
            for name in folders:
                if not self._allow_outside and Path(folder, name).is_symlink():
                    yield str(Path(below, name)), True
            self.look(len(names))
            for name in sorted(names):
                if not name.startswith("."):
                    yield str(Path(below, name)), False

    def link_refusal(self, path: str) -> Refusal:
        """Linked folders are not walked: a link may lead out of the corpus, or in a circle."""
        refusal = self.check(path)
        if refusal is not None and refusal.reason == "outside_corpus":
            return refusal
        detail = f"{path!r} is a symbolic link to a folder. Move the folder here, or set allow_outside: true."
        return Refusal("linked_folder", detail)

    def _is_inside(self, full: str) -> bool:
        if os.path.islink(full):  # noqa: PTH114
            return self._is_below_root(os.path.realpath(full))
        folder = os.path.dirname(full)  # noqa: PTH120
        if folder not in self._real_folders:
            self._real_folders[folder] = self._is_below_root(os.path.realpath(folder))
        return self._real_folders[folder]

    def _is_below_root(self, real: str) -> bool:
        return real == self._real_root or real.startswith(self._real_root.rstrip(os.sep) + os.sep)

    def _outside(self, path: str, how: str) -> Refusal:
        remedy = "Copy the file into the corpus, or set allow_outside: true."
        return Refusal("outside_corpus", f"{path!r} {how}: outside the corpus folder. {remedy}")


# --- A corpus of labelled videos.


@dataclass(frozen=True)
class Listing:
    """A corpus as its label source describes it."""

    root: Path  # absolute folder that every path is relative to
    kind: str  # name of the loader that read it
    entries: tuple[Entry, ...]  # usable files, each path once, sorted by path
    rejected: pl.DataFrame  # REJECTED table of what is not used
    # Every row of the label source, used or not, with the columns of the ANNOTATIONS table but for ``group_id``: a
    # video that is gone or not used still proves that its groups belong together.
    annotations: pl.DataFrame
    notes: tuple[str, ...] = ()  # sentences on what the loader could not map, with the remedy
    name: str = ""  # what the corpus is called, as table text; ``read_corpus`` fills it in
    # Of several corpora that were joined, each by its name, as it was read; none of one alone.
    parts: Mapping[str, "Listing"] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Where it lies, or where each of several lies, for messages."""
        return ", ".join(str(part.root) for part in (self.parts or {"": self}).values())

    @cached_property
    def memberships(self) -> tuple[tuple[str, str], ...]:
        """Every distinct (source id, stated group, link or common whole) pair of the label source, sorted."""
        stated = self.annotations.filter(pl.col("stated_group").is_not_null()).select("source_id", "stated_group")
        linked = {(entry.source_id, link) for entry in self.entries for link in entry.links}
        return tuple(sorted(linked.union(self.parts_by_name.items(), stated.iter_rows())))

    @cached_property
    def parts_by_name(self) -> Mapping[str, str]:
        """The group of each source that states none and is a part of a video by its name, as others are."""
        alone = self.annotations.group_by("source_id").agg(pl.col("stated_group").count()).filter(stated_group=0)
        sources = alone["source_id"].sort().to_list()
        families = part_families(sources, [None] * len(sources))
        return {sources[place]: f"parts of {whole}" for whole, places, _ in families for place in places}


def attributes_text(values: Mapping[str, str]) -> str | None:
    """The column ``attributes``: a JSON object with sorted keys; None: nothing."""
    return json.dumps(dict(values), sort_keys=True, ensure_ascii=False) if values else None


def listing_of_files(
    files: CorpusFiles, kind: str, entries: Iterable[Entry], rejections: Rejections, notes: Iterable[str] = ()
) -> Listing:
    """The listing of labelled files that no table lists."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.path))
    rows = [replace(entry, row=number, origin=kind) for number, entry in enumerate(ordered, start=1)]
    annotations = _annotations(rows, [row.path for row in rows])
    return Listing(files.root, kind, ordered, rejections.frame(), annotations, tuple(notes))


def listing_of_rows(
    files: CorpusFiles, kind: str, rows: Sequence[Entry], places: Sequence[str | Refusal], rejections: Rejections
) -> Listing:
    """The listing of label rows: one entry per source, with one undisputed usable label and a file.

    A source that carries two different labels is not used at all, also when only one of them is real or fake: a
    clip listed as both ``fake`` and ``debunked`` is not known to be either. An empty label disputes nothing.

    ``rows`` are all of the label source, and ``places`` for each the path of its file as table text, or why there is
    none; ``rejections`` receives every row that is not used, and ``kind`` is the name of the loader.
    """
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label is not None:
            labels[row.source_id].add(row.label)
    entries: dict[str, Entry] = {}
    taken: dict[str, Entry] = {}
    for row, found in zip(rows, places, strict=True):
        refusal = _label_refusal(row, labels[row.source_id])
        first = taken.get(row.source_id)
        if refusal is None and first is not None:
            detail = f"{row.origin} row {row.row}: already listed in {first.origin} row {first.row}."
            refusal = Refusal("duplicate_path", detail)
        if refusal is None:
            taken[row.source_id] = row
            if isinstance(found, str):
                entries[found] = replace(row, path=found)
                continue
            refusal = found
        rejections.add(row, refusal)
    used = tuple(entries[path] for path in sorted(entries))
    return Listing(files.root, kind, used, rejections.frame(), _annotations(rows, places))


def _label_refusal(row: Entry, labels: set[str]) -> Refusal | None:
    where = f"{row.origin} row {row.row}"
    if row.label not in LABELS:
        got = "no label" if row.label is None else f"label {row.label!r}"
        return Refusal("label_not_used", f"{where}: got {got}; only real and fake are used. {label_map_hint(labels)}")
    if len(labels) > 1:
        listed = " and ".join(repr(label) for label in sorted(labels))
        detail = f"{where}: {row.source_id!r} is listed as {listed}. Keep the row that is right."
        return Refusal("conflicting_labels", detail)
    return None


def _annotations(rows: Sequence[Entry], places: Sequence[str | Refusal]) -> pl.DataFrame:
    values = [
        (row.source_id, row.origin, row.row, row.label, row.stated_group, row.platform, isinstance(found, str))
        for row, found in zip(rows, places, strict=True)
    ]
    schema = {name: kind for name, kind in column_types(ANNOTATIONS).items() if name != "group_id"}
    return pl.DataFrame(values, schema=schema, orient="row")


def joined(*parts: str) -> str:
    """A path with '/' of those parts that are not empty."""
    return "/".join(filter(None, parts))


def parts_below(path: str, top: str) -> tuple[str, ...]:
    """The names that lead from ``top`` to ``path``."""
    return PurePosixPath(path).relative_to(top).parts


# --- Layouts, and which of them a corpus has.


@dataclass(frozen=True)
class CorpusLoader:
    """One layout of a corpus, as its file declares it.

    Attributes:
        name: of the layout.
        accepted: what it looks like, for the message that lists all layouts.
        recognises: whether a folder or file has the layout, told without opening a video.
        read: lists what is in it. A loader of videos takes the path and gives a ``Listing``, or raises a UsageError or
            DataError; one of images takes the ``CorpusFiles`` and a path below their root and gives ``ImageListing``.
        lacks: for a path that nothing recognises: what it lacks of this layout, in a sentence, where it is near it.
        rank: layouts are tried in this order; 0 for one that nothing else looks like.
        title, paper, licence, fetch: of a published corpus: its name, where it is described, under which terms it may
            be used, and from whom it is to be had. Its groups mean the same in every folder that it lies in, and in
            other published corpora, so that they are named after it or after what is known everywhere.
        corpus: what the corpus is called in tables; empty: after its folder or manifest.
        expected: of a published corpus where its reals and its fakes lie, by label; without one of a label that is
            named here it was unpacked halfway, and is refused.
        bibtex: the entry of the paper that published the corpus; empty for a layout that any corpus may have.
    """

    name: str
    accepted: str
    recognises: Callable[[Path], bool]
    read: Callable[..., Any]
    lacks: Callable[[Path], str] = lambda path: ""
    rank: int = 0
    title: str = ""
    corpus: str = ""
    expected: Mapping[str, str] = field(default_factory=dict)
    paper: str = ""
    licence: str = ""
    fetch: str = ""
    bibtex: str = ""


def by_rank(registry: Registry[Any]) -> list[CorpusLoader]:
    """All loaders of ``registry`` in the order in which they are tried."""
    return sorted((loader for _, loader in registry.items()), key=lambda loader: loader.rank)


def recognised(registry: Registry[Any], corpus: Path) -> CorpusLoader:
    """The layout that ``corpus`` has; ``UsageError``, which names them all, where it has none or cannot be read."""
    loaders = by_rank(registry)
    layouts = [loader.accepted for loader in loaders if not loader.title]
    accepted = f"A corpus is {', or '.join(f'({number}) {each}' for number, each in enumerate(layouts, start=1))}."
    if published := sorted(loader.name for loader in loaders if loader.title):
        accepted += f" Or a published one as it unpacks: {', '.join(published)}."
    try:
        if corpus.is_dir():
            os.listdir(corpus)  # noqa: PTH208 - only to see that it can be read
        elif not is_pattern(corpus):
            corpus.stat()
    except FileNotFoundError:
        raise UsageError(f"corpus {str(corpus)!r}: no such file or folder. {accepted}") from None
    except OSError as error:
        raise UsageError(f"corpus {str(corpus)!r}: {error.strerror}. {accepted}") from error
    for loader in loaders:
        if loader.recognises(corpus):
            return loader
    lacking = next(filter(None, (loader.lacks(corpus) for loader in loaders)), "has none of the known layouts.")
    if "Did you mean" not in lacking and (found := _layouts_below(corpus, loaders)):
        lacking += f" Did you mean {' or '.join(repr(str(each)) for each in found)}?"
    raise UsageError(f"corpus {str(corpus)!r}: {lacking} {accepted}")


def _layouts_below(corpus: Path, loaders: Sequence[CorpusLoader]) -> list[Path]:
    """Folders in ``corpus`` that have a layout, looked for in its first 20; in an outer folder, in the one within."""
    with suppress(OSError):  # a folder that cannot be read has none
        for _ in range(4):
            names = sorted(os.listdir(corpus)) if corpus.is_dir() else []  # noqa: PTH208 - names, not paths
            inner = [corpus / name for name in names if not name.startswith(".") and (corpus / name).is_dir()][:20]
            found = [each for each in inner if any(loader.recognises(each) for loader in loaders)]
            if found or len(inner) != 1:
                return found
            (corpus,) = inner
    return []


def read_corpus(
    corpus: AnyPath,
    *,
    allow_outside: bool = False,
    label_map: Mapping[str, str] | None = None,
    unused_labels: bool = False,
    most_files: int | None = None,
) -> Listing:
    """List what a corpus of videos holds, without opening a video.

    Args:
        corpus: a folder, a manifest file, a tar or a pattern of tars (``tar_patterns``).
        allow_outside: take listed files outside the corpus folder as well, and follow links.
        label_map: labels of a table, in lower case, that mean real or fake.
        unused_labels: ``label_map`` may name labels that no row has.
        most_files: look at so many files at most; none: at all.

    Raises:
        UsageError: it is not there, cannot be read or has no layout that is known; the message tells which there are.
        DataError: a manifest without one usable label.
        LongCorpusError: it has more than ``most_files`` files.
    """
    corpus = Path(corpus)
    looks = None if most_files is None else iter(range(most_files))
    token = _READING.set(Reading(allow_outside, label_map or {}, unused_labels, looks))
    try:
        loader = recognised(CORPORA, corpus)
        listing: Listing = loader.read(corpus)
    finally:
        _READING.reset(token)
    _refuse_half(corpus, loader, listing)
    name = loader.corpus or _name_of(corpus)
    entries = tuple(replace(entry, corpus=entry.corpus or name, label_source=listing.kind) for entry in listing.entries)
    names = {entry.corpus for entry in entries}
    notes, without, parts = listing.notes, sum(entry.official_split is None for entry in entries), listing.parts_by_name
    if 0 < without < len(entries):
        notes += (f"{without:,} of {len(entries):,} videos are in no part of the corpus's own split.",)
    if parts:
        told = f"{len(parts):,} videos are parts of {len(set(parts.values())):,} by their names, such as {min(parts)!r}"
        notes += (f"{told}: those of one are one group. The column 'group' of a table says otherwise.",)
    return replace(listing, name=names.pop() if len(names) == 1 else name, entries=entries, notes=notes)


def _refuse_half(corpus: Path, loader: CorpusLoader, listing: Listing) -> None:
    there = {entry.label for entry in listing.entries}
    missing = {label: place for label, place in loader.expected.items() if label not in there}
    if missing:
        said = "; ".join(f"{label} videos: expected {place}" for label, place in missing.items())
        unused = counted(listing.rejected["reason"])
        found = f" {listing.rejected.height:,} files are there and not used: {', '.join(unused)}." if unused else ""
        raise DataError(
            f"corpus {str(corpus)!r}: looks like {loader.title}, but has none of its {said}.{found} Fetch or unpack it "
            "as it was published; to use what is there as it is, write a manifest."
        )


def _name_of(corpus: Path) -> str:
    """After its folder; a manifest after itself, unless it is only called that."""
    path = Path(os.path.abspath(corpus))  # noqa: PTH100 - a link keeps the name it was given by
    path = fixed_folder(path) if is_pattern(path) else path
    own = path.name if path.is_dir() else path.stem
    return path_to_text(path.parent.name if own.lower() == "manifest" else own) or "corpus"


def stated_label(cell: str) -> str | None:
    """What a cell of a label column says, as table text in lower case and as ``label_map`` has it; None: nothing."""
    said = escape_text(cell.strip().lower())
    return _READING.get().label_map.get(said, said) or None


# How tables say that something is so, and that it is not, in lower case.
_TRUTHS = (("1", "0"), ("1.0", "0.0"), ("true", "false"), ("yes", "no"), ("t", "f"), ("y", "n"))


def label_map_hint(labels: Iterable[str], option: str = "-p label_map") -> str:
    """Return how to say what ``labels`` mean, by what they may mean: that a video is fake, and that it is not."""
    said = set(labels)
    fake, real = next((pair for pair in _TRUTHS if said & set(pair)), ("...", "..."))
    return f"Say what labels mean, if it is this: {option} {fake}=fake,{real}=real."


def refuse_unused_labels(table: str, cells: Iterable[str]) -> None:
    """Stop where ``label_map`` names a label that no cell of the label column has.

    Raises:
        UsageError: the message counts what was found.
    """
    said = [escape_text(cell.strip().lower()) for cell in cells]
    unused = sorted(set(_READING.get().label_map).difference(said))
    if unused and not _READING.get().unused_labels:
        raise UsageError(
            f"label_map: no row of {table} is labelled {some_of(unused)}; got {counts_text(said) or 'no data row'}. "
            "Leave it out of label_map, or spell it as the table does (in YAML, 'yes' and 'no' need quotes)."
        )
