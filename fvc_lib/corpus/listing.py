"""List corpora of labelled videos by their label sources, and recognise the layout of a corpus.

A label source states which videos are real and which are fake: a table, lists, or names of folders. Each module of
``fvc_lib.corpus.sources.*`` registers a ``CorpusLoader`` for one layout.

Several corpora are joined to one listing. Its root is a folder with a link to each corpus, and its paths begin with the
name of the corpus. A leakage group holds videos of the same footage or source, which a split never divides. Usually a
group name that occurs in two corpora stands for two different groups. Only in published corpora it is the same group,
such as a YouTube video from which clips in both were cut.

REJECTED and ANNOTATIONS are tables whose columns ``services.tables`` describes. Table text is text with escapes
(``atomic_files.path_to_text``).
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.corpus_files import (
    LABEL_FOLDER,
    READING,
    CorpusFiles,
    Entry,
    Reading,
    Refusal,
    Rejections,
    joined,
    part_families,
    reasons_text,
    some_of,
)
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_from_text, path_to_text, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CORPORA, Registry
from fvc_lib.services.run_paths import fixed_folder, is_pattern
from fvc_lib.services.tables import ANNOTATIONS, LABELS, column_types


@dataclass(frozen=True)
class Listing:
    """The usable and rejected files of a corpus, as its label source describes them; no video was opened."""

    root: Path  # absolute folder that every path is relative to
    kind: str  # name of the loader that read it
    entries: tuple[Entry, ...]  # usable files, each path once, sorted by path
    rejected: pl.DataFrame  # REJECTED table
    # All rows of the label source, used or not, with the ANNOTATIONS columns except ``group_id``. Rows of missing
    # videos also show which groups belong together.
    annotations: pl.DataFrame
    notes: tuple[str, ...] = ()  # sentences for the user
    name: str = ""  # name of the corpus, escaped by ``escape_text``; ``read_corpus`` sets it
    parts: Mapping[str, "Listing"] = field(default_factory=dict)  # listings of several joined corpora, by name

    @property
    def shown(self) -> str:
        """The folder of the corpus, for messages; of several joined corpora, their folders with commas between."""
        return ", ".join(str(part.root) for part in (self.parts or {"": self}).values())

    @cached_property
    def memberships(self) -> tuple[tuple[str, str], ...]:
        """The distinct pairs (source id, group) of the corpus, sorted; a source id may be in several groups.

        Groups come from three places: the label source's rows, the further groups of a file (``links`` of its
        ``Entry``), and names that look like parts of a longer video (``parts_by_name``).
        """
        stated = self.annotations.filter(pl.col("stated_group").is_not_null()).select("source_id", "stated_group")
        linked = {(entry.source_id, link) for entry in self.entries for link in entry.links}
        return tuple(sorted(linked.union(self.parts_by_name.items(), stated.iter_rows())))

    @cached_property
    def parts_by_name(self) -> Mapping[str, str]:
        """A mapping from source ids to groups, for source ids that are named like parts of a longer video.

        A source id is the name of a video in the label source. For example, ``talk_seg1.mp4`` and ``talk_seg2.mp4`` are
        mapped to the same group. Source ids with a stated group are left out.
        """
        alone = self.annotations.group_by("source_id").agg(pl.col("stated_group").count()).filter(stated_group=0)
        sources = alone["source_id"].sort().to_list()
        families = part_families(sources, [None] * len(sources))
        return {sources[place]: f"parts of {whole}" for whole, places, _ in families for place in places}


def attributes_text(values: Mapping[str, str]) -> str | None:
    """Return ``values`` as JSON text with sorted keys, for the column ``attributes``; None if ``values`` is empty."""
    return json.dumps(dict(values), sort_keys=True, ensure_ascii=False) if values else None


def listing_of_files(
    files: CorpusFiles, kind: str, entries: Iterable[Entry], rejections: Rejections, notes: Iterable[str] = ()
) -> Listing:
    """Return the listing of a corpus that has no label table; the labels in ``entries`` come from folders or names.

    Args:
        files: access to the files of the corpus.
        kind: name of the loader.
        entries: the usable labelled files.
        rejections: the files that are not used.
        notes: sentences for the user.
    """
    ordered = tuple(sorted(entries, key=lambda entry: entry.path))
    rows = [replace(entry, row=number, origin=kind) for number, entry in enumerate(ordered, start=1)]
    annotations = _annotations(rows, [row.path for row in rows])
    return Listing(files.root, kind, ordered, rejections.frame(), annotations, tuple(notes))


def listing_of_rows(
    files: CorpusFiles,
    kind: str,
    rows: Sequence[Entry],
    places: Sequence[str | Refusal],
    rejections: Rejections,
    notes: Iterable[str] = (),
) -> Listing:
    """Return the listing of a table of labels, with one entry per usable video.

    Rows with the same source id are about the same video. A video is usable if it has a file and all its rows have the
    same label, real or fake. A video with two different labels is rejected, even if only one of them is real or fake:
    the true label of a clip listed as ``fake`` and ``debunked`` is uncertain. Rows with an empty label are not
    compared.

    Args:
        files: access to the files of the corpus.
        kind: name of the loader.
        rows: all rows of the label source.
        places: for each row, the path of its file, escaped as in tables (``escape_text``), or a refusal.
        rejections: receives each unusable row.
        notes: sentences for the user.
    """
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.label:
            labels[row.source_id].add(row.label)
    first: dict[str, Entry] = {}
    entries = []
    for row, path in zip(rows, places, strict=True):
        stated, detail = labels[row.source_id], ""
        if row.label not in LABELS:
            reason, detail = "label_not_used", f"got label {row.label or ''!r}; only real and fake are used. "
            detail += label_map_hint()
        elif len(stated) > 1:
            reason, detail = "conflicting_labels", f"listed as {some_of(sorted(stated))}. Keep the row that is right."
        elif (earlier := first.setdefault(row.source_id, row)) is not row:
            reason = "duplicate_path"
            detail = f"already listed in {earlier.origin} row {earlier.row}."
        if detail:
            rejections.add(row, Refusal(reason, f"{row.origin} row {row.row}: {detail}"))
        elif isinstance(path, Refusal):
            rejections.add(row, path)
        else:
            entries.append(replace(row, path=path))
    used = tuple(sorted(entries, key=lambda entry: entry.path))
    return Listing(files.root, kind, used, rejections.frame(), _annotations(rows, places), tuple(notes))


def _annotations(rows: Sequence[Entry], places: Sequence[str | Refusal]) -> pl.DataFrame:
    values = [
        (row.source_id, row.origin, row.row, row.label, row.stated_group, row.platform, isinstance(place, str))
        for row, place in zip(rows, places, strict=True)
    ]
    schema = {name: kind for name, kind in column_types(ANNOTATIONS).items() if name != "group_id"}
    return pl.DataFrame(values, schema=schema, orient="row")


@dataclass(frozen=True)
class CorpusLoader:
    """A layout of corpora on disk: how to recognise it and how to list its files.

    Attributes:
        name: name of the layout.
        accepted: description of the layout in the message that lists all layouts.
        recognises: returns whether a folder or file has the layout, without opening a video.
        read: lists the corpus. A loader of videos takes the path and returns a ``Listing``; one of images takes the
            ``CorpusFiles`` and the path and returns an ``ImageListing``.
        rank: layouts of lower rank are tried first; 0: a layout that cannot be mistaken for another one.
        title: full name of a published corpus; empty for other layouts. The group names of published corpora mean the
            same in every folder and in other published corpora.
        corpus: name of the corpus in tables; empty: the name of its folder or manifest.
        expected: where a published corpus has its videos, by label. A corpus without videos of one of these labels is
            refused as incompletely unpacked.
        paper: reference to the publication.
        licence: terms of use.
        fetch: where to get the corpus.
        bibtex: BibTeX entry of the paper.
    """

    name: str
    accepted: str
    recognises: Callable[[Path], bool]
    read: Callable[..., Any]
    rank: int = 0
    title: str = ""
    corpus: str = ""
    expected: Mapping[str, str] = field(default_factory=dict)
    paper: str = ""
    licence: str = ""
    fetch: str = ""
    bibtex: str = ""


def by_rank(registry: Registry[Any]) -> list[CorpusLoader]:
    """Return all loaders of ``registry`` in the order in which they are tried."""
    return sorted((loader for _, loader in registry.items()), key=lambda loader: loader.rank)


def recognised(registry: Registry[Any], corpus: Path) -> CorpusLoader:
    """Return the loader of the layout that ``corpus`` has.

    Raises:
        UsageError: ``corpus`` has no known layout or cannot be read. The message names all layouts.
    """
    loaders = by_rank(registry)
    own = ", or ".join(loader.accepted for loader in loaders if not loader.title)
    published = ", ".join(sorted(loader.name for loader in loaders if loader.title))
    accepted = f"A corpus is {own}." + (published and f" Or a published one as it unpacks: {published}.")
    try:
        if not is_pattern(corpus):
            os.listdir(corpus) if corpus.is_dir() else corpus.stat()  # noqa: PTH208 - only to see that it can be read
    except OSError as error:
        what = "Name a folder of videos, a manifest (CSV, TSV, Parquet) or tars."
        raise UsageError(f"corpus {str(corpus)!r}: {error.strerror}. {what}") from error
    for loader in loaders:
        if loader.recognises(corpus):
            return loader
    hint = ""
    parent = [corpus.parent] if LABEL_FOLDER.fullmatch(corpus.name) else []
    for paths in (corpus.glob("[!.]*/[!.]*"), corpus.glob("[!.]*"), parent):  # the nearest comes last and wins
        if meant := [path for path in sorted(paths)[:20] if any(loader.recognises(path) for loader in loaders)]:
            hint = f" Did you mean {' or '.join(repr(str(path)) for path in meant)}?"
    raise UsageError(f"corpus {str(corpus)!r}: has none of the known layouts.{hint} {accepted}")


def read_corpus(
    corpus: AnyPath,
    *,
    allow_outside: bool = False,
    label_map: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Listing:
    """List a corpus of videos without opening a video.

    Args:
        corpus: a folder, a manifest file, a tar, or a pattern of tars such as ``shards/{000..099}.tar``.
        allow_outside: accept listed files outside the corpus folder, and follow links.
        label_map: maps further labels of a table, in lower case, to real or fake.
        columns: maps the name of a column that FVC reads to its name in the manifest, such as ``{"path": "file"}``.

    Raises:
        UsageError: the corpus does not exist, cannot be read or has no known layout.
        DataError: the corpus has no usable label, or is a published corpus that was not unpacked completely.
    """
    corpus = Path(corpus)
    token = READING.set(Reading(allow_outside, label_map or {}, columns or {}))
    try:
        loader = recognised(CORPORA, corpus)
        listing: Listing = loader.read(corpus)
    finally:
        READING.reset(token)
    labels = {entry.label for entry in listing.entries}
    missing = [f"{label} videos: expected {at}" for label, at in loader.expected.items() if label not in labels]
    if missing:
        raise DataError(
            f"corpus {str(corpus)!r}: looks like {loader.title}, but has none of its {'; '.join(missing)} (not used: "
            f"{reasons_text(listing.rejected)}). Unpack it as it was published, or write a manifest."
        )
    name = loader.corpus or _name_of(corpus)
    entries = tuple(replace(entry, corpus=entry.corpus or name, label_source=listing.kind) for entry in listing.entries)
    names = {entry.corpus for entry in entries}
    notes, parts = listing.notes, listing.parts_by_name
    if parts:
        such = f"{len(parts):,} videos are parts of longer ones by their names, such as {min(parts)!r}"
        notes += (f"{such}: the parts of one video are one group. A column 'group' overrides this.",)
    return replace(listing, name=names.pop() if len(names) == 1 else name, entries=entries, notes=notes)


def _name_of(corpus: Path) -> str:
    """Return the name of a corpus: the name of its folder, or of its manifest or tar without the extension.

    A file called ``manifest`` gets the name of its folder. A pattern such as ``shards/{000..099}.tar`` gets the name of
    the folder before the first braces or wildcards, here ``shards``.
    """
    path = Path(os.path.abspath(corpus))  # noqa: PTH100 - a link keeps the name it was given by
    path = fixed_folder(path) if is_pattern(path) else path
    name = path.name if path.is_dir() else path.stem
    return path_to_text(path.parent.name if name.lower() == "manifest" else name) or "corpus"


_FAKES = {"1": "fake", "true": "fake", "0": "real", "false": "real"}
_REALS = {"1": "real", "true": "real", "0": "fake", "false": "fake"}
# Meanings of values by the name of a column that says what they mean.
TRUTHS = {"is_fake": _FAKES, "fake": _FAKES, "is_real": _REALS, "real": _REALS}


def stated_label(cell: str, column: str = "label") -> str | None:
    """Return the label that a cell of ``column`` states, in lower case; None for an empty cell.

    A label that the user's ``label_map`` (in ``READING``) contains is translated to real or fake. Other labels are
    translated only in columns with names such as ``is_fake``: there 1 means fake and 0 means real (``TRUTHS``).
    """
    text = escape_text(cell.strip().lower())
    meanings = {**TRUTHS.get(column.lower(), {}), **READING.get().label_map}
    return meanings.get(text, text) or None


def label_map_hint(option: str = "-p label_map") -> str:
    """Return a sentence that tells the user to set ``option``, which translates the labels of a table."""
    return f"Say what labels mean, such as: {option} 1=fake,0=real."


# --- Several corpora as one.


def reading_options(config: RunConfig) -> dict[str, Any]:
    """Return the keyword arguments of ``read_corpora`` that the run's parameters give.

    These are ``allow_outside``, ``label_map`` and ``columns``.
    """
    return {"allow_outside": config.allow_outside, "label_map": config.label_map, "columns": config.columns}


def read_corpora(
    corpora: Sequence[AnyPath],
    links: AnyPath | None,
    *,
    allow_outside: bool = False,
    label_map: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Listing:
    """List several corpora as one, without opening a video.

    Paths in the result begin with the name of their corpus. The order of the corpora does not matter. For a single
    corpus the result is that of ``read_corpus``.

    Args:
        corpora: folders, manifests, tars and patterns of tars.
        links: folder that receives a folder with links to the corpora. None: no links are made, and the paths of the
            listing cannot be opened.
        allow_outside: accept listed files outside the folder of their corpus, and follow links.
        label_map: maps further labels of a table, in lower case, to real or fake.
        columns: maps the name of a column that FVC reads to its name in the manifests.

    Raises:
        UsageError: a corpus cannot be read, is given twice or lies within another one.
        DataError: a corpus has no usable label, or is a published corpus that was not unpacked completely.
    """
    paths = [Path(corpus) for corpus in corpora]
    read = [read_corpus(path, allow_outside=allow_outside, label_map=label_map, columns=columns) for path in paths]
    if len(read) == 1:
        return read[0]
    files = [Path(os.path.realpath(part.root)) / path_from_text(entry.path) for part in read for entry in part.entries]
    if twice := [path for path, count in Counter(files).items() if count > 1]:
        shown = some_of([part.shown for part in read])
        raise UsageError(
            f"more_corpora: two of {shown} both list {str(twice[0])!r}. Give one, or move one out of the other."
        )
    parts = {part.name: part for part in sorted(read, key=lambda part: part.name)}
    if len(parts) < len(read):
        raise UsageError(
            f"more_corpora: got the names {some_of([part.name for part in read])}, wanted different ones. Rename a "
            "folder, or give it by a link with another name. Folders of one published corpus belong into one folder."
        )
    placed = [_placed(part) for part in parts.values()]
    return Listing(
        root=Path() if links is None else _linked(parts, Path(links)),
        kind=" + ".join(sorted({part.kind for part in placed})),
        name=" + ".join(part.name for part in placed),
        entries=tuple(sorted(chain(*(part.entries for part in placed)), key=lambda entry: entry.path)),
        rejected=pl.concat([part.rejected for part in placed]),
        annotations=pl.concat([part.annotations for part in placed]),
        notes=tuple(f"{part.name}: {note}" for part in placed for note in part.notes),
        parts=parts,
    )


def place(name: str, path: str) -> str:
    """Return the path that the file ``path`` of corpus ``name`` has in a joined listing: ``name/path``.

    If ``name`` is empty or ``path`` is absolute (outside the corpus), the path is unchanged. Paths
    are escaped as in tables (``escape_text``).
    """
    return path if path.startswith("/") else joined(name, path)


def _placed(part: Listing) -> Listing:
    """Return a copy of the listing ``part`` in which the name of its corpus is put in front of all names.

    So names of several corpora can be joined to one listing. Paths, source ids (names of videos), names of tables and
    stated groups are renamed. Groups of published corpora are not renamed, because they mean the same in every corpus.
    """
    own = "" if CORPORA.get(part.kind).title else f"{part.name}: "
    entries = tuple(
        replace(
            entry,
            path=place(part.name, entry.path),
            source_id=joined(part.name, entry.source_id),
            stated_group=entry.stated_group and own + entry.stated_group,
            links=tuple(own + link for link in entry.links),
        )
        for entry in part.entries
    )
    below = f"{part.name}/"
    rejected = part.rejected.with_columns((below + pl.col("path", "source_id")).name.keep())
    annotations = part.annotations.with_columns(
        (below + pl.col("source_id", "origin")).name.keep(), stated_group=own + pl.col("stated_group")
    )
    return replace(part, entries=entries, rejected=rejected, annotations=annotations)


def _linked(parts: Mapping[str, Listing], links: Path) -> Path:
    """Make a folder below ``links`` with a symbolic link to each corpus, and return the folder's absolute path.

    A link has the name of its corpus. ``parts`` maps each corpus's name to its listing. Names are escaped as in tables
    (``escape_text``).

    Raises:
        OSError: the file system refuses a link.
    """
    targets = {name: str(part.root.absolute()) for name, part in parts.items()}
    folder = links / f"corpora_{sha256_of_json(targets)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in targets.items():
        with suppress(FileExistsError):  # an earlier stage made it
            (folder / path_from_text(name)).symlink_to(target)
    return folder.absolute()
