"""Store the clips of one run in a few large tar files (shards), for file systems on which many small files are slow.

The format is WebDataset's, an uncompressed tar. Every clip has two members, ``<clip id>.npy`` (its pixels) and
``<clip id>.json`` (its row of ``augmented_metadata.csv``). ``ClipShards`` reads any clip by its offset. So training
from shards uses the same clips, in the same order, as training from the store.

Before a shard is read, its SHA-256 and its members are compared with the manifest. Nothing in it is unpickled,
extracted or used as a path.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import BaseModel, Field, ValidationError

from fvc_lib.services.atomic_files import AnyPath, atomic_output, sha256_of_file, sweep_temporaries
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.clips import store as clip_store
from fvc_lib.video.clips.store import MANIFEST, ClipStore, Pixels, Shape, check_part, clip_file_bytes, clip_header
from fvc_lib.video.decode.file_parts import FilePart, contents_of

DEFAULT_SHARD_BYTES = 256 << 20
REMEDY = "Run 03_augmentation again."

Row = dict[str, Any]  # of AUGMENTED


class ShardEntry(BaseModel, frozen=True, extra="forbid", strict=True):
    """The entry of the manifest for one shard (tar file of clips).

    Attributes:
        name: file name.
        sha256: hexadecimal SHA-256 of the file.
        clips: tuples (video id, augmentation index), in the order of the file.
    """

    name: str = Field(pattern=r"^clips-[0-9]{6}\.tar$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    clips: tuple[tuple[str, int], ...]


class ShardManifest(BaseModel, frozen=True, extra="forbid", strict=True):
    """The manifest of a folder of shards: the list of its shards (tar files of clips), and facts about the clips.

    Attributes:
        format: name and version of the format.
        shape: shape of the pixels of every ``.npy`` member, (N T, 3, S, S): N clips of one video, concatenated, of T
            frames each.
        settings_hash: hash of the settings with which the clips were made.
        shards: the shards.
    """

    format: Literal["fvc clip shards 1"] = "fvc clip shards 1"
    shape: Shape
    settings_hash: str
    shards: tuple[ShardEntry, ...]


def member_names(video_id: str, augmentation_index: int) -> tuple[str, str]:
    """Return the names of the two files that a shard (tar file) has for a clip.

    They are ``.npy`` (the pixels) and ``.json`` (the clip's row of ``augmented_metadata.csv``).
    """
    return f"{video_id}_{augmentation_index}.npy", f"{video_id}_{augmentation_index}.json"


def shards_folder(store: ClipStore, clips: pl.DataFrame) -> Path:
    """Return the folder for the shards of ``clips``, an AUGMENTED table (one row per original or augmented clip).

    The folder's name is a hash of the store's settings and the table's rows, so other clips get another folder.
    """
    digest = hashlib.sha256(store.settings_hash.encode())
    for row in _in_shard_order(clips):
        digest.update(_as_line(row))
    return store.decode_folder / f"shards_{digest.hexdigest()[:32]}"


def write_shards(
    store: ClipStore,
    clips: pl.DataFrame,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Copy clips from the store into shards (large tar files); nothing is copied if undamaged shards of them exist.

    The bytes of the shards depend on the clips and ``shard_bytes`` alone. Clips are sorted by a hash of their ids, so
    every shard is a random sample. The manifest is written last, so that readers ignore unfinished shards.

    Args:
        store: the store that clips are read from.
        clips: an AUGMENTED table, one row per original or augmented clip.
        shard_bytes: approximate size of a shard.
        progress: called with (clips done, clips in all).

    Returns:
        The folder of the shards.

    Raises:
        DataError: a clip is missing in the store.
        OSError: a file cannot be written.
    """
    folder, rows = shards_folder(store, clips), _in_shard_order(clips)
    sweep_temporaries(folder)
    clip_store.note_use(folder, {"num_frames": store.num_frames, "fixed_size": store.fixed_size, "clips": clips.height})
    with suppress(DataError):
        return ClipShards(folder).folder
    entries: list[ShardEntry] = []
    size = max(1, shard_bytes // clip_file_bytes(store.shape))
    for start in range(0, len(rows), size):
        entries.append(_write_shard(store, folder / f"clips-{len(entries):06d}.tar", rows[start : start + size]))
        progress(min(len(rows), start + size), len(rows))
    manifest = ShardManifest(shape=store.shape, settings_hash=store.settings_hash, shards=tuple(entries))
    write_document(folder / MANIFEST, manifest.model_dump(mode="json"))
    return folder


def read_manifest(folder: AnyPath) -> ShardManifest:
    """Return the manifest of the shards in ``folder``.

    Raises:
        DataError: the manifest is missing or damaged.
    """
    path = Path(folder) / MANIFEST
    try:
        return ShardManifest.model_validate_json(json.dumps(read_document(path)))
    except ValidationError as error:
        raise DataError(f"shards: {str(path)!r} is missing, damaged or no manifest of clip shards. {REMEDY}") from error


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
                contents = clip_header(store.shape) + store.read(*clip).tobytes(), _as_line(row)
                for name, content in zip(member_names(*clip), contents, strict=True):
                    member = tarfile.TarInfo(name)  # time, owner and group are zero
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        digest = sha256_of_file(temporary)
    return ShardEntry(name=path.name, sha256=digest, clips=clips)


class ClipShards:
    """The clips in a folder of shards (large tar files), with the methods ``has`` and ``load`` of a ``ClipStore``.

    The constructor compares all shards with the manifest, on all cores. Threads and processes may use the same object.

    Args:
        folder: the folder of the shards.

    Raises:
        DataError: the manifest or a shard is missing or damaged, or a shard holds other members than are listed.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.shape, self.settings_hash = self.manifest.shape, self.manifest.settings_hash
        self.clips = [clip for shard in self.manifest.shards for clip in shard.clips]
        with ThreadPoolExecutor(available_cores()) as pool:
            parts = [part for shard in pool.map(self._checked, self.manifest.shards) for part in shard]
        self._parts = dict(zip(self.clips, parts, strict=True))  # ``.npy`` members by clip

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the shards contain a clip; ``augmentation_index`` 0 is the original clip of the video."""
        return (video_id, augmentation_index) in self._parts

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0) -> None:
        """Read t consecutive frames of a clip into an array.

        Args:
            video_id: id of the video.
            augmentation_index: index of the clip; 0 is the original.
            frames: uint8 (t, 3, S, S) in C order, which is filled.
            first: index of the first frame to read.

        Raises:
            DataError: there is no such clip, or its shard is missing or became shorter.
            ValueError: ``frames`` has another type or shape.
        """
        check_part(frames, self.shape, first)
        if not self.has(video_id, augmentation_index):
            raise DataError(
                f"clip {video_id!r} number {augmentation_index} is not in the shards of {str(self.folder)!r}. {REMEDY}"
            )
        part = self._parts[video_id, augmentation_index]
        offset = part.start + len(clip_header(self.shape)) + first * frames[0].nbytes
        with part.path.open("rb") as stream:
            if os.preadv(stream.fileno(), [frames.data], offset) != frames.nbytes:
                raise DataError(f"shard {str(part.path)!r}: it became shorter while it was read. {REMEDY}")

    def _checked(self, entry: ShardEntry) -> list[FilePart]:
        """Check a shard's SHA-256 and all its members, and return the byte ranges of its ``.npy`` members.

        There is one such member per clip, in the order of ``entry.clips``.

        Raises:
            DataError: the shard cannot be read, or differs from ``entry``.
        """
        path = self.folder / entry.name
        header = clip_header(self.shape)
        try:
            is_whole = sha256_of_file(path) == entry.sha256
            members = contents_of(path).members
        except OSError as error:
            raise DataError(f"shard {str(path)!r}: {error.strerror}. {REMEDY}") from error
        names = [name for clip in entry.clips for name in member_names(*clip)]
        pixels = [part for name, part in members.items() if name.endswith(".npy") and isinstance(part, FilePart)]
        are_clips = all(
            part.size_bytes == clip_file_bytes(self.shape) and part.read(len(header)) == header for part in pixels
        )
        if not is_whole or list(members) != names or len(pixels) != len(entry.clips) or not are_clips:
            raise DataError(
                f"shard {str(path)!r}: its content is not what was written (SHA-256), or its members are not plain "
                f"files of clips (.npy, uint8 {self.shape}) and rows (.json) as the manifest lists them. {REMEDY}"
            )
        return pixels
