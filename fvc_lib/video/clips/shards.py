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
import json
import os
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import AnyPath, atomic_output, sha256_of_file, sweep_temporaries
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.clips import store as clip_store
from fvc_lib.video.clips.clip_file import Pixels, Shape, check_part, clip_file_bytes, clip_header
from fvc_lib.video.clips.store import MANIFEST, ClipStore
from fvc_lib.video.decode.file_parts import FilePart, contents_of

DEFAULT_SHARD_BYTES = 256 << 20
REMEDY = "Run 03_augmentation again."

Progress = Callable[[int, int], None]
Row = dict[str, Any]  # of AUGMENTED


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
    for row in _in_shard_order(clips):
        digest.update(_as_line(row))
    return store.decode_folder / f"shards_{digest.hexdigest()[:32]}"


def write_shards(
    store: ClipStore, clips: pl.DataFrame, *, shard_bytes: int = DEFAULT_SHARD_BYTES, progress: Progress | None = None
) -> Path:
    """Write shards of ``clips`` (AUGMENTED) from the store, unless just these are there whole; returns their folder.

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
    rows = _in_shard_order(clips)
    with suppress(DataError, OSError):
        shards = ClipShards(folder)
        if _are_of(shards.manifest, store, rows):
            shards.verify()
            return folder
    entries: list[ShardEntry] = []
    size = max(1, shard_bytes // clip_file_bytes(store.shape))
    for start in range(0, len(rows), size):
        entries.append(_write_shard(store, folder / f"clips-{len(entries):06d}.tar", rows[start : start + size]))
        if progress is not None:
            progress(min(len(rows), start + size), len(rows))
    manifest = ShardManifest(shape=store.shape, settings_hash=store.settings_hash, shards=tuple(entries))
    for stray in set(folder.glob("clips-*.tar")) - {folder / entry.name for entry in entries}:
        stray.unlink(missing_ok=True)
    write_document(folder / MANIFEST, manifest.model_dump(mode="json"))
    return folder


def read_manifest(folder: AnyPath) -> ShardManifest:
    """The manifest of the shards in ``folder``.

    Raises:
        DataError: there is none, it is none of ours, or it names a clip twice or one that is no plain name.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = ShardManifest.model_validate_json(json.dumps(read_document(path) if path.stat() else {}))
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


def _are_of(manifest: ShardManifest, store: ClipStore, rows: Sequence[Row]) -> bool:
    listed = [clip for shard in manifest.shards for clip in shard.clips]
    wanted = [(row["video_id"], row["augmentation_index"]) for row in rows]
    return (manifest.settings_hash, manifest.shape, listed) == (store.settings_hash, store.shape, wanted)


def _in_shard_order(clips: pl.DataFrame) -> list[Row]:
    rows = clips.select(list(AUGMENTED.columns)).iter_rows(named=True)
    return sorted(rows, key=lambda row: hashlib.sha256(row["clip_id"].encode()).digest())


def _as_line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _write_shard(store: ClipStore, path: Path, rows: Sequence[Row]) -> ShardEntry:
    clips = tuple((row["video_id"], row["augmentation_index"]) for row in rows)
    with atomic_output(path) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for clip, row in zip(clips, rows, strict=True):
                pixels, line = member_names(*clip)
                _add(tar, pixels, clip_header(store.shape) + store.read(*clip).tobytes())
                _add(tar, line, _as_line(row))
        digest, size_bytes = sha256_of_file(temporary), temporary.stat().st_size
    return ShardEntry(name=path.name, sha256=digest, size_bytes=size_bytes, clips=clips)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time, owner and group are zero by default, which is what we want
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


# Read clips out of shards, each directly at its place, after the shard was found to be what its manifest says.

_MOST_ROW_BYTES = 1 << 20


class ClipShards:
    """The clips in a folder of shards, loaded like those of a ``ClipStore``.

    A shard is checked when a clip of it is first read, or all of them by ``verify``. Pixels are read straight into
    the caller's array, so memory stays flat whatever was read before. Safe for threads, forked and spawned processes.

    Args:
        folder: where they lie.
        buffer: for who reads them as a stream, among how many clips the next one is drawn: when a shard's first clip is
            read the system is asked to read all of it, from its beginning to its end, into the page cache; 0: clips are
            read in any order.

    Raises:
        DataError: no shards there, or the manifest is damaged.
    """

    def __init__(self, folder: AnyPath, buffer: int = 0) -> None:
        self.folder = Path(folder)
        self.buffer = buffer
        self._begun: set[int] = set()  # shards that this process has asked for in this pass
        self.manifest = read_manifest(folder)
        self.shape, self.settings_hash = self.manifest.shape, self.manifest.settings_hash
        # (number of the shard, place in it) of each clip
        self._place = {
            clip: (shard, place)
            for shard, entry in enumerate(self.manifest.shards)
            for place, clip in enumerate(entry.clips)
        }
        self._offsets: dict[int, list[int]] = {}  # of the pixels in each checked shard

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the manifest names the clip."""
        return (video_id, augmentation_index) in self._place

    def place_of(self, video_id: str, augmentation_index: int) -> tuple[int, int]:
        """The number of the shard that has the clip, and which clip of it that is; ``KeyError`` where none has."""
        return self._place[video_id, augmentation_index]

    def begin_pass(self) -> None:
        """From here on each shard is read once more."""
        self._begun.clear()

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0) -> None:
        """Fill ``frames``, uint8 (t, 3, S, S) in C order, with those of the clip from number ``first`` on.

        Raises:
            DataError: there is no such clip, or its shard is missing, damaged or holds what it must not.
            ValueError: ``frames`` is not such an array.
        """
        check_part(frames, self.shape, first)
        place = self._place.get((video_id, augmentation_index))
        if place is None:
            clip = f"clip {video_id!r} number {augmentation_index}"
            raise DataError(f"{clip} is not in the shards of {str(self.folder)!r}. {REMEDY}")
        if place[0] not in self._offsets:
            self._check(place[0])
        with self._open(place[0]) as stream:
            if self.buffer and place[0] not in self._begun:
                self._begun.add(place[0])
                _read_ahead(stream)
            offset = self._offsets[place[0]][place[1]] + first * frames[0].nbytes
            if os.preadv(stream.fileno(), [frames.data], offset) != frames.nbytes:
                raise DataError(f"shard {str(stream.name)!r}: it became shorter while it was read. {REMEDY}")

    def verify(self) -> None:
        """Check every shard now, on all cores.

        Raises:
            DataError: the first that is missing, damaged or holds what it must not.
        """
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(self._check, range(len(self.manifest.shards))))

    def _check(self, shard: int) -> None:
        with self._open(shard) as stream:
            entry = self.manifest.shards[shard]
            self._offsets[shard] = _checked_offsets(stream, self.folder / entry.name, entry, self.shape)

    def _open(self, shard: int) -> BufferedReader:
        path = self.folder / self.manifest.shards[shard].name
        try:
            return path.open("rb")
        except OSError as error:
            raise DataError(f"shard {str(path)!r}: {error.strerror}. {REMEDY}") from error


def _read_ahead(stream: BufferedReader) -> None:
    """Have the whole file read into the page cache, where the system can; in a thread, because that may take long."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.dup(stream.fileno())

    def ask() -> None:
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    threading.Thread(target=ask, daemon=True, name="reading ahead").start()


def _checked_offsets(stream: BufferedReader, path: Path, entry: ShardEntry, shape: Shape) -> list[int]:
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
    try:
        contents = contents_of(path)
    except OSError as error:
        raise DataError(f"shard {str(path)!r}: {error.strerror}. {REMEDY}") from error
    if contents.damage:
        raise DataError(f"shard {str(path)!r}: it is no readable tar file: {contents.damage}. {REMEDY}")
    wanted, header = [name for clip in entry.clips for name in member_names(*clip)], clip_header(shape)
    members = list[FilePart]()
    for name, found in zip_longest(wanted, contents.members):
        member = contents.members.get(found)
        if name is None or name != found or not isinstance(member, FilePart):
            what = f"member {found!r} was refused unread" if found else f"member {name!r} is missing"
            raise DataError(
                f"shard {str(path)!r}: {what}: wanted the plain file {name!r}, once. "
                f"A shard holds clips (.npy) and rows (.json) only. {REMEDY}"
            )
        if name.endswith(".json"):
            if member.size_bytes > _MOST_ROW_BYTES:
                raise DataError(f"shard {str(path)!r}: member {name!r}: {member.size_bytes} bytes are no row. {REMEDY}")
        elif member.size_bytes != clip_file_bytes(shape) or member.read(len(header)) != header:
            raise DataError(
                f"shard {str(path)!r}: member {name!r} was refused unread: it is no plain array of uint8 {shape}. "
                f"Pickled arrays are never loaded. {REMEDY}"
            )
        members.append(member)
    return [pixels.start + len(header) for pixels in members[::2]]
