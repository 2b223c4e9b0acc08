"""The clips of one run as a few large tar files, for file systems on which ten thousand small files are slow.

The format is WebDataset's: an uncompressed tar, each clip as two members of one name, ``<clip id>.npy`` (the pixels
as the clip store has them) and ``<clip id>.json`` (its row of ``augmented_metadata.csv``), so that the package
``webdataset`` and ``tar`` read them. Our own reader goes by the manifest beside the shards, which says what is where:
any clip is read directly at its offset, so that the sampler that trains from the store trains from shards as well, in
the same order and to the same bits.

Nothing in a shard is trusted before its SHA-256 and its members are what the manifest says, and nothing in it is ever
unpickled, executed, extracted or used as a path.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import AnyPath, atomic_output, sha256_of_file, sweep_temporaries, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.clips import store as clip_store
from fvc_lib.video.clips.store import MANIFEST, ClipStore, Pixels, Shape, clip_file_bytes, clip_header

DEFAULT_SHARD_BYTES = 256 << 20
REMEDY = "Run 03_augmentation again: run_notebooks.py --from 03."

Progress = Callable[[int, int], None]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ClipRecord(_Model):
    """One clip's row of AUGMENTED, as it lies beside its pixels in a shard."""

    clip_id: str
    video_id: str
    group_id: str
    label: str
    augmentation_index: int
    operations: str
    settings_hash: str
    clip_path: str


class ShardEntry(_Model):
    """One shard: its file, what its content hashes to, and (video id, augmentation index) of its clips in order."""

    name: str = Field(pattern=r"^clips-[0-9]{6}\.tar$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)
    clips: tuple[tuple[str, int], ...]


class ShardManifest(_Model):
    """What a folder of shards holds: clips of ``shape`` (T, 3, S, S) made with the settings of ``settings_hash``."""

    format: Literal["fvc clip shards 1"] = "fvc clip shards 1"
    shape: Shape
    settings_hash: str
    shards: tuple[ShardEntry, ...]

    @property
    def num_clips(self) -> int:
        """Clips in all shards."""
        return sum(len(shard.clips) for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)


def member_names(video_id: str, augmentation_index: int) -> tuple[str, str]:
    """The two members of a clip: pixels and row.

    Raises:
        ValueError: the id is no plain name, or the number is negative.
    """
    clip_store.check_clip_name(video_id, augmentation_index)
    return f"{video_id}_{augmentation_index}.npy", f"{video_id}_{augmentation_index}.json"


def shards_folder(store: ClipStore, clips: pl.DataFrame) -> Path:
    """Where the shards of ``clips`` (AUGMENTED) lie: named by settings and rows, so equal clips share one folder."""
    digest = hashlib.sha256(store.settings_hash.encode())
    for record in _in_shard_order(clips):
        digest.update(record.model_dump_json().encode() + b"\n")
    return store.decode_folder / f"shards_{digest.hexdigest()[:32]}"


def write_shards(
    store: ClipStore, clips: pl.DataFrame, *, shard_bytes: int = DEFAULT_SHARD_BYTES, progress: Progress | None = None
) -> Path:
    """Write shards of ``clips`` (AUGMENTED) from the store, unless they are there and whole; returns their folder.

    The bytes depend on the clips alone, not on the order of rows, the folder, the clock or the machine. Clips are dealt
    to shards in the order of a hash of their ids: every shard is a fair sample of the whole. The manifest is written
    last, so shards without one are nothing. A shard is of about ``shard_bytes``; ``progress`` is called with (clips
    done, clips in all).

    Raises:
        DataError: a clip is missing in the store.
        OSError: they cannot be written.
    """
    folder = shards_folder(store, clips)
    folder.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(folder)
    settings: dict[str, object] = {"num_frames": store.num_frames, "fixed_size": store.fixed_size}
    clip_store.note_use(folder, {**settings, "clips": clips.height})
    records = _in_shard_order(clips)
    size = max(1, shard_bytes // clip_file_bytes(store.shape))
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    known = _whole_shards(folder, parts)
    entries = []
    for number, part in enumerate(parts):
        name = f"clips-{number:06d}.tar"
        entries.append(known[name] if name in known else _write_shard(store, folder / name, part))
        if progress is not None:
            progress(min(len(records), (number + 1) * size), len(records))
    manifest = ShardManifest(shape=store.shape, settings_hash=store.settings_hash, shards=tuple(entries))
    for stray in set(folder.glob("clips-*.tar")) - {folder / entry.name for entry in entries}:
        stray.unlink(missing_ok=True)
    write_text(folder / MANIFEST, manifest.model_dump_json() + "\n")
    return folder


def read_manifest(folder: AnyPath) -> ShardManifest:
    """The manifest of the shards in ``folder``.

    Raises:
        DataError: there is none, it is none of ours, or it names a clip twice or one that is no plain name.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = ShardManifest.model_validate_json(path.read_bytes())
        clips = [clip for shard in manifest.shards for clip in shard.clips]
        for clip in clips:
            clip_store.check_clip_name(*clip)
    except OSError as error:
        raise DataError(f"shards: {str(path)!r}: {error.strerror}. {REMEDY}") from error
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:3])
        raise DataError(f"shards: {str(path)!r} is no manifest of clip shards: {what}. {REMEDY}") from error
    except ValueError as error:
        raise DataError(f"shards: {str(path)!r}: {error}. {REMEDY}") from error
    if len(set(clips)) != len(clips) or len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        raise DataError(f"shards: {str(path)!r} names a clip or a shard twice. {REMEDY}")
    return manifest


def _in_shard_order(clips: pl.DataFrame) -> list[ClipRecord]:
    records = [ClipRecord(**row) for row in clips.select(list(AUGMENTED.columns)).iter_rows(named=True)]
    return sorted(records, key=lambda record: hashlib.sha256(record.clip_id.encode()).digest())


def _write_shard(store: ClipStore, path: Path, records: Sequence[ClipRecord]) -> ShardEntry:
    with atomic_output(path) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for record in records:
                pixels, row = member_names(record.video_id, record.augmentation_index)
                frames = store.read(record.video_id, record.augmentation_index)
                _add(tar, pixels, clip_header(store.shape) + frames.tobytes())
                _add(tar, row, record.model_dump_json().encode() + b"\n")
        digest, size_bytes = sha256_of_file(temporary), temporary.stat().st_size
    clips = tuple((record.video_id, record.augmentation_index) for record in records)
    return ShardEntry(name=path.name, sha256=digest, size_bytes=size_bytes, clips=clips)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time, owner and group are zero by default, which is what we want
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _whole_shards(folder: Path, parts: Sequence[Sequence[ClipRecord]]) -> dict[str, ShardEntry]:
    """Shards of an earlier writing by name that hold just what is wanted, down to the last bit."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return {}
    wanted = [tuple((record.video_id, record.augmentation_index) for record in part) for part in parts]
    return {
        entry.name: entry
        for entry, clips in zip(manifest.shards, wanted, strict=False)
        if entry.clips == clips and _is_whole(folder / entry.name, entry)
    }


def _is_whole(path: Path, entry: ShardEntry) -> bool:
    try:
        return path.stat().st_size == entry.size_bytes and sha256_of_file(path) == entry.sha256
    except OSError:
        return False


# Read clips out of shards, each directly at its place, after the shard was found to be what its manifest says.

_OPEN_FILES = 64
_MOST_ROW_BYTES = 1 << 20

# What a shard's file was when it was found to be what the manifest says, and where each clip's pixels begin in it.
_Checked = tuple[tuple[int, ...], tuple[int, ...]]


class _OpenShard:
    """A checked shard's open file. Whoever reads from it keeps it open; the last one to let go closes it."""

    def __init__(self, path: Path, entry: ShardEntry, shape: Shape, known: _Checked | None) -> None:
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"shard {str(path)!r}: {error.strerror}. {REMEDY}") from error
        status = os.fstat(self.descriptor)
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if known is None or known[0] != state:
            with open(self.descriptor, "rb", closefd=False) as stream:
                known = state, tuple(_checked_offsets(stream, path, entry, shape))
        self.checked = known

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class ClipShards:
    """The clips in a folder of shards, loaded like those of a ``ClipStore``.

    A shard is checked when a clip of it is first read, or all of them by ``verify``. Pixels are read straight into
    the caller's array, so memory stays flat whatever was read before. Safe for threads, forked and spawned processes.

    Raises:
        DataError: no shards there, or the manifest is damaged.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = Path(folder)
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
        clip_store.check_pixels(frames, self.shape)
        number = self._number_of.get((video_id, augmentation_index))
        if number is None:
            clip = f"clip {video_id!r} number {augmentation_index}"
            raise DataError(f"{clip} is not in the shards of {str(self.folder)!r}. {REMEDY}")
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        shard = self._shard(place)
        pixels_offset = shard.checked[1][number - int(self._first[place])]
        if os.preadv(shard.descriptor, [frames.data], pixels_offset) != frames.nbytes:
            path = str(self.folder / self.manifest.shards[place].name)
            raise DataError(f"shard {path!r}: it became shorter while it was read. {REMEDY}")

    def verify(self) -> None:
        """Check every shard now, on all cores.

        Raises:
            DataError: the first that is missing, damaged or holds what it must not.
        """
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(self._shard, range(len(self.manifest.shards))))

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


def _checked_offsets(stream: BufferedReader, path: Path, entry: ShardEntry, shape: Shape) -> Iterator[int]:
    """Where the pixels of each clip of a shard begin.

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
    for pixels in members[::2]:
        yield pixels.offset_data + len(clip_header(shape))


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
