"""Patterns that name many tars at once: ``shards/train-{000..099}.tar``, ``{real,fake}/*.tar``, ``repo/**/*.tar``.

Every tar that braces name must exist. ``*``, ``?`` and ``[...]`` match existing files, and ``**`` matches any number of
folders. An existing path is never read as a pattern.
"""

import glob
import math
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
    """Return whether ``corpus`` is a pattern with braces or wildcards, and no existing path."""
    text = os.fspath(corpus)
    return any(mark in text for mark in "{*?[") and not os.path.lexists(text)


def fixed_folder(corpus: str | os.PathLike[str]) -> Path:
    """Return the folder before the first part with braces or wildcards; names of tars are relative to it."""
    parts = Path(corpus).parts
    fixed = next((number for number, part in enumerate(parts) if any(mark in part for mark in "{}*?[")), len(parts))
    return Path(*parts[: min(fixed, len(parts) - 1)])


def tars_of(corpus: str | os.PathLike[str]) -> list[Path]:
    """Return the tars that a pattern names, sorted by name.

    Raises:
        UsageError: the braces are malformed, a named tar is missing, wildcards match nothing, or a file is no tar.
    """
    pattern = os.fspath(corpus)
    named = _expanded(pattern)
    matches = {name: [name] if os.path.exists(name) else glob.glob(name, recursive=True) for name in named}  # noqa: PTH110, PTH207 - text
    found = {path for paths in matches.values() for path in paths}
    if missing := [name for name, paths in matches.items() if not paths]:
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
    """Return all texts that the braces of ``pattern`` stand for, in order.

    Raises:
        UsageError: braces within braces, without an end or without a choice, or more than a million names.
    """
    pieces = _BRACES.split(pattern)
    choices = [_choices(inner) for inner in pieces[1::2]]
    is_open = any(mark in piece for piece in pieces[::2] for mark in "{}")
    if is_open or not 0 < math.prod(map(len, choices)) <= _MOST:
        raise UsageError(
            f"corpus {pattern!r}: its braces cannot be read. Wanted {{000..099}}, a range upwards, or {{real,fake}}, "
            f"not one in another, at most {_MOST:,} names."
        )
    return ["".join(map(str.__add__, pieces[::2], (*chosen, ""))) for chosen in product(*choices)]


def _choices(inner: str) -> list[str]:
    match = _RANGE.fullmatch(inner)
    if match is None:
        return inner.split(",") if "," in inner else []
    first, last = match[1], match[2]
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    numbers = range(int(first), int(last) + 1, int(match[3] or 1) or _MOST)
    return [f"{number:0{width}}" for number in numbers] if len(numbers) <= _MOST else []
