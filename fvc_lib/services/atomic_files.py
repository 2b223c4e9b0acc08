"""Replace files atomically: a reader sees the complete old version or the complete new one.

A file is written under a temporary name in the same folder, fsynced, and moved over the target with ``os.replace``;
then the folder is fsynced. When files were written in place instead, 25 of 30 killed writers left an unreadable file.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from fvc_lib.services.errors import DataError

AnyPath = str | os.PathLike[str]

# File names as table text and back.
#
# A POSIX file name is bytes, table text is UTF-8. Bytes that are not UTF-8 become ``\xNN`` and a literal backslash
# becomes ``\\``, so every name has exactly one text, every text made here has exactly one name, and ordinary names
# (spaces, quotes, newlines, emoji) stay as they are.

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(\\))")


def escape_text(text: str) -> str:
    r"""Return ``text`` as valid UTF-8: surrogate-escaped bytes become ``\xNN``, and a backslash becomes ``\\``.

    The result is unambiguous; ``path_from_text`` turns it back into the original.
    """
    if text.isascii() and "\\" not in text:  # nearly every name
        return text
    return os.fsencode(text.replace("\\", "\\\\")).decode("utf-8", "backslashreplace")


def message_text(text: str) -> str:
    r"""Return ``text`` as valid UTF-8 for messages to people.

    Surrogate-escaped bytes become ``\xNN``, but backslashes stay, so the original cannot be recovered.
    """
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def path_to_text(path: PurePath | str) -> str:
    """Return a path as text for tables, in valid UTF-8, with ``/`` between folders.

    ``path_from_text`` turns the text back into the path.
    """
    return escape_text(PurePath(path).as_posix())


def path_from_text(text: str) -> Path:
    """Return the path from ``text``, which ``path_to_text`` wrote to a table.

    Raises:
        DataError: ``text`` holds a backslash that ``path_to_text`` cannot have written.
    """
    if text.isascii() and "\\" not in text:
        return Path(text)
    raw = text.encode("utf-8")
    if _ESCAPE.sub(b"", raw).count(b"\\"):
        raise DataError(
            f"path text {text!r}: got a lone backslash, wanted '\\\\' or '\\xNN' as path_to_text writes them. "
            "Write the table again with the stage that made it."
        )
    unescaped = _ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else b"\\", raw)
    return Path(os.fsdecode(unescaped))


def utc_now() -> str:
    """Return the current time in UTC as text, such as ``2026-01-31T12:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def this_host() -> str:
    """Return a text that identifies this host and pid namespace, such as ``node7-4026531836``.

    Two processes with the same text see the same process ids (pids), so ``process_lives`` works between them.
    """
    name = re.sub(r"[^0-9A-Za-z_-]", "-", socket.gethostname())[:40]
    namespace = Path("/proc/self/ns/pid")  # not on macOS
    return f"{name}-{namespace.stat().st_ino if namespace.exists() else 0}"


def process_lives(pid: int) -> bool:
    """Return whether a process with the process id ``pid`` runs on this host, whichever user owns it."""
    import psutil  # takes a sixth of a second to load

    return psutil.pid_exists(pid)


# The name of a temporary file holds host, thread and process. So two writers of one target never share a temporary
# file, and ``sweep_temporaries`` sees from the pid whether the writer still runs. No host in the name: this machine.
_TEMPORARY = re.compile(r"^\..+?(?:\.@(?P<host>[^.]+)\.\d+)?\.(?P<pid>\d+)\.tmp$", re.DOTALL)
# This host cannot see whether a process of another host runs. No running writer leaves its file unchanged for a day.
_FOREIGN_SECONDS = 24 * 3600.0


def _fsync(path: Path) -> None:
    """Write the content of the file ``path`` to the disk, so that it survives a power cut.

    For a folder, its list of new and renamed files is written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """Return the path for a temporary file in the folder of ``path``; no other thread or process gets the same path.

    ``sweep_temporaries`` recognises and removes such a file after its process has ended.
    """
    # The name is cut because a legal 255-byte name plus the suffix would not be legal any more.
    stem = os.fsdecode(os.fsencode(path.name)[:160])
    return path.parent / f".{stem}.@{this_host()}.{threading.get_native_id()}.{os.getpid()}.tmp"


@contextmanager
def atomic_output(path: AnyPath) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces the file ``path`` at the end of the ``with`` block.

    The block writes the temporary file.
    If the block raises an exception, the temporary file is removed and ``path`` keeps its old content.

    Args:
        path: the final file. Its folder is created when missing.

    Raises:
        OSError: writing failed (``ENOSPC``, ``EROFS``, ...); ``path`` keeps its old content.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        yield temporary
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # write() does not say which file it was for
            error.filename = str(path)
        raise


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Replace ``path`` with ``content`` atomically."""
    with atomic_output(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: AnyPath, content: str) -> None:
    """Replace ``path`` with ``content`` atomically, encoded in UTF-8.

    Surrogate escapes, which stand for undecodable bytes of file names, are written as the original bytes.
    """
    write_bytes(path, content.encode("utf-8", "surrogateescape"))


def write_json(path: AnyPath, value: Any) -> None:
    """Replace ``path`` atomically with ``value`` as indented JSON; raise ``ValueError`` for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path`` as a dict.

    The dict is empty if the file is missing, is no valid JSON, or holds a JSON value that is no object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return as_mapping(value)


def as_mapping(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def as_text(value: object) -> str | None:
    """Return ``value`` if it is a ``str`` that is not empty and not only white space, else None."""
    return value if isinstance(value, str) and value.strip() else None


def sweep_temporaries(folder: Path) -> list[Path]:
    """Remove temporary files that ended processes have left in ``folder``, and return their paths.

    Subfolders are searched too. Only files with names from ``temporary_of`` are removed. The processes of another host
    cannot be seen from here. So a temporary file from another host is removed when it has not changed for a day.
    """
    swept = []
    for path in sorted(folder.rglob(".*.tmp")):
        match = _TEMPORARY.match(path.name)
        if match is None or path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # its writer has finished meanwhile
            is_ours = match["host"] in (None, this_host())
            age = time.time() - path.stat(follow_symlinks=False).st_mtime
            if not process_lives(int(match["pid"])) if is_ours else age > _FOREIGN_SECONDS:
                path.unlink()
                swept.append(path)
    return swept


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files in ``folder`` and its subfolders; links are not followed."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                total += Path(parent, name).lstat().st_size
    return total


def sha256_of_file(path: AnyPath, num_bytes: int | None = None) -> str:
    """Return the SHA-256 of the file at ``path``, in hexadecimal.

    ``num_bytes`` limits it to the first bytes of the file; None: all bytes.
    """
    with Path(path).open("rb") as stream:
        return sha256_of_stream(stream, num_bytes)


def sha256_of_stream(stream: BinaryIO, num_bytes: int | None = None) -> str:
    """Return the SHA-256 of an open file from its current position on, in hexadecimal.

    ``num_bytes`` is the number of bytes to read; None: up to the end.
    """
    digest = hashlib.sha256()
    remaining = sys.maxsize if num_bytes is None else num_bytes
    while block := stream.read(min(1 << 20, remaining)):
        digest.update(block)
        remaining -= len(block)
    return digest.hexdigest()


def content_digest(path: AnyPath) -> str:
    """Return the SHA-256 of the file or folder at ``path``, in hexadecimal; an empty text if it does not exist.

    For a folder, the names and contents of its files are hashed. Subfolders and hidden files are left out.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return sha256_of_json([[file.name, content_hash(file)] for file in files])
    return content_hash(path)


def content_hash(path: Path, num_bytes: int | None = None) -> str:
    """Return the SHA-256 of the file at ``path``, in hexadecimal; an empty text if there is no such file.

    ``num_bytes`` limits it to the first bytes of the file; None: all bytes. The result is cached. The file is read
    again only if its size or times have changed.
    """
    if not path.is_file():
        return ""
    status = path.stat()
    changed = status.st_mtime_ns, status.st_ctime_ns
    if time.time_ns() - max(changed) < _SETTLED_NS:
        return sha256_of_file(path, num_bytes)
    return _hash_of(path, num_bytes, (status.st_dev, status.st_ino, status.st_size, *changed))


# File times are coarse: a file that changes twice within this time may show the same times, so it is not cached.
_SETTLED_NS = 2_000_000_000


@lru_cache(maxsize=4096)
def _hash_of(path: Path, num_bytes: int | None, status: tuple[int, ...]) -> str:
    return sha256_of_file(path, num_bytes)


def sha256_of_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, in hexadecimal; the order of keys does not change it."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
