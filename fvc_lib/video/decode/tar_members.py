"""Videos inside tar files, read where they lie: nothing is unpacked, so nothing in a tar becomes a path or a program.

A path that leads into a tar names a plain file in it: ``shards/000.tar/a/b.mp4`` is ``a/b.mp4`` in ``shards/000.tar``.
What lies where is read from the tar's headers once in a process, as long as the tar stays as it is. What lies whole
before a cut or a damaged header can be read; what lies behind it cannot be found. A header says how long it is: one
of more than ``HEADER_BYTES`` counts as damaged, so that a lie in it costs neither memory nor time.
"""

import errno
import io
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
_ERRORS = (tarfile.TarError, EOFError, ValueError)
HEADER_BYTES = 32 << 10  # names have up to 4 KiB; ``tarfile`` of Python 3.11.7 takes seconds for 64 KiB of digits
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
        FileNotFoundError: the tar has no such member.
        OSError: as the file system gave it, the tar is damaged, or the member is no plain file or there twice.
    """
    for archive, name in _into_tars(str(path)):
        found = contents_of(archive).members.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"no file {name!r} in the tar", str(path))
        if isinstance(found, str):
            raise _damaged(archive, f"{name!r} in the tar {found}")
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

    members: Mapping[str, Member | str]  # by name in its order; a text says why one is not read, such as "is a link"
    damage: str = ""  # what ends the reading too early; empty: the tar is whole
    last: str = ""  # the name in the last header that was read, also where its content is cut
    folders: Mapping[str, Mapping[str, Member]] = field(default_factory=dict)  # the plain files of each, by name


def contents_of(archive: Path) -> Contents:
    """Return what ``archive`` holds. Of several members of one name none is read.

    Raises:
        OSError: as the file system gave it, or it is no tar or is compressed: nothing in it can be read.
    """
    status = archive.stat()
    return _contents(os.path.abspath(archive), status.st_mtime_ns, status.st_size)  # noqa: PTH100 - as text


class _Headers(io.BufferedReader):
    """A tar for ``tarfile``, which reads its headers alone: at most ``HEADER_BYTES`` for each member."""

    left = HEADER_BYTES  # until the member is found

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= size or 0
        if self.left < 0:
            raise tarfile.ReadError(f"a header of more than {HEADER_BYTES:,} bytes")
        return super().read(size)

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(min(target, os.fstat(self.fileno()).st_size), whence)  # a size may be beyond any file


@lru_cache(maxsize=64)
def _contents(archive: str, mtime_ns: int, size_bytes: int) -> Contents:
    path, found, damage, name = Path(archive), dict[str, Member | str](), "", ""
    with _Headers(path.open("rb", buffering=0)) as stream:
        if stream.peek(_BLOCK).startswith(_COMPRESSED):
            raise _damaged(path, "is compressed: a video in it could only be read by unpacking all before it")
        try:
            tar = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - it closes nothing
        except _ERRORS as error:
            raise _damaged(path, f"is no readable tar file: {error}") from error
        try:
            while (member := tar.next()) is not None:
                stream.left = HEADER_BYTES
                vars(tar)["members"].clear()  # else it keeps a kilobyte for each
                vars(tar)["pax_headers"].clear()  # likewise: nothing that is read here stands in a header for all
                if member.size < 0:  # it would lead back to a header that was read
                    raise tarfile.ReadError(f"{member.name!r} has a negative size")
                if member.isdir():
                    continue
                name = member.name.removeprefix("./")
                why_not = "is there more than once" if name in found else _why_not(member, name)
                if not why_not and member.offset_data + member.size > size_bytes:
                    continue
                found[name] = why_not or Member(path, member.offset_data, member.size, mtime_ns)
            stream.seek(tar.offset)
            if stream.read(_BLOCK) != bytes(_BLOCK):  # without the mark of the end it is a cut, or a damaged header
                damage = f"neither a header nor its end at byte {tar.offset:,}"
        except _ERRORS as error:
            damage = str(error)
    folders = {
        folder: {each.rpartition("/")[2]: at for each in names if isinstance(at := found[each], Member)}
        for folder, names in groupby(sorted(found, key=dirname), dirname)
    }
    return Contents(found, damage, name, folders)


def _why_not(member: tarfile.TarInfo, name: str) -> str:
    if member.sparse is not None:
        return "is stored with holes (tar --sparse)"
    if member.type not in _PLAIN:
        return "is a link or a device, not a plain file"
    is_out = os.path.normpath(name) != name or name.startswith((os.sep, os.pardir))
    return "has a name that leads out of the tar" if is_out else ""


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
