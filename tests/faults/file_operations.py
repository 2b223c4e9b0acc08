"""Record every change that this process makes to the files of one folder, and disturb the n-th one.

Use it in a process that ends afterwards: replaced functions stay replaced.
"""

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
    """Watch ``folder`` once ``begin`` was called.

    Attributes:
        folder: The watched folder, with everything below it.
        before: Called with the number (from 1) of the next operation and a function that does the first half of a
            write.
        done: (operation, file name) of every operation; ``NAME~`` is the temporary file of NAME.
    """

    folder: Path
    before: Callable[[int, Callable[[], Any]], None] = lambda number, half: None
    done: list[tuple[str, str]] = field(default_factory=list)

    def begin(self) -> None:
        """Count every operation of this process from now on, in any thread."""
        self._lock = threading.RLock()
        self._open = open
        for name in ("replace", "unlink", "mkdir", "fsync"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def count(self, operation: str, path: Any, half: Callable[[], Any] = lambda: None) -> None:
        """Note one operation that is about to happen."""
        place = Path(os.fsdecode(path))
        if place.is_relative_to(self.folder):
            # ".latest_checkpoint.pt.@host.<thread>.<process>.tmp" becomes latest_checkpoint.pt
            name = f"{place.name[1:].partition('.@')[0]}~" if _TEMPORARY.match(place.name) else place.name
            with self._lock:
                self.done.append((operation, name))
                self.before(len(self.done), half)

    def _counted(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def operate(target: Any, *arguments: Any) -> None:
            place = Path(f"/proc/self/fd/{target}").readlink() if name == "fsync" else target
            if os.path.lexists(place) != (name == "mkdir"):
                self.count(name, place)
            real(target, *arguments)

        return operate

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        reads = isinstance(file, int) or not set(mode) & set("wax+")
        if reads or not Path(os.fsdecode(file)).is_relative_to(self.folder):
            return self._open(file, mode, buffering, *arguments, **options)
        assert mode in ("wb", "ab"), f"nobody watches mode {mode}"
        self.count("open", file)
        raw = _WatchedFile(file, mode[0])
        raw.operations = self
        return raw if buffering == 0 else io.BufferedWriter(raw)


class _WatchedFile(io.FileIO):
    operations: FileOperations

    def write(self, content: Any) -> int:
        half = bytes(content)[: len(content) // 2]
        self.operations.count("write", self.name, lambda: super(_WatchedFile, self).write(half))
        return super().write(content)
