"""Every change a process makes to the files of one folder, on record, and with a fault before or within the n-th.

For a process of its own: what is replaced is not put back.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import _TEMPORARY


@dataclass
class FileOperations:
    """Watches ``folder`` once ``begin`` was called.

    Attributes:
        folder: and everything below it.
        before: called with the number (from 1) of an operation that is about to happen, and with a function that does
            the first half of it, where it is a write.
        done: (what, file name) of every operation; a temporary is named ``<its target>~``.
    """

    folder: Path
    before: Callable[[int, Callable[[], None]], None] = lambda number, half: None
    done: list[tuple[str, str]] = field(default_factory=list)

    def begin(self) -> None:
        """From now on every operation of this process counts, whichever thread it is in."""
        self._lock = threading.RLock()
        self._open = open
        for name in ("replace", "unlink", "mkdir", "fsync"):
            setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def count(self, what: str, path: Any, half: Callable[[], None] = lambda: None) -> None:
        """One operation is about to happen."""
        if not self._is_mine(path):
            return
        place = Path(os.fsdecode(path))
        match = _TEMPORARY.match(place.name)
        # ".latest_checkpoint.pt.@host.<thread>.<process>.tmp" is on its way to latest_checkpoint.pt
        name = f"{place.name[1:].partition('.@')[0]}~" if match else place.name
        with self._lock:
            self.done.append((what, name))
            self.before(len(self.done), half)

    def _is_mine(self, path: Any) -> bool:
        return self.folder in (Path(os.fsdecode(path)), *Path(os.fsdecode(path)).parents)

    def _replace(self, real: Callable[..., None]) -> Callable[..., None]:
        def replace(source: Any, target: Any) -> None:
            self.count("replace", source)
            real(source, target)

        return replace

    def _unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        def unlink(path: Any) -> None:
            if os.path.lexists(path):
                self.count("unlink", path)
            real(path)

        return unlink

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: Any, *arguments: Any) -> None:
            if not os.path.lexists(path):
                self.count("mkdir", path)
            real(path, *arguments)

        return mkdir

    def _fsync(self, real: Callable[..., None]) -> Callable[..., None]:
        def fsync(descriptor: int) -> None:
            self.count("fsync", _path_of(descriptor))
            real(descriptor)

        return fsync

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        if mode == "rb" or isinstance(file, int) or not self._is_mine(file):
            return self._open(file, mode, buffering, *arguments, **options)
        if mode not in ("wb", "ab"):
            assert not set(mode) & set("wax+"), f"a mode nobody watches: {mode}"
            return self._open(file, mode, buffering, *arguments, **options)
        self.count("open", file)
        raw = _WatchedFile(file, mode[0])
        raw.operations = self
        return raw if buffering == 0 else io.BufferedWriter(raw)


class _WatchedFile(io.FileIO):
    operations: FileOperations

    def write(self, content: Any) -> int:
        half = bytes(content)[: len(content) // 2]
        self.operations.count("write", self.name, lambda: void(super(_WatchedFile, self).write(half)))
        return super().write(content)


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def void(_: object) -> None:
    pass
