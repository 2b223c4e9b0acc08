"""Videos inside tar files, read where they lie: nothing is unpacked, so nothing in a tar becomes a path or a program.

A path that leads into a tar names a plain file in it: ``shards/000.tar/a/b.mp4`` is ``a/b.mp4`` in ``shards/000.tar``.
What lies where is read from the tar's headers once in a process, as long as the tar stays as it is. What lies whole
before a cut or a damaged header can be read; what lies behind it cannot be found.
"""

import errno
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from posixpath import dirname
from typing import BinaryIO

SUFFIX = ".tar"
_INTO = f"{SUFFIX}{os.sep}"
_BLOCK = 512
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_ERRORS = (tarfile.TarError, EOFError, ValueError, RecursionError)  # the last by a chain of long names
_CHUNK_BYTES = 1 << 20
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd


@dataclass(frozen=True, slots=True)
class Member:
    """A plain file in ``archive``: ``size_bytes`` bytes from byte ``start`` on; ``mtime_ns`` is the archive's."""

    archive: Path
    start: int
    size_bytes: int
    mtime_ns: int

    def read(self, most: int | None = None) -> bytes:
        """Its bytes, or the first ``most`` of them.

        Raises:
            OSError: as the file system gave it, or the archive became shorter.
        """
        return b"".join(self.chunks(most))

    def chunks(self, most: int | None = None) -> Iterator[bytes]:
        """As ``read``, piece by piece."""
        left = self.size_bytes if most is None else min(most, self.size_bytes)
        with self.archive.open("rb") as stream:
            stream.seek(self.start)
            while left:
                content = stream.read(min(left, _CHUNK_BYTES))
                if not content:
                    raise _damaged(self.archive, "it became shorter while it was read")
                left -= len(content)
                yield content

    @property
    def url(self) -> str:
        """What ffmpeg opens it by, with the protocols ``file`` and ``subfile``."""
        end = self.start + self.size_bytes
        return f"subfile,,start,{self.start},end,{end},,:file:{os.path.abspath(self.archive)}"  # noqa: PTH100 - as text


def member_at(path: Path) -> Member | None:
    """The member of a tar that ``path`` leads to; None where it leads into none.

    Raises:
        FileNotFoundError: the tar has no such plain file.
        OSError: as the file system gave it, or the tar is damaged.
    """
    for archive, name in _into_tars(str(path)):
        found = contents_of(archive).members.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"no plain file {name!r} in the tar", str(path))
        return found
    return None


def folder_at(path: Path) -> Mapping[str, Member]:
    """The plain files of the folder in a tar that ``path`` leads to, by name; empty where it leads to none."""
    with suppress(OSError):  # ``member_at`` says it
        return next((contents_of(archive).folders.get(name, {}) for archive, name in _into_tars(str(path))), {})
    return {}


def _into_tars(text: str) -> Iterator[tuple[Path, str]]:
    """Yield the tars on the way and what follows: one, as nothing lies below a file."""
    place = text.lower().find(_INTO)
    while place >= 0:
        archive = Path(text[: place + len(SUFFIX)])
        if archive.is_file():
            yield archive, text[place + len(_INTO) :]
        place = text.lower().find(_INTO, place + 1)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a tar holds, as far as its headers can be read."""

    # By name in its order; None for what is no plain file, or whose name would leave the tar.
    members: Mapping[str, Member | None]
    damage: str = ""  # what ends the reading too early; empty: the tar is whole
    last: str = ""  # the name in the last header that was read, also where its content is cut
    folders: Mapping[str, Mapping[str, Member]] = field(default_factory=dict)  # the plain files of each, by name


def contents_of(archive: Path) -> Contents:
    """What ``archive`` holds. Of several members of one name the last counts, as with ``tar``.

    Raises:
        OSError: as the file system gave it, or it is no tar or is compressed: nothing in it can be read.
    """
    status = archive.stat()
    return _contents(os.path.abspath(archive), status.st_mtime_ns, status.st_size)  # noqa: PTH100 - as text


@lru_cache(maxsize=64)
def _contents(archive: str, mtime_ns: int, size_bytes: int) -> Contents:
    path, found = Path(archive), dict[str, Member | None]()
    damage, name = "", ""
    with path.open("rb") as stream:
        if stream.read(_BLOCK).startswith(_COMPRESSED):
            raise _damaged(path, "is compressed: a video in it could only be read by unpacking all before it")
    try:
        tar = tarfile.open(archive, "r:")  # noqa: SIM115 - closed below
    except _ERRORS as error:
        raise _damaged(path, f"no readable tar file: {error}") from error
    with tar, path.open("rb") as stream:
        try:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # else it keeps a kilobyte for each
                if member.size < 0:  # it would lead back to a header that was read
                    raise tarfile.ReadError(f"{member.name!r} has a negative size")
                if member.isdir():
                    continue
                name = member.name.removeprefix("./")
                found.pop(name, None)
                if member.offset_data + member.size > size_bytes:
                    continue
                plain = member.type in _PLAIN and member.sparse is None
                inside = os.path.normpath(name) == name and not name.startswith((os.sep, os.pardir))
                is_file = plain and inside
                found[name] = Member(path, member.offset_data, member.size, mtime_ns) if is_file else None
            stream.seek(tar.offset)
            if stream.read(_BLOCK) != bytes(_BLOCK):  # without the mark of the end it is a cut, or a damaged header
                damage = f"neither a header nor its end at byte {tar.offset:,}"
        except _ERRORS as error:
            damage = str(error)
    folders = {
        folder: {each.rpartition("/")[2]: at for each in names if (at := found[each]) is not None}
        for folder, names in groupby(sorted(found, key=dirname), dirname)
    }
    return Contents(found, damage, name, folders)


def _damaged(path: Path, what: str) -> OSError:
    return OSError(errno.EBADMSG, what, str(path))


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int, int]]:
    """Open the file that holds the bytes of ``path``: itself, or the tar it leads into; with their begin and end in it.

    Raises:
        OSError: as ``member_at``.
    """
    member = member_at(path)
    with (member.archive if member else path).open("rb") as file:
        start = member.start if member else 0
        yield file, start, start + (member.size_bytes if member else os.fstat(file.fileno()).st_size)
