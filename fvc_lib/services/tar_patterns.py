"""Patterns that name many tars at once: ``shards/train-{000..099}.tar``, ``{real,fake}/*.tar``, ``repo/**/*.tar``.

Braces say which tars there have to be: each is looked for. ``*``, ``?`` and ``[...]`` take what is there, and ``**``
any folders between. A path that exists is no pattern, whatever letters it has.
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
    """Whether it names tars by braces or wildcards."""
    text = os.fspath(corpus)
    return any(mark in text for mark in "{*?[") and not os.path.lexists(text)


def fixed_folder(corpus: str | os.PathLike[str]) -> Path:
    """The folder that a pattern's tars are named relative to: as much of it as has neither braces nor wildcards."""
    parts = Path(corpus).parts
    fixed = next((number for number, part in enumerate(parts) if any(mark in part for mark in "{}*?[")), len(parts))
    return Path(*parts[: min(fixed, len(parts) - 1)])


def tars_of(corpus: str | os.PathLike[str]) -> list[Path]:
    """Every tar that a pattern names, each once, sorted by name; all are there.

    Raises:
        UsageError: its braces cannot be read, a tar that they name is missing, wildcards find nothing, or what is named
            is no tar. The message says which, and what to write.
    """
    pattern = os.fspath(corpus)
    named = _expanded(pattern)
    found, missing = set[str](), list[str]()
    for each in named:
        matches = [each] if os.path.exists(each) else glob.glob(each, recursive=True)  # noqa: PTH110, PTH207 - text
        found.update(matches)
        missing += [] if matches else [each]
    if missing:
        more = f" and {len(missing) - 5:,} more" if len(missing) > 5 else ""
        count = f"of the {len(named):,} that it names, {len(missing):,} cannot be found"
        what = f"{count}: {', '.join(map(repr, missing[:5]))}{more}" if len(named) > 1 else "no file is called so"
        folder = os.path.dirname(pattern.split("{")[0])  # noqa: PTH120 - text
        raise UsageError(
            f"corpus {pattern!r}: {what}. Fetch what is missing, or write a pattern of "
            f"what is there, in quotes, such as {os.path.join(folder, '*.tar')!r}."  # noqa: PTH118 - text
        )
    others = sorted(path for path in found if not path.lower().endswith(SUFFIX) or not os.path.isfile(path))  # noqa: PTH113
    if others:
        raise UsageError(
            f"corpus {pattern!r}: {others[0]!r} is no tar, and a pattern names only tars. Let it end in '.tar'; a "
            "compressed one is unpacked first: gunzip NAME.tar.gz."
        )
    return [Path(path) for path in sorted(found)]


def _expanded(pattern: str) -> list[str]:
    """The pattern once for each choice in its braces, in their order.

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
