"""Shared reading of published corpora: files by the pattern of their path, and the corpora's own lists.

A loader describes each path (``Described``) or refuses it. Parts that a corpus can be used without, such as the lists
of its official split, are noted when they are missing. ``read_corpus`` refuses a corpus without reals or fakes.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, some_of
from fvc_lib.corpus.listing import Listing, attributes_text, listing_of_files
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError, UsageError

PARTS = {"train": "train", "val": "validation", "test": "test"}  # by the names of published lists


@dataclass(frozen=True)
class Described:
    """The meaning of a video's path. Videos that share one of ``groups`` are never parted."""

    label: str
    groups: Sequence[str] = ()
    generator: str | None = None
    real_source: str | None = None
    split: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    corpus: str = ""  # where the layout holds several; else the loader's


def read_published(
    root: AnyPath,
    kind: str,
    folders: Iterable[str],
    describe: Callable[[str], Described | Refusal | None],
    notes: Iterable[str] = (),
) -> Listing:
    """List the videos below ``folders`` of ``root``.

    Args:
        root: folder of the corpus.
        kind: name of the loader.
        folders: below ``root``; missing ones are skipped.
        describe: maps a path below ``root``, as table text, to its meaning, to a refusal, or to None to skip it.
        notes: sentences for the user.
    """
    files, rejections, entries, others = CorpusFiles(root), Rejections(), [], Rejections()
    for folder in folders:
        if not (files.root / folder).is_dir():
            continue
        for path in files.walk(folder, others):
            text = path_to_text(path)
            found = describe(text)
            refusal = found if isinstance(found, Refusal) else files.check(path) if found else None
            if refusal is not None:
                rejections.add_file(text, refusal)
            elif isinstance(found, Described):
                entries.append(_entry(text, found))
    # Some releases have their own lists among the videos.
    rejections.rows.extend(row for row in others.rows if not row[0].endswith((".json", ".jsonl", ".csv", ".txt")))
    return listing_of_files(files, kind, entries, rejections, notes)


def _entry(path: str, found: Described) -> Entry:
    groups = tuple(dict.fromkeys(found.groups))
    return Entry(
        path=path,
        label=found.label,
        source_id=path,
        stated_group=groups[0] if groups else None,
        manipulation=found.generator,
        generator=found.generator,
        real_source=found.real_source,
        official_split=found.split,
        attributes=attributes_text(found.attributes),
        links=groups[1:],
        corpus=found.corpus,
    )


def unknown_name(path: str, wanted: str) -> Refusal:
    """Return the refusal of a video whose name does not fit the layout."""
    return Refusal("unknown_name", f"{path!r}: wanted {wanted}. Restore its name as it was published, or move it away.")


def first_of(root: Path, *names: str) -> Path | None:
    """Return the first of ``names`` below ``root`` that exists."""
    return next((root / name for name in names if (root / name).exists()), None)


def require(root: Path, title: str, *names: str) -> None:
    """Raise ``DataError`` if one of ``names`` is missing below ``root``: the corpus was unpacked halfway."""
    if missing := [name for name in names if not (root / name).exists()]:
        raise DataError(
            f"corpus {str(root)!r}: looks like {title}, but lacks {some_of(missing)}. Fetch or unpack it as it was "
            "published; to use what is there as it is, write a manifest."
        )


def split_lists(folder: Path, *patterns: str) -> dict[str, Path]:
    """Return the list of each part of an official split; empty if there is none.

    Args:
        folder: of the corpus.
        patterns: paths of a list below ``folder``, with ``{}`` for train, val or test.

    Raises:
        DataError: only some of the three lists are there.
    """
    lists = {name: first_of(folder, *(each.format(name) for each in patterns)) for name in PARTS}
    found = {PARTS[name]: path for name, path in lists.items() if path is not None}
    if found and len(found) < len(PARTS):
        missing = [patterns[0].format(name) for name, path in lists.items() if path is None]
        raise DataError(
            f"corpus {str(folder)!r}: of the official split {some_of(missing)} is missing. Fetch all three lists, or "
            "remove the others."
        )
    return found


def read_lines(path: AnyPath) -> list[str]:
    """Return the stripped lines of a text file, including empty ones. Bytes that are not UTF-8 are escaped.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{str(path)!r}: {error.strerror}. Restore the corpus's own list.") from error
    return [line.strip() for line in text.splitlines()]


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the content of a list of the corpus.

    Raises:
        DataError: it cannot be read, is no JSON, or is not of the given kind.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r}: cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(content, kind):
        raise DataError(f"{str(path)!r}: got a {type(content).__name__}, wanted a {kind.__name__}. Fetch it again.")
    return content


def listed_but_absent(root: Path, source: str, names: Iterable[str]) -> list[str]:
    """Return a note on videos that a list names and the folder lacks; nothing if there are none."""
    names = list(names)
    absent = [name for name in names if not (root / name).is_file()]
    if not absent:
        return []
    return [f"{len(absent):,} of {len(names):,} videos that {source} names are not there: {some_of(absent, 3)}."]


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders in ``folder`` that are not hidden; none if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
