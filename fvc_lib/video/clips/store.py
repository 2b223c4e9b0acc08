"""A cache of decoded clips that all folds and runs share.

Every clip is a file of three parts: NumPy's ``.npy`` header, uint8 pixels, and the SHA-256 of both. NumPy reads it like
any ``.npy`` file. The path depends on the video's id and the settings of decoding and augmentation.
"""

import contextlib
import hashlib
import importlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import av
import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath, atomic_output, sha256_of_json, write_json
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CROPS, PLAIN_VIEW, View
from fvc_lib.video.reencode import recipe_named, reencoded_folder

if TYPE_CHECKING:  # each worker process would load 20 MB more
    from fvc_lib.services.config import RunConfig
    from fvc_lib.video.augmentations import AugmentationSettings

Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int, int]
CLIPS_FOLDER = "clips"
SETTINGS_FILE = "settings.json"
MANIFEST = "manifest.json"  # of shards
DIGEST_BYTES = 32
FIRST_BLEND = 1000  # copies with this and higher indices are pseudo-fakes (``video/self_blending.py``)
_PLAIN_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


@dataclass(frozen=True)
class ClipStore:
    """A folder of clip files that any number of runs and processes share, with methods to find, read and write them.

    The view (the rule that selects frames and part of the picture) takes N clips of every video, often a single one.
    The N clips are concatenated and stored in one file. Their augmented copies are further files, each with N clips.
    The methods of this class say "clip" for the content of a file, even if N > 1.

    Original clips are in ``clips/decode_<hash>/original/ab/abcd.npy`` under ``cache_dir``, augmented clips in
    ``clips/decode_<hash>/augmented_<hash>/ab/abcd_2.npy``. So original clips are used with every choice of
    augmentation. Pseudo-fakes are in ``clips/decode_<hash>/blended_<hash>/ab/abcd_1000.npy``.

    Attributes:
        cache_dir: the cache that runs share.
        num_frames: T, frames of one clip.
        fixed_size: S, side of a frame in pixels.
        augmentation: operations of augmented copies.
        view: which frames and which part of the picture the clips of a video show.
        recipe: name of the recipe (a way to re-encode, from ``video.reencode``) that is applied to videos before they
            are decoded. Empty: videos are decoded as they are.
        self_blended: number of pseudo-fakes (clips whose face is blended with a changed copy of itself) of a video.
    """

    cache_dir: Path
    num_frames: int
    fixed_size: int
    augmentation: "AugmentationSettings"
    view: View = PLAIN_VIEW
    recipe: str = ""
    self_blended: int = 0

    @classmethod
    def of(cls, config: "RunConfig") -> Self:
        """Return the store for the decoding and augmentation settings of ``config``."""
        from fvc_lib.video.augmentations import AugmentationSettings

        augmentation = AugmentationSettings(names=config.augmentations)
        clips = config.clips
        cache = Path(config.cache_dir)
        blends = config.self_blended
        return cls(cache, clips.num_frames, clips.side, augmentation, clips.view, config.recipe, blends)

    @cached_property
    def decode_hash(self) -> str:
        """Return a hexadecimal SHA-256 of the settings, code and PyAV's version that original clips depend on."""
        recipe = recipe_named(self.recipe).digest if self.recipe else ""
        return sha256_of_json([self.decode_code, self.view.resized(self.fixed_size), self._decode_settings, recipe])

    @property
    def _decode_settings(self) -> dict[str, object]:
        settings = {"num_frames": self.num_frames, "fixed_size": self.fixed_size, "av": av.__version__}
        return settings | asdict(self.view) | self.crop_code

    @property
    def decode_code(self) -> str:
        """Return the hexadecimal SHA-256 of the code that decodes original clips; another hash means other clips."""
        return decode_code(self.view)

    @cached_property
    def crop_code(self) -> dict[str, object]:
        """Return the name, code hash and package versions of the view's crop function; empty without a crop.

        A crop function finds the part of the picture to show, such as a face. The function ``crop_code`` computes the
        result. It is computed only once, so that later edits of the user's file do not change it.
        """
        return crop_code(self.view)

    @cached_property
    def augmentation_hash(self) -> str:
        """Return a hexadecimal SHA-256 of the settings and code that turn original clips into augmented clips."""
        return sha256_of_json(
            [self.augmentation.settings_hash, code_hash("fvc_lib.video.augmentations", "fvc_lib.video")]
        )

    @cached_property
    def blending_hash(self) -> str:
        """Return a hexadecimal SHA-256 of the code and packages that turn original clips into pseudo-fakes.

        Pseudo-fakes are clips whose face is blended with a changed copy of itself.

        Raises:
            UsageError: a package that finds faces is not installed.
        """
        finding = crop_code(View(crop="face"))
        return sha256_of_json([finding, code_hash("fvc_lib.video.self_blending", "fvc_lib.video")])

    @cached_property
    def settings_hash(self) -> str:
        """Return a hexadecimal SHA-256 of all settings and code that the clips of the store depend on."""
        blending = [self.blending_hash] if self.self_blended else []
        return sha256_of_json([self.decode_hash, self.augmentation_hash, *blending])

    @property
    def shape(self) -> Shape:
        """Return the shape of the array in every file, (N T, 3, S, S): N clips of T frames of S x S pixels."""
        return (self.view.clips * self.num_frames, 3, self.fixed_size, self.fixed_size)

    @property
    def decode_folder(self) -> Path:
        """Return the folder of all clips, original and augmented, that were decoded with the settings of this store."""
        return self.cache_dir / CLIPS_FOLDER / f"decode_{self.decode_hash[:32]}"

    @property
    def originals_folder(self) -> Path:
        """Return the folder of original clips."""
        return self.decode_folder / "original"

    @property
    def augmented_folder(self) -> Path:
        """Return the folder of augmented clips."""
        return self.decode_folder / f"augmented_{self.augmentation_hash[:32]}"

    @property
    def blended_folder(self) -> Path:
        """Return the folder of pseudo-fakes (clips whose face is blended with a changed copy of itself)."""
        return self.decode_folder / f"blended_{self.blending_hash[:32]}"

    def clip_path(self, video_id: str, augmentation_index: int) -> Path:
        """Return the path of a clip's file.

        ``augmentation_index`` 0 is the original clip. Higher indices are augmented copies. Indices from ``FIRST_BLEND``
        on are pseudo-fakes (clips whose face is blended with a changed copy of itself).
        """
        check_clip_name(video_id, augmentation_index)
        if augmentation_index == 0:
            return self.originals_folder / video_id[:2] / f"{video_id}.npy"
        folder = self.augmented_folder if augmentation_index < FIRST_BLEND else self.blended_folder
        return folder / video_id[:2] / f"{video_id}_{augmentation_index}.npy"

    def seen_path(self, video_id: str) -> Path:
        """Return the path of the JSON file that records the frames and the part of the picture that clips show."""
        return self.clip_path(video_id, 0).with_suffix(".json")

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the file of a clip exists and has the expected size.

        ``augmentation_index`` 0 is the original, larger numbers are augmented copies.
        """
        try:
            size_bytes = self.clip_path(video_id, augmentation_index).stat().st_size
        except FileNotFoundError:
            return False
        return size_bytes == clip_file_bytes(self.shape) + DIGEST_BYTES

    def read(self, video_id: str, augmentation_index: int) -> Pixels:
        """Return the pixels of a file, uint8 (N T, 3, S, S): N clips of a video, concatenated, of T frames each.

        ``augmentation_index`` 0 is the original, larger numbers are augmented copies.

        Raises:
            DataError: the file is missing or damaged.
        """
        frames = np.empty(self.shape, np.uint8)
        self.load(video_id, augmentation_index, frames)
        return frames

    def load(self, video_id: str, augmentation_index: int, frames: Pixels, first: int = 0) -> None:
        """Read t consecutive frames of a clip into an array.

        Args:
            video_id: id of the video.
            augmentation_index: index of the clip; 0 is the original.
            frames: uint8 (t, 3, S, S) in C order, which is filled.
            first: index of the first frame to read.

        Raises:
            DataError: the file is missing or damaged.
            ValueError: ``frames`` has another type or shape.
        """
        check_part(frames, self.shape, first)
        path = self.clip_path(video_id, augmentation_index)
        name = hash((video_id, augmentation_index))
        try:
            if name not in self._checked:
                check_digest(path)
                self._checked.add(name)
            load_clip_file(path, frames, self.shape, first)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"clip {str(path)!r}: {reason}. Delete the file and run 03_augmentation again.") from error

    def write(self, video_id: str, augmentation_index: int, frames: Pixels) -> None:
        """Write a file atomically: ``frames``, uint8 (N T, 3, S, S), are the N clips of a video, concatenated.

        ``augmentation_index`` 0 is the original, larger numbers are augmented copies.

        Raises:
            ValueError: ``frames`` is not uint8 of the store's shape.
            OSError: the file cannot be written.
        """
        check_pixels(frames, self.shape)
        write_clip_file(self.clip_path(video_id, augmentation_index), frames)

    @cached_property
    def _checked(self) -> set[int]:
        """Return the set of clips whose files were already checked for damage in this process; empty at first.

        Clips are represented by Python's hash of (video id, augmentation index). ``load`` adds to this set.
        """
        return set()

    def note_use(self) -> None:
        """Record in every folder of the store that it is used now; the command ``clean`` needs the time of last use.

        A folder without a settings file gets one; it tells people how the clips were made.
        """
        note_use(self.originals_folder, self._decode_settings)
        note_use(self.augmented_folder, {**self._decode_settings, "augmentations": sorted(self.augmentation.names)})
        if self.self_blended:
            note_use(self.blended_folder, self._decode_settings)
        if self.recipe:
            note_use(reencoded_folder(self.recipe, self.cache_dir), {"recipe": self.recipe, "av": av.__version__})


def decode_code(view: View) -> str:
    """Return the hexadecimal SHA-256 of the code that decodes clips with ``view``.

    A view is the rule that selects frames and part of the picture.
    """
    return code_hash(f"fvc_lib.video.decode.{'clip' if view == PLAIN_VIEW else 'views'}", "fvc_lib.video")


def crop_code(view: View) -> dict[str, object]:
    """Return the name, hash and package versions of the crop function of ``view``, to detect any change of it.

    A crop function finds the part of the picture that clips show, such as a face.

    Returns:
        A mapping with ``crop`` (identity of the function in the registry), ``crop_code`` (hash of its code) and
        ``versions`` (of the packages that it needs, by name). It is empty for a view without a crop.

    Raises:
        UsageError: the crop is unknown, or its file cannot be imported.
    """
    if not view.crop:
        return {}
    crop = CROPS.get(view.crop)
    metadata = importlib.import_module("importlib.metadata")  # importing it takes 3 MB of memory in every process
    packages = (*crop.packages, "pillow")  # Pillow resizes the crop
    versions = {package: metadata.version(package.replace("_", "-")) for package in packages}
    code = code_hash(crop.code, crop.code) if crop.code else ""
    return {"crop": CROPS.identity(view.crop), "crop_code": code, "versions": versions}


def note_use(folder: Path, settings: Mapping[str, object]) -> None:
    """Record when ``folder`` was last used: set the modification time of its settings file to now.

    A missing settings file is written with ``settings``. Errors of the file system, as in a read-only cache, are
    ignored.
    """
    path = folder / SETTINGS_FILE
    with contextlib.suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            write_json(path, settings)


def check_clip_name(video_id: str, augmentation_index: int) -> None:
    """Raise an error if a video id or augmentation index cannot be part of a clip's file name.

    Raises:
        ValueError: ``video_id`` is empty, longer than 128 characters, or has other characters than ASCII letters,
            digits, ``_`` and ``-``; or the index is negative.
    """
    if not _PLAIN_ID.fullmatch(video_id) or augmentation_index < 0:
        raise ValueError(f"clip: got {video_id!r} number {augmentation_index}, wanted a plain id and 0 or more")


def contact_sheet(clips: Sequence[Pixels], gap: int = 4) -> bytes:
    """Return the bytes of a PNG picture that shows the frames of clips on a white ground.

    It has one row per clip and one column per frame.

    Args:
        clips: arrays of the same shape, uint8 (T, 3, H, W).
        gap: number of white pixels to the right of every frame and below it.
    """
    from PIL import Image  # workers that only read clips do not need it

    cells = np.pad(np.stack(clips), ((0, 0),) * 3 + ((0, gap),) * 2, constant_values=255)
    rows, columns, _, height, width = cells.shape
    sheet = cells.transpose(0, 3, 1, 4, 2).reshape(rows * height, columns * width, 3)
    stream = io.BytesIO()
    Image.fromarray(sheet).save(stream, "PNG")
    return stream.getvalue()


# --- Files of clips


@lru_cache(maxsize=32)
def clip_header(shape: Shape) -> bytes:
    """Return the ``.npy`` header of a clip of ``shape`` (T, 3, S, S): version 1.0, uint8, C order."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def clip_file_bytes(shape: Shape) -> int:
    """Return the size in bytes of a clip file without the digest at its end; ``shape`` is the clip's (T, 3, S, S)."""
    return len(clip_header(shape)) + int(np.prod(shape))


def write_clip_file(path: AnyPath, frames: Pixels) -> None:
    """Write a clip, uint8 (T, 3, S, S), to ``path`` atomically; an existing file is replaced."""
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        write_with_digest(stream, clip_header((len(frames), 3, *frames.shape[2:])), np.ascontiguousarray(frames).data)


def write_with_digest(stream: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write ``parts`` to ``stream``, then the SHA-256 of all parts together, 32 bytes."""
    digest = hashlib.sha256()
    for part in parts:
        stream.write(part)
        digest.update(part)
    stream.write(digest.digest())


def check_digest(path: AnyPath) -> None:
    """Raise an error unless the last 32 bytes of a file are the SHA-256 of all bytes before them.

    Raises:
        OSError: the file cannot be read.
        ValueError: the digest differs, so the file is damaged.
    """
    content = memoryview(Path(path).read_bytes())
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise ValueError("the file is damaged: it is not what was written (SHA-256)")


def load_clip_file(path: AnyPath, frames: Pixels, shape: Shape, first: int = 0) -> None:
    """Read consecutive frames of a clip file into the array ``frames``, without a check of the file's digest.

    Args:
        path: the clip file.
        frames: uint8 (t, 3, S, S) in C order; filled.
        shape: shape of the whole clip, (T, 3, S, S).
        first: index of the first frame to read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no clip of that shape.
    """
    header = clip_header(shape)
    with Path(path).open("rb", buffering=0) as stream:
        found = stream.read(len(header))
        stream.seek(len(header) + first * frames[0].nbytes)
        if found != header or stream.readinto(frames.data) != frames.nbytes:
            raise ValueError(f"the file is no clip of uint8 {shape}")


def check_pixels(frames: Pixels, shape: Shape) -> None:
    """Raise ``ValueError`` unless ``frames`` is uint8 of ``shape``."""
    if frames.dtype != np.uint8 or frames.shape != shape:
        raise ValueError(f"clip: got {frames.dtype} {frames.shape}, wanted uint8 {shape}")


def check_part(frames: Pixels, shape: Shape, first: int) -> None:
    """Check an array into which frames of a clip shall be read, and raise ``ValueError`` if it is unsuitable.

    ``frames`` must be uint8 (t, 3, S, S). The clip has ``shape`` (T, 3, S, S), and must have at least t frames from the
    index ``first`` on.
    """
    fits = frames.ndim == 4 and first >= 0 and 0 < len(frames) <= shape[0] - first
    check_pixels(frames, (len(frames) if fits else shape[0], *shape[1:]))
