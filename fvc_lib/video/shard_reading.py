"""Read clips out of shards, each directly at its place, after the shard was found to be what its manifest says."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.video.clip_file import Pixels, Shape, check_pixels, clip_file_bytes, clip_header
from fvc_lib.video.shards import REMEDY, ClipRecord, ShardEntry, member_names, read_manifest

_OPEN_FILES = 64
_MOST_ROW_BYTES = 1 << 20


@dataclass(frozen=True)
class _Place:
    """Where a clip's pixels begin in its shard, and where its row lies."""

    pixels_offset: int
    row_offset: int
    row_bytes: int


@dataclass(frozen=True)
class _Checked:
    """A shard that was found to be what the manifest says, the state of its file then, and where its clips lie."""

    file_state: tuple[int, ...]
    places: tuple[_Place, ...]


class _OpenShard:
    """A checked shard's open file. Whoever reads from it keeps it open; the last one to let go closes it."""

    def __init__(self, path: Path, entry: ShardEntry, shape: Shape, known: _Checked | None) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.descriptor = -1
            raise DataError(f"shard {str(path)!r}: {error.strerror}. {REMEDY}") from error
        status = os.fstat(self.descriptor)
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if known is None or known.file_state != state:
            with open(self.descriptor, "rb", closefd=False) as stream:
                known = _Checked(state, tuple(_checked_places(stream, path, entry, shape)))
        self.checked = known

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class ClipShards:
    """The clips in a folder of shards, loaded like those of a ``ClipStore``.

    A shard is checked when a clip of it is first read, or all of them by ``verify``. Pixels are read straight into
    the caller's array, so memory stays flat whatever was read before. Safe for threads, forked and spawned processes.

    Args:
        folder: what ``write_shards`` returned.

    Raises:
        DataError: no shards there, or the manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.clips = tuple(clip for shard in self.manifest.shards for clip in shard.clips)
        self._number_of = {clip: number for number, clip in enumerate(self.clips)}
        self._first = np.cumsum([0, *(len(shard.clips) for shard in self.manifest.shards)])
        self._checked: dict[int, _Checked] = {}
        self._open: dict[int, _OpenShard] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def settings_hash(self) -> str:
        """What decides every clip besides the video's content: the store's."""
        return self.manifest.settings_hash

    @property
    def shape(self) -> Shape:
        """(T, 3, S, S) of every clip."""
        return self.manifest.shape

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the manifest names the clip."""
        return (video_id, augmentation_index) in self._number_of

    def load(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Fill ``frames``, uint8 (T, 3, S, S) in C order, with the clip.

        Raises:
            DataError: there is no such clip, or its shard is missing, damaged or holds what it must not.
            ValueError: ``frames`` is not such an array.
        """
        self._load(self._number(video_id, augmentation_index), frames)

    def load_number(self, number: int) -> Pixels:
        """The clip ``clips[number]`` as a new array; raises like ``load``."""
        frames = np.empty(self.shape, np.uint8)
        self._load(number, frames)
        return frames

    def record(self, video_id: str, augmentation_index: int) -> ClipRecord:
        """The clip's row.

        Raises:
            DataError: as ``load``, or the row is none.
        """
        return self.record_number(self._number(video_id, augmentation_index))

    def record_number(self, number: int) -> ClipRecord:
        """The row of ``clips[number]``; else like ``record``."""
        shard, place = self._find(number)
        content = os.pread(shard.descriptor, place.row_bytes, place.row_offset)
        member = member_names(*self.clips[number])[1]
        try:
            record = ClipRecord.model_validate_json(content)
        except ValidationError as error:
            raise DataError(f"{self._name(number)}: member {member!r} is no row of a clip. {REMEDY}") from error
        if (record.video_id, record.augmentation_index) != self.clips[number]:
            raise DataError(f"{self._name(number)}: member {member!r} is the row of another clip. {REMEDY}")
        return record

    def shard_of(self, number: int) -> int:
        """Which shard, as numbered in the manifest, holds ``clips[number]``."""
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def verify(self) -> None:
        """Check every shard now, on all cores.

        Raises:
            DataError: the first that is missing, damaged or holds what it must not.
        """
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(self._shard, range(len(self.manifest.shards))))

    def _number(self, video_id: str, augmentation_index: int) -> int:
        number = self._number_of.get((video_id, augmentation_index))
        if number is None:
            where = str(self.folder)
            raise DataError(
                f"clip {video_id!r} number {augmentation_index} is not in the shards of {where!r}. {REMEDY}"
            )
        return number

    def _load(self, number: int, frames: Pixels) -> None:
        check_pixels(frames, self.shape)
        shard, place = self._find(number)
        if os.preadv(shard.descriptor, [frames.data], place.pixels_offset) != frames.nbytes:
            raise DataError(f"{self._name(number)}: it became shorter while it was read. {REMEDY}")

    def _name(self, number: int) -> str:
        return f"shard {str(self.folder / self.manifest.shards[self.shard_of(number)].name)!r}"

    def _find(self, number: int) -> tuple[_OpenShard, _Place]:
        shard = self.shard_of(number)
        found = self._shard(shard)
        return found, found.checked.places[number - int(self._first[shard])]

    def _shard(self, shard: int) -> _OpenShard:
        found = self._open.get(shard)
        if found is None:
            entry = self.manifest.shards[shard]
            found = _OpenShard(self.folder / entry.name, entry, self.shape, self._checked.get(shard))
            self._checked[shard] = found.checked
            self._open[shard] = found
            while len(self._open) > _OPEN_FILES:
                self._open.pop(next(iter(self._open)), None)
        return found


def _checked_places(stream: BufferedReader, path: Path, entry: ShardEntry, shape: Shape) -> Iterator[_Place]:
    """Where each clip of a shard lies.

    Raises:
        DataError: it is not what the manifest says, or holds anything but plain clips and rows.
    """
    size_bytes = stream.seek(0, os.SEEK_END)
    if size_bytes != entry.size_bytes:
        raise DataError(f"shard {str(path)!r}: got {size_bytes} bytes, wanted {entry.size_bytes}. {REMEDY}")
    stream.seek(0)
    if hashlib.file_digest(stream, "sha256").hexdigest() != entry.sha256:
        raise DataError(f"shard {str(path)!r}: its content is not what was written (SHA-256). {REMEDY}")
    stream.seek(0)
    wanted = [name for clip in entry.clips for name in member_names(*clip)]
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            members = [
                _checked_member(stream, member, name, path, shape)
                for member, name in zip_longest(tar, wanted, fillvalue=None)
            ]
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DataError(f"shard {str(path)!r}: it is no readable tar file: {error}. {REMEDY}") from error
    for pixels, row in zip(members[::2], members[1::2], strict=True):
        yield _Place(pixels.offset_data + len(clip_header(shape)), row.offset_data, row.size)


def _checked_member(
    stream: BufferedReader, member: tarfile.TarInfo | None, name: str | None, path: Path, shape: Shape
) -> tarfile.TarInfo:
    """``member`` when it is the plain file ``name``, of the size and beginning that such a file has."""
    if member is None:
        raise DataError(f"shard {str(path)!r}: member {name!r} is missing. {REMEDY}")
    if member.name != name or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        raise DataError(
            f"shard {str(path)!r}: member {member.name!r} was refused unread: got a {_kind(member)}, wanted the plain "
            f"file {name!r}. A shard holds clips (.npy) and rows (.json) only. {REMEDY}"
        )
    if name.endswith(".json"):
        if member.size > _MOST_ROW_BYTES:
            raise DataError(f"shard {str(path)!r}: member {name!r}: {member.size} bytes are no row. {REMEDY}")
        return member
    header = clip_header(shape)
    if member.size != clip_file_bytes(shape) or os.pread(stream.fileno(), len(header), member.offset_data) != header:
        raise DataError(
            f"shard {str(path)!r}: member {name!r} was refused unread: it is no plain array of uint8 {shape}. "
            f"Pickled arrays are never loaded. {REMEDY}"
        )
    return member


def _kind(member: tarfile.TarInfo) -> str:
    kinds = {tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "link", tarfile.DIRTYPE: "folder"}
    return kinds.get(member.type, "file" if member.isreg() else "special file")
