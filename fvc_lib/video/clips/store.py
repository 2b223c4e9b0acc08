"""Clips made once and shared by all folds and runs: one uint8 ``.npy`` file each, named by content and settings."""

import contextlib
import importlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import av
import numpy as np

from fvc_lib.services.atomic_files import AnyPath, read_json_object, sha256_of_json, write_json
from fvc_lib.services.clip_settings import PLAIN_VIEW, View
from fvc_lib.services.code.code_version import code_hash
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CROPS
from fvc_lib.video.clips.clip_file import (
    DIGEST_BYTES,
    Pixels,
    Shape,
    check_digest,
    check_part,
    check_pixels,
    clip_file_bytes,
    load_clip_file,
    map_clip_file,
    write_clip_file,
)
from fvc_lib.video.reencode import REENCODED_FOLDER, recipe_named, reencoded_folder

if TYPE_CHECKING:  # pydantic takes 17 MiB of every process that decodes, what augments clips 6
    from fvc_lib.services.config import RunConfig
    from fvc_lib.video.augmentations import AugmentationSettings

CLIPS_FOLDER = "clips"
SETTINGS_FILE = "settings.json"
MANIFEST = "manifest.json"  # of shards
_PLAIN_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


@dataclass(frozen=True)
class ClipStore:
    """A folder of clips, uint8 (N num_frames, 3, fixed_size, fixed_size), shared by any number of runs and processes.

    A file holds all N clips that ``view`` takes of a video, or an augmented copy of them, one after the other.

    Layout: ``clips/decode_<hash>/original/ab/abcd.npy`` and ``clips/decode_<hash>/augmented_<hash>/ab/abcd_2.npy``
    under ``cache_dir``, so that original clips serve every choice of augmentation.
    """

    cache_dir: Path
    num_frames: int
    fixed_size: int
    augmentation: "AugmentationSettings"
    view: View = PLAIN_VIEW
    recipe: str = ""  # by which videos are re-encoded before they are decoded (``video.reencode``); empty: not at all

    @classmethod
    def of(cls, config: "RunConfig") -> Self:
        """The shared store that ``config``'s decode and augmentation settings name."""
        from fvc_lib.video.augmentations import AugmentationSettings

        augmentation = AugmentationSettings(names=config.augmentations, strength=config.augmentation_strength)
        clips = config.clips
        return cls(Path(config.cache_dir), clips.num_frames, clips.side, augmentation, clips.view, config.recipe)

    @cached_property
    def decode_hash(self) -> str:
        """Hex SHA-256 of what decides an original clip besides the video's content: settings, code and PyAV's build."""
        made_by = {"code": self.decode_code, "av": av.__version__, **self._view}
        made_by |= {"recipe": recipe_named(self.recipe).digest} if self.recipe else {}
        return sha256_of_json({**made_by, "frames": self.num_frames, "size": self.fixed_size})

    @property
    def decode_code(self) -> str:
        """Hex SHA-256 of the code that makes an original clip."""
        return decode_code(self.view)

    @cached_property
    def _view(self) -> dict[str, object]:
        """What the view adds to the settings: nothing where it is that of the clips from before there was a choice."""
        if self.view == PLAIN_VIEW:
            return {}
        chosen: dict[str, object] = asdict(self.view)
        if self.view.crop:
            chosen |= {"fit": "", **self.crop_code}  # a crop is never fitted
        elif self.view.fit != "letterbox":
            chosen["resized"] = self.view.resized(self.fixed_size)
        return chosen

    @cached_property
    def crop_code(self) -> dict[str, object]:
        """What finds the part of the picture that is seen, as ``crop_code`` had it when the store's name was made."""
        return crop_code(self.view)

    @cached_property
    def augmentation_hash(self) -> str:
        """Hex SHA-256 of what decides an augmented clip besides the original: settings and code."""
        return sha256_of_json(
            [self.augmentation.settings_hash, code_hash("fvc_lib.video.augmentations", "fvc_lib.video")]
        )

    @cached_property
    def settings_hash(self) -> str:
        """Hex SHA-256 of what decides every clip besides the video's content."""
        return sha256_of_json([self.decode_hash, self.augmentation_hash])

    @property
    def shape(self) -> Shape:
        """(N T, 3, S, S) of every file."""
        return (self.view.clips * self.num_frames, 3, self.fixed_size, self.fixed_size)

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

    def seen_path(self, video_id: str) -> Path:
        """Beside a video's original clip: what it shows, where the view is not that of ``decode_clip``."""
        return self.clip_path(video_id, 0).with_suffix(".json")

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the clip is there in full; a file of another size counts as absent."""
        try:
            size_bytes = self.clip_path(video_id, augmentation_index).stat().st_size
        except FileNotFoundError:
            return False
        return size_bytes == clip_file_bytes(self.shape) + DIGEST_BYTES

    def read(self, video_id: str, augmentation_index: int) -> Pixels:
        """The clip as a read-only memory map, uint8 (T, 3, S, S).

        Raises:
            DataError: it is missing or not such a clip; the message says how to make it.
        """
        with self._naming(video_id, augmentation_index) as path:
            return map_clip_file(path, self.shape)

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0) -> None:
        """Fill ``frames``, uint8 (t, 3, S, S) in C order, with those from number ``first`` on of the file.

        For training, straight into its batch.

        Raises:
            DataError: as ``read``.
            ValueError: ``frames`` is not such an array.
        """
        check_part(frames, self.shape, first)
        with self._naming(video_id, augmentation_index) as path:
            load_clip_file(path, frames, self.shape, first)

    def write(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Store a clip atomically; of several writers of one clip the last wins, with equal content.

        Raises:
            ValueError: not uint8 of the store's shape.
            OSError: as the file system gave it.
        """
        check_pixels(frames, self.shape)
        write_clip_file(self.clip_path(video_id, augmentation_index), frames)

    @cached_property
    def _checked(self) -> set[int]:
        """Hashes of the names of clips that this process has read: a file is checked at its first reading."""
        return set()

    @contextlib.contextmanager
    def _naming(self, video_id: str, augmentation_index: int) -> Iterator[Path]:
        """The clip's path; what is wrong with the file becomes an error that names it and the remedy."""
        path, name = self.clip_path(video_id, augmentation_index), hash((video_id, augmentation_index))
        try:
            if name not in self._checked:
                check_digest(path)
                self._checked.add(name)
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
        decode = {"num_frames": self.num_frames, "fixed_size": self.fixed_size, "av": av.__version__, **self._view}
        augmentation = {"augmentations": sorted(self.augmentation.names), "strength": self.augmentation.strength}
        note_use(self.originals_folder, decode)
        note_use(self.augmented_folder, {**decode, **augmentation})
        if self.recipe:
            note_use(reencoded_folder(self.recipe, self.cache_dir), {"recipe": self.recipe, "av": av.__version__})


def decode_code(view: View) -> str:
    """Hex SHA-256 of the code that decodes with ``view``."""
    return code_hash(f"fvc_lib.video.decode.{'clip' if view == PLAIN_VIEW else 'views'}", "fvc_lib.video")


def crop_code(view: View) -> dict[str, object]:
    """The function, code and packages that find and cut out what ``view`` shows, as they are now; none: nothing.

    Raises:
        UsageError: the crop is unknown, or its file cannot be imported.
    """
    if not view.crop:
        return {}
    crop = CROPS.get(view.crop)
    packages = (*crop.packages, "pillow")  # Pillow resizes what is cut out
    metadata = importlib.import_module("importlib.metadata")  # with what it imports 3 MB of every process
    versions = {package: metadata.version(package.replace("_", "-")) for package in packages}
    code = code_hash(crop.code, crop.code) if crop.code else ""
    return {"crop": CROPS.identity(view.crop), "crop_code": code, "versions": versions}


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


# Clips side by side in one image: a row per clip, a column per frame.


def contact_sheet(clips: Sequence[Pixels], *, gap: int = 4, background: int = 255) -> Pixels:
    """Lay out clips as rows and their frames as columns.

    Args:
        clips: each uint8 (T, 3, H, W); T and the sizes may differ.
        gap: pixels between frames.
        background: grey level of gaps and of what is left over.

    Returns:
        uint8 (rows, columns, 3).
    """
    if not clips:
        raise ValueError("clips: got none, wanted at least one")
    height = sum(clip.shape[2] for clip in clips) + gap * (len(clips) - 1)
    width = max(clip.shape[0] * (clip.shape[3] + gap) - gap for clip in clips)
    sheet = np.full((height, width, 3), background, np.uint8)
    top = 0
    for clip in clips:
        for number, frame in enumerate(clip):
            left = number * (clip.shape[3] + gap)
            sheet[top : top + clip.shape[2], left : left + clip.shape[3]] = frame.transpose(1, 2, 0)
        top += clip.shape[2] + gap
    return sheet


def png_bytes(image: Pixels) -> bytes:
    """Encode a uint8 (H, W, 3) RGB image as PNG."""
    from PIL import Image  # not where clips are only read

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


# What the store holds, and making room in it: when asked, of our own files only, never through a link.

Kind = Literal["original", "augmented", "shards", "features", "reencoded"]

_DECODE = re.compile(r"decode_[0-9a-f]{32}")
_SET = re.compile(r"(?P<kind>original)|(?P<other>augmented|shards|features)_[0-9a-f]{32}")
_REENCODED = re.compile(r"[a-z0-9_]+_[0-9a-f]{32}")
_OURS = re.compile(r"[0-9A-Za-z_-]+\.(npy|json)|[0-9a-f]{64}\.mp4|clips-[0-9]{6}\.tar|\..+\.tmp", re.DOTALL)


@dataclass(frozen=True)
class ClipSet:
    """Clips, or re-encoded videos, made with one choice of settings: a folder that is kept or deleted as a whole."""

    folder: Path  # ``clips/decode_<hash>/original``, ``.../{augmented,shards,features}_<hash>``, ``reencoded/...``
    kind: Kind
    settings: dict[str, object]  # what it was made with, as far as it says so
    num_files: int  # of ours in it
    size_bytes: int  # of those
    last_used: float  # seconds since 1970, when a run last began to read or write it

    @property
    def name(self) -> str:
        """The folder as it is called below the clips folder."""
        return f"{self.folder.parent.name}/{self.folder.name}"


def stored_sets(cache_dir: AnyPath) -> list[ClipSet]:
    """Every set of clips under ``cache_dir``, by name, then of re-encoded videos. Looks without writing.

    Raises:
        UsageError: one of the folders is a link; nothing is followed out of the cache.
    """
    clips, videos = (Path(cache_dir) / name for name in (CLIPS_FOLDER, REENCODED_FOLDER))
    for folder in (clips, videos):
        if folder.is_symlink():
            where = str(folder.readlink())
            raise UsageError(f"{str(folder)!r} is a link to {where!r}. Give the cache folder that really holds it.")
    sets = []
    for decode in filter(lambda folder: _DECODE.fullmatch(folder.name), _folders(clips)):
        for folder in _folders(decode):
            if match := _SET.fullmatch(folder.name):
                kind: Kind = match["kind"] or match["other"]  # type: ignore[assignment]  # the pattern's words
                sets.append(_clip_set(folder, kind))
    of_videos = (folder for folder in _folders(videos) if _REENCODED.fullmatch(folder.name))
    return [*sets, *(_clip_set(folder, "reencoded") for folder in of_videos)]


def prune_set(clip_set: ClipSet, progress: Callable[[int], None] = lambda num_deleted: None) -> list[Path]:
    """Delete the files of one of ``stored_sets``; links and files that are not ours stand, and are returned, sorted.

    ``progress`` is called after each file, with how many are deleted.

    Raises:
        OSError: as the file system gave it; repeating goes on where it stopped.
    """
    num_files, left = 0, []
    manifest = clip_set.folder / MANIFEST
    if manifest.is_file() and not manifest.is_symlink():  # first: half a set of shards cannot be taken for a whole one
        manifest.unlink()
        num_files = 1
        progress(num_files)
    for entry in _entries(clip_set.folder):
        if entry.is_dir(follow_symlinks=False):
            _remove_empty(entry)
        elif _is_ours(entry):
            os.unlink(entry)  # noqa: PTH108 - a Path for each of many clips takes as long as deleting it
            num_files += 1
            progress(num_files)
        else:
            left.append(Path(entry))
    for folder in (clip_set.folder, clip_set.folder.parent):
        _remove_empty(folder)
    return sorted(left)


def _remove_empty(folder: AnyPath) -> None:
    with os.scandir(folder) as entries:
        is_empty = not any(entries)
    if is_empty:
        Path(folder).rmdir()


def _clip_set(folder: Path, kind: Kind) -> ClipSet:
    found = [entry.stat(follow_symlinks=False) for entry in _entries(folder) if _is_ours(entry)]
    last_used = max((status.st_mtime for status in found), default=0.0)
    settings = {} if (path := folder / SETTINGS_FILE).is_symlink() else read_json_object(path)
    return ClipSet(folder, kind, settings, len(found), sum(status.st_size for status in found), last_used)


def _folders(parent: Path) -> list[Path]:
    """The folders in ``parent``, without links, by name."""
    if not parent.is_dir() or parent.is_symlink():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _entries(folder: AnyPath) -> Iterator["os.DirEntry[str]"]:
    """All that is under ``folder``, a folder after what is in it, links unfollowed; only their listing is read."""
    with os.scandir(os.fspath(folder)) as listing:
        entries = list(listing)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry)
        yield entry


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    return entry.is_file(follow_symlinks=False) and bool(_OURS.fullmatch(entry.name))
