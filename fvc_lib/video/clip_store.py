"""Clips made once and shared by all folds and runs: one uint8 ``.npy`` file each, named by content and settings."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import av
import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.services.atomic_files import atomic_output, sha256_of_file, sha256_of_json, sweep_temporaries
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.path_text import path_from_text
from fvc_lib.services.tables import AUGMENTED, write_table
from fvc_lib.video.augmentation import AugmentationSettings, apply_augmentation, draw_augmentation
from fvc_lib.video.decode import decode_clip
from fvc_lib.video.errors import UnreadableVideo, VideoError

Pixels = npt.NDArray[np.uint8]

# The code that makes the pixels is part of a clip's key: a mended decoder must not be served what the old one made.
_DECODE_CODE = ("decode.py", "frame_reader.py", "frame_table.py", "letterbox.py", "source.py")
_AUGMENTATION_CODE = ("augmentation.py", "augmentation_operations.py")
_PLAIN_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


def _code_hash(names: tuple[str, ...]) -> str:
    return sha256_of_json([sha256_of_file(Path(__file__).with_name(name)) for name in names])


@dataclass(frozen=True)
class ClipStore:
    """A folder of clips, uint8 (num_frames, 3, fixed_size, fixed_size), shared by any number of runs and processes.

    Layout: ``clips/decode_<hash>/original/ab/abcd.npy`` and ``clips/decode_<hash>/augmented_<hash>/ab/abcd_2.npy``
    under ``cache_dir``, so that original clips serve every choice of augmentation.
    """

    cache_dir: Path
    num_frames: int
    fixed_size: int
    augmentation: AugmentationSettings

    @cached_property
    def decode_hash(self) -> str:
        """Hex SHA-256 of what decides an original clip besides the video's content: settings, code and PyAV's build."""
        made_by = {"code": _code_hash(_DECODE_CODE), "av": av.__version__}
        return sha256_of_json({**made_by, "frames": self.num_frames, "size": self.fixed_size})

    @cached_property
    def augmentation_hash(self) -> str:
        """Hex SHA-256 of what decides an augmented clip besides the original: settings and code."""
        return sha256_of_json([self.augmentation.settings_hash, _code_hash(_AUGMENTATION_CODE)])

    @cached_property
    def settings_hash(self) -> str:
        """Hex SHA-256 of what decides every clip besides the video's content."""
        return sha256_of_json([self.decode_hash, self.augmentation_hash])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, 3, S, S) of every clip."""
        return (self.num_frames, 3, self.fixed_size, self.fixed_size)

    def clip_path(self, video_id: str, augmentation_index: int) -> Path:
        """The file of a clip; index 0 is the original."""
        if not _PLAIN_ID.fullmatch(video_id) or augmentation_index < 0:
            raise ValueError(f"clip: got {video_id!r} number {augmentation_index}, wanted a plain id and 0 or more")
        folder = self.cache_dir / "clips" / f"decode_{self.decode_hash[:32]}"
        if augmentation_index == 0:
            return folder / "original" / video_id[:2] / f"{video_id}.npy"
        name = f"augmented_{self.augmentation_hash[:32]}"
        return folder / name / video_id[:2] / f"{video_id}_{augmentation_index}.npy"

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the clip is there in full; a file of another size counts as absent."""
        try:
            size_bytes = self.clip_path(video_id, augmentation_index).stat().st_size
        except FileNotFoundError:
            return False
        return size_bytes == self._file_bytes

    def read(self, video_id: str, augmentation_index: int) -> Pixels:
        """The clip as a read-only memory map, uint8 (T, 3, S, S).

        Raises:
            DataError: it is missing or not such a clip; the message says how to make it.
        """
        path = self.clip_path(video_id, augmentation_index)
        try:
            clip: Pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"clip {str(path)!r}: {error}. Run 03_augmentation again.") from error
        if clip.dtype != np.uint8 or clip.shape != self.shape:
            raise DataError(
                f"clip {str(path)!r}: got {clip.dtype} {clip.shape}, wanted uint8 {self.shape}. "
                "Delete the file and run 03_augmentation again."
            )
        return clip

    def write(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Store a clip atomically; of several writers of one clip the last wins, with equal content.

        Raises:
            ValueError: not uint8 of the store's shape.
            OSError: as the file system gave it.
        """
        if frames.dtype != np.uint8 or frames.shape != self.shape:
            raise ValueError(f"clip: got {frames.dtype} {frames.shape}, wanted uint8 {self.shape}")
        with (
            atomic_output(self.clip_path(video_id, augmentation_index)) as temporary,
            temporary.open("wb") as stream,
        ):
            np.save(stream, frames, allow_pickle=False)

    @cached_property
    def _file_bytes(self) -> int:
        return 128 + int(np.prod(self.shape))  # the header of a plain .npy file of such a shape fills two cache lines


@dataclass(frozen=True)
class ClipReport:
    """What ``make_clips`` did: clips made and reused, and (video id, what was wrong) of the videos that failed."""

    made: int
    reused: int
    failed: tuple[tuple[str, str], ...]


def make_clips(
    store: ClipStore,
    index: pl.DataFrame,
    corpus_root: Path,
    augmentations_per_video: int,
    metadata_csv: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int = 0,
) -> ClipReport:
    """Make the original clip and ``augmentations_per_video`` augmented ones of every video, reusing what is there.

    ``metadata_csv`` grows by a video's rows as soon as its clips are there; a killed run may leave its last line
    torn. At the end it is replaced by the whole table, checked against ``AUGMENTED``, in the order of ``index``.

    Args:
        store: where clips are kept.
        index: an INDEX table.
        corpus_root: what its ``path`` column is relative to.
        augmentations_per_video: clips besides the original.
        metadata_csv: the table to write, one row per clip; ``clip_path`` is relative to ``store.cache_dir``.
        progress: called with (videos done, videos in all).
        workers: threads that decode (ffmpeg lets go of the interpreter lock); 0: one per core. Clips do not
            depend on it.

    Raises:
        OSError: clips or the table cannot be written. A video that fails is reported instead.
    """
    sweep_temporaries(store.cache_dir / "clips")
    metadata_csv.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    made, failed = 0, []
    with metadata_csv.open("w", encoding="utf-8", newline="") as stream:
        _append(stream, [list(AUGMENTED.columns)])
        videos = list(index.iter_rows(named=True))
        outcomes = _in_order(lambda video: _make(store, video, corpus_root, augmentations_per_video), videos, workers)
        for done, (video, outcome) in enumerate(zip(videos, outcomes, strict=True), start=1):
            if isinstance(outcome, VideoError):
                failed.append((video["video_id"], str(outcome)))
            else:
                made += outcome
                new = [_row(store, video, number) for number in range(augmentations_per_video + 1)]
                _append(stream, [list(row.values()) for row in new])
                rows += new
            if progress is not None:
                progress(done, len(videos))
    schema = {name: column.dtype.type for name, column in AUGMENTED.columns.items()}
    write_table(pl.DataFrame(rows, schema=schema), AUGMENTED, metadata_csv)
    return ClipReport(made, len(rows) - made, tuple(failed))


def _make(store: ClipStore, video: dict[str, Any], corpus_root: Path, augmentations_per_video: int) -> int | VideoError:
    """The number of clips that had to be made, or what is wrong with the video."""
    video_id = video["video_id"]
    missing = [number for number in range(augmentations_per_video + 1) if not store.has(video_id, number)]
    if not missing:
        return 0
    if 0 in missing:
        try:
            store.write(video_id, 0, _decode(store, video, corpus_root))
        except VideoError as error:
            return error
    original = store.read(video_id, 0)
    for number in missing:
        if number:
            plan = draw_augmentation(video_id, number, store.augmentation, store.num_frames)
            store.write(video_id, number, apply_augmentation(original, plan))
    return len(missing)


def _decode(store: ClipStore, video: dict[str, Any], corpus_root: Path) -> Pixels:
    path = corpus_root / path_from_text(video["path"])
    try:
        content = sha256_of_file(path)
    except OSError as error:
        raise UnreadableVideo(path, (error.strerror or type(error).__name__).lower()) from error
    if content != video["content_sha256"]:
        # Stored under the id of what was indexed, it would be taken for that by every later run.
        raise UnreadableVideo(path, "its content has changed since it was indexed; build the index again")
    return decode_clip(path, store.num_frames, store.fixed_size).frames


def _row(store: ClipStore, video: dict[str, Any], number: int) -> dict[str, Any]:
    video_id = video["video_id"]
    return {
        "clip_id": f"{video_id}_{number}",
        "video_id": video_id,
        "group_id": video["group_id"],
        "label": video["label"],
        "augmentation_index": number,
        "operations": draw_augmentation(video_id, number, store.augmentation, store.num_frames).to_json(),
        "settings_hash": store.settings_hash,
        "clip_path": store.clip_path(video_id, number).relative_to(store.cache_dir).as_posix(),
    }


def _append(stream: TextIO, lines: list[list[Any]]) -> None:
    csv.writer(stream, lineterminator="\n").writerows(lines)
    stream.flush()


def _in_order(
    work: Callable[[dict[str, Any]], int | VideoError], items: list[dict[str, Any]], workers: int
) -> Iterator[int | VideoError]:
    """Results in the order of ``items``; what has not begun when the caller stops is never begun."""
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(cancel_futures=True)
