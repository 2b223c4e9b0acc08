"""Several corpora as one: what each is called, and one listing of all of them.

Paths begin with the name of their corpus, below one folder of links that lead to where each lies, so that whatever
reads a video goes on taking a folder and a path. Groups that a corpus states are its own, whatever another one calls
its groups; those of published corpora mean the same everywhere (the YouTube video behind a sequence, a sequence of
FaceForensics++), so they join across corpora, as equal contents and near-duplicates do.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from fvc_lib.corpus.corpus_files import Entry, joined
from fvc_lib.corpus.listing import Listing, read_corpus
from fvc_lib.services.atomic_files import AnyPath, path_from_text, path_to_text, sha256_of_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tar_patterns import is_pattern, tars_of

_OUTSIDE = " outside"  # ends the name of the link by which files outside a corpus's folder are found


def read_corpora(
    corpora: Sequence[AnyPath],
    links: AnyPath | None,
    *,
    allow_outside: bool = False,
    label_map: Mapping[str, str] | None = None,
    unused_labels: bool = False,
    most_files: int | None = None,
) -> Listing:
    """List the corpora without opening a video. Their order does not matter; one alone is unchanged.

    Args:
        corpora: folders, manifests, tars and patterns of tars.
        links: folder in which those of several are linked, in a folder for each set of them. None: nothing is written,
            and the paths of several lead nowhere.
        allow_outside: as of ``listing.read_corpus``.
        label_map: likewise.
        unused_labels: likewise.
        most_files: likewise, of each.

    Raises:
        UsageError: one cannot be read, is given twice or lies within another one.
        DataError: of one of them, as of ``listing.read_corpus``.
        LongCorpusError: likewise.
    """
    paths = [Path(each) for each in corpora]
    read = [
        read_corpus(
            path, allow_outside=allow_outside, label_map=label_map, unused_labels=unused_labels, most_files=most_files
        )
        for path in paths
    ]
    if len(read) == 1:
        return read[0]
    _refuse_overlap(paths)
    names = _names(paths, read)
    parts = {of[listing.name]: _called(listing, of) for of, listing in zip(names, read, strict=True)}
    parts = dict(sorted(parts.items()))
    places = {name: str(part.root.absolute()) for name, part in parts.items()}
    outside = {name for name, part in parts.items() if any(entry.path.startswith("/") for entry in part.entries)}
    places |= {f"{name}{_OUTSIDE}": "/" for name in outside}
    placed = [_placed(name, part) for name, part in parts.items()]
    return Listing(
        root=Path() if links is None else _linked(places, Path(links)),
        kind=" + ".join(sorted({part.kind for part in placed})),
        name=" + ".join(parts),
        entries=tuple(sorted((entry for part in placed for entry in part.entries), key=lambda entry: entry.path)),
        rejected=pl.concat([part.rejected for part in placed]),
        annotations=pl.concat([part.annotations for part in placed]),
        notes=tuple(f"{part.name}: {note}" for part in placed for note in part.notes),
        parts=parts,
    )


def corpus_names(
    corpora: Sequence[AnyPath], *, allow_outside: bool = False, label_map: Mapping[str, str] | None = None
) -> list[str]:
    """Return the sorted names of corpora that are indexed together; nothing is written.

    Arguments and errors are those of ``read_corpora``.
    """
    found = read_corpora(corpora, None, allow_outside=allow_outside, label_map=label_map)
    return sorted({entry.corpus for entry in found.entries})


def place(name: str, path: str) -> str:
    """Return the path, as table text, of ``path`` in corpus ``name`` among several; unchanged without a name."""
    return f"{name}{_OUTSIDE}{path}" if name and path.startswith("/") else joined(name, path)


def _refuse_overlap(paths: Sequence[Path]) -> None:
    """Refuse corpora within others. Two manifests in one folder are two corpora."""
    real = [Path(os.path.realpath(path)) for path in paths]
    tars = [{os.path.realpath(tar) for tar in (tars_of(path) if is_pattern(path) else [path])} for path in paths]
    for number, path in enumerate(real):
        if path in real[:number]:
            raise UsageError(f"more_corpora: {str(paths[number])!r} is given twice. Leave it out once.")
        if twice := tars[number].intersection(set().union(*tars[:number])):
            raise UsageError(f"more_corpora: {str(paths[number])!r} names {min(twice)!r}, which is given before.")
    for inner, path in zip(real, paths, strict=True):
        for outer, folder in zip(real, paths, strict=True):
            if outer != inner and outer.is_dir() and inner.is_relative_to(outer):
                raise UsageError(
                    f"more_corpora: {str(path)!r} lies within {str(folder)!r}, so its videos could be listed twice. "
                    "Move it out of that folder, or give one of the two."
                )


def _names(paths: Sequence[Path], listings: Sequence[Listing]) -> list[dict[str, str]]:
    """Return new names for the names in each corpus: shared ones get the distinguishing end of the path.

    That end is the same in whatever order the corpora are given.
    """
    own = [{listing.name, *(entry.corpus for entry in listing.entries)} for listing in listings]
    names: list[dict[str, str]] = [{} for _ in own]
    for name in sorted(set().union(*own)):
        alike = [number for number, each in enumerate(own) if name in each]
        ends = [Path(os.path.realpath(paths[number])).parts for number in alike]
        length = next(n for n in range(1, 10_000) if len({end[-n:] for end in ends}) == len(ends))
        for number, end in zip(alike, ends, strict=True):
            suffix = path_to_text(" ".join(end[-length:]).replace("/", " ").strip())
            names[number][name] = name if len(alike) == 1 else f"{name} ({suffix})"
    return names


def _called(listing: Listing, names: Mapping[str, str]) -> Listing:
    entries = tuple(replace(entry, corpus=names[entry.corpus]) for entry in listing.entries)
    return replace(listing, name=names[listing.name], entries=entries)


def _placed(name: str, part: Listing) -> Listing:
    """Put the name of its corpus before the paths and sources of ``part``, and before its own groups."""
    is_published = bool(dict(CORPORA.items())[part.kind].title)

    def group(stated: str) -> str:
        return stated if is_published else f"{name}: {stated}"

    def moved(entry: Entry) -> Entry:
        return replace(
            entry,
            path=place(name, entry.path),
            source_id=joined(name, entry.source_id),
            stated_group=entry.stated_group and group(entry.stated_group),
            links=tuple(map(group, entry.links)),
        )

    rejected = _behind(f"{name}/", part.rejected, "path", "source_id")
    annotations = _behind(f"{name}/", part.annotations, "source_id", "origin")
    if not is_published:
        annotations = _behind(f"{name}: ", annotations, "stated_group")
    return replace(part, entries=tuple(map(moved, part.entries)), rejected=rejected, annotations=annotations)


def _behind(text: str, frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """Put ``text`` before the values of ``columns``; null stays null."""
    return frame.with_columns((pl.lit(text) + pl.col(name)).alias(name) for name in columns)


def _linked(places: Mapping[str, str], links: Path) -> Path:
    """Return a folder below ``links`` with a link for each of ``places``, targets by name (table text)."""
    folder = links / f"corpora_{sha256_of_json(places)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in places.items():
        link = folder / path_from_text(name)
        if not link.is_symlink():
            try:
                link.symlink_to(target)
            except FileExistsError:  # another stage made it meanwhile
                continue
            except OSError as error:
                raise UsageError(f"{str(link)!r}: {error.strerror}. cache_dir must allow links.") from error
    return folder.absolute()
