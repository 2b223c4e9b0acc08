"""What loaders of published corpora share: files by the pattern of their path, the corpus's lists, and refusals.

A loader says what a path means (``Described``), or why it is not used. A folder without its reals, its fakes or the
table that names its people, such as one that was unpacked halfway, is refused with what was expected where: it would
be another corpus under the same name. What a corpus can be used without (some of its reals, lists of its official
split) is noted where it is missing.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.corpus.listing import (
    CorpusFiles,
    Entry,
    Listing,
    Refusal,
    Rejections,
    attributes_text,
    listing_of_files,
    some_of,
)
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError, UsageError


@dataclass(frozen=True)
class Described:
    """What the path of a video says. ``groups`` are all it belongs to: videos that share one are never parted."""

    label: str
    groups: tuple[str, ...] = ()
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
    """The listing of the videos below ``folders`` of ``root``, as ``describe`` understands their paths.

    Args:
        root: folder of the corpus.
        kind: name of the loader.
        folders: below ``root``; those that are not there are left out.
        describe: from a path below ``root`` as table text to what it means, why it is not used, or None where it
            belongs to something else, such as masks, and is passed over.
        notes: sentences on what could not be mapped.
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
    # The corpus's own lists lie among its videos in some releases.
    rejections.rows.extend(row for row in others.rows if not row[0].endswith((".json", ".jsonl", ".csv", ".txt")))
    return listing_of_files(files, kind, entries, rejections, notes)


def _entry(path: str, found: Described) -> Entry:
    first, *others = found.groups or (None,)
    return Entry(
        path=path,
        label=found.label,
        source_id=path,
        stated_group=first,
        manipulation=found.generator,
        generator=found.generator,
        real_source=found.real_source,
        official_split=found.split,
        attributes=attributes_text(found.attributes),
        links=tuple(each for each in others if each is not None),
        corpus=found.corpus,
    )


def unknown_name(path: str, wanted: str) -> Refusal:
    """Of a video whose name is not of the layout."""
    return Refusal("unknown_name", f"{path!r}: wanted {wanted}. Restore its name as it was published, or move it away.")


def first_of(root: Path, *names: str) -> Path | None:
    """The first of ``names`` below ``root`` that is there."""
    return next((root / name for name in names if (root / name).exists()), None)


def require(root: Path, title: str, **wanted: Sequence[str]) -> None:
    """Stop where a part of a published corpus is missing or empty; of each part one of the names has to be there.

    Raises:
        DataError: names the parts, and where they were expected.
    """
    missing = {
        part: names for part, names in wanted.items() if not any(_holds_something(root / name) for name in names)
    }
    if missing:
        said = "; ".join(
            f"{part.replace('_', ' ')}: expected {' or '.join(map(repr, names))}" for part, names in missing.items()
        )
        raise DataError(
            f"corpus {str(root)!r}: looks like {title}, but lacks its {said}. Fetch or unpack it as it was published; "
            "to use what is there as it is, write a manifest."
        )


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file()


def read_lines(path: AnyPath) -> list[str]:
    """The stripped lines of a text file, with their places kept: empty ones too. UTF-8, other bytes escaped.

    Raises:
        UsageError: it is missing or cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{str(path)!r}: {error.strerror}. Restore the corpus's own list.") from error
    return [line.strip() for line in text.splitlines()]


def read_json(path: Path) -> Any:
    """What a list of the corpus holds.

    Raises:
        DataError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r}: cannot be read as JSON: {error}. Fetch it again.") from error


def listed_but_absent(root: Path, source: str, names: Iterable[str]) -> list[str]:
    """A note on those videos that a list of the corpus names and the folder lacks; nothing where there are none."""
    names = list(names)
    absent = [name for name in names if not (root / name).is_file()]
    if not absent:
        return []
    return [f"{len(absent):,} of {len(names):,} videos that {source} names are not there: {some_of(absent, 3)}."]


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in ``folder`` that are not hidden, sorted; none where it is not there."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def shared_by_parts(parts: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Keys that lie in more than one part of an official split, each with those parts: the split's own leaks."""
    found: dict[str, list[str]] = {}
    for part, keys in parts.items():
        for key in set(keys):
            found.setdefault(key, []).append(part)
    return {key: sorted(of) for key, of in sorted(found.items()) if len(of) > 1}
