"""SHA-256 digests by which a run knows its own files again: many a flipped bit still makes a file that can be read.

The record of a finished stage (``checkpoints/stage_*.json``) holds those of what the stage left: of its tables, and
(``logs``) of its executed notebook, of its logs and of tables for readers alone, as far as these had been written then.
``run.json``, ``status.json`` and each task's status hold their own. Versions that wrote none left nothing to compare
with.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json, sha256_of_stream, write_json
from fvc_lib.services.errors import DataError, command_text

_logger = logging.getLogger(__name__)

# A file changed again within so short a time after it was hashed might show the same times.
_SETTLED_NS = 2_000_000_000
_seen: dict[tuple[Path, int | None], tuple[tuple[int, ...], str]] = {}


def content_hash(path: Path, num_bytes: int | None = None) -> str:
    """SHA-256 of a file's content, or of its first ``num_bytes``; empty where there is none; read again only when the
    file has changed since.
    """
    if not path.is_file():
        return ""
    status = path.stat()
    now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = _seen.get((path, num_bytes))
    if known is not None and known[0] == now:
        return known[1]
    digest = sha256_of_file(path, num_bytes=num_bytes)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        _seen[path, num_bytes] = (now, digest)
    return digest


# --- What a finished stage left


_WRITTEN_SINCE = "written anew since"  # in place of a digest: the stage has to repeat it, and no reader complains


def left_by_stage(paths: Iterable[Path], root: Path) -> dict[str, dict[str, Any]]:
    """For a stage's record: ``sha256`` and ``num_bytes`` of those of ``paths`` that are there, by path below ``root``.

    A log may grow afterwards: what is compared is its beginning.
    """
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    return {
        str(path.relative_to(root)): {"sha256": content_hash(path, size), "num_bytes": size}
        for path, size in sizes.items()
    }


@dataclass(frozen=True)
class _Left:
    """What the record of a finished stage says of one of its files."""

    record: Path
    document: dict[str, Any]
    name: str  # of the file, as seen from the run folder
    sha256: str
    num_bytes: int | None = None  # of a log or notebook

    @property
    def path(self) -> Path:
        return self.record.parents[1] / self.name

    def damage(self) -> str:
        """What is wrong, with the stage to repeat."""
        stage, root = self.record.stem.removeprefix("stage_"), self.record.parents[1]
        name, _, fold = stage.rpartition("_fold_")
        told = (
            f"{self.path}: is not what stage {stage} wrote: damaged, or changed since (SHA-256 in checkpoints/"
            f"{self.record.name})."
        )
        if self.num_bytes is None:
            # Of several folds only the one whose table it is: the plan knows it by its digest.
            again = command_text("--resume", root, *([] if fold.isdecimal() else ["--only", stage]))
            return f"{told} Repeat that stage: {again}"
        again = command_text("--resume", root, "--only", name if fold.isdecimal() else stage)
        what = f"repeat {name}, with all its folds" if fold.isdecimal() else "repeat it"
        return f"{told} The stage's tables and weights have digests of their own. To have it anew, {what}: {again}"


def _left(root: Path) -> Iterator[_Left]:
    """All that the records of the run in ``root`` say."""
    for record in sorted((root / "checkpoints").glob("stage_*.json")):
        try:
            document = json.loads(record.read_bytes())
            found = [_Left(record, document, name, digest) for name, digest in document["outputs"].items()]
            for name, each in document.get("logs", {}).items():
                found.append(_Left(record, document, name, each["sha256"], each["num_bytes"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # the plan does not count that stage as finished either
        yield from (each for each in found if isinstance(each.sha256, str) and each.sha256 not in ("", _WRITTEN_SINCE))


def _left_as(path: Path) -> _Left | None:
    """What the run that ``path`` lies in knows of it; None where no finished stage of a run answers for it."""
    root = next((folder for folder in path.absolute().parents if (folder / "run.json").is_file()), None)
    if root is None:
        return None
    name = str(path.absolute().relative_to(root))
    return next((each for each in _left(root) if each.name == name), None)


def note_rewritten(path: Path, content: Path) -> None:
    """Before ``content`` replaces the table at ``path``: where a finished stage left another one, its record, which
    lasts, speaks of it no more. An interactive notebook writes it.
    """
    left = _left_as(path)
    if left is not None and left.sha256 != sha256_of_file(content):
        if left.name in left.document["outputs"]:
            left.document["outputs"][left.name] = _WRITTEN_SINCE
        else:  # for readers alone: no stage has to repeat it
            del left.document["logs"][left.name]
        write_json(left.record, left.document)


def undamaged_content(path: Path) -> bytes:
    """The bytes of ``path``; errors as of ``undamaged_file``."""
    with undamaged_file(path) as stream:
        return stream.read()


@contextmanager
def undamaged_file(path: Path) -> Iterator[BinaryIO]:
    """``path``, opened: what is read is what was compared, also when another file takes its place meanwhile.

    Raises:
        DataError: the stage that wrote it has finished, and left others.
        OSError: it cannot be read.
    """
    for _ in range(2):  # between the two looks a stage may have finished writing it anew
        with path.open("rb") as stream:
            left = _left_as(path)
            if left is None or sha256_of_stream(stream, left.num_bytes) == left.sha256:
                stream.seek(0)
                yield stream
                return
    assert left is not None
    if left.document.get("rewrites_noted"):
        raise DataError(left.damage())
    _warn_once(
        f"{path}: is not as stage {left.record.stem.removeprefix('stage_')} left it. The version of the code "
        "that finished it did not note tables written interactively since, so this may be one, or damage."
    )
    with path.open("rb") as stream:
        yield stream


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def log_damage(path: Path) -> str:
    """What is wrong with the log or executed notebook at ``path``, in words; empty where nothing is known."""
    left = _left_as(path)
    if left is None or content_hash(path, left.num_bytes) in ("", left.sha256):
        return ""
    return left.damage()


# --- Documents that hold their own digest


_OWN = "document_sha256"


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` with ``document`` as JSON with its own digest in it, atomically."""
    known = {name: value for name, value in document.items() if name != _OWN}
    write_json(path, {**known, _OWN: sha256_of_json(known)})


def document_damage(path: Path, document: Mapping[str, Any]) -> str:
    """What is wrong with ``document``, read from ``path``, in words; empty where nothing is known to be."""
    if _OWN in document and document[_OWN] != _digest(document) and not _is_continued(document):
        return f"{path}: is not what was written there: damaged, or changed by hand. What it says may be wrong."
    if "damaged" in document:
        return f"{path}: was damaged, which was seen at {document['damaged']}. What it says of before may be wrong."
    return ""


def _digest(document: Mapping[str, Any]) -> str:
    return sha256_of_json({name: value for name, value in document.items() if name != _OWN})


def _is_continued(document: Mapping[str, Any]) -> bool:
    """Whether a version that knows of no digests only added attempts, and what those differ in, to the run's record."""
    attempts, differs = document.get("attempts"), document.get("bit_equal_resume_because", [])
    if not isinstance(attempts, list) or not isinstance(differs, list) or document.get(_OWN) == _digest(document):
        return False
    told = ("bit_equal_resume", "bit_equal_resume_because")
    plain = {name: value for name, value in document.items() if name not in told}
    before = [plain, *({**document, told[1]: differs[:number]} for number in range(1, len(differs) + 1))]
    return any(
        _digest({**each, "attempts": attempts[:number]}) == document[_OWN]
        for number in range(1, len(attempts))
        for each in before
    )


def recorded_files(root: Path) -> list[Path]:
    """The records of the run in ``root``, and the files of its finished stages that they have digests of."""
    records = [*(root / "checkpoints").glob("stage_*.json"), *(root / "status").glob("[!.]*.json")]
    return sorted([*records, *(left.path for left in _left(root))])


def run_damage(root: Path) -> list[str]:
    """What is wrong with the documents, logs and executed notebooks of the run in ``root``; tables apart."""
    found = []
    for path in (root / "run.json", root / "status.json", *sorted((root / "status").glob("[!.]*.json"))):
        try:
            document = json.loads(path.read_bytes())
            found.append(document_damage(path, document))
            if _OWN in document and _is_continued(document):
                found.append(f"{path}: another version of the code, without digests, added to it: that is not checked.")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            found.append(f"{path}: cannot be read ({type(error).__name__}): what it said is left out.")
    for left in _left(root):
        if left.num_bytes is not None and content_hash(left.path, left.num_bytes) not in ("", left.sha256):
            found.append(left.damage())
    return list(filter(None, found))
