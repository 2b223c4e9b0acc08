"""The end of a kernel's log, which is all that is left of a kernel that never started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TAIL_BYTES = 4_000
_TAIL_LINES = 20


def tail_of(path: Path) -> str:
    """The last lines of ``path``; empty where there are none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def never_started_hint(log_tail: str) -> str:
    """What the kernel said last, and what to do about it."""
    said = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = f"; it said last: {said[-1]}" if said else "; it said nothing"
    return f"{last}. Try '{sys.executable} -m ipykernel --version'; where that fails too, set the environment up again."
