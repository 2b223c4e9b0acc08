"""What a stage tells of its memory while it runs: policy, plan, warnings and shortages, for the runner's terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


class MemoryNews:
    """Follows a stage's event log (``memory/events/<stage>.jsonl``) from where it ends now.

    Args:
        path: the log; it may not exist yet.
        told: messages told already, here and by others that share it; each is told once, so that a run of five folds
            tells its policy once.
    """

    def __init__(self, path: Path, told: set[str]) -> None:
        self._path = path
        self._told = told
        self._position = path.stat().st_size if path.is_file() else 0

    def __iter__(self) -> Iterator[str]:
        """Messages written since the last look. Lines that are no events are passed over."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                lines = stream.read()
        except OSError:  # not there yet, or a file server that is away: then at the next look
            return
        whole = lines[: lines.rfind(b"\n") + 1]  # the last line may be half written
        self._position += len(whole)
        for line in whole.splitlines():
            message = _message(line)
            if message and message not in self._told:
                self._told.add(message)
                yield message


def _message(line: bytes) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    message = event.get("message") if isinstance(event, dict) else None
    return message if isinstance(message, str) else ""
