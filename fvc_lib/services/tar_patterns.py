"""Patterns that name many tars at once: ``shards/train-{000..099}.tar``, ``{real,fake}/*.tar``, ``repo/**/*.tar``.

Every tar that braces name must exist. ``*``, ``?`` and ``[...]`` match existing files, ``**`` any folders. A path that
exists is no pattern.
"""

import glob
import os
import re
from itertools import product
from pathlib import Path

from fvc_lib.services.errors import UsageError

SUFFIX = ".tar"
_MOST = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?", re.ASCII)


def is_pattern(corpus: str | os.PathLike[str]) -> bool:
    """Return whether ``corpus`` names tars by braces or wildcards."""
    text = os.fspath(corpus)
    return any(mark in text for mark in "{*?[") and not os.path.lexists(text)


def fixed_folder(corpus: str | os.PathLike[str]) -> Path:
    """Return the part of a pattern before braces and wildcards: its tars are named relative to that folder."""
    parts = Path(corpus).parts
    fixed = next((number for number, part in enumerate(parts) if any(mark in part for mark in "{}*?[")), len(parts))
    return Path(*parts[: min(fixed, len(parts) - 1)])


def tars_of(corpus: str | os.PathLike[str]) -> list[Path]:
    """Return the tars that a pattern names, sorted by name.

    Raises:
        UsageError: the braces make no sense, a named tar is missing, wildcards match nothing, or a file is no tar.
    """
    pattern = os.fspath(corpus)
    named = _expanded(pattern)
    found, missing = set[str](), list[str]()
    for each in named:
        matches = [each] if os.path.exists(each) else glob.glob(each, recursive=True)  # noqa: PTH110, PTH207 - text
        found.update(matches)
        missing += [] if matches else [each]
    if missing:
        what = f"{len(missing):,} of {len(named):,} named tars do not exist: {', '.join(map(repr, missing[:5]))}"
        folder = fixed_folder(pattern)
        raise UsageError(
            f"corpus {pattern!r}: {what}. Fetch them, or write a pattern in quotes such as {str(folder / '*.tar')!r}."
        )
    others = sorted(path for path in found if not path.lower().endswith(SUFFIX) or not os.path.isfile(path))  # noqa: PTH113
    if others:
        raise UsageError(
            f"corpus {pattern!r}: {others[0]!r} is no tar, and a pattern names only tars. Let it end in '.tar'; a "
            "compressed one is unpacked first: gunzip NAME.tar.gz."
        )
    return [Path(path) for path in sorted(found)]


def _expanded(pattern: str) -> list[str]:
    """Return the pattern for each choice in its braces, in order.

    Raises:
        UsageError: braces within braces, without an end or without a choice, or more than a million names.
    """
    pieces, choices, number = _BRACES.split(pattern), list[list[str]](), 1
    for inner in pieces[1::2]:
        if match := _RANGE.fullmatch(inner):
            first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
            is_padded = any(len(end) > 1 and end.startswith("0") for end in match.groups()[:2])
            width = max(len(match[1]), len(match[2])) if is_padded else 0
            count = (last - first) // step + 1 if step else 0
            one = [f"{value:0{width}}" for value in range(first, last + 1, step)] if 0 < count <= _MOST else []
        else:
            one = inner.split(",") if "," in inner else []
            count = len(one)
        choices.append(one)
        number *= count
    if any(mark in piece for piece in pieces[::2] for mark in "{}") or not all(choices) or number > _MOST:
        raise UsageError(
            f"corpus {pattern!r}: its braces cannot be read. Wanted {{000..099}}, a range upwards, or {{real,fake}}, "
            f"not one in another, at most {_MOST:,} names."
        )
    return ["".join(map(str.__add__, pieces[::2], (*chosen, ""))) for chosen in product(*choices)]
