"""Decode a still picture to upright RGB, and raise an error if it is incomplete or damaged."""

import hashlib
import io
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode.file_parts import part_at
from fvc_lib.video.decode.source import (
    STRICT,
    CorruptVideo,
    RefusedVideo,
    TruncatedVideo,
    UnreadableVideo,
    VideoError,
    system_reason,
)

Picture = npt.NDArray[np.uint8]  # (H, W, 3), RGB

MAX_PIXELS = 80_000_000  # less than 89 million, above which Pillow warns
MAX_FILE_BYTES = 1 << 28
# Pillow can open more formats, but EPS would start Ghostscript, and others are drawings or documents.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")


class NoPictureError(VideoError):
    """The error for a file that is no picture in one of the accepted formats, such as JPEG or PNG."""

    reason = "no_image"
    remedy = "Give a JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or PPM file, or leave it out."


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts about a picture and its file.

    Attributes:
        width, height: size in pixels of the upright picture, before it is reduced.
        size_bytes: size of the file.
        content_sha256: hexadecimal SHA-256 of the file.
    """

    width: int
    height: int
    size_bytes: int
    content_sha256: str


def decode_image(path: AnyPath, *, shortest_side: int | None = None) -> Picture:
    """Return the picture in the file ``path``, turned upright by its EXIF orientation.

    Grey, palette and CMYK colours become RGB, transparent parts become white, and 16 bits per channel become 8. For an
    animation, the first frame is returned. Colour profiles are not applied. An orientation that cannot be read is
    ignored.

    Args:
        path: a regular file with any extension.
        shortest_side: least length of a side in pixels. To save time, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size
            if no side gets shorter than this. None: full size.

    Returns:
        uint8 (H, W, 3), contiguous and writable.

    Raises:
        VideoError: the file cannot be read, is no picture, or is incomplete, damaged or too large.
    """
    return np.array(_load(Path(path), shortest_side)[1])


def examine_image(path: AnyPath, *, shortest_side: int = 1) -> tuple[ImageFacts, Picture]:
    """Check a picture for damage, also for damage that Pillow ignores, and return facts and a reduced picture.

    Args:
        path: a regular file with any extension.
        shortest_side: least length of a side in pixels; the picture is reduced by the largest whole factor that
            leaves no side shorter.

    Returns:
        A tuple: facts about the full picture, and the reduced picture, uint8 (H, W, 3).

    Raises:
        VideoError: as for ``decode_image``, or Pillow decodes a JPEG though its coded data are damaged.
    """
    content, image, (width, height) = _load(Path(path), shortest_side)
    if content.startswith(b"\xff\xd8"):
        _check_jpeg(Path(path), content)
    picture = np.array(image.reduce(max(1, min(image.size) // shortest_side)))
    return ImageFacts(width, height, len(content), hashlib.sha256(content).hexdigest()), picture


def write_picture(item: dict[str, Any]) -> dict[str, Any]:
    """Decode a picture in a worker process, and write its pixels, uint8 (H, W, 3), to a NumPy file.

    Args:
        item: a mapping with ``source`` (path of the picture), ``target`` (path of the NumPy file) and
            ``shortest_side``, as for ``decode_image``.

    Returns:
        On success, a mapping with ``facts`` (the fields of ``ImageFacts``) and ``perceptual_hash`` (always None, as it
        is not computed here). On failure, a mapping with the ``reason`` and ``detail`` of the ``VideoError``.
    """
    try:
        facts, _ = examine_image(item["source"])
        pixels = decode_image(item["source"], shortest_side=item["shortest_side"])
    except VideoError as error:
        return {"reason": error.reason, "detail": f"{error.detail}. {error.remedy}"}
    np.save(item["target"], pixels)
    return {"facts": asdict(facts), "perceptual_hash": None}


def _load(path: Path, shortest_side: int | None) -> tuple[bytes, Image.Image, tuple[int, int]]:
    """Return a tuple: the bytes of a file, its picture (upright, RGB), and the (width, height) of its full size.

    To save time, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, if no side gets shorter than ``shortest_side``
    pixels. None: full size.
    """
    try:
        part = part_at(path)
        content = part.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UnreadableVideo(path, system_reason(error), "Restore the file, or the right to read it.") from error
    try:
        Image.init()
        image = Image.open(io.BytesIO(content), formats=[name for name in _FORMATS if name in Image.OPEN])
        size = image.size
        if size[0] * size[1] > MAX_PIXELS or len(content) > MAX_FILE_BYTES:
            raise RefusedVideo(
                path,
                f"{size[0]} x {size[1]} pixels in {part.size_bytes:,} bytes, the limits are {MAX_PIXELS:,} pixels and "
                f"{MAX_FILE_BYTES:,} bytes",
            )
        if shortest_side is not None:
            image.draft(image.mode, (shortest_side, shortest_side))
        image.load()
        stored = image.size
        with suppress(Exception):  # an EXIF block that cannot be read is ignored
            ImageOps.exif_transpose(image, in_place=True)
        return content, _to_rgb(path, image), size if image.size == stored else size[::-1]
    except (VideoError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise NoPictureError(path, "is no picture in a format that is accepted") from error
    except Image.DecompressionBombError as error:
        raise RefusedVideo(path, str(error).rstrip(".")) from error
    except Exception as error:  # Pillow raises any exception for damaged files
        text = str(error).rstrip(".") or type(error).__name__
        raise (TruncatedVideo if "truncated" in text.lower() else CorruptVideo)(path, text) from error


def _check_jpeg(path: Path, content: bytes) -> None:
    """Raise an error for a JPEG whose entropy-coded data are damaged, as far as ffmpeg's decoder detects it.

    Pillow fills lost data with grey. ffmpeg detects missing data and excess data at the end, but not every changed bit.
    Kinds of JPEG that ffmpeg does not support (arithmetic coding, 12 bits) are not checked.

    Raises:
        CorruptVideo: the data are damaged.
    """
    context = av.CodecContext.create("mjpeg", "r")
    context.options, context.thread_count = dict(STRICT), 1
    try:
        for packet in (av.Packet(content), None):
            context.decode(packet)
    except av.error.InvalidDataError as error:
        raise CorruptVideo(path, "its coded data are damaged or incomplete") from error
    except av.error.FFmpegError:
        return


def _to_rgb(path: Path, image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise RefusedVideo(path, f"pixels of 32 bits (mode {image.mode})", "Save it with 8 or 16 bits per channel.")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
