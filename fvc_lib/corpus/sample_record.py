"""What a generated corpus remembers of its files, so that another call makes only what is missing or damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from fvc_lib.services.atomic_files import sha256_of_file, write_bytes, write_text


def read_checksums(record: Path, version: str) -> dict[str, str]:
    """What an earlier call of this version recorded, by path in the corpus; anything else counts as nothing."""
    try:
        document = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("version") != version:
        return {}
    checksums = document.get("sha256")
    return dict(checksums) if isinstance(checksums, dict) else {}


def write_checksums(record: Path, version: str, checksums: dict[str, str]) -> None:
    """For ``read_checksums``."""
    document = {"version": version, "sha256": checksums}
    write_if_other(record, json.dumps(document, indent=1, sort_keys=True) + "\n")


def kept_or_made(path: Path, checksum: str | None, make: Callable[[], bytes]) -> str:
    """The checksum of ``path``, which is written with what ``make`` gives unless it is there as ``checksum`` says."""
    if checksum is not None and path.is_file() and sha256_of_file(path) == checksum:
        return checksum
    content = make()
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def write_if_other(path: Path, text: str) -> None:
    """Replace ``path`` atomically where it does not hold just ``text``: an unchanged file keeps its time."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)
