"""What a label source lists: usable entries, refused rows with reasons, and every annotation that links groups.

Which layouts there are is said by the files of ``fvc_lib.corpus.sources.*``: each registers a ``CorpusLoader``.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import polars as pl

from fvc_lib.services.atomic_files import message_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import CORPORA, Registry
from fvc_lib.services.tables import LABELS, REJECTED

# Exclusions that say nothing about the quality of the corpus: no labelled video was lost by them.
NOT_A_LOSS = frozenset(
    {
        "label_not_used", "duplicate_path", "duplicate_content", "unknown_extension", "not_listed", "surplus_file",
        "not_opened",
    }
)  # fmt: skip

_ANNOTATIONS = {
    "source_id": pl.String,
    "origin": pl.String,
    "row": pl.Int64,
    "label": pl.String,
    "stated_group": pl.String,
    "platform": pl.String,
    "is_present": pl.Boolean,
}


@dataclass(frozen=True)
class Refusal:
    """Why a file or row is not used: a code of a small vocabulary, and what exactly with the remedy."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One labelled file of a corpus. Text is table text (``services.path_text``)."""

    path: str  # relative to the corpus root, with '/'
    label: str
    source_id: str
    stated_group: str | None = None
    manipulation: str | None = None
    platform: str | None = None
    row: int | None = None  # 1-based data row of the table that listed it


@dataclass(frozen=True, slots=True)
class LabelRow:
    """One data row of a label table before anything was looked up on disk. Text is table text."""

    row: int
    path: str
    source_id: str
    label: str | None  # stripped, lower case; None when the cell is empty
    stated_group: str | None
    manipulation: str | None
    platform: str | None
    origin: str  # file name of the table, for messages


@dataclass(frozen=True)
class Listing:
    """A corpus as its label source describes it.

    Attributes:
        root: absolute folder that every path is relative to.
        kind: name of the loader that read it.
        entries: usable files, each path once, sorted by path.
        rejected: REJECTED table of what is not used.
        annotations: every row of the label source, used or not, with the columns of the ANNOTATIONS table but for
            ``group_id``: a video that is gone or not used still proves that its groups belong together.
    """

    root: Path
    kind: str
    entries: tuple[Entry, ...]
    rejected: pl.DataFrame
    annotations: pl.DataFrame

    @cached_property
    def memberships(self) -> tuple[tuple[str, str], ...]:
        """Every distinct (source id, stated group) pair of the label source, sorted."""
        stated = self.annotations.filter(pl.col("stated_group").is_not_null())
        return tuple(sorted(set(stated.select("source_id", "stated_group").iter_rows())))


@dataclass
class Rejections:
    """Collects rows of the REJECTED table."""

    rows: list[tuple[str, str | None, int | None, str | None, str, str]] = field(default_factory=list)

    def add(self, entry: Entry | LabelRow, refusal: Refusal) -> None:
        """Record that a listed row is not used."""
        self.rows.append(
            (entry.path, entry.source_id, entry.row, entry.label, refusal.reason, message_text(refusal.detail))
        )

    def add_file(self, path: str, refusal: Refusal, label: str | None = None, row: int | None = None) -> None:
        """Record a file or row that no usable listing belongs to; ``path`` is table text."""
        self.rows.append((path, None, row, label, refusal.reason, message_text(refusal.detail)))

    def frame(self, before: pl.DataFrame | None = None) -> pl.DataFrame:
        """The REJECTED table, sorted by path and row; ``before`` is a table to add to."""
        schema = {name: column.dtype.type for name, column in REJECTED.columns.items()}
        new = pl.DataFrame(self.rows, schema=schema, orient="row")
        both = new if before is None else pl.concat([before, new])
        return both.sort("path", "row", "reason", "detail", nulls_last=True)


class CorpusFiles:
    """Finds listed files and refuses what lies outside the corpus.

    A path may be relative to ``root`` or absolute inside it. It may not leave the root by ``..``, even to come back:
    whether it comes back depends on what the folder is called. Symbolic links may point inside the root only.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.resolve would also follow symbolic links
        self._root_prefix = f"{str(self.root).rstrip(os.sep)}{os.sep}"
        self._real_root = os.path.realpath(root)
        self._real_folders: dict[str, bool] = {}

    def normalized(self, raw: str) -> str | Refusal:
        """The listed path relative to the root without ``.`` and ``..`` (not yet table text), or why not."""
        if not raw or "\0" in raw:
            return Refusal("no_path", f"got {raw!r} as path; wanted a file name relative to the corpus folder.")
        path = os.path.normpath(raw)
        if os.path.isabs(path):  # noqa: PTH117 - text, as in check
            roots = (self._root_prefix, f"{self._real_root}{os.sep}")
            inside = next((root for root in roots if path.startswith(root)), None)
            if inside is None:
                return self._outside(raw, "is absolute and not below it")
            path = path[len(inside) :]
        if path == os.pardir or path.startswith(f"{os.pardir}{os.sep}"):
            return self._outside(raw, "leaves it by '..'")
        return path

    def check(self, path: str) -> Refusal | None:
        """Why the normalized ``path`` cannot be used, or None when it is a regular file inside the corpus."""
        full = f"{self._root_prefix}{path}"  # text: a Path for each of 100,000 files would take longer than their stat
        try:
            if not self._is_inside(full):
                return self._outside(path, f"leads by a symbolic link to {os.path.realpath(full)!r}")
            mode = os.stat(full).st_mode  # noqa: PTH116
        except FileNotFoundError:
            return Refusal("missing_video", f"no file {path!r} in the corpus folder. Restore it, or drop its row.")
        except OSError as error:
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name or the permissions.")
        if not stat.S_ISREG(mode):
            return Refusal("not_a_file", f"{path!r} is not a regular file. List video files only.")
        return None

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
        return Refusal(
            "outside_corpus",
            f"{path!r} {how}: outside the corpus folder. Copy the file into the corpus.",
        )


def settle_rows(rows: Sequence[LabelRow], rejections: Rejections, places: Sequence[str | Refusal]) -> tuple[Entry, ...]:
    """Turn label rows into entries: one per source, with one undisputed usable label and a file.

    A source that carries two different labels is not used at all, also when only one of them is real or fake: a
    clip listed as both ``fake`` and ``debunked`` is not known to be either. An empty label disputes nothing.

    Args:
        rows: all rows of the label source.
        rejections: receives every row that is not used.
        places: for each row the path of its file as table text, or why there is none.
    """
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label is not None:
            labels[row.source_id].add(row.label)
    entries: dict[str, Entry] = {}
    taken: dict[str, LabelRow] = {}
    for row, found in zip(rows, places, strict=True):
        refusal = _label_refusal(row, labels[row.source_id]) or _duplicate_refusal(row, taken.get(row.source_id))
        if refusal is None:
            taken[row.source_id] = row
            if isinstance(found, str):
                entries[found] = _entry(row, found)
                continue
            refusal = found
        rejections.add(row, refusal)
    return tuple(entries[path] for path in sorted(entries))


def annotations_of(rows: Sequence[LabelRow], places: Sequence[str | Refusal]) -> pl.DataFrame:
    """The ``Listing.annotations`` table of label rows; ``places`` as for ``settle_rows``."""
    values = [
        (row.source_id, row.origin, row.row, row.label, row.stated_group, row.platform, isinstance(found, str))
        for row, found in zip(rows, places, strict=True)
    ]
    return pl.DataFrame(values, schema=_ANNOTATIONS, orient="row")


def annotations_of_files(entries: Sequence[Entry], origin: str) -> pl.DataFrame:
    """The same of labelled files that no table lists: each stands in a row of its own, in the order given."""
    values = [
        (entry.source_id, origin, number, entry.label, entry.stated_group, entry.platform, True)
        for number, entry in enumerate(entries, start=1)
    ]
    return pl.DataFrame(values, schema=_ANNOTATIONS, orient="row")


def counts_text(values: Iterable[Any], limit: int = 8) -> str:
    """``133 x 'unlabelled', 2 x 'parody'``: the commonest values first, at most ``limit`` of them."""
    counts = sorted(Counter(values).items(), key=lambda item: (-item[1], str(item[0])))
    more = f", and {len(counts) - limit} more" if len(counts) > limit else ""
    return ", ".join(f"{count} x {value!r}" for value, count in counts[:limit]) + more


def _label_refusal(row: LabelRow, labels: set[str]) -> Refusal | None:
    if row.label not in LABELS:
        got = "no label" if row.label is None else f"label {row.label!r}"
        return Refusal("label_not_used", f"{row.origin} row {row.row}: got {got}; only real and fake are used.")
    if len(labels) > 1:
        listed = " and ".join(repr(label) for label in sorted(labels))
        return Refusal(
            "conflicting_labels",
            f"{row.origin} row {row.row}: {row.source_id!r} is listed as {listed}. Keep the row that is right.",
        )
    return None


def _duplicate_refusal(row: LabelRow, first: LabelRow | None) -> Refusal | None:
    if first is None:
        return None
    return Refusal("duplicate_path", f"{row.origin} row {row.row}: already listed in {first.origin} row {first.row}.")


def _entry(row: LabelRow, path: str) -> Entry:
    return Entry(
        path=path,
        label=str(row.label),
        source_id=row.source_id,
        stated_group=row.stated_group,
        manipulation=row.manipulation,
        platform=row.platform,
        row=row.row,
    )


VIDEO_EXTENSIONS = frozenset(
    {
        ".3g2", ".3gp", ".264", ".265", ".amv", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264",
        ".h265", ".hevc", ".ivf", ".m1v", ".m2ts", ".m4s", ".m2v", ".m4v", ".mjpeg", ".mjpg", ".mkv", ".mov", ".mp4",
        ".mpe", ".mpeg", ".mpg", ".mts", ".mxf", ".nut", ".obu", ".ogg", ".ogv", ".qt", ".rm", ".rmvb", ".ts", ".vob",
        ".webm", ".wmv", ".y4m",
    }
)  # fmt: skip


def is_video_name(name: str) -> bool:
    """Whether the extension, in any case, is one of a video container or elementary stream."""
    return PurePath(name).suffix.lower() in VIDEO_EXTENSIONS


def is_hidden(name: str) -> bool:
    """Whether a name is hidden (``.DS_Store``, ``._clip.mp4``): never meant as part of a corpus."""
    return name.startswith(".")


def walk_files(root: Path, top: str) -> Iterator[tuple[str, bool]]:
    """Yield (path below ``root``, whether it is a linked folder) of files and linked folders that are not hidden."""
    if (root / top).is_symlink():
        yield top, True
        return
    for folder, folders, names in os.walk(root / top):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = os.path.relpath(folder, root)
        for name in folders:
            if Path(folder, name).is_symlink():
                yield str(Path(below, name)), True
        for name in sorted(names):
            if not is_hidden(name):
                yield str(Path(below, name)), False


def folder_link_refusal(files: CorpusFiles, path: str) -> Refusal:
    """Linked folders are not walked: a link may lead out of the corpus, or in a circle."""
    refusal = files.check(path)
    if refusal is not None and refusal.reason == "outside_corpus":
        return refusal
    return Refusal(
        "linked_folder", f"{path!r} is a symbolic link to a folder. Move the folder here, or use a manifest."
    )


@dataclass(frozen=True)
class CorpusLoader:
    """One layout of a corpus, as its file declares it.

    Attributes:
        name: of the layout.
        accepted: what it looks like, for the message that lists all layouts.
        recognises: whether a folder or file has the layout, told without opening a video.
        read: lists what is in it. A loader of videos takes the path and gives a ``Listing``, or raises a UsageError or
            DataError; for images see ``image_listing``.
        lacks: for a path that nothing recognises: what it lacks of this layout, in a sentence, where it is near it.
        rank: layouts are tried in this order; 0 for one that nothing else looks like.
    """

    name: str
    accepted: str
    recognises: Callable[[Path], bool]
    read: Callable[..., Any]
    lacks: Callable[[Path], str] = lambda path: ""
    rank: int = 0


def by_rank(registry: Registry[Any]) -> list[CorpusLoader]:
    """All loaders of ``registry`` in the order in which they are tried."""
    return sorted((loader for _, loader in registry.items()), key=lambda loader: loader.rank)


def accepted_layouts(registry: Registry[Any]) -> str:
    """A sentence on all layouts of ``registry``."""
    layouts = (f"({number}) {loader.accepted}" for number, loader in enumerate(by_rank(registry), start=1))
    return f"A corpus is {', or '.join(layouts)}."


def recognised(registry: Registry[Any], corpus: Path) -> CorpusLoader:
    """The loader of ``registry`` for the layout that ``corpus`` has.

    Raises:
        UsageError: it is not there, cannot be read or has no layout that is known; the message tells which there are.
    """
    loaders, accepted = by_rank(registry), accepted_layouts(registry)
    try:
        if corpus.is_dir():
            os.listdir(corpus)  # noqa: PTH208 - only to see that it can be read
        else:
            corpus.stat()
    except FileNotFoundError:
        raise UsageError(f"corpus {str(corpus)!r}: no such file or folder. {accepted}") from None
    except OSError as error:
        raise UsageError(f"corpus {str(corpus)!r}: {error.strerror}. {accepted}") from error
    for loader in loaders:
        if loader.recognises(corpus):
            return loader
    lacking = next(filter(None, (loader.lacks(corpus) for loader in loaders)), "has none of the known layouts.")
    raise UsageError(f"corpus {str(corpus)!r}: {lacking} {accepted}")


def read_corpus(corpus: Path) -> Listing:
    """List what a corpus of videos holds, without opening a video.

    Raises:
        UsageError: it has none of the layouts that are known; the message tells which there are.
        DataError: a manifest without one usable label.
    """
    listing: Listing = recognised(CORPORA, corpus).read(corpus)
    return listing
