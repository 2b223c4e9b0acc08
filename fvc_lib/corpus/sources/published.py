"""Read published corpora by patterns of their paths, and by the lists that they come with.

A corpus is declared by a ``CorpusLoader`` and by ``Rule``s or a table of entries. ``read_published`` lists its videos.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, some_of
from fvc_lib.corpus.listing import Listing, attributes_text, listing_of_files
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError, UsageError

PARTS = {"train": "train", "val": "validation", "test": "test"}  # by the names of published lists
Describe = Callable[[str], Entry | Refusal | None]  # maps a path, as table text; None skips the file


@dataclass(frozen=True)
class Rule:
    """Description of the videos whose path matches ``pattern``.

    The fields ``groups`` to ``attributes`` are templates: ``{name}`` stands for the part of the path that the named
    group of the regular expression matches, and ``{path}`` for the whole path.

    Attributes:
        pattern: regular expression for the whole path below the corpus.
        label: real or fake; empty to skip the files.
        groups: leakage groups of the video; videos that share a group are never separated by a split.
        generator: name of what made a fake.
        real_source: where a real video comes from.
        listed: name of the video in the lists of the official split.
        attributes: further facts by name.
        corpus: name of the corpus if the layout holds several.
    """

    pattern: str
    label: str
    groups: tuple[str, ...] = ()
    generator: str | None = None
    real_source: str | None = None
    listed: str = "{path}"
    attributes: Mapping[str, str] = field(default_factory=dict)
    corpus: str = ""


def by_rules(
    rules: Sequence[Rule],
    wanted: str,
    parts: Mapping[str, str] | None = None,
    other_part: str | None = None,
    also: Mapping[str, str] | None = None,
) -> Describe:
    """Return a function that maps a path to its entry by the first rule that matches.

    The function returns None for a path to skip, and a refusal for a path that no rule matches.

    Args:
        rules: rules of the corpus.
        wanted: example paths, for the text of the refusal.
        parts: official part by name in the lists.
        other_part: official part of videos that are in no list.
        also: maps a group to a further group that its videos belong to.
    """

    def describe(path: str) -> Entry | Refusal | None:
        for rule in rules:
            match = re.fullmatch(rule.pattern, path)
            if match is None:
                continue
            names = {"path": path, **match.groupdict()}
            stated = [group.format_map(names) for group in rule.groups]
            groups = [name for group in stated for name in (group, (also or {}).get(group)) if name]
            if not rule.label:
                return None
            return entry_of_video(
                path, rule.label, groups,
                generator=rule.generator and rule.generator.format_map(names),
                real_source=rule.real_source and rule.real_source.format_map(names),
                part=(parts or {}).get(rule.listed.format_map(names), other_part),
                attributes={key: value.format_map(names) for key, value in rule.attributes.items()},
                corpus=rule.corpus,
            )  # fmt: skip
        return Refusal("unknown_name", f"{path!r}: wanted {wanted}. Restore its published name, or move it away.")

    return describe


def entry_of_video(
    path: str,
    label: str,
    groups: Sequence[str],
    *,
    generator: str | None = None,
    real_source: str | None = None,
    part: str | None = None,
    attributes: Mapping[str, str] | None = None,
    corpus: str = "",
) -> Entry:
    """Return the entry of a video that belongs to all of ``groups``."""
    first, *links = dict.fromkeys(groups) or (None,)
    return Entry(
        path=path,
        label=label,
        source_id=path,
        stated_group=first,
        manipulation=generator,
        generator=generator,
        real_source=real_source,
        official_split=part,
        attributes=attributes_text(attributes or {}),
        links=tuple(link for link in links if link),
        corpus=corpus,
    )


def by_table(entries: Mapping[str, Entry], table: str) -> Describe:
    """Return a function that maps a path to its entry in ``entries``, or to a refusal if it has none.

    ``table`` is the name of the list that the entries come from, for the text of the refusal.
    """

    def describe(path: str) -> Entry | Refusal:
        return entries.get(path) or Refusal("not_listed", f"{path!r}: {table} does not name it. Fetch that again.")

    return describe


def read_published(
    root: AnyPath, kind: str, folders: Iterable[str], describe: Describe, notes: Iterable[str] = ()
) -> Listing:
    """List the videos of a published corpus.

    Args:
        root: folder of the corpus.
        kind: name of the loader.
        folders: folders below ``root`` to search; missing ones are skipped.
        describe: maps a path to its entry, a refusal, or None to skip the file.
        notes: sentences for the user.
    """
    files, rejections, entries, others = CorpusFiles(root), Rejections(), list[Entry](), Rejections()
    for path in (path for folder in folders if (files.root / folder).is_dir() for path in files.walk(folder, others)):
        text = path_to_text(path)
        described = describe(text)
        refusal = files.check(path) if isinstance(described, Entry) else described
        if refusal is not None:
            rejections.add_file(text, refusal)
        elif isinstance(described, Entry):
            entries.append(described)
    # Some releases have their own lists among the videos.
    rejections.rows.extend(row for row in others.rows if not row[0].endswith((".json", ".jsonl", ".csv", ".txt")))
    return listing_of_files(files, kind, entries, rejections, notes)


def first_of(root: Path, *names: str) -> Path | None:
    """Return the path of the first of ``names`` that exists below ``root``; None if none does."""
    return next((root / name for name in names if (root / name).exists()), None)


def require(root: Path, title: str, *names: str) -> None:
    """Raise ``DataError`` if one of ``names`` is missing below ``root``."""
    if missing := [name for name in names if not (root / name).exists()]:
        raise DataError(
            f"corpus {str(root)!r}: looks like {title}, but lacks {some_of(missing)}. Fetch or unpack it as it was "
            "published; to use the present files, write a manifest."
        )


def split_lists(folder: Path, *patterns: str) -> dict[str, Path]:
    """Return the file with the list of each part of an official split; empty if there is none.

    The keys are train, validation and test. ``patterns`` are possible paths of a list below ``folder``, where ``{}``
    stands for train, val or test.

    Raises:
        DataError: only some of the three lists are there.
    """
    lists = {part: first_of(folder, *(each.format(name) for each in patterns)) for name, part in PARTS.items()}
    present = {part: path for part, path in lists.items() if path is not None}
    if present:
        require(folder, "a corpus with an official split", *(
            patterns[0].format(name) for name, part in PARTS.items() if part not in present
        ))  # fmt: skip
    return present


def read_lines(path: AnyPath) -> list[str]:
    """Return the stripped lines of a text file, including empty ones. Bytes that are not UTF-8 are escaped.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{str(path)!r}: {error.strerror}. Restore this list of the corpus.") from error
    return [line.strip() for line in text.splitlines()]


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the content of a JSON list of the corpus.

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
    """Return a list with one note on videos that are named but missing in ``root``; an empty list if none is missing.

    ``source`` is the name of the list that has the names.
    """
    names = list(names)
    absent = [name for name in names if not (root / name).is_file()]
    note = f"{len(absent):,} of {len(names):,} videos that {source} names are not there: {some_of(absent, 3)}."
    return [note] if absent else []


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders in ``folder`` that are not hidden; empty if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
