"""Check the files of a run by their SHA-256, because a file with a flipped bit can often still be read.

The record of a finished stage (``checkpoints/stage_*.json``) lists size and SHA-256 of every file that the stage wrote
and a later command reads. ``run.json`` has the digest of ``params.yaml``. Records, checkpoints, cached files and
bundles (folders with exported models) contain a digest of their own content. ``undamaged_file`` checks one file before
it is read; ``run_damage`` checks all files of a run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fvc_lib.services.atomic_files import (
    as_mapping,
    content_hash,
    read_json_object,
    sha256_of_file,
    sha256_of_json,
    sha256_of_stream,
    write_json,
)
from fvc_lib.services.errors import DataError, command_text

PARAMS = "params.yaml"
_LOGS = ("metrics/", "memory/", "notebooks/")  # may grow after the stage: only the recorded length is compared


def is_log(name: str) -> bool:
    """Return whether the file ``name`` (path in the run folder) is a log or an executed notebook.

    Such a file may grow after its stage. If it is damaged, its stage does not run again.
    """
    return name.startswith(_LOGS)


def listed(paths: Iterable[Path], root: Path) -> dict[str, dict[str, Any]]:
    """Return the SHA-256 and size of the existing files in ``paths``, as a dict for the record of a stage.

    The keys are the paths relative to ``root``. A value is a dict with ``sha256`` (hexadecimal) and ``num_bytes``.
    """
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    return {
        str(path.relative_to(root)): {"sha256": content_hash(path, size), "num_bytes": size}
        for path, size in sizes.items()
    }


@dataclass(frozen=True)
class _Listed:
    """The entry of one file in a record (a JSON file with the digests of other files) of a run.

    Attributes:
        root: the run folder.
        record: path of the record.
        name: path of the file in the run folder.
        digests: valid values of the SHA-256, in hexadecimal. ``params.yaml`` may have two: after the process was killed
            between two writes, the file may be the earlier one.
        num_bytes: size of a log when it was recorded; None for other files.
    """

    root: Path
    record: Path
    name: str
    digests: Sequence[str]
    num_bytes: int | None = None

    def is_damaged(self) -> bool:
        """Return whether the file exists and its content differs from the entry."""
        return content_hash(self.root / self.name, self.num_bytes) not in ("", *self.digests)

    def damage(self) -> str:
        """Return the message that says that the file is damaged, with the remedy."""
        remedy = f"Delete it; what wrote it makes it again: {command_text('--resume', self.root)}"
        if self.name == PARAMS:
            fork = command_text("--resume", self.root, "--fork", "-p", "NAME", "VALUE")
            remedy = (
                f"Put the file back (run.json has its values under params), or begin a new run. To change it: {fork}"
            )
        elif self.record.stem == "stage_09_robustness":
            remedy = f"Delete it; what wrote it makes it again: {command_text('robustness', self.root)}"
        return (
            f"{self.root / self.name}: is not what the run wrote: damaged, or changed since (SHA-256 in "
            f"{self.record.name}). {remedy}"
        )


def _records(root: Path) -> list[Path]:
    return [root / "run.json", *sorted((root / "checkpoints").glob("stage_*.json"))]


def _listed_in(root: Path) -> Iterator[_Listed]:
    """Yield one entry per file that is listed in a record of the run in ``root``. Damaged records are skipped.

    An entry has the expected SHA-256 of the file.
    """
    for record in _records(root):
        document = read_document(record)  # nothing of a damaged one: ``run_damage`` says so
        if digests := document.get("params_sha256"):
            yield _Listed(root, record, PARAMS, digests)
        for name, entry in as_mapping(document.get("files")).items():
            yield _Listed(root, record, name, [entry["sha256"]], entry["num_bytes"] if is_log(name) else None)


def _listed_as(path: Path) -> _Listed | None:
    """Return the entry of the file ``path`` in the records of its run, with the expected SHA-256.

    The result is None if the file has no entry or is in no run folder.

    Raises:
        DataError: ``path`` is ``params.yaml``, and ``run.json``, which has its digest, is damaged.
    """
    path = path.absolute()
    root = next((folder for folder in path.parents if (folder / "run.json").is_file()), None)
    if root is None:
        return None
    if path == root / PARAMS and (damage := _damage_of_document(root / "run.json")):
        raise DataError(damage)  # which has its digest
    return next((entry for entry in _listed_in(root) if root / entry.name == path), None)


def note_rewritten(path: Path, content: Path) -> None:
    """Delete the entry of the file ``path`` from its run's record, because the file gets new content.

    Otherwise the rewritten file would be taken for a damaged one. This happens when an interactive notebook rewrites a
    table. ``content`` is the path of the temporary file that will replace ``path``. If its digest is the recorded one,
    nothing changes.
    """
    found = _listed_as(path)
    if found is not None and sha256_of_file(content) not in found.digests:
        document = read_document(found.record)
        del document["files"][found.name]
        write_document(found.record, document)


def undamaged_content(path: Path) -> bytes:
    """Return the content of the file ``path`` after checking its digest against the record of its run.

    Raises:
        DataError: the digest differs from the record, or the record is damaged; the message has the remedy.
        OSError: the file cannot be read.
    """
    with undamaged_file(path) as stream:
        return stream.read()


@contextmanager
def undamaged_file(path: Path) -> Iterator[BinaryIO]:
    """Check the digest of the file ``path`` against the record of its run, and yield the open file for reading.

    A file without an entry in a record is not checked. The yielded content is the checked content, even if another file
    replaces ``path`` meanwhile.

    Raises:
        DataError: the digest differs from the record, or the record is damaged; the message has the remedy.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        found = _listed_as(path)
        if found is not None and sha256_of_stream(stream, found.num_bytes) not in found.digests:
            raise DataError(found.damage())
        stream.seek(0)
        yield stream


def damage_of(path: Path) -> str:
    """Check the file ``path`` by the SHA-256 in the record of its run, and return a message if it is damaged.

    The message has the remedy. It is empty if the SHA-256 is right, no record lists the file, or there is no file.
    """
    found = _listed_as(path)
    return found.damage() if found is not None and found.is_damaged() else ""


# --- Documents that hold their own digest


_OWN = "document_sha256"


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as JSON to ``path`` atomically, with a SHA-256 of its content as a further field."""
    known = _content(document)
    write_json(path, {**known, _OWN: sha256_of_json(known)})


def _content(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != _OWN}


def _is_whole(document: Mapping[str, Any]) -> bool:
    try:
        return bool(document.get(_OWN) == sha256_of_json(_content(document)))
    except ValueError:  # a number beyond all floats
        return False


def document_damage(path: Path, document: Mapping[str, Any]) -> str:
    """Check a JSON document by the digest that it contains, and return a message if the document is damaged.

    ``document`` was read from the file ``path``. The message is empty if the digest is right or there is none.
    """
    if _OWN not in document or _is_whole(document):
        return ""
    return (
        f"{path}: is not what was written there: damaged, or changed by hand. Put a copy back in its place. Any but "
        "run.json may be deleted; --resume then goes on without it."
    )


def _damage_of_document(path: Path) -> str:
    document = read_json_object(path)
    return document_damage(path, document or {_OWN: "cannot be read"}) if path.exists() else ""


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON file that ``write_document`` wrote, check the digest in it, and return its content as a dict.

    The dict does not contain the digest. It is empty if the file is missing, damaged or has no digest.
    """
    document = read_json_object(path)
    return _content(document) if _is_whole(document) else {}


# --- A whole run


def run_damage(root: Path, *, logs: bool = True) -> list[str]:
    """Check all files of the run in ``root`` by their digests, and return one message per damaged file.

    ``logs`` says whether logs and executed notebooks are checked too.
    """
    documents = map(_damage_of_document, [root / "status.json", *_records(root)])
    files = [entry for entry in _listed_in(root) if logs or not is_log(entry.name)]
    return [*filter(None, documents), *(entry.damage() for entry in files if entry.is_damaged())]


def refuse_damaged(*roots: Path, logs: bool = True) -> None:
    """Check all files of the runs in ``roots`` by their digests. If any is damaged, raise a ``DataError``.

    The message names all damaged files. ``logs`` says whether logs and executed notebooks are checked too.
    """
    damage = [message for root in roots for message in run_damage(root, logs=logs)]
    if damage:
        raise DataError("\n".join(damage))
