"""Clips made once and shared by all folds and runs: one uint8 ``.npy`` file each, named by content and settings."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import av

from fvc_lib.execution.code_version import code_hash
from fvc_lib.services.atomic_files import sha256_of_json, write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.video.augmentation import AugmentationSettings
from fvc_lib.video.clip_file import (
    Pixels,
    Shape,
    check_pixels,
    clip_file_bytes,
    load_clip_file,
    map_clip_file,
    write_clip_file,
)

CLIPS_FOLDER = "clips"
SETTINGS_FILE = "settings.json"
_PLAIN_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


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

    @classmethod
    def of(cls, config: RunConfig) -> ClipStore:
        """The shared store that ``config``'s decode and augmentation settings name."""
        augmentation = AugmentationSettings(names=config.augmentations, strength=config.augmentation_strength)
        return cls(Path(config.cache_dir), config.num_frames, config.fixed_size, augmentation)

    @cached_property
    def decode_hash(self) -> str:
        """Hex SHA-256 of what decides an original clip besides the video's content: settings, code and PyAV's build."""
        made_by = {"code": code_hash("fvc_lib.video.decode", "fvc_lib.video"), "av": av.__version__}
        return sha256_of_json({**made_by, "frames": self.num_frames, "size": self.fixed_size})

    @cached_property
    def augmentation_hash(self) -> str:
        """Hex SHA-256 of what decides an augmented clip besides the original: settings and code."""
        return sha256_of_json([self.augmentation.settings_hash, code_hash("fvc_lib.video.augmentation", "fvc_lib.video")])

    @cached_property
    def settings_hash(self) -> str:
        """Hex SHA-256 of what decides every clip besides the video's content."""
        return sha256_of_json([self.decode_hash, self.augmentation_hash])

    @property
    def shape(self) -> Shape:
        """(T, 3, S, S) of every clip."""
        return (self.num_frames, 3, self.fixed_size, self.fixed_size)

    @property
    def decode_folder(self) -> Path:
        """Where everything made with these decode settings lies."""
        return self.cache_dir / CLIPS_FOLDER / f"decode_{self.decode_hash[:32]}"

    @property
    def originals_folder(self) -> Path:
        """Where original clips lie."""
        return self.decode_folder / "original"

    @property
    def augmented_folder(self) -> Path:
        """Where augmented clips lie."""
        return self.decode_folder / f"augmented_{self.augmentation_hash[:32]}"

    def clip_path(self, video_id: str, augmentation_index: int) -> Path:
        """The file of a clip; index 0 is the original."""
        check_clip_name(video_id, augmentation_index)
        if augmentation_index == 0:
            return self.originals_folder / video_id[:2] / f"{video_id}.npy"
        return self.augmented_folder / video_id[:2] / f"{video_id}_{augmentation_index}.npy"

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the clip is there in full; a file of another size counts as absent."""
        try:
            size_bytes = self.clip_path(video_id, augmentation_index).stat().st_size
        except FileNotFoundError:
            return False
        return size_bytes == clip_file_bytes(self.shape)

    def read(self, video_id: str, augmentation_index: int) -> Pixels:
        """The clip as a read-only memory map, uint8 (T, 3, S, S).

        Raises:
            DataError: it is missing or not such a clip; the message says how to make it.
        """
        with self._naming(video_id, augmentation_index) as path:
            return map_clip_file(path, self.shape)

    def load(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Fill ``frames``, uint8 (T, 3, S, S) in C order, with the clip: for training, straight into its batch.

        Raises:
            DataError: as ``read``.
            ValueError: ``frames`` is not such an array.
        """
        check_pixels(frames, self.shape)
        with self._naming(video_id, augmentation_index) as path:
            load_clip_file(path, frames)

    def write(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Store a clip atomically; of several writers of one clip the last wins, with equal content.

        Raises:
            ValueError: not uint8 of the store's shape.
            OSError: as the file system gave it.
        """
        check_pixels(frames, self.shape)
        write_clip_file(self.clip_path(video_id, augmentation_index), frames)

    @contextlib.contextmanager
    def _naming(self, video_id: str, augmentation_index: int) -> Iterator[Path]:
        """The clip's path; what is wrong with the file becomes an error that names it and the remedy."""
        path = self.clip_path(video_id, augmentation_index)
        try:
            yield path
        except OSError as error:
            raise DataError(f"clip {str(path)!r}: {error.strerror}. Run 03_augmentation again.") from error
        except ValueError as error:
            message = f"clip {str(path)!r}: {error}. Delete the file and run 03_augmentation again."
            raise DataError(message) from error

    def note_use(self) -> None:
        """Leave word that the clips are used now and what they are, for whoever has to make room later.

        Reading from a store that may not be written is fine: then nothing is noted.
        """
        decode = {"num_frames": self.num_frames, "fixed_size": self.fixed_size, "av": av.__version__}
        augmentation = {"augmentations": sorted(self.augmentation.names), "strength": self.augmentation.strength}
        note_use(self.originals_folder, decode)
        note_use(self.augmented_folder, {**decode, **augmentation})


def note_use(folder: Path, settings: dict[str, object]) -> None:
    """Set the time of ``folder``'s settings file to now, writing it when it is not there; nothing where none may be."""
    path = folder / SETTINGS_FILE
    with contextlib.suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            write_json(path, settings)


def check_clip_name(video_id: str, augmentation_index: int) -> None:
    """Refuse what could be taken for a path.

    Raises:
        ValueError: ``video_id`` is no plain name or the number is negative.
    """
    if not _PLAIN_ID.fullmatch(video_id) or augmentation_index < 0:
        raise ValueError(f"clip: got {video_id!r} number {augmentation_index}, wanted a plain id and 0 or more")
