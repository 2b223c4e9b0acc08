"""A process's claim on a lock file: who holds it, and how often it has said that it lives."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fvc_lib.services.process_identity import process_lives, this_host

_LONGEST_INTERVAL = 60.0  # what a file may say; nobody waits for hours because a file was damaged
_BYTES = 512  # always as many, so that a beat replaces the one before in a single write
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who works on a run: a process of a host, and how often it has said so.

    ``started_utc`` tells one process from a later one with the same number.
    """

    pid: int
    host: str
    started_utc: str
    interval_seconds: float
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started_utc}"

    def is_same_process(self, other: Holder) -> bool:
        """Whether both are claims of one process, however many beats lie between them."""
        return replace(self, beat=0) == replace(other, beat=0)

    @property
    def is_gone(self) -> bool:
        """Whether this host itself can tell that the process has ended."""
        return self.host == this_host() and not process_lives(self.pid)


def write_claim(path: Path, holder: Holder) -> None:
    """Opened and closed each time: a network file system shows other hosts what was written when it is closed."""
    text = json.dumps(asdict(holder)).encode()
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(_BYTES - 1) + b"\n", 0)
        os.ftruncate(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def clear_claim(path: Path, holder: Holder) -> None:
    """Leave no claim behind, unless it is another's by now."""
    now, _ = read_claim(path)
    if now is not None and now.is_same_process(holder):
        try:
            os.truncate(path, 0)
        except OSError as error:
            _logger.warning("%s: the claim of this process stays and will be watched: %s", path, error)


def read_claim(path: Path) -> tuple[Holder | None, float]:
    """The claim in ``path`` (None: there is none, or nothing of ours) and the seconds since it was written."""
    try:
        with path.open("rb") as stream:
            age_seconds = time.time() - os.fstat(stream.fileno()).st_mtime
            values = json.loads(stream.read(2 * _BYTES))
        pid = int(values["pid"])
        if not 0 < pid < 2**31:
            return None, 0.0
        holder = Holder(
            pid,
            str(values["host"]),
            str(values["started_utc"]),
            min(max(float(values["interval_seconds"]), 0.01), _LONGEST_INTERVAL),
            int(values["beat"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None, 0.0
    return holder, age_seconds
