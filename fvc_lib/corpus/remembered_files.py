"""What was found out about files before, for as long as they are unchanged and the code that found it is the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells that a file is unchanged."""

    size_bytes: int
    mtime_ns: int


def file_state(path: Path) -> FileState | None:
    """Of ``path`` now; None where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileState(status.st_size, status.st_mtime_ns)


def store_for(work_dir: Path, kind: str, root: Path) -> Path:
    """The file of JSON lines in ``work_dir`` about the files below ``root``."""
    return work_dir / f"{kind}_{hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]}.jsonl"


def remembered_rows(store: Path, version: str) -> Iterator[dict[str, Any]]:
    """The rows of ``store`` that code of ``version`` wrote, oldest first; torn and foreign lines are passed over."""
    if not store.is_file():
        return
    with store.open("rb") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("version") == version:
                yield row
