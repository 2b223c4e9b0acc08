"""What the shared clip store holds, and making room in it: when asked, of our own files only, never through a link."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fvc_lib.services.errors import UsageError
from fvc_lib.video.clips.shards import MANIFEST
from fvc_lib.video.clips.store import CLIPS_FOLDER, SETTINGS_FILE

Kind = Literal["original", "augmented", "shards"]

_DECODE = re.compile(r"decode_[0-9a-f]{32}")
_SET = re.compile(r"(?P<kind>original)|(?P<other>augmented|shards)_[0-9a-f]{32}")
_OURS = re.compile(r"[0-9A-Za-z_-]+\.npy|clips-[0-9]{6}\.tar|settings\.json|manifest\.json|\..+\.tmp", re.DOTALL)


@dataclass(frozen=True)
class ClipSet:
    """Clips of one kind made with one choice of settings: a folder that is kept or deleted as a whole.

    Attributes:
        folder: ``clips/decode_<hash>/original``, ``.../augmented_<hash>`` or ``.../shards_<hash>``.
        settings: what it was made with, as far as it says so.
        num_files, size_bytes: of files of ours in it.
        last_used: seconds since 1970, when a run last began to read or write it.
    """

    folder: Path
    kind: Kind
    settings: dict[str, object]
    num_files: int
    size_bytes: int
    last_used: float

    @property
    def name(self) -> str:
        """The folder as it is called below the clips folder."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True)
class Pruned:
    """What was deleted, and what stands in a deleted set's folder because it is not ours."""

    num_files: int
    size_bytes: int
    left: tuple[Path, ...]


def stored_sets(cache_dir: str | os.PathLike[str]) -> list[ClipSet]:
    """Every set of clips under ``cache_dir``, by name. Looks without writing.

    Raises:
        UsageError: the clips folder is a link; nothing is followed out of the cache.
    """
    clips = Path(cache_dir) / CLIPS_FOLDER
    if clips.is_symlink():
        where = str(clips.readlink())
        raise UsageError(f"{str(clips)!r} is a link to {where!r}. Give the cache folder that really holds the clips.")
    sets = []
    for decode in _folders(clips):
        if _DECODE.fullmatch(decode.name):
            for folder in _folders(decode):
                match = _SET.fullmatch(folder.name)
                if match:
                    kind: Kind = match["kind"] or match["other"]  # type: ignore[assignment]  # the pattern's words
                    sets.append(_clip_set(folder, kind))
    return sets


def prune_set(clip_set: ClipSet) -> Pruned:
    """Delete the files of one of ``stored_sets``; links and files that are not ours stand.

    Raises:
        OSError: as the file system gave it; repeating goes on where it stopped.
    """
    num_files = size_bytes = 0
    left = []
    # The manifest goes first, so that half a set of shards cannot be taken for a whole one.
    for entry in sorted(_entries(clip_set.folder), key=lambda entry: entry.name != MANIFEST):
        if _is_ours(entry):
            size_bytes += entry.stat(follow_symlinks=False).st_size
            num_files += 1
            Path(entry.path).unlink()
        else:
            left.append(Path(entry.path))
    _remove_empty(clip_set.folder)
    _remove_if_empty(clip_set.folder.parent)
    return Pruned(num_files, size_bytes, tuple(sorted(left)))


def _clip_set(folder: Path, kind: Kind) -> ClipSet:
    num_files, size_bytes, last_used = 0, 0, 0.0
    for entry in _entries(folder):
        if _is_ours(entry):
            status = entry.stat(follow_symlinks=False)
            num_files += 1
            size_bytes += status.st_size
            last_used = max(last_used, status.st_mtime)
    return ClipSet(folder, kind, _settings(folder), num_files, size_bytes, last_used)


def _settings(folder: Path) -> dict[str, object]:
    path = folder / SETTINGS_FILE
    try:
        settings = {} if path.is_symlink() else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _folders(parent: Path) -> list[Path]:
    """The folders in ``parent``, without links, by name."""
    if not parent.is_dir() or parent.is_symlink():
        return []
    with os.scandir(parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All that is not a folder under ``folder``, links unfollowed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield entry


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode) and bool(_OURS.fullmatch(entry.name))


def _remove_empty(folder: Path) -> None:
    for inner in _folders(folder):
        _remove_empty(inner)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
