"""The clips of one run as a few large tar files, for file systems on which ten thousand small files are slow.

The format is WebDataset's: an uncompressed tar, each clip as two members of one name, ``<clip id>.npy`` (the pixels
as the clip store has them) and ``<clip id>.json`` (its row of ``augmented_metadata.csv``), so that the package
``webdataset`` and ``tar`` read them. Our own reader goes by the manifest beside the shards, which says what is where:
any clip is read directly at its offset, so that the sampler that trains from the store trains from shards as well, in
the same order and to the same bits. ``shard_stream`` reads them one after the other instead.

Nothing in a shard is trusted before its SHA-256 and its members are what the manifest says, and nothing in it is ever
unpickled, executed, extracted or used as a path.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import atomic_output, sha256_of_file, sweep_temporaries, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.clip_file import Shape, clip_file_bytes, clip_header
from fvc_lib.video.clip_store import ClipStore, check_clip_name, note_use

MANIFEST = "manifest.json"
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
    check_clip_name(video_id, augmentation_index)
    return f"{video_id}_{augmentation_index}.npy", f"{video_id}_{augmentation_index}.json"


def shards_folder(store: ClipStore, clips: pl.DataFrame) -> Path:
    """Where the shards of ``clips`` (AUGMENTED) lie: named by settings and rows, so equal clips share one folder."""
    digest = hashlib.sha256(store.settings_hash.encode())
    for record in _in_shard_order(clips):
        digest.update(record.model_dump_json().encode() + b"\n")
    return store.decode_folder / f"shards_{digest.hexdigest()[:32]}"


def write_shards(
    store: ClipStore,
    clips: pl.DataFrame,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write shards of ``clips`` (AUGMENTED) from the store, unless they are there and whole; returns their folder.

    The bytes depend on the clips alone, not on the order of rows, the folder, the clock or the machine. Clips are
    dealt to shards in the order of a hash of their ids: every shard is a fair sample of the whole. The manifest is
    written last, so shards without one are nothing.

    Args:
        store: where the clips are.
        clips: one row per clip.
        shard_bytes: about the size of one shard.
        progress: called with (clips done, clips in all).

    Raises:
        DataError: a clip is missing in the store.
        OSError: they cannot be written.
    """
    folder = shards_folder(store, clips)
    folder.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(folder)
    settings: dict[str, object] = {"num_frames": store.num_frames, "fixed_size": store.fixed_size}
    note_use(folder, {**settings, "clips": clips.height})
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


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of the shards in ``folder``.

    Raises:
        DataError: there is none, it is none of ours, or it names a clip twice or one that is no plain name.
    """
    path = folder / MANIFEST
    try:
        manifest = ShardManifest.model_validate_json(path.read_bytes())
        clips = [clip for shard in manifest.shards for clip in shard.clips]
        for clip in clips:
            check_clip_name(*clip)
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
