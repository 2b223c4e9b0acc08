"""What a generated corpus remembers of its files, so that another call makes only what is missing or damaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.services.atomic_files import sha256_of_file, write_bytes, write_text
from fvc_lib.services.errors import StoppedError

_MAX_THREADS = 4


@dataclass(frozen=True)
class PlannedFile:
    """A file of a generated corpus: its path in the corpus folder, with '/', and what makes its content."""

    path: str
    make: Callable[[], bytes]


def make_missing(
    folder: Path,
    record: Path,
    version: str,
    plan: Sequence[Sequence[PlannedFile]],
    what: str,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
) -> None:
    """Write what a generated corpus plans and ``folder`` does not have, on a few threads.

    Args:
        folder: of the corpus.
        record: where checksums are kept, also of a call that is interrupted.
        version: of the generator; files of another one are made anew.
        plan: the files of each thing that is drawn.
        what: those things are called, for the message.
        progress: called with (things done, things in all) after each of them.
        stop: asked after each of them.

    Raises:
        StoppedError: ``stop`` said so; a later call goes on.
    """
    known = read_checksums(record, version)
    checksums = dict(known)

    def made(files: Sequence[PlannedFile]) -> dict[str, str]:
        return {file.path: _kept_or_made(folder / file.path, known.get(file.path), file.make) for file in files}

    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, _MAX_THREADS)) as makers:
        try:
            for done, some in enumerate(makers.map(made, plan), start=1):
                checksums.update(some)
                if progress is not None:
                    progress(done, len(plan))
                if stop is not None and stop():
                    raise StoppedError(f"stopped after {done} of {len(plan)} {what} of the sample corpus; run it again")
        except BaseException:
            makers.shutdown(cancel_futures=True)
            raise
        finally:
            write_checksums(record, version, checksums)


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


def _kept_or_made(path: Path, checksum: str | None, make: Callable[[], bytes]) -> str:
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
