"""Read the bytes of a video, which is a file, a member of a tar, or a folder of pictures.

A path may lead into a tar: ``shards/000.tar/a/b.mp4`` is the member ``a/b.mp4`` of ``shards/000.tar``. Members are read
at their offset in the tar. Nothing is unpacked, so names of members are never used as paths of files.
"""

import errno
import hashlib
import io
import os
import re
import stat
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fvc_lib.services.atomic_files import AnyPath

SUFFIX = ".tar"
PICTURES = (".png", ".jpg", ".jpeg")
HEADER_BYTES = 32 << 10  # members with longer headers are not read; names have at most 4 KiB
_BLOCK = 512  # a tar consists of blocks of this size
_CHUNK_BYTES = 1 << 20
_DIGITS = re.compile(r"\d+", re.ASCII)
# Errors that ``tarfile`` raises for damaged files. Chained headers cause recursion, and offsets may overflow.
_ERRORS = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, OSError)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of bytes in a file: a whole file, or a plain member of a tar.

    The range is ``size_bytes`` long and begins at byte ``start`` of the file ``path``.
    """

    path: Path
    start: int
    size_bytes: int
    mtime_ns: int  # modification time of the file

    def read(self, size: int | None = None) -> bytes:
        """Return the bytes, or the first ``size`` of them.

        Raises:
            OSError: the file cannot be read, or became shorter.
        """
        return b"".join(self.chunks(size))

    def chunks(self, size: int | None = None) -> Iterator[bytes]:
        """Yield the bytes, or the first ``size`` of them, in pieces of at most 1 MiB; errors are those of ``read``."""
        left = self.size_bytes if size is None else min(size, self.size_bytes)
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            while left:
                content = stream.read(min(left, _CHUNK_BYTES))
                if not content:
                    raise _damaged(self.path, "it became shorter while it was read")
                left -= len(content)
                yield content

    @property
    def url(self) -> str:
        """Return the URL with which ffmpeg opens the part, by its protocols ``file`` and ``subfile``."""
        # An absolute name behind "file:" keeps a colon or a dash in it from being read as a protocol or an option.
        name = "file:" + os.path.abspath(self.path)  # noqa: PTH100 - Path.absolute() keeps ".."
        return f"subfile,,start,{self.start},end,{self.start + self.size_bytes},,:{name}" if self.start else name


def part_at(path: Path) -> FilePart:
    """Return the range of bytes that ``path`` names: a regular file, or a plain member of a tar.

    Raises:
        OSError: the file or member does not exist, is not regular or cannot be read, or the tar is damaged.
        ValueError: the path holds a NUL character.
    """
    archive, name = _split(path)
    if archive is not None:
        member = contents_of(archive).members.get(name)
        if member is None:
            raise FileNotFoundError(errno.ENOENT, f"no file {name!r} in the tar", str(path))
        if isinstance(member, str):
            raise _damaged(archive, f"{name!r} in the tar {member}")
        return member
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return FilePart(path, 0, status.st_size, status.st_mtime_ns)


def parts_of(path: Path) -> list[FilePart]:
    """Return the ranges of bytes that make up a video: one for a file, or one per picture of a folder of pictures.

    Pictures are in the order of ``picture_names``.

    Raises:
        OSError: as ``part_at``.
        ValueError: as ``part_at``.
    """
    return [part_at(path / name) for name in picture_names(path)] or [part_at(path)]


def picture_names(path: AnyPath) -> list[str]:
    """Return the names of the PNG and JPEG files in a folder, or in a folder of a tar; empty for a file.

    Names that begin with a dot are left out. Names are sorted by the numbers in them: 9 comes before 10.
    """
    archive, inside = _split(Path(path))
    names: list[str] = []
    if os.path.isdir(path):  # noqa: PTH112 - raises nothing
        names = os.listdir(path)  # noqa: PTH208 - names, not paths
    elif archive is not None:
        try:
            names = contents_of(archive).folders.get(inside, [])
        except OSError:  # ``part_at`` raises it
            return []
    shown = (name for name in names if not name.startswith(".") and name.lower().endswith(PICTURES))
    return sorted(shown, key=lambda name: ([int(digits) for digits in _DIGITS.findall(name)], name))


def sha256_of_video(path: AnyPath) -> str:
    """Return the hexadecimal SHA-256 of a file, or of the joined contents of all pictures in a folder.

    Raises:
        OSError: as ``part_at``.
        ValueError: as ``part_at``.
    """
    digest = hashlib.sha256()
    for part in parts_of(Path(path)):
        for chunk in part.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _split(path: Path) -> tuple[Path | None, str]:
    """Split a path that leads into a tar into (path of the tar, name of the member); ``(None, "")`` without a tar."""
    for archive in path.parents:
        if archive.suffix.lower() == SUFFIX and archive.is_file():
            return archive, str(path.relative_to(archive))
    return None, ""


class Contents(NamedTuple):
    """The list of the members of a tar; of a damaged tar, it has only the members before the damage."""

    members: Mapping[str, FilePart | str]  # by name, in the tar's order: the part, or a text why it must not be read
    folders: Mapping[str, list[str]]  # by folder: names of the readable members in it
    damage: str = ""  # why reading stopped before the end; empty: the whole tar was read
    last: str = ""  # name in the last header; the content of this member may be cut off


def contents_of(archive: Path) -> Contents:
    """Return the members of a tar, from its headers. The result is cached until the file changes.

    If several members share a name, none of them may be read.

    Raises:
        OSError: the file cannot be read, is compressed or is no tar.
    """
    status = archive.stat()
    return _contents(os.path.abspath(archive), status.st_mtime_ns, status.st_size)  # noqa: PTH100 - as text


class _Headers(io.BufferedReader):
    """A tar file, opened for reading, that raises an error if a member has more than ``HEADER_BYTES`` of headers."""

    left = HEADER_BYTES  # bytes that may still be read before the next member

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= size or 0
        if self.left < 0:
            raise tarfile.ReadError(f"a header of more than {HEADER_BYTES:,} bytes")
        return super().read(size)


@lru_cache(maxsize=64)
def _contents(archive: str, mtime_ns: int, size_bytes: int) -> Contents:
    path = Path(archive)
    members = dict[str, FilePart | str]()
    damage = ""
    name = ""
    with _Headers(path.open("rb", buffering=0)) as stream:
        try:
            tar = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - it closes nothing
        except _ERRORS as error:
            raise _damaged(path, f"is no readable tar file, or is compressed: {error}") from error
        try:
            while (member := tar.next()) is not None:
                stream.left = HEADER_BYTES
                vars(tar)["members"].clear()  # otherwise ``tarfile`` holds a kilobyte per member
                if member.size < 0:  # it would lead back to a header that was read before
                    raise tarfile.ReadError(f"{member.name!r} has a negative size")
                if member.isdir():
                    continue
                name = member.name.removeprefix("./")
                if refusal := "is there more than once" if name in members else _refusal(member, name):
                    members[name] = refusal
                elif member.offset_data + member.size <= size_bytes:
                    members[name] = FilePart(path, member.offset_data, member.size, mtime_ns)
            stream.seek(tar.offset)
            if stream.read(_BLOCK) != bytes(_BLOCK):
                damage = f"neither a header nor its end at byte {tar.offset:,}"
        except _ERRORS as error:
            damage = str(error)
    folders: dict[str, list[str]] = defaultdict(list)
    for each, part in members.items():
        if isinstance(part, FilePart):
            folder, _, last = each.rpartition("/")
            folders[folder].append(last)
    return Contents(members, dict(folders), damage, name)


def _refusal(member: tarfile.TarInfo, name: str) -> str:
    """Return a text that states why a member of a tar must not be read, such as a link; empty if it may be read.

    ``name`` is the member's name without a leading ``./``.
    """
    if not member.isreg() or member.sparse is not None:
        return "is no plain file: a link, a device, or stored with holes (tar --sparse)"
    is_outside = os.path.normpath(name) != name or name.startswith((os.sep, os.pardir))
    return "has a name that leads out of the tar" if is_outside else ""


def _damaged(path: Path, reason: str) -> OSError:
    return OSError(errno.EBADMSG, reason, str(path))
